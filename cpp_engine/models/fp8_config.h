// The quantization_config of FP8 checkpoints.
#pragma once

#include "io/checkpoint.h"

namespace pocket {

// Error(unsupported) naming the file, and the key or the tensor, where the weights can't be read by their quantization_config. Read are checkpoints
// without one, and FP8 E4M3 with a scale for each block of 128 x 128 weights and activations that are not quantized by the file.
void check_quantization(const Checkpoint& checkpoint);

}  // namespace pocket
