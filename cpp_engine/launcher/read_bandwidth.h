// What the memory delivers when it is only read: the limit of decoding.
#pragma once

#include <cstddef>
#include <string>

namespace pocket::launcher {

// Bytes a second of reading host memory of `num_bytes` with `num_threads` threads, the median of `repeats` passes after one that is not counted.
double read_bandwidth(std::size_t num_bytes, int num_threads, int repeats);

// The same of the memory of `device`, as DeviceInfo names it.
double device_bandwidth(const std::string& device, int num_threads, int repeats);

}  // namespace pocket::launcher
