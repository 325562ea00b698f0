#include "models/weights.h"

#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/number_formats.h"
#include "models/fp8_config.h"
#include "pocket/error.h"

namespace pocket {

namespace {

constexpr std::int64_t fp8_block = 128;

[[noreturn]] void fail(const HostTensor& tensor, const std::string& what) {
    throw Error(ErrorKind::configuration, tensor.file + " has the tensor " + tensor.name + what, "model");
}

bool is_dense(DType dtype) { return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16; }

// Value `place` of a dense tensor.
float value_at(const HostTensor& tensor, std::int64_t place) {
    if (tensor.dtype == DType::float32) return reinterpret_cast<const float*>(tensor.data)[place];
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(tensor.data)[place];
    return tensor.dtype == DType::float16 ? from_float16(bits) : from_bfloat16(bits);
}

}  // namespace

Weights::Weights(Checkpoint& checkpoint, const Share& share) : checkpoint_(checkpoint), share_(share) { check_quantization(checkpoint); }

MatrixPart Weights::matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    const HostTensor& weight = checkpoint_.take(name, {rows, columns});
    if (is_dense(weight.dtype)) return {&weight, nullptr};
    if (weight.dtype != DType::float8_e4m3) {
        fail(weight, std::string(" of the type ") + pocket::name(weight.dtype) + ", which holds no weights: download it again.");
    }
    const std::vector<std::int64_t> wanted{(rows + fp8_block - 1) / fp8_block, (columns + fp8_block - 1) / fp8_block};
    const std::string scales_name = name + "_scale_inv";
    const HostTensor* scales = checkpoint_.find(scales_name);
    if (!scales || scales->shape != wanted) {
        const std::string found = scales ? " has the shape " + shape_text(scales->shape) : " is missing";
        fail(weight, " of the type F8_E4M3, and " + scales_name + found + " where " + shape_text(wanted) + " is needed: download the model again.");
    }
    if (scales->dtype != DType::float32 && scales->dtype != DType::bfloat16) {
        fail(*scales, std::string(" of the type ") + pocket::name(scales->dtype) + ", and scales are float32 or bfloat16: download the model again.");
    }
    return {&weight, &checkpoint_.take(scales_name, wanted)};
}

// A part of FP8 values has the scales of its own blocks where it begins with one, or lies within one.
void Weights::check_cut(const HostTensor& whole, const char* what, const Range& part) const {
    if (part.begin % fp8_block == 0 || part.begin / fp8_block == (part.end - 1) / fp8_block) return;
    throw Error(ErrorKind::unsupported,
                whole.file + " has the tensor " + whole.name + " in FP8 blocks of 128 x 128, and " + std::to_string(share_.size) + " ranks would cut one at " + what +
                    " " + std::to_string(part.begin) + ": send a smaller tensor_parallel_size, or use an unquantized checkpoint.",
                "tensor_parallel_size");
}

const HostTensor& Weights::cut_rows(const HostTensor& whole, const Range& rows) {
    HostTensor& tensor = parts_.emplace_back(Part{whole, {}}).tensor;
    const auto skipped = rows.begin * whole.shape[1] * static_cast<std::int64_t>(item_size(whole.dtype));
    tensor.shape[0] = rows.size();
    tensor.data += skipped;
    tensor.offset += skipped;
    return tensor;
}

const HostTensor& Weights::cut_columns(const HostTensor& whole, const Range& columns) {
    Part& part = parts_.emplace_back(Part{whole, {}});
    const std::size_t item = item_size(whole.dtype), from = static_cast<std::size_t>(whole.shape[1]) * item, to = static_cast<std::size_t>(columns.size()) * item;
    const auto num_rows = static_cast<std::size_t>(whole.shape[0]);
    part.copies.resize(num_rows * to);
    for (std::size_t row = 0; row < num_rows; ++row) {
        std::memcpy(part.copies.data() + row * to, whole.data + row * from + static_cast<std::size_t>(columns.begin) * item, to);
    }
    part.tensor.shape[1] = columns.size();
    part.tensor.data = part.copies.data();
    part.tensor.descriptor = -1;  // no file has these values one behind the other
    return part.tensor;
}

MatrixPart Weights::rows(const MatrixPart& whole, const Range& rows) {
    if (!whole.scales) return {&cut_rows(*whole.weight, rows), nullptr};
    check_cut(*whole.weight, "row", rows);
    return {&cut_rows(*whole.weight, rows), &cut_rows(*whole.scales, {rows.begin / fp8_block, (rows.end + fp8_block - 1) / fp8_block})};
}

MatrixPart Weights::share_rows(const MatrixPart& whole, std::int64_t first, std::int64_t count) {
    if (share_.size == 1 && count == whole.weight->shape[0]) return whole;
    const auto of = [&](int rank) {
        const Range part = Share{rank, share_.size}.of(count);
        return Range{first + part.begin, first + part.end};
    };
    for (int rank = 0; whole.scales && rank < share_.size; ++rank) check_cut(*whole.weight, "row", of(rank));
    return rows(whole, of(share_.rank));
}

MatrixPart Weights::share_columns(const MatrixPart& whole) {
    if (share_.size == 1) return whole;
    const std::int64_t count = whole.weight->shape[1];
    for (int rank = 0; whole.scales && rank < share_.size; ++rank) check_cut(*whole.weight, "column", Share{rank, share_.size}.of(count));
    const Range mine = share_.of(count);
    if (!whole.scales) return {&cut_columns(*whole.weight, mine), nullptr};
    return {&cut_columns(*whole.weight, mine), &cut_columns(*whole.scales, {mine.begin / fp8_block, (mine.end + fp8_block - 1) / fp8_block})};
}

std::vector<float> Weights::floats(const std::string& name, const std::vector<std::int64_t>& shape) {
    const HostTensor& tensor = checkpoint_.take(name, shape);
    if (!is_dense(tensor.dtype)) {
        fail(tensor, std::string(" of the type ") + pocket::name(tensor.dtype) + ", which should be float32, float16 or bfloat16: download the model again.");
    }
    std::vector<float> values(static_cast<std::size_t>(tensor.num_elements()));
    for (std::size_t place = 0; place < values.size(); ++place) {
        values[place] = value_at(tensor, static_cast<std::int64_t>(place));
        if (!std::isfinite(values[place])) fail(tensor, ", whose value " + std::to_string(place) + " is NaN or infinite: download the model again.");
    }
    return values;
}

}  // namespace pocket
