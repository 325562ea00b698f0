// Products of many rows, through cuBLASLt.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "backends/cuda/kernels.h"

namespace pocket::cuda {

// Rows of float8_e4m3 with a scale for each 128 columns of a row: scales [ceil(columns / 128), rows].
struct Float8Rows {
    const void* values = nullptr;
    const float* scales = nullptr;
    std::int64_t rows = 0, columns = 0;
};

// Owns cuBLASLt's handle and which of its algorithms serves each size best. One thread, one stream.
class WideProduct {
public:
    static constexpr std::size_t kWorkspaceBytes = 32 << 20;

    WideProduct();
    ~WideProduct();
    WideProduct(const WideProduct&) = delete;
    WideProduct& operator=(const WideProduct&) = delete;

    // out [x.rows, weight_rows] (+)= x weight^T. x and weight [weight_rows, x.columns], contiguous rows, are both float16 or both bfloat16; out is float32 or of
    // that type. `workspace` has kWorkspaceBytes. The first product of a size of kTimedRows or more tries several algorithms, and waits for them.
    void run(const Context&, const Tensor& x, const void* weight, std::int64_t weight_rows, const Tensor& out, bool adds, void* workspace);

    // The same by the tensor cores of Hopper for float8_e4m3, with the scales of the weight's 128x128 blocks; out is float32 or bfloat16 and has x.rows rows.
    static bool takes_float8(const Context&, const Segment& weight, std::int64_t rows, std::int64_t columns);
    void run(const Context&, const Float8Rows& x, const Segment& weight, const Tensor& out, bool adds, void* workspace);

private:
    static constexpr std::int64_t kTimedRows = 1024;
    // Rows, in steps; weight rows; columns; strides of x and out; types of x and out; adds.
    using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, DType, DType, bool>;
    struct Call;
    void multiply(const Context&, Call& call);
    cublasLtMatmulAlgo_t choose(const Context&, Call& call, bool is_timed);
    float milliseconds_of(const Context&, Call& call, const cublasLtMatmulAlgo_t& algorithm, void* out);

    cublasLtHandle_t handle_ = nullptr;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
    std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace pocket::cuda
