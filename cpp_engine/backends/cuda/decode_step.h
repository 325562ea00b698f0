// A whole decode step of a few rows as one kernel: the operators become a table of phases, which the kernel walks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/cuda/kernels.h"

namespace pocket::cuda {

constexpr int kStepRows = 8;                                // most rows of a step
constexpr int kStepConsumers = 256;                         // threads of a block that compute; others beside them copy weights
constexpr int kStepCopiers = 2;                             // warps that copy
constexpr int kPieceBytes = 1024;                           // of a weight row that one copy takes
constexpr int kPieceStride = kPieceBytes + 64;              // between rows in shared memory, so that two neighbours fall into different banks
constexpr int kStageRows = 16;                              // of a weight, in a stage of the ring
constexpr int kStageBytes = kStageRows * kPieceStride;
constexpr int kMostStages = 16;
constexpr int kStepHeads = 256;                             // most heads whose norms' factors a product takes
constexpr int kKeptRows = 128;                              // weight rows of a block whose sums wait for further columns of x

// What Gated DeltaNet leaves to the product after it: results with weight and gate, but without the factor of the norm, and the sums of squares for that.
struct DeltaResults {
    std::uint16_t* values = nullptr;                        // bfloat16 [rows, value_size]
    float* squares = nullptr;                               // [rows, value heads, delta_squares(value_dim)]
};

enum class PhaseKind : std::int32_t { embed, product, attention, combine, delta_net };

// The residual stream as the next product takes it: bfloat16, times the weight of that product's norm, without its factor; and sums of the squares of what each
// block has of a row.
struct Rounded {
    const float* norm = nullptr;                            // null: no product asks for it
    std::uint16_t* values = nullptr;                        // [rows, columns]
    std::int64_t stride = 0;
    float* squares = nullptr;                               // [rows, blocks]
};

// out (+)= x W^T for the rows of one segment. Every block has neighbouring rows of it.
struct ProductPhase {
    Segment weight;
    std::int64_t row_bytes = 0;
    int columns = 0, staged_columns = 0;                    // of x, and how many of them shared memory takes at a time
    int limit = 0;                                          // results of a row of x: the segment's rows, or half of them with swiglu
    bool is_swiglu = false, adds = false;
    const std::uint16_t* x = nullptr;                       // bfloat16
    std::int64_t x_stride = 0;
    const std::int32_t* x_rows = nullptr;                   // which rows of x; null: the first ones
    // x still lacks the factor of its RMS norm, over a row or over each head of it: squares [rows, columns / norm_columns, num_squares] are summed for that.
    const float* squares = nullptr;
    int num_squares = 0, norm_columns = 0;
    float eps = 0;
    void* out = nullptr;
    DType out_dtype = DType::float32;
    std::int64_t out_stride = 0;
    Rounded rounded;                                        // of out, with `adds`
};

struct EmbedPhase {
    Segment table;
    std::int64_t columns = 0;
    const std::int32_t* ids = nullptr;
    float* out = nullptr;
    std::int64_t out_stride = 0;
    Rounded rounded;
};

struct alignas(16) Phase {
    PhaseKind kind = PhaseKind::embed;
    bool meets = true;                                      // whether the next phase waits for this one
    ProductPhase product;
    EmbedPhase embed;
    AttentionCall attention;
    DeltaNetCall delta_net;
    bool moves_tails = false;                               // a product, of the delta_net before it
    DeltaResults results;                                   // of delta_net
};

// The weights of a product, for the warps that copy.
struct alignas(16) CopyRun {
    const std::uint8_t* values = nullptr;
    std::int32_t row_bytes = 0, staged_bytes = 0;           // of a row, and of those how many between two turns of all tiles
    std::int32_t limit = 0, is_swiglu = 0;                  // as of the product
};

struct StepPlan {
    const Phase* phases = nullptr;                          // device memory
    const CopyRun* runs = nullptr;                          // the same
    int num_phases = 0, num_runs = 0;
    int rows = 0;
    int attention_group = 2;                                // query heads that one block takes
    int num_splits = 1;                                     // of attention's context
    int delta_width = 0;                                    // value channels of a part of a head
    int num_stages = 0;
    int work_bytes = 0;                                     // of shared memory for x, or for what a mixer needs
    std::uint32_t num_meetings = 0;
    std::uint32_t* meetings = nullptr;                      // how many blocks came to meetings, and how many had before this launch
    float* partial = nullptr;                               // of attention
};

std::size_t decode_step_bytes(int rows, int num_stages, int work_bytes);  // of shared memory
std::size_t attention_step_bytes(const AttentionShape& shape, int group, int num_splits);
std::size_t delta_step_bytes();
bool takes_delta_step(const DeltaNetShape& shape);
int delta_step_width(const Context& context, const DeltaNetShape& shape, int rows);  // value channels that a block has
constexpr int delta_squares(int value_dim) { return (value_dim + 31) / 32; }           // sums of squares of a head, of 32 channels each
void decode_step(const Context& context, const StepPlan& plan);

}  // namespace pocket::cuda
