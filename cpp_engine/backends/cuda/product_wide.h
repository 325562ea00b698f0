// Products of many rows, through cuBLASLt.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "backends/cuda/kernels.h"

namespace pocket::cuda {

// Owns cuBLASLt's handle and what it found out about each shape. One thread, one stream.
class WideProduct {
public:
    static constexpr std::size_t kWorkspaceBytes = 32 << 20;

    WideProduct();
    ~WideProduct();
    WideProduct(const WideProduct&) = delete;
    WideProduct& operator=(const WideProduct&) = delete;

    // out [x.rows, weight_rows] (+)= x weight^T. x and weight [weight_rows, x.columns], contiguous rows, are both float16 or both bfloat16; out is float32 or of
    // that type. `workspace` has kWorkspaceBytes.
    void run(const Context&, const Tensor& x, const void* weight, std::int64_t weight_rows, const Tensor& out, bool adds, void* workspace);

private:
    using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, DType, DType, bool>;
    struct Plan;
    const Plan& plan(const Key& key);

    cublasLtHandle_t handle_ = nullptr;
    std::map<Key, Plan> plans_;
};

}  // namespace pocket::cuda
