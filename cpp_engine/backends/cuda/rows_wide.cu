// What goes over many rows once, beside products of many rows: 16 bytes a lane, each value read once.
#include <cuda_fp8.h>

#include "backends/cuda/tensor_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 256, kMostVectors = 20;            // of four columns, of a thread
constexpr float kLargestFloat8 = 448.0f;

__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
template <typename T>
__device__ __forceinline__ float4 load_four(const T* from) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    const float2 low = unpack<T>(words.x), high = unpack<T>(words.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

// A block a row; a warp's lanes have 128 neighbouring columns at a time. To is what x is rounded to; with kFloat8 it becomes float8_e4m3 after that, its scale
// the largest of the 128 / 448.
template <typename From, typename To, bool kFloat8, int kVectors>
__global__ __launch_bounds__(kThreads) void prepare_kernel(const From* x, std::int64_t stride, const float* norm, float eps, int columns, void* out, float* scales) {
    __shared__ float sums[32];
    const std::int64_t row = blockIdx.x;
    float4 values[kVectors];
    float squares = 0.0f;
#pragma unroll
    for (int index = 0; index < kVectors; ++index) {
        const int column = (index * kThreads + static_cast<int>(threadIdx.x)) * 4;
        values[index] = column < columns ? load_four(x + row * stride + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        squares += values[index].x * values[index].x + values[index].y * values[index].y + values[index].z * values[index].z + values[index].w * values[index].w;
    }
    const float factor = norm ? rsqrtf(block_sum(squares, sums) / columns + eps) : 1.0f;
#pragma unroll
    for (int index = 0; index < kVectors; ++index) {
        const int column = (index * kThreads + static_cast<int>(threadIdx.x)) * 4;
        float4 value = values[index];
        if (norm && column < columns) {
            const float4 weight = load_four(norm + column);
            value = make_float4(value.x * factor * weight.x, value.y * factor * weight.y, value.z * factor * weight.z, value.w * factor * weight.w);
        }
        const std::uint32_t low = pack<To>(value.x, value.y), high = pack<To>(value.z, value.w);
        if constexpr (kFloat8) {
            const float2 first = unpack<To>(low), second = unpack<To>(high);
            const float largest = warp_max(fmaxf(fmaxf(fabsf(first.x), fabsf(first.y)), fmaxf(fabsf(second.x), fabsf(second.y))));
            const float grow = largest > 0.0f ? kLargestFloat8 / largest : 0.0f;
            if (column >= columns) continue;                // of all lanes of the warp: columns are a multiple of 128
            const auto eight = [&](float2 pair) {
                return static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(pair.x * grow, pair.y * grow), __NV_SATFINITE, __NV_E4M3));
            };
            *reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(out) + row * columns + column) = eight(first) | eight(second) << 16;
            if ((threadIdx.x & 31) == 0) scales[static_cast<std::int64_t>(column / 128) * gridDim.x + row] = largest / kLargestFloat8;
        } else {
            if (column >= columns) continue;
            *reinterpret_cast<uint2*>(static_cast<To*>(out) + row * columns + column) = make_uint2(low, high);
        }
    }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void swiglu_kernel(const T* both, std::int64_t stride, T* out, std::int64_t out_stride, int columns) {
    const std::int64_t row = blockIdx.y;
    const int column = (blockIdx.x * kThreads + threadIdx.x) * 8;
    if (column >= columns) return;
    const uint4 gates = *reinterpret_cast<const uint4*>(both + row * stride + column), ups = *reinterpret_cast<const uint4*>(both + row * stride + columns + column);
    const auto combine = [](std::uint32_t gate_words, std::uint32_t up_words) {
        const float2 gate = unpack<T>(gate_words), up = unpack<T>(up_words);
        return pack<T>(silu(gate.x) * up.x, silu(gate.y) * up.y);
    };
    *reinterpret_cast<uint4*>(out + row * out_stride + column) = make_uint4(combine(gates.x, ups.x), combine(gates.y, ups.y), combine(gates.z, ups.z), combine(gates.w, ups.w));
}

template <typename From, typename To, bool kFloat8>
void launch_prepare(const Context& context, const Tensor& x, const Norm* norm, void* out, float* scales) {
    const auto go = [&](auto kernel) {
        launch(context, kernel, dim3(static_cast<unsigned>(x.rows)), kThreads, 0, static_cast<const From*>(x.data), x.stride, norm ? norm->weight : nullptr, norm ? norm->eps : 0.0f,
               static_cast<int>(x.columns), out, scales);
    };
    const std::int64_t vectors = (x.columns + 4 * kThreads - 1) / (4 * kThreads);
    if (vectors <= 4) go(prepare_kernel<From, To, kFloat8, 4>);
    else if (vectors <= 8) go(prepare_kernel<From, To, kFloat8, 8>);
    else go(prepare_kernel<From, To, kFloat8, kMostVectors>);
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

}  // namespace

bool takes_prepare_wide(const Tensor& x, const Norm* norm, DType to) {
    return (x.dtype == DType::float32 || (x.dtype == DType::bfloat16 && to == DType::float8_e4m3)) && x.columns % 8 == 0 && x.columns <= 4LL * kThreads * kMostVectors &&
           x.stride % 8 == 0 && is_aligned(x.data) && (!norm || is_aligned(norm->weight));
}

void prepare_wide(const Context& context, const Tensor& x, const Norm* norm, void* out, DType to, float* scales) {
    if (to == DType::bfloat16) launch_prepare<float, __nv_bfloat16, false>(context, x, norm, out, nullptr);
    else if (to == DType::float16) launch_prepare<float, __half, false>(context, x, norm, out, nullptr);
    else if (x.dtype == DType::float32) launch_prepare<float, __nv_bfloat16, true>(context, x, norm, out, scales);
    else launch_prepare<__nv_bfloat16, __nv_bfloat16, true>(context, x, norm, out, scales);
}

bool takes_swiglu_wide(const Tensor& both, const Tensor& out) {
    return both.dtype == out.dtype && both.dtype != DType::float32 && out.columns % 8 == 0 && both.stride % 8 == 0 && out.stride % 8 == 0 && is_aligned(both.data) &&
           is_aligned(out.data);
}

void combine_swiglu_wide(const Context& context, const Tensor& both, const Tensor& out) {
    const auto go = [&]<typename T>(T*) {
        launch(context, swiglu_kernel<T>, dim3(ceil_div(out.columns, 8 * kThreads), static_cast<unsigned>(out.rows)), kThreads, 0, static_cast<const T*>(both.data), both.stride,
               static_cast<T*>(out.data), out.stride, static_cast<int>(out.columns));
    };
    if (out.dtype == DType::bfloat16) go(static_cast<__nv_bfloat16*>(nullptr));
    else go(static_cast<__half*>(nullptr));
}

}  // namespace pocket::cuda
