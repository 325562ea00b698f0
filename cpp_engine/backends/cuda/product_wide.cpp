#include "backends/cuda/product_wide.h"

#include <array>
#include <bit>
#include <string>

#include "backends/cuda/call.h"

namespace pocket::cuda {

namespace {

void call_blas(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(ErrorKind::device, std::string("cuBLASLt failed at ") + what + ": " + cublasLtGetStatusString(status) + ". Free device memory, or restart the process.");
}

cudaDataType_t blas_type(DType dtype) {
    if (dtype == DType::float8_e4m3) return CUDA_R_8F_E4M3;
    return dtype == DType::float32 ? CUDA_R_32F : dtype == DType::bfloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

// An algorithm serves a range of sizes: steps of 64 rows, later powers of two.
std::int64_t step_of(std::int64_t rows, std::int64_t timed) {
    return rows < timed ? (rows + 63) / 64 * 64 : static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(rows)));
}

}  // namespace

// Column-major, as cuBLAS counts: out^T [weight_rows, rows] = weight x^T.
struct WideProduct::Call {
    const void* x;
    const void* weight;
    Tensor out;
    std::int64_t rows, weight_rows, columns, x_stride;
    DType dtype;
    bool adds;
    void* workspace;
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t weight_layout, x_layout, out_layout;

    Call(const void* x_, std::int64_t rows_, std::int64_t columns_, std::int64_t x_stride_, DType dtype_, const void* weight_, std::int64_t weight_rows_, const Tensor& out_,
         bool adds_, void* workspace_)
        : x(x_), weight(weight_), out(out_), rows(rows_), weight_rows(weight_rows_), columns(columns_), x_stride(x_stride_), dtype(dtype_), adds(adds_), workspace(workspace_) {
        call_blas(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product's description");
        set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
        call_blas(cublasLtMatrixLayoutInit(&weight_layout, blas_type(dtype), static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(weight_rows), columns), "a weight's layout");
        call_blas(cublasLtMatrixLayoutInit(&x_layout, blas_type(dtype), static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows), x_stride), "an input's layout");
        call_blas(cublasLtMatrixLayoutInit(&out_layout, blas_type(out.dtype), static_cast<std::uint64_t>(weight_rows), static_cast<std::uint64_t>(rows), out.stride), "a result's layout");
    }
    template <typename T>
    void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
        call_blas(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)), "a product's description");
    }
};

WideProduct::WideProduct() {
    call_blas(cublasLtCreate(&handle_), "its start");
    call(cudaEventCreate(&begin_), "an event");
    call(cudaEventCreate(&end_), "an event");
}

WideProduct::~WideProduct() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cublasLtDestroy(handle_);
}

// Of one product, written to `out`.
float WideProduct::milliseconds_of(const Context& context, Call& one, const cublasLtMatmulAlgo_t& algorithm, void* out) {
    constexpr int kTurns = 3;
    const float factor = 1.0f, beta = one.adds ? 1.0f : 0.0f;
    float milliseconds = 0.0f;
    for (int turn = 0; turn <= kTurns; ++turn) {            // the first one warms up
        if (turn == 1) call(cudaEventRecord(begin_, context.stream), "an event");
        if (cublasLtMatmul(handle_, &one.operation, &factor, one.weight, &one.weight_layout, one.x, &one.x_layout, &beta, one.out.data, &one.out_layout, out, &one.out_layout,
                           &algorithm, one.workspace, kWorkspaceBytes, context.stream) != CUBLAS_STATUS_SUCCESS)
            return 1e30f;                                   // the heuristic was wrong: it is not taken
    }
    call(cudaEventRecord(end_, context.stream), "an event");
    call(cudaEventSynchronize(end_), "an event");
    call(cudaEventElapsedTime(&milliseconds, begin_, end_), "an event");
    return milliseconds / kTurns;
}

cublasLtMatmulAlgo_t WideProduct::choose(const Context& context, Call& one, bool is_timed) {
    std::array<cublasLtMatmulHeuristicResult_t, 8> results = {};
    cublasLtMatmulPreferenceOpaque_t preference;
    call_blas(cublasLtMatmulPreferenceInit(&preference), "a preference");
    const std::size_t workspace = kWorkspaceBytes;
    call_blas(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)), "a preference");
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, &one.operation, &one.weight_layout, &one.x_layout, &one.out_layout, &one.out_layout, &preference,
                                                                 is_timed ? static_cast<int>(results.size()) : 1, results.data(), &count);
    call_blas(status == CUBLAS_STATUS_SUCCESS && count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status, "the choice of an algorithm");
    if (count == 1) return results[0].algo;
    // What is added to must not change, so the results go elsewhere while they are tried; what they overwrite otherwise is computed again.
    void* elsewhere = nullptr;
    if (one.adds && cudaMalloc(&elsewhere, static_cast<std::size_t>(one.rows * one.out.stride) * item_size(one.out.dtype)) != cudaSuccess) {
        cudaGetLastError();                                 // no room to try: the first one is as good as cuBLASLt knows
        return results[0].algo;
    }
    int best = 0;
    float least = 1e30f;
    try {
        for (int index = 0; index < count; ++index) {
            const float milliseconds = milliseconds_of(context, one, results[static_cast<std::size_t>(index)].algo, elsewhere ? elsewhere : one.out.data);
            if (milliseconds < least) least = milliseconds, best = index;
        }
    } catch (...) {
        cudaFree(elsewhere);
        throw;
    }
    cudaFree(elsewhere);
    return results[static_cast<std::size_t>(best)].algo;
}

void WideProduct::multiply(const Context& context, Call& one) {
    const Key key = {step_of(one.rows, kTimedRows), one.weight_rows, one.columns, one.x_stride, one.out.stride, one.dtype, one.out.dtype, one.adds};
    const auto found = algorithms_.find(key);
    cublasLtMatmulAlgo_t algorithm;
    if (found != algorithms_.end()) {
        algorithm = found->second;
    } else {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        call(cudaStreamIsCapturing(context.stream, &capture), "a capture");
        const bool is_recorded = capture != cudaStreamCaptureStatusNone;
        algorithm = choose(context, one, one.rows >= kTimedRows && !is_recorded);
        if (!is_recorded) algorithms_.emplace(key, algorithm);
    }
    const float factor = 1.0f, beta = one.adds ? 1.0f : 0.0f;
    const auto run_with = [&](const cublasLtMatmulAlgo_t& chosen) {
        return cublasLtMatmul(handle_, &one.operation, &factor, one.weight, &one.weight_layout, one.x, &one.x_layout, &beta, one.out.data, &one.out_layout, one.out.data,
                              &one.out_layout, &chosen, one.workspace, kWorkspaceBytes, context.stream);
    };
    cublasStatus_t status = run_with(algorithm);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) status = run_with(choose(context, one, false));  // chosen for other rows of this step
    call_blas(status, "a product");
}

void WideProduct::run(const Context& context, const Tensor& x, const void* weight, std::int64_t weight_rows, const Tensor& out, bool adds, void* workspace) {
    Call one(x.data, x.rows, x.columns, x.stride, x.dtype, weight, weight_rows, out, adds, workspace);
    multiply(context, one);
}

bool WideProduct::takes_float8(const Context& context, const Segment& weight, std::int64_t rows, std::int64_t columns) {
    return context.capability == 90 && weight.dtype == DType::float8_e4m3 && weight.scale_stride % 4 == 0 && columns % 128 == 0 && weight.rows % 16 == 0 && rows % 4 == 0 &&
           cublasLtGetVersion() >= 120900;
}

void WideProduct::run(const Context& context, const Float8Rows& x, const Segment& weight, const Tensor& out, bool adds, void* workspace) {
    Call one(x.values, x.rows, x.columns, x.columns, DType::float8_e4m3, weight.values, weight.rows, out, adds, workspace);
#if CUBLAS_VERSION >= 120900
    one.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, std::int32_t{CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F});
    one.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, std::int32_t{CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F});
    one.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weight.scales);
    one.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x.scales);
#endif
    multiply(context, one);
}

}  // namespace pocket::cuda
