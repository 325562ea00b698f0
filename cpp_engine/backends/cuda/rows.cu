// Kernels that go over rows once: gathers, norms, roundings, the gate of a feed-forward layer, float8 blocks to 16 bits.
#include <algorithm>

#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 256;

// Rows of the segment alone; `stride` may be more than the columns where it is not float8_e4m3.
__global__ void gather_kernel(const Segment table, std::int64_t stride, int columns, const std::int32_t* ids, float* out, std::int64_t out_stride) {
    const std::int64_t row = ids[blockIdx.x] - table.first_row, from = row * stride;
    if (row < 0 || row >= table.rows) return;
    float* to = out + blockIdx.x * out_stride;
    for (int column = threadIdx.x; column < columns; column += kThreads) {
        if (table.dtype == DType::float8_e4m3) {
            to[column] = float8_to_float(static_cast<const std::uint8_t*>(table.values)[from + column]) * table.scales[row / 128 * table.scale_stride + column / 128];
        } else {
            to[column] = load_value(table.values, table.dtype, from + column);
        }
    }
}

__global__ void prepare_kernel(const void* x, DType x_dtype, std::int64_t stride, const float* norm, float eps, int columns, void* out, DType to,
                               DType round_first, float* row_scales) {
    __shared__ float sums[32], largest[32];
    const std::int64_t row = blockIdx.x;
    float factor = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (int column = threadIdx.x; column < columns; column += blockDim.x) {
            const float value = load_value(x, x_dtype, row * stride + column);
            squares += value * value;
        }
        factor = rsqrtf(block_sum(squares, sums) / columns + eps);
    }
    const auto value_at = [&](int column) {
        const float value = load_value(x, x_dtype, row * stride + column);
        return round_to(norm ? value * factor * norm[column] : value, round_first);
    };
    float shrink = 1.0f;
    if (row_scales) {
        float most = 0.0f;
        for (int column = threadIdx.x; column < columns; column += blockDim.x) most = fmaxf(most, fabsf(value_at(column)));
        most = warp_max(most);
        if ((threadIdx.x & 31) == 0) largest[threadIdx.x >> 5] = most;
        __syncthreads();
        most = warp_max((threadIdx.x & 31) < (blockDim.x >> 5) ? largest[threadIdx.x & 31] : 0.0f);
        const int exponent = most > 0.0f && most < INFINITY ? ilogbf(most) : 0;
        shrink = ldexpf(1.0f, 14 - exponent);  // the largest becomes 2^14 to 2^15
        if (exponent < -100) shrink = ldexpf(1.0f, 114);
        if (threadIdx.x == 0) row_scales[row] = 1.0f / shrink;
    }
    for (int column = threadIdx.x; column < columns; column += blockDim.x) store_value(out, to, row * columns + column, value_at(column) * shrink);
}

__global__ void swiglu_kernel(const void* both, DType both_dtype, std::int64_t stride, void* out, DType dtype, std::int64_t out_stride, int columns) {
    const std::int64_t row = blockIdx.y;
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const float gate = load_value(both, both_dtype, row * stride + column), up = load_value(both, both_dtype, row * stride + columns + column);
    store_value(out, dtype, row * out_stride + column, silu(gate) * up);
}

__global__ void store_kernel(const float* values, std::int64_t stride, void* out, DType dtype, std::int64_t out_stride, int columns, bool adds) {
    const std::int64_t row = blockIdx.y;
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float value = values[row * stride + column];
    if (adds) value += load_value(out, dtype, row * out_stride + column);
    store_value(out, dtype, row * out_stride + column, value);
}

// Sixteen values a thread.
__global__ void expand_kernel(const std::uint8_t* values, const float* scales, int scale_stride, std::int64_t columns, std::int64_t first, std::int64_t rows,
                              void* out, DType to) {
    const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    if (at >= rows * columns) return;
    for (std::int64_t index = at; index < at + 16 && index < rows * columns; ++index) {
        const std::int64_t row = first + index / columns, column = index % columns;
        store_value(out, to, index, float8_to_float(values[row * columns + column]) * scales[row / 128 * scale_stride + column / 128]);
    }
}

__global__ void convert_kernel(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t first, std::int64_t count, unsigned long long* first_bad) {
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
    for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < count; index += step) {
        bool is_bad = false, is_large = false;
        if (from_dtype == DType::float8_e4m3) {
            const std::uint8_t bits = static_cast<const std::uint8_t*>(from)[index];
            static_cast<std::uint8_t*>(to)[index] = bits;
            is_bad = (bits & 0x7fu) == 0x7fu;
        } else {
            const float value = load_value(from, from_dtype, index);
            store_value(to, to_dtype, index, value);
            is_bad = !isfinite(value), is_large = !is_bad && !isfinite(round_to(value, to_dtype));
        }
        if (is_bad || is_large) atomicMin(first_bad, static_cast<unsigned long long>(first + index) * 2 + (is_large ? 1 : 0));
    }
}

}  // namespace

bool has_code() noexcept {
    cudaFuncAttributes attributes;
    const bool found = cudaFuncGetAttributes(&attributes, convert_kernel) == cudaSuccess;
    cudaGetLastError();  // which is no error of a later call
    return found;
}

void gather_rows(const Context& context, const Segment& table, std::int64_t stride, std::int64_t columns, const std::int32_t* ids, int num_rows, const Tensor& out) {
    if (num_rows == 0) return;
    launch(context, gather_kernel, dim3(num_rows), kThreads, 0, table, stride, static_cast<int>(columns), ids, static_cast<float*>(out.data), out.stride);
}

void prepare_rows(const Context& context, const Tensor& x, const Norm* norm, void* out, DType to, DType round_first, float* row_scales) {
    launch(context, prepare_kernel, dim3(static_cast<unsigned>(x.rows)), kThreads, 0, x.data, x.dtype, x.stride, norm ? norm->weight : nullptr,
                  norm ? norm->eps : 0.0f, static_cast<int>(x.columns), out, to, round_first, row_scales);
}

void combine_swiglu(const Context& context, const Tensor& both, const Tensor& out) {
    launch(context, swiglu_kernel, dim3(ceil_div(out.columns, kThreads), static_cast<unsigned>(out.rows)), kThreads, 0, both.data, both.dtype, both.stride, out.data,
           out.dtype, out.stride, static_cast<int>(out.columns));
}

void store_rows(const Context& context, const float* values, std::int64_t stride, const Tensor& out, bool adds) {
    launch(context, store_kernel, dim3(ceil_div(out.columns, kThreads), static_cast<unsigned>(out.rows)), kThreads, 0, values, stride, out.data, out.dtype, out.stride,
           static_cast<int>(out.columns), adds);
}

void expand_float8(const Context& context, const Segment& segment, std::int64_t columns, std::int64_t first, std::int64_t rows, void* out, DType to) {
    launch(context, expand_kernel, dim3(ceil_div(rows * columns, kThreads * 16)), kThreads, 0, static_cast<const std::uint8_t*>(segment.values), segment.scales,
           segment.scale_stride, columns, first, rows, out, to);
}

void convert_values(const Context& context, const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t first, std::int64_t count,
                    unsigned long long* first_bad) {
    const int blocks = std::min(ceil_div(count, kThreads * 8), context.num_multiprocessors * 8);
    launch(context, convert_kernel, dim3(blocks), kThreads, 0, from, from_dtype, to, to_dtype, first, count, first_bad);
}

}  // namespace pocket::cuda
