// A whole decode step of a few rows as one kernel: the operators become a table of phases, which the kernel walks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/cuda/kernels.h"

namespace pocket::cuda {

constexpr int kStepRows = 8;                                // most rows of a step
constexpr int kStepConsumers = 256;                         // threads of a block that compute; a warp beside them copies weights
constexpr int kPieceBytes = 1024;                           // of a weight row that one copy takes
constexpr int kPieceStride = kPieceBytes + 64;              // between rows in shared memory, so that two neighbours fall into different banks
constexpr int kStageRows = 16;                              // of a weight, in a stage of the ring
constexpr int kStageBytes = kStageRows * kPieceStride;
constexpr int kMostStages = 16;
constexpr int kKeptRows = 128;                              // weight rows of a block whose sums wait for further columns of x

enum class PhaseKind : std::int32_t { embed, product, attention, delta_net };

// out (+)= x W^T for the rows of one segment. Every block has neighbouring rows of it.
struct ProductPhase {
    Segment weight;
    std::int64_t row_bytes = 0;
    int columns = 0, staged_columns = 0;                    // of x, and how many of them shared memory takes at a time
    int limit = 0;                                          // results of a row of x: the segment's rows, or half of them with swiglu
    bool is_swiglu = false, adds = false;
    const void* x = nullptr;
    DType x_dtype = DType::float32;
    std::int64_t x_stride = 0;
    const std::int32_t* x_rows = nullptr;                   // which rows of x; null: the first ones
    const float* norm = nullptr;                            // weight of the RMS norm of x, or of each of its heads where it has `gates`
    float eps = 0;
    const void* gates = nullptr;                            // x is norm(x) * silu(gates), a head of `head_dim` at a time
    DType gates_dtype = DType::float32;
    std::int64_t gates_stride = 0;
    int head_dim = 0;
    void* out = nullptr;
    DType out_dtype = DType::float32;
    std::int64_t out_stride = 0;
};

struct EmbedPhase {
    Segment table;
    std::int64_t columns = 0;
    const std::int32_t* ids = nullptr;
    float* out = nullptr;
    std::int64_t out_stride = 0;
};

struct alignas(16) Phase {
    PhaseKind kind = PhaseKind::embed;
    bool meets = true;                                      // whether the next phase waits for this one
    ProductPhase product;
    EmbedPhase embed;
    AttentionCall attention;
    DeltaNetCall delta_net;
    float* results = nullptr;                               // of delta_net, before norm and gate
};

struct StepPlan {
    const Phase* phases = nullptr;                          // device memory
    int num_phases = 0;
    int rows = 0;
    int attention_group = 1;                                // query heads that one block takes
    int num_splits = 1;                                     // of attention's context
    int num_stages = 0;
    int work_bytes = 0;                                     // of shared memory for x, or for what a mixer needs
    std::uint32_t num_meetings = 0;
    std::uint32_t* meetings = nullptr;                      // how many blocks came to meetings, and how many had before this launch
    float* partial = nullptr;                               // of attention
    int* tickets = nullptr;                                 // zeros between steps
};

std::size_t decode_step_bytes(int rows, int num_stages, int work_bytes);  // of shared memory
std::size_t attention_step_bytes(const AttentionShape& shape, int group, int num_splits);
std::size_t delta_step_bytes();
bool takes_delta_step(const DeltaNetShape& shape);
void decode_step(const Context& context, const StepPlan& plan);

}  // namespace pocket::cuda
