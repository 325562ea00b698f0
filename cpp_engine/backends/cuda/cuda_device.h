// A CUDA GPU from Turing (compute capability 7.5) on.
#pragma once

#include <memory>
#include <vector>

#include "backends/cuda/make_device.h"
#include "backends/cuda/matrix.h"
#include "backends/cuda/product_wide.h"
#include "backends/cuda/step_recorder.h"

namespace pocket::cuda {

// Memory that operators use between their kernels. It grows where a step needs more than any before, which is why a step is computed once before it is
// captured; memory that a captured graph may hold is kept.
class Scratch {
public:
    explicit Scratch(Device& device) : device_(device) {}
    void* take(std::size_t num_bytes);                      // valid until the next take; new memory is zeroed
    void keep_old() noexcept { keeps_old_ = true; }

private:
    Device& device_;                                        // outlives this
    std::unique_ptr<Buffer> buffer_;
    std::vector<std::unique_ptr<Buffer>> old_;
    bool keeps_old_ = false;
};

class CudaDevice : public Device {
public:
    explicit CudaDevice(int ordinal);
    ~CudaDevice() override;
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;

    DeviceInfo info() const override;
    std::unique_ptr<Buffer> allocate(std::size_t num_bytes) override;
    void upload(void* to, const void* from, std::size_t num_bytes) override;
    void download(void* to, const void* from, std::size_t num_bytes) override;
    void copy(void* to, const void* from, std::size_t num_bytes) override;
    void synchronize() override;
    std::unique_ptr<Matrix> load_matrix(std::span<const MatrixPart> parts, DType dtype) override;
    void reserve(int max_tokens, int max_rows) override;
    std::unique_ptr<Graph> capture(const std::function<void()>& work) override;

    void embed(const Step& step, const Matrix& table, const Tensor& out) override;
    void linear(const Tensor& x, const Norm* norm, const Matrix& weight, Epilogue epilogue, const Tensor& out) override;
    void attention(const Step& step, const AttentionShape& shape, const AttentionWeights& weights, const Tensor& projections, const KvCache& cache,
                   const Tensor& out) override;
    void delta_net(const Step& step, const DeltaNetShape& shape, const DeltaNetWeights& weights, const Tensor& projections, const StateCache& states,
                   const Tensor& out) override;
    void take_samples(const Step& step, const Tensor& x, const Tensor& out) override;
    void sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs) override;
#ifdef POCKET_NCCL
    std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> host) override;  // nccl_communicator.cpp
#endif

private:
    void use() const;                                       // the calling thread's CUDA device is this one
    void segment_product(const Tensor& x, const Norm* norm, const Segment& segment, std::int64_t columns, Epilogue epilogue, const Tensor& out);
    void wide_product(const Tensor& x, const Segment& segment, const Tensor& out, bool adds);
    int* tickets(std::size_t count);                        // zeros, which every kernel leaves as zeros
    std::unique_ptr<Graph> record_step(const std::function<void()>& work);
    Tensor prepare(const Tensor& x, const Norm* norm, DType to, DType round_first, float** row_scales);

    int ordinal_;
    std::string description_;
    Context context_;
    Scratch prepared_, partial_, both_, expanded_, workspace_, mixed_, read_, queries_, tickets_, draws_, drawn_, changed_, masks_;
    int max_samples_ = 0;                                   // that `draws_` is laid out for
    std::int64_t max_vocab_size_ = 0;
    std::byte* pinned_ = nullptr;                           // of `sample`: inputs, masks and outputs
    std::size_t pinned_bytes_ = 0;
    std::byte* sent_ = nullptr;                             // pinned, what uploads take their small pieces from, one behind the other
    std::size_t sent_bytes_ = 0;                            // of it in use
    std::int64_t both_bytes_ = 0;                           // of gates and ups at a time
    MatrixLoader loader_;
    std::unique_ptr<WideProduct> wide_;
    StepRecorder* recorder_ = nullptr;                      // while a step is taken down instead of computed
};

}  // namespace pocket::cuda
