// What the attention kernels share: a head's norm and rotation, and where a token lies in the cache.
#pragma once

#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

constexpr int kMostDim = 256;                               // of a head: a lane has up to 8 values

// Dimensions that a lane has of a head: 8 * lane to 8 * lane + 7, where they are below head_dim, which is a multiple of 8.
struct LaneHead {
    float values[8];
};

__device__ __forceinline__ LaneHead load_lane(const void* data, DType dtype, std::int64_t start, int head_dim) {
    LaneHead head;
    const int first = (threadIdx.x & 31) * 8;
#pragma unroll
    for (int index = 0; index < 8; ++index) head.values[index] = first < head_dim ? load_value(data, dtype, start + first + index) : 0.0f;
    return head;
}

// Norm, then rotation of pairs (i, i + rotary_dim / 2); `scratch` has head_dim values of the warp's own, and holds the result too.
__device__ __forceinline__ void norm_and_rotate(LaneHead& head, const Norm& norm, const AttentionShape& shape, const AttentionWeights& weights, int position,
                                                float* scratch) {
    const int first = (threadIdx.x & 31) * 8;
    float squares = 0.0f;
#pragma unroll
    for (int index = 0; index < 8; ++index) squares += head.values[index] * head.values[index];
    const float factor = rsqrtf(warp_sum(squares) / shape.head_dim + norm.eps);
    if (first < shape.head_dim) {
#pragma unroll
        for (int index = 0; index < 8; ++index) scratch[first + index] = head.values[index] * factor * norm.weight[first + index];
    }
    __syncwarp();
    const int half = shape.rotary_dim / 2;
    for (int index = threadIdx.x & 31; index < half; index += 32) {
        const std::int64_t at = static_cast<std::int64_t>(position) * half + index;
        const float cosine = weights.cosines[at], sine = weights.sines[at], low = scratch[index], high = scratch[index + half];
        scratch[index] = low * cosine - high * sine;
        scratch[index + half] = high * cosine + low * sine;
    }
    __syncwarp();
    if (first < shape.head_dim) {
#pragma unroll
        for (int index = 0; index < 8; ++index) head.values[index] = scratch[first + index];
    }
}

// First value of a token's head in the cache; `slot` is block * block_size + offset.
__device__ __forceinline__ std::int64_t cache_place(const KvCache& cache, int num_kv_heads, int head_dim, std::int64_t slot, int kv_head) {
    return ((slot / cache.block_size * num_kv_heads + kv_head) * cache.block_size + slot % cache.block_size) * head_dim;
}

// Eight values as the cache has them, and as float32.
template <typename T>
struct Eight;
template <>
struct Eight<float> {
    float4 low, high;
    __device__ __forceinline__ void load(const float* from) { low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1]; }
    __device__ __forceinline__ void clear() { low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
    __device__ __forceinline__ void unpack(float (&to)[8]) const {
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w, to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
};
template <typename T>
struct Eight {
    uint4 words;
    __device__ __forceinline__ void load(const T* from) { words = *reinterpret_cast<const uint4*>(from); }
    __device__ __forceinline__ void clear() { words = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void unpack(float (&to)[8]) const {
        const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            if constexpr (std::is_same_v<T, __nv_bfloat16>) {
                to[2 * index] = __uint_as_float(all[index] << 16), to[2 * index + 1] = __uint_as_float(all[index] & 0xffff0000u);
            } else {
                const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&all[index]));
                to[2 * index] = pair.x, to[2 * index + 1] = pair.y;
            }
        }
    }
};

}  // namespace pocket::cuda
