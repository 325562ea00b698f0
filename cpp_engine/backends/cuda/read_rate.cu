#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "backends/cuda/read_rate.h"
#include "backends/cuda/call.h"
#include "backends/cuda/make_device.h"

namespace pocket::cuda {

namespace {

__global__ void read_kernel(const uint4* from, std::size_t count, unsigned* sink) {
    unsigned mixed = 0;
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    std::size_t at = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + 3 * step < count; at += 4 * step) {
        uint4 words[4];
#pragma unroll
        for (int index = 0; index < 4; ++index) words[index] = __ldcs(from + at + index * step);
#pragma unroll
        for (const uint4& four : words) mixed ^= four.x ^ four.y ^ four.z ^ four.w;
    }
    for (; at < count; at += step) mixed ^= from[at].x;
    if (mixed == 0x9e3779b9u) *sink = mixed;  // keeps the loads
}

// Numbers without a pattern: memory of zeros may be read faster than memory of data.
__global__ void fill_kernel(unsigned* to, std::size_t count) {
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
    for (std::size_t at = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
        unsigned mixed = static_cast<unsigned>(at) * 0x9e3779b9u;
        mixed = (mixed ^ mixed >> 16) * 0x85ebca6bu;
        to[at] = mixed ^ mixed >> 13;
    }
}

}  // namespace

double read_rate(int ordinal, std::size_t num_bytes) {
    const auto device = make_device(ordinal);
    const auto buffer = device->allocate(num_bytes);
    device->synchronize();
    void *data = buffer->data(), *sink = data;
    cudaEvent_t begin = nullptr, end = nullptr;
    call(cudaEventCreate(&begin), "an event");
    call(cudaEventCreate(&end), "an event");
    fill_kernel<<<132 * 8, 512>>>(static_cast<unsigned*>(data), num_bytes / 4);
    double best = 0;
    for (int blocks : {132 * 4, 132 * 8, 132 * 16}) {
        std::vector<float> times;
        for (int turn = 0; turn < 7; ++turn) {
            call(cudaEventRecord(begin), "an event");
            read_kernel<<<blocks, 512>>>(static_cast<const uint4*>(data), num_bytes / 16, static_cast<unsigned*>(sink));
            call(cudaGetLastError(), "a launch");
            call(cudaEventRecord(end), "an event");
            call(cudaEventSynchronize(end), "a read");
            float milliseconds = 0;
            call(cudaEventElapsedTime(&milliseconds, begin, end), "a read");
            times.push_back(milliseconds);
        }
        std::sort(times.begin(), times.end());
        best = std::max(best, static_cast<double>(num_bytes) / (times[times.size() / 2] * 1e-3));
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return best;
}

}  // namespace pocket::cuda
