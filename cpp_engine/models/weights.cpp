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

Weights::Weights(Checkpoint& checkpoint) : checkpoint_(checkpoint) { check_quantization(checkpoint); }

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
