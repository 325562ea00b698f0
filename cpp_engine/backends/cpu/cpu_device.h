// The CPU device: complete, portable, and the oracle of the others. Its memory is the host's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/cpu/isa.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/matrix.h"
#include "backends/cpu/memory.h"
#include "core/thread_pool.h"
#include "pocket/device.h"

namespace pocket {

class CpuDevice final : public Device {
public:
    // `num_threads` 0 takes available_cores(). `isa`: the best one where it is not given; Error(unsupported) for one that the processor lacks.
    explicit CpuDevice(int num_threads, std::optional<Isa> isa = std::nullopt);

    DeviceInfo info() const override;
    std::unique_ptr<Buffer> allocate(std::size_t num_bytes) override { return allocate_memory(num_bytes); }
    void upload(void* to, const void* from, std::size_t num_bytes) override { copy(to, from, num_bytes); }
    void download(void* to, const void* from, std::size_t num_bytes) override { copy(to, from, num_bytes); }
    void copy(void* to, const void* from, std::size_t num_bytes) override;
    void synchronize() override {}
    std::unique_ptr<Matrix> load_matrix(std::span<const MatrixPart> parts, DType dtype) override { return CpuMatrix::load(parts, dtype, pool_); }
    void reserve(int, int) override {}  // workspaces grow on first use, since they hang on the model's widths too

    void embed(const Step& step, const Matrix& table, const Tensor& out) override;
    void linear(const Tensor& x, const Norm* norm, const Matrix& weight, Epilogue epilogue, const Tensor& out) override;
    void attention(const Step& step, const AttentionShape& shape, const AttentionWeights& weights, const Tensor& projections, const KvCache& cache,
                   const Tensor& out) override;
    void delta_net(const Step& step, const DeltaNetShape& shape, const DeltaNetWeights& weights, const Tensor& projections, const StateCache& states,
                   const Tensor& out) override;
    void take_samples(const Step& step, const Tensor& x, const Tensor& out) override;
    void sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs) override;
    bool summarize(const Tensor& logits, const SampleInputs& inputs, std::span<const int> num_candidates, std::span<LogitSummary> summaries) override;
    std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> host) override { return host; }  // its memory is the host's

    ThreadPool& pool() noexcept { return pool_; }

private:
    struct AttentionCall;  // attention.cpp

    void multiply(const Tensor& x, const Norm* norm, const CpuMatrix& weight, Epilogue epilogue, const Tensor& out);
    void multiply_segment(const Tensor& x, const Norm* norm, const CpuMatrix& weight, const CpuMatrix::Segment& segment, Epilogue epilogue, const Tensor& out);
    void multiply_tiles(const Tensor& x, const Norm* norm, const CpuMatrix& weight, const CpuMatrix::Segment& segment, Epilogue epilogue,
                        const Tensor& out);  // linear_amx.cpp
    void attend_decode(const AttentionCall& call);
    void attend_prefill(const AttentionCall& call);

    // Some neighbouring tokens of a row.
    struct TokenBlock {
        int row, token;
    };

    Isa isa_;
    const Kernels& kernels_;
    ThreadPool pool_;
    Workspace shared_, own_, wide_;  // of all threads together; a part for each thread; what two passes of one operator hand on
    Workspace changed_;              // logits of samples that have edits, or min_p
    std::vector<TokenBlock> blocks_;
};

}  // namespace pocket
