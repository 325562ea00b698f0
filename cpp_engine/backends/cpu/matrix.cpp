#include "backends/cpu/matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "backends/cpu/memory.h"
#include "core/number_formats.h"
#include "pocket/error.h"

namespace pocket {
namespace {

[[noreturn]] void refuse(const HostTensor& tensor, const std::string& what) {
    throw Error(ErrorKind::configuration, tensor.file + ": " + tensor.name + " " + what, "model");
}

DType stored_dtype(const HostTensor& tensor, DType dtype) { return tensor.dtype == DType::float8_e4m3 ? DType::float8_e4m3 : dtype; }

// Where a panel holds column `column` of its row `lane`, in items of its type; the scales of float8 aside.
std::int64_t place(DType dtype, std::int64_t lane, std::int64_t column) {
    if (dtype == DType::bfloat16) return (column / 2 * kPanelRows + lane) * 2 + column % 2;
    if (dtype == DType::float8_e4m3) return column / kScaleBlock * (kScaleBlock + 4) * kPanelRows + kPanelRows * 4 + column % kScaleBlock * kPanelRows + lane;
    return column * kPanelRows + lane;
}

std::size_t panel_size(DType dtype, std::int64_t columns) {
    const std::int64_t scales = dtype == DType::float8_e4m3 ? (columns + kScaleBlock - 1) / kScaleBlock * 4 : 0;
    return static_cast<std::size_t>(kPanelRows * (columns + scales)) * item_size(dtype);
}

template <typename T>
T item(const std::byte* data, std::int64_t index) {  // tensors in a file need not be aligned
    T value;
    std::memcpy(&value, data + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
    return value;
}

float as_float(const HostTensor& tensor, std::int64_t index) {
    switch (tensor.dtype) {
        case DType::float32: return item<float>(tensor.data, index);
        case DType::float16: return from_float16(item<std::uint16_t>(tensor.data, index));
        case DType::bfloat16: return from_bfloat16(item<std::uint16_t>(tensor.data, index));
        case DType::float8_e4m3: return from_float8_e4m3(item<std::uint8_t>(tensor.data, index));
        case DType::int32: break;
    }
    return 0;
}

void check_part(const MatrixPart& part, std::int64_t columns) {
    const HostTensor& weight = *part.weight;
    if (weight.shape.size() != 2) refuse(weight, "is not a matrix; the checkpoint is not of the model that its config names");
    if (weight.shape[1] != columns) {
        refuse(weight, "has " + std::to_string(weight.shape[1]) + " columns where the weights beside it have " + std::to_string(columns) +
                           "; the checkpoint does not fit its config");
    }
    if (weight.dtype == DType::int32) refuse(weight, "is int32; weights are float32, float16, bfloat16 or float8_e4m3");
    if (weight.dtype != DType::float8_e4m3) return;
    if (!part.scales) refuse(weight, "is float8_e4m3 without scales; its weight_scale_inv is missing");
    const HostTensor& scales = *part.scales;
    const std::vector<std::int64_t> shape = {(weight.shape[0] + 127) / 128, (columns + 127) / 128};
    if (scales.shape != shape)
        refuse(scales, "is not [" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) + "]: one scale for each 128 x 128 values of " + weight.name);
    if (scales.dtype != DType::float32 && scales.dtype != DType::bfloat16)
        refuse(scales, std::string("is ") + name(scales.dtype) + "; scales are float32 or bfloat16");
    for (std::int64_t i = 0; i < scales.num_elements(); ++i)
        if (!std::isfinite(as_float(scales, i))) refuse(scales, "has a value that is NaN or infinite at index " + std::to_string(i) + "; the file is damaged: download it again");
}

[[noreturn]] void refuse_value(const HostTensor& weight, std::int64_t row, std::int64_t columns, DType dtype) {
    for (std::int64_t column = 0; column < columns; ++column) {
        const float value = as_float(weight, row * columns + column);
        const std::string place = " at [" + std::to_string(row) + ", " + std::to_string(column) + "]";
        if (!std::isfinite(value)) refuse(weight, "has a value that is NaN or infinite" + place + "; the file is damaged: download it again");
        if (dtype == DType::float16 && std::isinf(from_float16(to_float16(value))))
            refuse(weight, "has " + std::to_string(value) + place + ", too large for float16; load it as bfloat16 or float32");
    }
    refuse(weight, "has a value that is NaN or infinite; the file is damaged: download it again");
}

// One row [columns] of `weight` as bits of `dtype`. False when one is not finite.
bool convert(const HostTensor& weight, std::int64_t row, std::int64_t columns, DType dtype, std::byte* out) {
    const std::size_t size = item_size(weight.dtype);
    const std::byte* from = weight.data + static_cast<std::size_t>(row * columns) * size;
    unsigned broken = 0;
    if (dtype == weight.dtype) {
        std::memcpy(out, from, static_cast<std::size_t>(columns) * size);
    } else if (dtype == DType::float32) {
        float* values = reinterpret_cast<float*>(out);
        if (weight.dtype == DType::bfloat16)
            for (std::int64_t i = 0; i < columns; ++i) values[i] = from_bfloat16(item<std::uint16_t>(from, i));
        else
            for (std::int64_t i = 0; i < columns; ++i) values[i] = from_float16(item<std::uint16_t>(from, i));
    } else {
        std::uint16_t* values = reinterpret_cast<std::uint16_t*>(out);
        for (std::int64_t i = 0; i < columns; ++i) {
            const float value = weight.dtype == DType::float32    ? item<float>(from, i)
                                : weight.dtype == DType::bfloat16 ? from_bfloat16(item<std::uint16_t>(from, i))
                                                                  : from_float16(item<std::uint16_t>(from, i));
            values[i] = dtype == DType::bfloat16 ? to_bfloat16(value) : to_float16(value);
        }
    }
    if (dtype == DType::float32) {
        const std::uint32_t* bits = reinterpret_cast<const std::uint32_t*>(out);
        for (std::int64_t i = 0; i < columns; ++i) broken |= (bits[i] & 0x7f800000u) == 0x7f800000u;
    } else if (dtype == DType::float8_e4m3) {
        const std::uint8_t* bits = reinterpret_cast<const std::uint8_t*>(out);
        for (std::int64_t i = 0; i < columns; ++i) broken |= (bits[i] & 0x7fu) == 0x7fu;
    } else {
        const std::uint16_t* bits = reinterpret_cast<const std::uint16_t*>(out);
        const std::uint16_t exponent = dtype == DType::bfloat16 ? 0x7f80 : 0x7c00;
        for (std::int64_t i = 0; i < columns; ++i) broken |= (bits[i] & exponent) == exponent;
    }
    return broken == 0;
}

}  // namespace

std::unique_ptr<CpuMatrix> CpuMatrix::load(std::span<const MatrixPart> parts, DType dtype, ThreadPool& pool) {
    if (parts.empty()) throw Error(ErrorKind::configuration, "cpu: a matrix of no weights");
    if (parts[0].weight->shape.size() != 2) refuse(*parts[0].weight, "is not a matrix; the checkpoint is not of the model that its config names");
    if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16) {
        throw Error(ErrorKind::unsupported, std::string("dtype: weights can't be held as ") + pocket::name(dtype) + "; use float32, float16 or bfloat16",
                    "dtype");
    }
    const std::int64_t columns = parts[0].weight->shape[1];
    std::int64_t rows = 0;
    bool is_float8 = false;
    for (const MatrixPart& part : parts) {
        check_part(part, columns);
        rows += part.weight->shape[0];
        is_float8 |= part.weight->dtype == DType::float8_e4m3;
    }
    std::unique_ptr<CpuMatrix> matrix(new CpuMatrix(rows, columns, is_float8 ? DType::float8_e4m3 : dtype));
    std::int64_t first_row = 0;
    for (const MatrixPart& part : parts) {
        const DType stored = stored_dtype(*part.weight, dtype);
        if (matrix->segments_.empty() || matrix->segments_.back().dtype != stored) matrix->segments_.push_back({stored, first_row, 0, 0, 0, nullptr});
        matrix->segments_.back().rows += part.weight->shape[0];
        first_row += part.weight->shape[0];
    }
    for (Segment& segment : matrix->segments_) {
        segment.num_panels = (segment.rows + kPanelRows - 1) / kPanelRows;
        segment.panel_bytes = panel_size(segment.dtype, matrix->padded_columns());
        segment.data = allocate_memory(segment.panel_bytes * static_cast<std::size_t>(segment.num_panels));
        pool.parallel_for(segment.num_panels, [&](std::int64_t begin, std::int64_t end, int) {
            for (std::int64_t panel = begin; panel < end; ++panel) matrix->fill_panel(segment, panel, parts);
        });
    }
    return matrix;
}

// Memory is zeroed, so rows and columns that nobody has are.
void CpuMatrix::fill_panel(Segment& segment, std::int64_t panel, std::span<const MatrixPart> parts) const {
    std::byte* out = static_cast<std::byte*>(segment.data->data()) + static_cast<std::size_t>(panel) * segment.panel_bytes;
    const std::int64_t count = std::min<std::int64_t>(kPanelRows, segment.rows - panel * kPanelRows);
    std::vector<std::byte> values(static_cast<std::size_t>(columns()) * item_size(segment.dtype) + 2);
    const auto spread = [&]<typename T>(T, std::int64_t lane) {
        const T* from = reinterpret_cast<const T*>(values.data());
        for (std::int64_t column = 0; column < columns(); ++column) reinterpret_cast<T*>(out)[place(segment.dtype, lane, column)] = from[column];
    };
    for (std::int64_t lane = 0; lane < count; ++lane) {
        std::int64_t row = segment.first_row + panel * kPanelRows + lane;
        const MatrixPart* part = parts.data();
        while (row >= part->weight->shape[0]) row -= (part++)->weight->shape[0];
        if (!convert(*part->weight, row, columns(), segment.dtype, values.data())) refuse_value(*part->weight, row, columns(), segment.dtype);
        if (segment.dtype == DType::float32) {
            spread(std::uint32_t{}, lane);
        } else if (segment.dtype == DType::bfloat16) {  // pairs move together
            values[values.size() - 2] = values[values.size() - 1] = std::byte{0};
            const std::int64_t pairs = (columns() + 1) / 2;
            for (std::int64_t pair = 0; pair < pairs; ++pair) std::memcpy(out + (pair * kPanelRows + lane) * 4, values.data() + pair * 4, 4);
        } else if (segment.dtype == DType::float16) {
            spread(std::uint16_t{}, lane);
        } else {
            spread(std::uint8_t{}, lane);
            const std::int64_t blocks = (columns() + kScaleBlock - 1) / kScaleBlock;
            for (std::int64_t block = 0; block < blocks; ++block) {
                const float scale = as_float(*part->scales, row / 128 * blocks + block);
                std::memcpy(out + (block * (kScaleBlock + 4) * kPanelRows) + lane * 4, &scale, sizeof(scale));
            }
        }
    }
}

std::size_t CpuMatrix::num_bytes() const noexcept {
    std::size_t total = 0;
    for (const Segment& segment : segments_) total += segment.panel_bytes * static_cast<std::size_t>(segment.num_panels);
    return total;
}

void CpuMatrix::read_row(std::int64_t row, float* out) const {
    const auto segment = std::find_if(segments_.begin(), segments_.end(), [&](const Segment& one) { return row < one.first_row + one.rows; });
    const std::int64_t local = row - segment->first_row, lane = local % kPanelRows;
    const std::byte* panel = segment->panel(local / kPanelRows);
    for (std::int64_t column = 0; column < columns(); ++column) {
        const std::int64_t at = place(segment->dtype, lane, column);
        switch (segment->dtype) {
            case DType::float32: out[column] = item<float>(panel, at); break;
            case DType::float16: out[column] = from_float16(item<std::uint16_t>(panel, at)); break;
            case DType::bfloat16: out[column] = from_bfloat16(item<std::uint16_t>(panel, at)); break;
            default: {
                const std::byte* scale = panel + column / kScaleBlock * (kScaleBlock + 4) * kPanelRows + lane * 4;
                out[column] = from_float8_e4m3(item<std::uint8_t>(panel, at)) * item<float>(scale, 0);
            }
        }
    }
}

}  // namespace pocket
