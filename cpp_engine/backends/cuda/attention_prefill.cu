// Attention of prompts, outside the flash kernel: heads are normalized, rotated and stored; and an exact float32 form for the types and sizes that the flash
// kernel does not take.
#include "backends/cuda/attention_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// Eight values of a lane, from and to memory of one type; all at once where that is bfloat16 and aligned.
template <bool kPacked>
__device__ __forceinline__ LaneHead load_head(const void* data, DType dtype, std::int64_t start, int head_dim) {
    if constexpr (!kPacked) return load_lane(data, dtype, start, head_dim);
    LaneHead head;
    const int first = (threadIdx.x & 31) * 8;
    Eight<__nv_bfloat16> words;
    words.clear();
    if (first < head_dim) words.load(static_cast<const __nv_bfloat16*>(data) + start + first);
    words.unpack(head.values);
    return head;
}
template <bool kPacked>
__device__ __forceinline__ void store_head(void* data, DType dtype, std::int64_t place, const LaneHead& head) {
    if constexpr (kPacked) {
        __align__(16) __nv_bfloat162 pairs[4];
#pragma unroll
        for (int index = 0; index < 4; ++index) pairs[index] = __floats2bfloat162_rn(head.values[2 * index], head.values[2 * index + 1]);
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(data) + place) = *reinterpret_cast<const uint4*>(pairs);
    } else {
#pragma unroll
        for (int index = 0; index < 8; ++index) store_value(data, dtype, place + index, head.values[index]);
    }
}

// One warp a head: query heads first, then KV heads with their key and value. Tokens from `first_token` on. kPacked: everything is bfloat16 and aligned.
template <bool kPacked>
__global__ void heads_kernel(const AttentionCall call, int first_token, void* queries, DType dtype) {
    __shared__ float scratch[kWarps][kMostDim];
    const AttentionShape& shape = call.shape;
    const int item = blockIdx.y * kWarps + (threadIdx.x >> 5), head_dim = shape.head_dim, first = (threadIdx.x & 31) * 8;
    if (item >= shape.num_heads + shape.num_kv_heads) return;
    const std::int64_t token = first_token + static_cast<int>(blockIdx.x), projections = token * call.projections.stride;
    const int position = call.step.positions[token];
    float* own = scratch[threadIdx.x >> 5];
    if (item < shape.num_heads) {
        LaneHead head = load_head<kPacked>(call.projections.data, call.projections.dtype, projections + static_cast<std::int64_t>(item) * 2 * head_dim, head_dim);
        norm_and_rotate(head, call.weights.query_norm, shape, call.weights, position, own);
        if (first < head_dim) {
            const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * shape.num_heads + item) * head_dim + first;
            store_head<kPacked>(queries, dtype, at, head);
        }
        return;
    }
    const int kv_head = item - shape.num_heads;
    const std::int64_t at = projections + 2LL * shape.num_heads * head_dim + static_cast<std::int64_t>(kv_head) * head_dim;
    LaneHead key = load_head<kPacked>(call.projections.data, call.projections.dtype, at, head_dim);
    norm_and_rotate(key, call.weights.key_norm, shape, call.weights, position, own);
    const LaneHead value = load_head<kPacked>(call.projections.data, call.projections.dtype, at + static_cast<std::int64_t>(shape.num_kv_heads) * head_dim, head_dim);
    const std::int64_t slot = call.step.slot_mapping[token];
    if (slot < 0 || first >= head_dim) return;
    const std::int64_t place = cache_place(call.cache, shape.num_kv_heads, head_dim, slot, kv_head) + first;
    store_head<kPacked>(call.cache.keys, call.cache.dtype, place, key);
    store_head<kPacked>(call.cache.values, call.cache.dtype, place, value);
}

// One block a token and query head; a warp takes every fourth token of the context, a lane 8 dimensions.
template <typename T>
__global__ void plain_kernel(const AttentionCall call, int first_token, const void* queries, DType dtype) {
    __shared__ float maxima[kWarps], sums[kWarps], parts[kWarps][kMostDim];
    const AttentionShape& shape = call.shape;
    const int head = blockIdx.y, kv_head = head / (shape.num_heads / shape.num_kv_heads), head_dim = shape.head_dim;
    const int warp = threadIdx.x >> 5, first = (threadIdx.x & 31) * 8;
    const std::int64_t token = first_token + static_cast<int>(blockIdx.x);
    int row = call.step.num_decode;
    while (call.step.row_starts[row + 1] <= token) ++row;
    const int seen = call.step.lengths[row] - (call.step.row_starts[row + 1] - 1 - static_cast<int>(token));
    const std::int32_t* table = call.step.block_tables + static_cast<std::int64_t>(row) * call.step.max_blocks;
    float asked[8], read[8] = {}, maximum = -INFINITY, sum = 0.0f;
    const float scale = kLog2E * rsqrtf(static_cast<float>(head_dim));
#pragma unroll
    for (int index = 0; index < 8; ++index)
        asked[index] = first < head_dim
                           ? load_value(queries, dtype, (static_cast<std::int64_t>(blockIdx.x) * shape.num_heads + head) * head_dim + first + index) * scale
                           : 0.0f;
    for (int other = warp; other < seen; other += kWarps) {
        const std::int64_t slot = static_cast<std::int64_t>(table[other / call.cache.block_size]) * call.cache.block_size + other % call.cache.block_size;
        const std::int64_t place = cache_place(call.cache, shape.num_kv_heads, head_dim, slot, kv_head) + first;
        Eight<T> words;
        float key[8], value[8], score = 0.0f;
        words.clear();
        if (first < head_dim) words.load(static_cast<const T*>(call.cache.keys) + place);
        words.unpack(key);
        if (first < head_dim) words.load(static_cast<const T*>(call.cache.values) + place);
        words.unpack(value);
#pragma unroll
        for (int index = 0; index < 8; ++index) score = fmaf(asked[index], key[index], score);
        score = warp_sum(score);
        const float highest = fmaxf(maximum, score), fade = exp2f(maximum - highest), weight = exp2f(score - highest);
        sum = sum * fade + weight;
        maximum = highest;
#pragma unroll
        for (int index = 0; index < 8; ++index) read[index] = fmaf(weight, value[index], read[index] * fade);
    }
    if ((threadIdx.x & 31) == 0) maxima[warp] = maximum, sums[warp] = sum;
    __syncthreads();
    float highest = -INFINITY, total = 0.0f;
    for (int other = 0; other < kWarps; ++other) highest = fmaxf(highest, maxima[other]);
    for (int other = 0; other < kWarps; ++other) total += sums[other] > 0.0f ? sums[other] * exp2f(maxima[other] - highest) : 0.0f;
    const float factor = sum > 0.0f ? exp2f(maximum - highest) : 0.0f;
    if (first < head_dim) {
#pragma unroll
        for (int index = 0; index < 8; ++index) parts[warp][first + index] = read[index] * factor;
    }
    __syncthreads();
    for (int dim = threadIdx.x; dim < head_dim; dim += kThreads) {
        float value = 0.0f;
        for (int other = 0; other < kWarps; ++other) value += parts[other][dim];
        const float gate = load_value(call.projections.data, call.projections.dtype, token * call.projections.stride + static_cast<std::int64_t>(head) * 2 * head_dim + head_dim + dim);
        store_value(call.out.data, call.out.dtype, token * call.out.stride + head * head_dim + dim, total > 0.0f ? value / total * sigmoid(gate) : 0.0f);
    }
}

}  // namespace

void attention_heads(const Context& context, const AttentionCall& call, int first_token, int num_tokens, void* queries, DType dtype) {
    const dim3 grid(num_tokens, ceil_div(call.shape.num_heads + call.shape.num_kv_heads, kWarps));
    const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
    const bool is_packed = dtype == DType::bfloat16 && call.cache.dtype == DType::bfloat16 && call.projections.dtype == DType::bfloat16 && call.projections.stride % 8 == 0 &&
                           is_aligned(call.projections.data) && is_aligned(call.cache.keys) && is_aligned(call.cache.values) && is_aligned(queries);
    launch(context, is_packed ? heads_kernel<true> : heads_kernel<false>, grid, kThreads, 0, call, first_token, queries, dtype);
}

void attention_prefill_plain(const Context& context, const AttentionCall& call, int first_token, const void* queries, DType dtype) {
    const dim3 grid(call.step.num_tokens - first_token, call.shape.num_heads);
    if (call.cache.dtype == DType::float32) {
        launch(context, plain_kernel<float>, grid, kThreads, 0, call, first_token, queries, dtype);
    } else if (call.cache.dtype == DType::bfloat16) {
        launch(context, plain_kernel<__nv_bfloat16>, grid, kThreads, 0, call, first_token, queries, dtype);
    } else {
        launch(context, plain_kernel<__half>, grid, kThreads, 0, call, first_token, queries, dtype);
    }
}

}  // namespace pocket::cuda
