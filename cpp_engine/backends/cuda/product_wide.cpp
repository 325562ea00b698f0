#include "backends/cuda/product_wide.h"

#include <string>

#include "backends/cuda/call.h"

namespace pocket::cuda {

namespace {

void call_blas(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(ErrorKind::device, std::string("cuBLASLt failed at ") + what + ": " + cublasLtGetStatusString(status) + ". Free device memory, or restart the process.");
}

cudaDataType_t blas_type(DType dtype) { return dtype == DType::float32 ? CUDA_R_32F : dtype == DType::bfloat16 ? CUDA_R_16BF : CUDA_R_16F; }

}  // namespace

// Column-major, as cuBLAS counts: out^T [weight_rows, rows] = weight x^T.
struct WideProduct::Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t weight = nullptr, x = nullptr, out = nullptr;
    cublasLtMatmulAlgo_t algorithm = {};

    Plan() = default;
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;
    ~Plan() {  // what was never made is null, and destroying null only says so
        if (operation) cublasLtMatmulDescDestroy(operation);
        for (cublasLtMatrixLayout_t layout : {weight, x, out})
            if (layout) cublasLtMatrixLayoutDestroy(layout);
    }
};

WideProduct::WideProduct() { call_blas(cublasLtCreate(&handle_), "its start"); }

WideProduct::~WideProduct() {
    plans_.clear();
    cublasLtDestroy(handle_);
}

const WideProduct::Plan& WideProduct::plan(const Key& key) {
    const auto [found, is_new] = plans_.try_emplace(key);
    Plan& plan = found->second;
    if (!is_new) return plan;
    try {
        const auto [rows, weight_rows, columns, x_stride, out_stride, dtype, out_dtype, adds] = key;
        call_blas(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product's description");
        const cublasOperation_t transposed = CUBLAS_OP_T;
        call_blas(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)), "a product's description");
        call_blas(cublasLtMatrixLayoutCreate(&plan.weight, blas_type(dtype), columns, weight_rows, columns), "a weight's layout");
        call_blas(cublasLtMatrixLayoutCreate(&plan.x, blas_type(dtype), columns, rows, x_stride), "an input's layout");
        call_blas(cublasLtMatrixLayoutCreate(&plan.out, blas_type(out_dtype), weight_rows, rows, out_stride), "a result's layout");
        cublasLtMatmulPreference_t preference = nullptr;
        call_blas(cublasLtMatmulPreferenceCreate(&preference), "a preference");
        const std::size_t workspace = kWorkspaceBytes;
        cublasLtMatmulHeuristicResult_t result = {};
        int count = 0;
        cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
        if (status == CUBLAS_STATUS_SUCCESS)
            status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.weight, plan.x, plan.out, plan.out, preference, 1, &result, &count);
        cublasLtMatmulPreferenceDestroy(preference);
        call_blas(status == CUBLAS_STATUS_SUCCESS && count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status, "the choice of an algorithm");
        plan.algorithm = result.algo;
    } catch (...) {
        plans_.erase(found);
        throw;
    }
    return plan;
}

void WideProduct::run(const Context& context, const Tensor& x, const void* weight, std::int64_t weight_rows, const Tensor& out, bool adds, void* workspace) {
    const Plan& chosen = plan({x.rows, weight_rows, x.columns, x.stride, out.stride, x.dtype, out.dtype, adds});
    const float one = 1.0f, beta = adds ? 1.0f : 0.0f;
    call_blas(cublasLtMatmul(handle_, chosen.operation, &one, weight, chosen.weight, x.data, chosen.x, &beta, out.data, chosen.out, out.data, chosen.out,
                             &chosen.algorithm, workspace, kWorkspaceBytes, context.stream),
              "a product");
}

}  // namespace pocket::cuda
