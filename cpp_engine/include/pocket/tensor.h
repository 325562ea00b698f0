// Element types, and views of matrices that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pocket {

enum class DType : std::uint8_t { float32, float16, bfloat16, float8_e4m3, int32 };

constexpr std::size_t item_size(DType dtype) noexcept {
    switch (dtype) {
        case DType::float32:
        case DType::int32: return 4;
        case DType::float16:
        case DType::bfloat16: return 2;
        case DType::float8_e4m3: return 1;
    }
    return 0;
}

constexpr const char* name(DType dtype) noexcept {
    switch (dtype) {
        case DType::float32: return "float32";
        case DType::float16: return "float16";
        case DType::bfloat16: return "bfloat16";
        case DType::float8_e4m3: return "float8_e4m3";
        case DType::int32: return "int32";
    }
    return "";
}

// A tensor of a checkpoint, in host memory that the Checkpoint keeps mapped. Row-major, contiguous.
struct HostTensor {
    std::string name;
    std::string file;  // for error messages
    DType dtype = DType::float32;
    std::vector<std::int64_t> shape;
    const std::byte* data = nullptr;
    int descriptor = -1;           // of the open file that holds the same values from byte `offset` on; -1 where there is none
    std::int64_t offset = 0;

    std::int64_t num_elements() const noexcept {
        std::int64_t count = 1;
        for (std::int64_t extent : shape) count *= extent;
        return count;
    }
};

// A view of a matrix [rows, columns] in device memory; each row contiguous, rows `stride` elements apart. Owns nothing.
struct Tensor {
    void* data = nullptr;
    DType dtype = DType::float32;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::int64_t stride = 0;  // elements from a row to the next
};

}  // namespace pocket
