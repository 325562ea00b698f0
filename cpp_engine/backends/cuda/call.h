// Calls of the CUDA runtime, whose failures become one-line errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "pocket/error.h"

namespace pocket::cuda {

[[noreturn]] inline void fail(cudaError_t status, const char* what) {
    throw Error(ErrorKind::device, std::string("CUDA failed at ") + what + ": " + cudaGetErrorString(status) +
                                       ". The device cannot go on: restart the process; if it fails again, run it under compute-sanitizer.");
}

inline void call(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail(status, what);
}

}  // namespace pocket::cuda
