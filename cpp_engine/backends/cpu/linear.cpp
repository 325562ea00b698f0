// Products with weights.
#include <algorithm>

#include "backends/cpu/cpu_device.h"
#include "pocket/error.h"

namespace pocket {
namespace {

constexpr std::int64_t kTiledFloat8Rows = 12;    // from here on unpacking float8 for AMX pays
constexpr int kRowBlock = 64;                   // rows whose sums a thread holds at once
constexpr std::int64_t kOwnPreparation = 16384; // values of x that each thread prepares for itself: cheaper than a loop of its own

PanelProduct product_of(const Kernels& kernels, DType dtype) {
    switch (dtype) {
        case DType::float32: return kernels.product_float32;
        case DType::float16: return kernels.product_float16;
        case DType::bfloat16: return kernels.product_bfloat16;
        default: return kernels.product_float8;
    }
}

RowForm form_of(const Kernels& kernels, DType dtype) {
    if (dtype == DType::bfloat16 && kernels.packs_bfloat16) return RowForm::bfloat16;
    return dtype == DType::bfloat16 || dtype == DType::float8_e4m3 ? RowForm::rounded_float32 : RowForm::float32;
}

}  // namespace

void CpuDevice::linear(const Tensor& x, const Norm* norm, const Matrix& weight, Epilogue epilogue, const Tensor& out) {
    const CpuMatrix& matrix = static_cast<const CpuMatrix&>(weight);
    const std::int64_t wide = epilogue == Epilogue::swiglu ? matrix.rows() / 2 : matrix.rows();
    if (x.columns != matrix.columns() || out.columns != wide || out.rows != x.rows) {
        throw Error(ErrorKind::device, "cpu: a product of [" + std::to_string(x.rows) + ", " + std::to_string(x.columns) + "] and a weight [" +
                                           std::to_string(matrix.rows()) + ", " + std::to_string(matrix.columns()) + "] into [" + std::to_string(out.rows) +
                                           ", " + std::to_string(out.columns) + "]; this is an error of the model's code");
    }
    if (x.rows == 0) return;
    // Gates and ups are combined where their panels lie alike; else behind a product of its own.
    if (epilogue != Epilogue::swiglu || (matrix.segments().size() == 1 && wide % kPanelRows == 0)) return multiply(x, norm, matrix, epilogue, out);
    wide_.reserve<float>(1, static_cast<std::size_t>(x.rows * matrix.rows()));
    const Tensor both{wide_.of<float>(0), DType::float32, x.rows, matrix.rows(), matrix.rows()};
    multiply(x, norm, matrix, Epilogue::store, both);
    pool_.parallel_for(x.rows, [&](std::int64_t begin, std::int64_t end, int) {
        alignas(64) float gates[kPanelRows] = {}, ups[kPanelRows] = {};
        for (std::int64_t row = begin; row < end; ++row) {
            const float* from = static_cast<const float*>(both.data) + row * both.stride;
            for (std::int64_t column = 0; column < wide; column += kPanelRows) {
                const int valid = static_cast<int>(std::min<std::int64_t>(kPanelRows, wide - column));
                std::copy_n(from + column, valid, gates);
                std::copy_n(from + wide + column, valid, ups);
                kernels_.finish(Epilogue::swiglu, gates, ups, 1, valid, static_cast<float*>(out.data) + row * out.stride + column, out.stride);
            }
        }
    });
}

void CpuDevice::multiply(const Tensor& x, const Norm* norm, const CpuMatrix& weight, Epilogue epilogue, const Tensor& out) {
    for (const CpuMatrix::Segment& segment : weight.segments()) multiply_segment(x, norm, weight, segment, epilogue, out);
}

void CpuDevice::multiply_segment(const Tensor& x, const Norm* norm, const CpuMatrix& weight, const CpuMatrix::Segment& segment, Epilogue epilogue,
                                 const Tensor& out) {
    // Tiles read bfloat16 weights fastest even for one row, and add in the same order for any number of rows.
    const bool is_tiled = segment.dtype == DType::bfloat16 || (segment.dtype == DType::float8_e4m3 && x.rows >= kTiledFloat8Rows);
    if (isa_ == Isa::amx_bf16 && is_tiled) return multiply_tiles(x, norm, weight, segment, epilogue, out);
    const std::int64_t padded = weight.padded_columns();
    const int rows = static_cast<int>(x.rows);
    const RowForm form = form_of(kernels_, segment.dtype);
    const PanelProduct product = product_of(kernels_, segment.dtype);
    const std::int64_t row_bytes = padded * (form == RowForm::bfloat16 ? 2 : 4);
    const auto prepare = [&](int first, int count, std::byte* to) {
        kernels_.prepare(static_cast<const float*>(x.data) + first * x.stride, x.stride, count, x.columns, padded, norm, form, to);
    };
    const bool is_own = rows * padded <= kOwnPreparation;
    if (is_own) {
        own_.reserve<std::byte>(pool_.size(), static_cast<std::size_t>(rows * row_bytes) + 64);
        for (int thread = 0; thread < pool_.size(); ++thread) *own_.of<std::byte>(thread) = std::byte{0};  // not prepared
    } else {
        shared_.reserve<std::byte>(1, static_cast<std::size_t>(rows * row_bytes));
        pool_.parallel_for(rows, [&](std::int64_t begin, std::int64_t end, int) {
            prepare(static_cast<int>(begin), static_cast<int>(end - begin), shared_.of<std::byte>(0) + begin * row_bytes);
        });
    }
    const bool is_gated = epilogue == Epilogue::swiglu;
    const std::int64_t panels = is_gated ? segment.num_panels / 2 : segment.num_panels;
    pool_.parallel_for(panels, [&](std::int64_t begin, std::int64_t end, int thread) {
        std::byte* mark = is_own ? own_.of<std::byte>(thread) : nullptr;
        if (mark && *mark == std::byte{0}) {
            prepare(0, rows, mark + 64);
            *mark = std::byte{1};
        }
        const std::byte* prepared = mark ? mark + 64 : shared_.of<std::byte>(0);
        alignas(64) float sums[kRowBlock * kPanelRows], ups[kRowBlock * kPanelRows];
        for (std::int64_t panel = begin; panel < end; ++panel) {
            const int valid = static_cast<int>(std::min<std::int64_t>(kPanelRows, segment.rows - panel * kPanelRows));
            for (int first = 0; first < rows; first += kRowBlock) {
                const int count = std::min(kRowBlock, rows - first);
                product(segment.panel(panel), prepared + first * row_bytes, count, padded, sums);
                if (is_gated) product(segment.panel(panels + panel), prepared + first * row_bytes, count, padded, ups);
                kernels_.finish(epilogue, sums, ups, count, valid, static_cast<float*>(out.data) + first * out.stride + segment.first_row + panel * kPanelRows,
                                out.stride);
            }
        }
    });
}

}  // namespace pocket
