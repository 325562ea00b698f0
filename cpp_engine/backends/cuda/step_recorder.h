// Takes the calls of a decode step down as phases of the one kernel that computes them all.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/decode_step.h"
#include "pocket/device.h"

namespace pocket::cuda {

// Of one capture. A call that the kernel does not compute, or that comes where the kernel has no place for it, makes `finish` return null.
class StepRecorder {
public:
    StepRecorder(const Context& context, Device& device) : context_(context), device_(device) {}

    void embed(const Step& step, std::span<const Segment> table, std::int64_t columns, const Tensor& out);
    void linear(const Tensor& x, const Norm* norm, std::span<const Segment> weight, std::int64_t columns, Epilogue epilogue, const Tensor& out);
    void attention(const AttentionCall& call);
    void delta_net(const DeltaNetCall& call);
    void take_samples(const Step& step, const Tensor& x, const Tensor& out);

    // The step, launched by each replay; its buffers live as long as it. Matrices and what tensors point to must outlive it.
    std::unique_ptr<Graph> finish();

private:
    Phase* add(PhaseKind kind, std::int64_t rows);          // null where the step is not for this kernel
    void refuse() { is_possible_ = false; }
    bool ask_rounded(const void* x, const float* norm);
    bool cut_products();                                    // lays shared memory out

    const Context& context_;
    Device& device_;                                        // outlives this
    bool is_possible_ = true;
    std::int64_t rows_ = 0;
    std::vector<Phase> phases_;
    StepPlan plan_;
    AttentionShape attention_shape_;
    std::size_t partial_size_ = 0, results_size_ = 0, head_squares_ = 0;
    std::int64_t stream_columns_ = 0;                       // of the residual stream
    // What the next product takes from elsewhere than its x: rows by their numbers, or heads without norm and gate.
    const void *gathered_ = nullptr, *ungated_ = nullptr;   // its x
    Tensor gathered_from_;
    const std::int32_t* gathered_rows_ = nullptr;
};

}  // namespace pocket::cuda
