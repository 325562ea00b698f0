#include "weighing_device.h"

#include <cstring>
#include <new>

#include "pocket/error.h"

namespace pocket::launcher {

namespace {

class HostBuffer final : public Buffer {
public:
    explicit HostBuffer(std::size_t num_bytes) {
        data_ = ::operator new(num_bytes, std::align_val_t{64});
        num_bytes_ = num_bytes;
        std::memset(data_, 0, num_bytes);
    }
    ~HostBuffer() override { ::operator delete(data_, std::align_val_t{64}); }
};

class WeighedMatrix final : public Matrix {
public:
    WeighedMatrix(std::int64_t rows, std::int64_t columns, DType dtype, std::size_t num_bytes) : Matrix(rows, columns, dtype), num_bytes_(num_bytes) {}
    std::size_t num_bytes() const noexcept override { return num_bytes_; }

private:
    std::size_t num_bytes_;
};

}  // namespace

std::unique_ptr<Buffer> WeighingDevice::allocate(std::size_t num_bytes) { return std::make_unique<HostBuffer>(num_bytes); }

void WeighingDevice::upload(void* to, const void* from, std::size_t num_bytes) { std::memcpy(to, from, num_bytes); }

void WeighingDevice::download(void* to, const void* from, std::size_t num_bytes) { std::memcpy(to, from, num_bytes); }

void WeighingDevice::copy(void* to, const void* from, std::size_t num_bytes) { std::memmove(to, from, num_bytes); }

std::unique_ptr<Matrix> WeighingDevice::load_matrix(std::span<const MatrixPart> parts, DType dtype) {
    std::int64_t rows = 0;
    std::size_t num_bytes = 0;
    bool is_fp8 = true;
    for (const MatrixPart& part : parts) {
        const std::size_t item = part.weight->dtype == DType::float8_e4m3 ? 1 : item_size(dtype);
        is_fp8 = is_fp8 && item == 1;
        rows += part.weight->shape.at(0);
        num_bytes += static_cast<std::size_t>(part.weight->num_elements()) * item;
        if (part.scales != nullptr) num_bytes += static_cast<std::size_t>(part.scales->num_elements()) * sizeof(float);
    }
    return std::make_unique<WeighedMatrix>(rows, parts[0].weight->shape.at(1), is_fp8 ? DType::float8_e4m3 : dtype, num_bytes);
}

void WeighingDevice::refuse() { throw Error(ErrorKind::unsupported, "An audit lays a model out and computes nothing."); }

}  // namespace pocket::launcher
