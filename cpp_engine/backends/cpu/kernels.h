// The inner loops of the CPU device, once for each instruction set: each runs on one thread, allocates nothing and throws nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/isa.h"
#include "pocket/device.h"

namespace pocket {

constexpr int kPanelRows = 16;             // rows of a weight that lie side by side, one a lane
constexpr int kColumnStep = 32;            // panels have whole steps of columns, padded with zeros
constexpr int kScaleBlock = 128;           // columns of a float8 panel that share scales
constexpr int kDeltaTokens = 64;          // most tokens of one call of delta_rule

// Rows of x as a product reads them.
enum class RowForm : std::uint8_t {
    float32,
    rounded_float32,  // to what bfloat16 holds
    bfloat16,
    tiles,            // bfloat16, 16 rows at a time: [columns / 32][16][32]
};

// A panel is 16 rows of a weight, its columns one after another:
//   float32, float16   [columns][16]
//   bfloat16           [columns / 2][16][2], the order of AMX tiles and of dot products of pairs
//   float8_e4m3        for each 128 columns (the last may be fewer): scales [16] float32, then [columns][16]
// x: prepared rows [rows, columns], one after another; sums [rows, 16] float32, written.
using PanelProduct = void (*)(const std::byte* panel, const void* x, int rows, std::int64_t columns, float* sums);

// Keys and values of one KV head: token t of the row lies at block_table[t / block_size], offset t % block_size.
struct KvView {
    const void* keys = nullptr;            // the head's in block 0
    const void* values = nullptr;
    std::int64_t block_stride = 0;         // values from a block to the next
    const std::int32_t* block_table = nullptr;
    int block_size = 0;
    int head_dim = 0;
};

// softmax(q k^T) v over some of a row's tokens, before the division: with others' it makes the whole (Dao et al., arXiv 2205.14135).
struct PartialAttention {
    float* largest = nullptr;              // [queries], of the scores
    float* total = nullptr;                // [queries], sum of exp(score - largest)
    float* values = nullptr;               // [queries, head_dim], sum of exp(score - largest) v
};

// Up to kQueryRows queries that share keys; the rows of a token's heads lie side by side, token after token.
constexpr int kQueryRows = 64, kKeyTile = 64;
struct QueryBlock {
    const float* queries = nullptr;        // [rows, head_dim], scaled
    int rows = 0;
    int heads = 0;                         // rows of one token
    int first_position = 0;                // of the first token
    float* workspace = nullptr;            // block_workspace_size(head_dim) float32
};
constexpr std::int64_t block_workspace_size(int head_dim) { return 2LL * kKeyTile * head_dim + 1LL * kQueryRows * kKeyTile; }

// Up to kDeltaTokens tokens of one value head, convolved and normalized.
struct DeltaTokens {
    const float* queries = nullptr;        // [count], key_dim values each, stride floats apart; the same for the others
    const float* keys = nullptr;
    const float* values = nullptr;         // value_dim
    const float* decays = nullptr;         // [count], logarithms
    const float* betas = nullptr;          // [count]
    float* outputs = nullptr;              // value_dim
    std::int64_t key_stride = 0, value_stride = 0, output_stride = 0;
    int count = 0, key_dim = 0, value_dim = 0;
};

// What a stretch of logits says. Ids that a mask forbids count for `largest_allowed`, `sum_scaled` and the blocks as minus infinity.
struct LogitScan {
    float largest = 0;
    float sum = 0;                         // of exp(logit - largest)
    float largest_allowed = 0;
    float sum_scaled = 0;                  // of exp((logit - largest_allowed) * inverse_temperature)
    bool has_nan = false;
};
constexpr int kLogitBlock = 128;

struct Kernels {
    bool packs_bfloat16 = false;           // products of bfloat16 panels read RowForm::bfloat16, else rounded_float32

    // out [rows, padded]: rows of x, normalized where `norm` is given, rounded as `form` says, then zeros from `columns` on.
    void (*prepare)(const float* x, std::int64_t stride, int rows, std::int64_t columns, std::int64_t padded, const Norm* norm, RowForm form, void* out);
    PanelProduct product_float32, product_float16, product_bfloat16, product_float8;
    // out [rows, stride], the first `valid` of 16 columns, from sums [rows, 16]; swiglu: `sums` are the gates, `ups` the others.
    void (*finish)(Epilogue epilogue, const float* sums, const float* ups, int rows, int valid, float* out, std::int64_t stride);

    // out [head_dim] = x, normalized, its leading 2 * half values rotated, times scale.
    void (*prepare_head)(const float* x, const Norm& norm, const float* cosines, const float* sines, int half, int head_dim, float scale, float* out);
    void (*store_values)(const float* x, int count, DType dtype, void* out);  // count: a multiple of 16
    // Queries [rows, head_dim] of one token, scaled, over the tokens [begin, end) of its row.
    void (*attend_token)(const float* queries, int rows, const KvView& kv, DType dtype, int begin, int end, const PartialAttention& out);
    // Each token over all tokens of its row up to itself.
    void (*attend_block)(const QueryBlock& block, const KvView& kv, DType dtype, const PartialAttention& out);
    // out [count] = values / total * sigmoid(gates)
    void (*gate_attention)(const float* values, float total, const float* gates, int count, float* out);

    // out [tokens, channels] = SiLU of the causal convolution of x [tokens, channels] behind tail [kernel - 1, channels], which moves on.
    void (*convolve)(const float* x, std::int64_t stride, int tokens, int channels, const float* weight, std::int64_t weight_stride, int kernel, float* tail,
                     std::int64_t tail_stride, float* out, std::int64_t out_stride);
    void (*unit_rows)(float* x, std::int64_t stride, int rows, int size, float scale);  // each row / its length * scale
    // Tokens of one value head through its state [key_dim, value_dim]; workspace: delta_workspace_size(key_dim).
    void (*delta_rule)(const DeltaTokens& tokens, float* state, float* workspace);
    void (*gate_norm)(const float* x, const Norm& norm, const float* gates, int size, float* out);  // norm(x) * silu(gates)

    // Logits [begin, end) of a row, begin a multiple of kLogitBlock: the scan, and the largest allowed logit of each kLogitBlock of them.
    void (*scan_logits)(const float* logits, const std::uint32_t* mask, int begin, int end, float inverse_temperature, LogitScan& scan, float* block_largest);
};
constexpr std::int64_t delta_workspace_size(int key_dim) { return 32LL * key_dim; }

// The kernels of one of available_isas(). AMX has its own products beside those of avx512_bf16.
const Kernels& kernels(Isa isa);

const Kernels& plain_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
#endif

}  // namespace pocket
