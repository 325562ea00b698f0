// What the kernels share: launches, element types, sums over a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "backends/cuda/call.h"
#include "backends/cuda/kernels.h"

namespace pocket::cuda {

constexpr float kLog2E = 1.4426950408889634f;


// Brings a line into the multiprocessor's own cache; `from` is aligned to 16 bytes.
__device__ __forceinline__ void touch(const float* from) {
    [[maybe_unused]] float4 unused;
    asm volatile("ld.global.ca.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(unused.x), "=f"(unused.y), "=f"(unused.z), "=f"(unused.w) : "l"(from));
}

// Brings a line into the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

template <typename... Parameters, typename... Arguments>
void launch(const Context& context, cudaLaunchAttribute* attribute, void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, Arguments&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = context.stream;
    config.attrs = attribute;
    config.numAttrs = attribute ? 1 : 0;
    // A no-op after the first time; what is static counts too.
    if (shared > 32 * 1024) call(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "a kernel's shared memory");
    call(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "a launch");
}
template <typename... Parameters, typename... Arguments>
void launch(const Context& context, void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, Arguments&&... arguments) {
    launch(context, nullptr, kernel, grid, threads, shared, std::forward<Arguments>(arguments)...);
}
// Of blocks that wait for each other, all of which are started at once.
template <typename... Parameters, typename... Arguments>
void launch_together(const Context& context, void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared, Arguments&&... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    launch(context, &attribute, kernel, grid, threads, shared, std::forward<Arguments>(arguments)...);
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value) {
    if constexpr (sizeof(T) == 4) {
        return value;
    } else if constexpr (std::is_same_v<T, __half>) {
        return __float2half_rn(value);
    } else {
        return __float2bfloat16_rn(value);
    }
}

// One value of an array whose dtype is known at run time only; uniform over a launch, so that the branch costs little.
__device__ __forceinline__ float load_value(const void* data, DType dtype, std::int64_t index) {
    if (dtype == DType::float32) return static_cast<const float*>(data)[index];
    if (dtype == DType::bfloat16) return to_float(static_cast<const __nv_bfloat16*>(data)[index]);
    return to_float(static_cast<const __half*>(data)[index]);
}
__device__ __forceinline__ void store_value(void* data, DType dtype, std::int64_t index, float value) {
    if (dtype == DType::float32) {
        static_cast<float*>(data)[index] = value;
    } else if (dtype == DType::bfloat16) {
        static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
    } else {
        static_cast<__half*>(data)[index] = __float2half_rn(value);
    }
}

__device__ __forceinline__ float round_to(float value, DType dtype) {
    if (dtype == DType::bfloat16) return __bfloat162float(__float2bfloat16_rn(value));
    if (dtype == DType::float16) return __half2float(__float2half_rn(value));
    return value;
}

// float8_e4m3 to float32: its 7 bits are those of a float16 whose exponent is 8 too small.
__device__ __forceinline__ float float8_to_float(std::uint32_t bits) {
    const unsigned short half_bits = static_cast<unsigned short>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7);
    return __half2float(__ushort_as_half(half_bits)) * 256.0f;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = 16; step; step >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

// Over a block of whole warps; `shared` has 32 values, free for the next use after the block's next barrier.
__device__ __forceinline__ float block_sum(float value, float* shared) {
    value = warp_sum(value);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = value;
    __syncthreads();
    value = (threadIdx.x & 31) < (blockDim.x >> 5) ? shared[threadIdx.x & 31] : 0.0f;
    return warp_sum(value);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

inline int ceil_div(std::int64_t number, std::int64_t by) { return static_cast<int>((number + by - 1) / by); }

}  // namespace pocket::cuda
