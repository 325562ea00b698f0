// A checkpoint's tensors as a model takes them, under Hugging Face's names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "pocket/device.h"

namespace pocket {

class Weights {
public:
    // The checkpoint must outlive this. Error(unsupported) as check_quantization has it.
    explicit Weights(Checkpoint& checkpoint);

    Checkpoint& checkpoint() noexcept { return checkpoint_; }

    // The matrix `name` [rows, columns], and the scales of its blocks where it is FP8. Error(configuration) naming file and tensor where one of the two is
    // missing, or has another shape or type. The values are not looked at: Device::load_matrix does that.
    MatrixPart matrix(const std::string& name, std::int64_t rows, std::int64_t columns);

    // The values of the tensor `name` in float32. Error(configuration) naming file and tensor where it is missing, or has another shape or type, or a value
    // is NaN or infinite.
    std::vector<float> floats(const std::string& name, const std::vector<std::int64_t>& shape);

private:
    Checkpoint& checkpoint_;
};

}  // namespace pocket
