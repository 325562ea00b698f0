// The rate at which kernels can read device memory: the limit that decoding is measured against. Without CUDA's own headers.
#pragma once

#include <cstddef>

namespace pocket::cuda {

// Bytes a second of device number `ordinal`, the median of several readings of `num_bytes` of new memory (a few GiB, so that no cache holds it).
double read_rate(int ordinal, std::size_t num_bytes);

}  // namespace pocket::cuda
