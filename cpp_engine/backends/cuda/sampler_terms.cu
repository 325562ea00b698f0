// Rows that are drawn from other logits than the model's: copies of them with edits, and without what min_p leaves out.
#include "backends/cuda/sampler_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kEach = kDrawChunk / kDrawThreads;

__global__ __launch_bounds__(kDrawThreads) void copy_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how) {
    const int row = blockIdx.y;
    const std::int32_t copy = how.copies[row];
    if (copy < 0) return;
    const float* from = static_cast<const float*>(logits) + row * stride;
    float* to = how.changed + static_cast<std::int64_t>(copy) * vocab_size;
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const std::int32_t id = blockIdx.x * kDrawChunk + index * kDrawThreads + threadIdx.x;
        if (id < vocab_size) to[id] = from[id];
    }
}

// One block a row; its ids are all different.
__global__ __launch_bounds__(kDrawThreads) void edit_kernel(int vocab_size, const DrawInputs how) {
    const int row = blockIdx.x;
    const std::int32_t copy = how.copies[row];
    if (copy < 0) return;
    float* values = how.changed + static_cast<std::int64_t>(copy) * vocab_size;
    for (std::int32_t place = how.edit_starts[row] + static_cast<std::int32_t>(threadIdx.x); place < how.edit_starts[row + 1]; place += kDrawThreads) {
        const LogitEdit edit = how.edits[place];
        const double logit = values[edit.id], scale = edit.scale;
        values[edit.id] = static_cast<float>((logit > 0.0 ? logit / scale : logit * scale) + edit.offset);
    }
}

__global__ __launch_bounds__(kDrawThreads) void unlikely_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, RowState* states, float* sums,
                                                                std::int32_t* tickets) {
    __shared__ float shared[32];
    __shared__ bool is_last;
    const int row = blockIdx.y, num_chunks = gridDim.x;
    const float min_p = how.min_ps[row];
    if (!(min_p > 0.0f) || is_greedy(how, row) || !states[row].is_finite) return;
    const Row mine = row_at<true>(logits, stride, vocab_size, how, row);
    float* values = how.changed + static_cast<std::int64_t>(how.copies[row]) * vocab_size;
    const float largest = states[row].largest_allowed, inverse = 1.0f / how.temperatures[row];
    const double limit = largest + static_cast<double>(how.temperatures[row]) * log(static_cast<double>(min_p));
    float sum = 0.0f;
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const std::int32_t id = blockIdx.x * kDrawChunk + index * kDrawThreads + threadIdx.x;
        if (id >= vocab_size) continue;
        const float value = values[id];
        if (static_cast<double>(value) < limit) {
            values[id] = -INFINITY;
        } else if (mine.allows(id)) {
            sum += expf((value - largest) * inverse);
        }
    }
    sum = block_sum(sum, shared);
    float* own = sums + static_cast<std::int64_t>(row) * num_chunks;
    if (threadIdx.x == 0) own[blockIdx.x] = sum;
    if (!is_last_block(&tickets[row], num_chunks, &is_last) || threadIdx.x >= 32) return;
    const volatile float* all = own;
    double total = 0.0;
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += 32) total += all[chunk];
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(0xffffffffu, total, step);
    if (threadIdx.x == 0) states[row].log_scaled = log(total);
}

dim3 chunks_of(const Tensor& logits) { return dim3(ceil_div(logits.columns, kDrawChunk), static_cast<unsigned>(logits.rows)); }

}  // namespace

void change_rows(const Context& context, const Tensor& logits, const DrawInputs& how) {
    const int vocab_size = static_cast<int>(logits.columns);
    launch(context, copy_kernel, chunks_of(logits), kDrawThreads, 0, logits.data, logits.stride, vocab_size, how);
    launch(context, edit_kernel, dim3(static_cast<unsigned>(logits.rows)), kDrawThreads, 0, vocab_size, how);
}

void cut_unlikely(const Context& context, const Tensor& logits, const DrawInputs& how, RowState* states, float* sums, std::int32_t* tickets) {
    launch(context, unlikely_kernel, chunks_of(logits), kDrawThreads, 0, logits.data, logits.stride, static_cast<int>(logits.columns), how, states, sums, tickets);
}

}  // namespace pocket::cuda
