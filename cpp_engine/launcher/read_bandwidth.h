// What the memory delivers when it is only read: the limit of decoding.
#pragma once

#include <cstddef>

namespace pocket::launcher {

// Bytes a second of reading `num_bytes` with `num_threads` threads, the median of `repeats` passes after one that is not counted.
double read_bandwidth(std::size_t num_bytes, int num_threads, int repeats);

}  // namespace pocket::launcher
