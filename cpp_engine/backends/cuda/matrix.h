// Weights in device memory, and their way there.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/kernels.h"

namespace pocket::cuda {

// Rows stay row-major: the kernels of few rows take them from there into the tensor cores' registers, cuBLASLt wants them so too.
class CudaMatrix : public Matrix {
public:
    CudaMatrix(std::int64_t rows, std::int64_t columns, DType dtype, std::unique_ptr<Buffer> memory, std::vector<Segment> segments, std::size_t num_bytes)
        : Matrix(rows, columns, dtype), memory_(std::move(memory)), segments_(std::move(segments)), num_bytes_(num_bytes) {}

    std::size_t num_bytes() const noexcept override { return num_bytes_; }
    std::span<const Segment> segments() const noexcept { return segments_; }

private:
    std::unique_ptr<Buffer> memory_;                        // of all segments
    std::vector<Segment> segments_;                         // one below the other
    std::size_t num_bytes_;
};

// Brings host tensors to the device in pieces, through two pinned buffers in turn; values are converted and checked there.
class MatrixLoader {
public:
    explicit MatrixLoader(Device& device) : device_(device) {}
    ~MatrixLoader();
    MatrixLoader(const MatrixLoader&) = delete;
    MatrixLoader& operator=(const MatrixLoader&) = delete;

    std::unique_ptr<Matrix> load(const Context& context, std::span<const MatrixPart> parts, DType dtype);

private:
    static constexpr std::size_t kPieceBytes = 16 << 20;

    void prepare();
    void send(const Context& context, const HostTensor& tensor, void* to, DType dtype, unsigned long long* first_bad);

    Device& device_;                                        // outlives this
    std::unique_ptr<Buffer> arrived_;                       // two pieces as the file has them
    std::byte* pinned_ = nullptr;                           // two pieces
    cudaEvent_t sent_[2] = {};                              // the piece has left the pinned buffer and was converted
    int turn_ = 0;
};

}  // namespace pocket::cuda
