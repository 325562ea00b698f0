// Products of any kind and size in float32 arithmetic: exact, for float32 weights and for shapes that the tensor cores don't take.
#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float weight_at(const Segment& weight, std::int64_t row, int column, int columns) {
    if (weight.dtype == DType::float8_e4m3) {
        const std::uint32_t bits = static_cast<const std::uint8_t*>(weight.values)[row * columns + column];
        return float8_to_float(bits) * weight.scales[row / 128 * weight.scale_stride + column / 128];
    }
    return load_value(weight.values, weight.dtype, row * columns + column);
}

// One warp a weight row, for few rows of x: lanes take neighbouring columns.
__global__ void narrow_kernel(const void* x, DType x_dtype, std::int64_t x_stride, DType rounded, const Segment weight, int columns, float* out,
                              std::int64_t out_stride, bool adds) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5), batch = blockIdx.y;
    if (row >= weight.rows) return;
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
#pragma unroll 4
    for (int column = lane; column < columns; column += 32)
        sum = fmaf(round_to(load_value(x, x_dtype, batch * x_stride + column), rounded), weight_at(weight, row, column, columns), sum);
    sum = warp_sum(sum);
    if (lane == 0) out[batch * out_stride + row] = adds ? out[batch * out_stride + row] + sum : sum;
}

constexpr int kTile = 64, kDepth = 16;

// 64x64 results a block, 4x4 a thread.
__global__ __launch_bounds__(kThreads) void wide_kernel(const void* x, DType x_dtype, std::int64_t x_stride, DType rounded, int x_rows, const Segment weight,
                                                       int columns, float* out, std::int64_t out_stride, bool adds) {
    __shared__ float left[kDepth][kTile + 4], right[kDepth][kTile + 4];
    const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kTile, first_weight = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int at_row = threadIdx.x / 16 * 4, at_column = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (int start = 0; start < columns; start += kDepth) {
        for (int index = threadIdx.x; index < kTile * kDepth; index += kThreads) {
            const int row = index / kDepth, depth = index % kDepth, column = start + depth;
            left[depth][row] = first_row + row < x_rows && column < columns
                                   ? round_to(load_value(x, x_dtype, (first_row + row) * x_stride + column), rounded)
                                   : 0.0f;
            right[depth][row] = first_weight + row < weight.rows && column < columns ? weight_at(weight, first_weight + row, column, columns) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int depth = 0; depth < kDepth; ++depth) {
            const float4 a = *reinterpret_cast<const float4*>(&left[depth][at_row]), b = *reinterpret_cast<const float4*>(&right[depth][at_column]);
            const float rows[4] = {a.x, a.y, a.z, a.w}, weights[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(rows[i], weights[j], sums[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
            const std::int64_t row = first_row + at_row + i, column = first_weight + at_column + j;
            if (row >= x_rows || column >= weight.rows) continue;
            float& to = out[row * out_stride + column];
            to = adds ? to + sums[i][j] : sums[i][j];
        }
    }
}

}  // namespace

void product_plain(const Context& context, const Tensor& x, DType rounded, const Segment& weight, std::int64_t columns, float* out, std::int64_t stride, bool adds) {
    if (x.rows <= 4) {
        launch(context, narrow_kernel, dim3(ceil_div(weight.rows, kThreads / 32), static_cast<unsigned>(x.rows)), kThreads, 0, x.data, x.dtype, x.stride, rounded,
               weight, static_cast<int>(columns), out, stride, adds);
    } else {
        launch(context, wide_kernel, dim3(ceil_div(weight.rows, kTile), ceil_div(x.rows, kTile)), kThreads, 0, x.data, x.dtype, x.stride, rounded,
               static_cast<int>(x.rows), weight, static_cast<int>(columns), out, stride, adds);
    }
}

}  // namespace pocket::cuda
