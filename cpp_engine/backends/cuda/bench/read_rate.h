#pragma once

#include <cstddef>

namespace pocket::cuda {

// Bytes a second, the median of several readings of `num_bytes` of device memory (a few GiB, so that no cache holds it), which is overwritten. `sink` has 4 bytes.
double read_rate(void* data, std::size_t num_bytes, void* sink);

}  // namespace pocket::cuda
