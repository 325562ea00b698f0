// Weights in device memory, and their way there.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/kernels.h"
#include "core/thread_pool.h"

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

// Brings host tensors to the device in pieces, several at a time, each through two pinned buffers in turn; values are converted and checked there.
class MatrixLoader {
public:
    explicit MatrixLoader(Device& device) : device_(device) {}
    ~MatrixLoader() { release(); }
    MatrixLoader(const MatrixLoader&) = delete;
    MatrixLoader& operator=(const MatrixLoader&) = delete;

    std::unique_ptr<Matrix> load(const Context& context, std::span<const MatrixPart> parts, DType dtype);
    void release() noexcept;                                // threads and buffers, until the next load

private:
    // Small, so that all lanes end a matrix at about the same time, and that a processor's cache holds all of them.
    static constexpr std::size_t kPieceBytes = 2 << 20;
    static constexpr int kMostLanes = 16;

    // A thread's way to the device.
    struct Lane {
        cudaStream_t stream = nullptr;
        std::byte* pinned = nullptr;                        // two pieces
        std::unique_ptr<Buffer> arrived;                    // two pieces as the file has them
        cudaEvent_t sent[2] = {};                           // the piece has left the pinned buffer and was converted
        int turn = 0;
    };
    struct Piece {
        const HostTensor* tensor;
        std::int64_t first, count;                          // of its values
        std::byte* to;
        DType dtype;
        unsigned long long* first_bad;
    };

    void prepare();
    static void cut(std::vector<Piece>& pieces, const HostTensor& tensor, void* to, DType dtype, unsigned long long* first_bad);
    void send(const Context& context, std::span<const Piece> pieces);
    void send(const Context& context, const Piece& piece, Lane& lane);

    Device& device_;                                        // outlives this
    std::unique_ptr<ThreadPool> threads_;
    std::vector<Lane> lanes_;                               // one a thread
};

}  // namespace pocket::cuda
