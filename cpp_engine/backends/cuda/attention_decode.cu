// Attention of rows that compute one token: one launch a layer, a block for each row, group of heads and split of the context.
#include <algorithm>

#include "backends/cuda/attention_decode.cuh"

namespace pocket::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

template <typename T, int kGroup>
__global__ __launch_bounds__(kThreads) void decode_kernel(const AttentionCall call, float* partial, int* tickets) {
    extern __shared__ __align__(16) float memory[];
    __shared__ AttentionNotes<kGroup> notes;
    attend<T, kGroup, true>(call, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y), static_cast<int>(blockIdx.z)}, partial,
                      tickets, memory, notes);
}

template <typename T, int kGroup>
void launch_kernel(const Context& context, const AttentionCall& call, int num_splits, float* partial, int* tickets) {
    const dim3 grid(num_splits, call.shape.num_heads / kGroup, call.step.num_decode);
    const std::size_t shared = sizeof(float) * static_cast<std::size_t>(std::max(kWarps * kGroup * call.shape.head_dim, num_splits * kGroup));
    launch(context, decode_kernel<T, kGroup>, grid, kThreads, shared, call, partial, tickets);
}

template <typename T>
void launch_group(const Context& context, const AttentionCall& call, int num_splits, float* partial, int* tickets) {
    const int group = call.shape.num_heads / call.shape.num_kv_heads;
    if (group == 6) {
        launch_kernel<T, 6>(context, call, num_splits, partial, tickets);
    } else if (group % 4 == 0) {
        launch_kernel<T, 4>(context, call, num_splits, partial, tickets);
    } else if (group % 2 == 0) {
        launch_kernel<T, 2>(context, call, num_splits, partial, tickets);
    } else {
        launch_kernel<T, 1>(context, call, num_splits, partial, tickets);
    }
}

}  // namespace

int decode_splits(const Context& context, const AttentionShape& shape, int num_rows, int max_length) {
    constexpr int kMostSplits = 160;                        // that the block which puts them together takes
    const int wanted = context.num_multiprocessors / std::max(1, num_rows * shape.num_kv_heads);
    return std::max(1, std::min({wanted, ceil_div(max_length, 64), kMostSplits}));
}

std::size_t decode_partial_size(const AttentionShape& shape, int num_rows, int num_splits) {
    return static_cast<std::size_t>(num_rows) * shape.num_heads * num_splits * (shape.head_dim + 2);
}

void attention_decode(const Context& context, const AttentionCall& call, int num_splits, float* partial, int* tickets) {
    if (call.cache.dtype == DType::float32) {
        launch_kernel<float, 1>(context, call, num_splits, partial, tickets);
    } else if (call.cache.dtype == DType::bfloat16) {
        launch_group<__nv_bfloat16>(context, call, num_splits, partial, tickets);
    } else {
        launch_group<__half>(context, call, num_splits, partial, tickets);
    }
}

}  // namespace pocket::cuda
