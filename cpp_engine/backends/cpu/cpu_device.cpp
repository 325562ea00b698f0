#include "backends/cpu/cpu_device.h"

#include <algorithm>
#include <cstring>

#include "core/cores.h"
#include "pocket/error.h"

namespace pocket {
namespace {

Isa choose(std::optional<Isa> wanted) {
    const std::vector<Isa>& isas = available_isas();
    if (!wanted) return isas.back();
    if (std::find(isas.begin(), isas.end(), *wanted) == isas.end())
        throw Error(ErrorKind::unsupported, std::string("device: this processor has no ") + name(*wanted) + "; use the best that it has", "device");
    return *wanted;
}

}  // namespace

CpuDevice::CpuDevice(int num_threads, std::optional<Isa> isa)
    : isa_(choose(isa)), kernels_(kernels(isa_)), pool_(num_threads > 0 ? num_threads : available_cores()) {}

DeviceInfo CpuDevice::info() const {
    DeviceInfo info;
    info.name = "cpu";
    info.description = std::string("CPU, ") + name(isa_) + ", " + std::to_string(pool_.size()) + (pool_.size() == 1 ? " thread" : " threads");
    info.total_memory = total_memory();
    info.free_memory = free_memory();
    info.num_threads = pool_.size();
    return info;
}

void CpuDevice::copy(void* to, const void* from, std::size_t num_bytes) {
    if (num_bytes) std::memcpy(to, from, num_bytes);
}

void CpuDevice::embed(const Step& step, const Matrix& table, const Tensor& out) {
    const CpuMatrix& matrix = static_cast<const CpuMatrix&>(table);
    pool_.parallel_for(step.num_tokens, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t token = begin; token < end; ++token) matrix.read_row(step.token_ids[token], static_cast<float*>(out.data) + token * out.stride);
    });
}

void CpuDevice::take_samples(const Step& step, const Tensor& x, const Tensor& out) {
    for (int i = 0; i < step.num_samples; ++i) {
        copy(static_cast<float*>(out.data) + i * out.stride, static_cast<const float*>(x.data) + step.sample_tokens[i] * x.stride,
             static_cast<std::size_t>(x.columns) * sizeof(float));
    }
}

}  // namespace pocket
