// The kernels as the device's host code calls them: each function enqueues on the context's stream and returns.
//
// Scratch is given by the caller. Sizes are in elements unless a name says bytes. A dtype beside an untyped pointer is that of its values.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "pocket/device.h"

namespace pocket::cuda {

// What a launch depends on beside its arguments.
struct Context {
    cudaStream_t stream = nullptr;
    int num_multiprocessors = 1;
    int capability = 75;                                    // 10 * major + minor
    int shared_memory = 48 * 1024;                          // bytes that a block may ask for
};

// Rows of a weight of one kind, [rows, columns] row-major; float8_e4m3 with the scales of its 128x128 blocks, [ceil(rows / 128), scale_stride].
struct Segment {
    const void* values = nullptr;
    const float* scales = nullptr;
    std::int64_t rows = 0;
    std::int64_t first_row = 0;                             // of the matrix
    int scale_stride = 0;
    DType dtype = DType::float32;
};

// --- rows.cu: what goes over rows once ---
bool has_code() noexcept;                                   // whether this build has kernels for the GPU that the calling thread uses
// The rows `ids` that lie in `table`, which are `stride` apart, to the rows of out, float32; ids count from the matrix's first row.
void gather_rows(const Context&, const Segment& table, std::int64_t stride, std::int64_t columns, const std::int32_t* ids, int num_rows, const Tensor& out);
// out [rows, columns] contiguous, rounded to `to`; `norm` may be null. Where out's dtype is float16 and `round_first` is bfloat16, values are rounded to that,
// and each row is divided by the power of two in `row_scales` [rows] that brings it into float16's range (for float8_e4m3 weights).
void prepare_rows(const Context&, const Tensor& x, const Norm* norm, void* out, DType to, DType round_first, float* row_scales);
void combine_swiglu(const Context&, const Tensor& both, const Tensor& out);                             // both [rows, 2 * out.columns]
void store_rows(const Context&, const float* values, std::int64_t stride, const Tensor& out, bool adds);  // values [out.rows, out.columns]
// `count` values of `from` become those of `to`, rounded to nearest even (float8_e4m3 to itself alone). `first` is the number of the first one in its tensor;
// *first_bad becomes the least of twice the number of one that is NaN or infinite, and twice plus 1 of one that `to` has no room for.
void convert_values(const Context&, const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t first, std::int64_t count, unsigned long long* first_bad);
// Values of a float8_e4m3 segment's rows [first, first + rows) as bfloat16 or float16, [rows, columns] contiguous.
void expand_float8(const Context&, const Segment&, std::int64_t columns, std::int64_t first, std::int64_t rows, void* out, DType to);

// --- rows_wide.cu: the same for many rows, where they are aligned ---
// out [rows, columns] contiguous, rounded to `to`, 16-bit; or to bfloat16 and then to float8_e4m3, with a scale for each 128 columns of a row, which columns are a
// multiple of: scales [columns / 128, rows].
bool takes_prepare_wide(const Tensor& x, const Norm* norm, DType to);
void prepare_wide(const Context&, const Tensor& x, const Norm* norm, void* out, DType to, float* scales);
bool takes_swiglu_wide(const Tensor& both, const Tensor& out);
void combine_swiglu_wide(const Context&, const Tensor& both, const Tensor& out);

// --- product_few.cu: 1 to 64 rows through tensor cores, each weight read once ---
struct FewProduct {
    const void* x = nullptr;                                // one row: float32 or 16-bit, x_dtype; more: prepared rows [rows, columns]
    DType x_dtype = DType::float32;
    const float* row_scales = nullptr;                      // of prepared float16 rows, or null
    Norm norm;                                              // of one row; weight null where there is none
    int rows = 1;
    std::int64_t columns = 0;
    Segment weight;
    Epilogue epilogue = Epilogue::store;
    Tensor out;                                             // its column 0 belongs to the segment's row 0
};
bool takes_few(const Context&, DType weight, std::int64_t columns, const void* values);
void product_few(const Context&, const FewProduct&);

// --- product_plain.cu: any kind, any number of rows, float32 arithmetic ---
// out float32 [rows, weight.rows] at `stride`; x rounded to `round_to` first.
void product_plain(const Context&, const Tensor& x, DType round_to, const Segment& weight, std::int64_t columns, float* out, std::int64_t stride, bool adds);

// --- attention ---
struct AttentionCall {
    AttentionShape shape;
    AttentionWeights weights;
    Tensor projections, out;
    KvCache cache;
    Step step;
};
void attention_decode(const Context&, const AttentionCall&, int num_splits, float* partial, int* tickets);
int decode_splits(const Context&, const AttentionShape&, int num_rows, int max_length);
std::size_t decode_partial_size(const AttentionShape&, int num_rows, int num_splits);                   // float32 values
// Queries of the prompt rows' tokens, normalized and rotated, [tokens, num_heads, head_dim] of `dtype`; keys and values to the cache.
void attention_heads(const Context&, const AttentionCall&, int first_token, int num_tokens, void* queries, DType dtype);
void attention_prefill_plain(const Context&, const AttentionCall&, int first_token, const void* queries, DType dtype);
bool takes_flash(const Context&, const AttentionShape&, const KvCache&);
void attention_prefill_flash(const Context&, const AttentionCall&, int first_token, const void* queries);  // queries of the cache's dtype
bool takes_hopper(const Context&, const AttentionCall&);
void attention_prefill_hopper(const Context&, const AttentionCall&, int first_token, const void* queries);  // the same

// --- Gated DeltaNet ---
struct DeltaNetCall {
    DeltaNetShape shape;
    DeltaNetWeights weights;
    Tensor projections, out;
    StateCache states;
    Step step;
};
bool takes_delta_decode(const DeltaNetShape&);
void delta_decode(const Context&, const DeltaNetCall&, int num_rows, int* tickets);
// Rows [first_row, num_rows), tokens from `first_token` on. mixed [tokens, conv_dim] and read [tokens, value_size] float32.
void delta_prefill(const Context&, const DeltaNetCall&, int first_row, int first_token, float* mixed, float* read);
void delta_tails(const Context&, const DeltaNetCall&, int first_row);                                   // the past inputs as the next step finds them
// The same rows on tensor cores, with bfloat16 operands; scratch of delta_chunks_bytes, aligned to 128 bytes.
bool takes_delta_chunks(const Context&, const DeltaNetCall&);
std::size_t delta_chunks_bytes(const DeltaNetShape&, int tokens, int rows);
void delta_chunks(const Context&, const DeltaNetCall&, int first_row, int first_token, void* scratch);

// --- draws ---
struct DrawInputs {                                         // device memory, [num_samples] each
    const float* temperatures;
    const float* top_ps;
    const std::int32_t* top_ks;
    const std::uint64_t* seeds;
    const std::int32_t* draws;
    const std::int32_t* num_logprobs;
    const std::int32_t* mask_rows;                          // line of `masks`, or -1
    const std::uint32_t* masks;                             // [.., mask_stride]
    int mask_stride = 0;
    // Where some row has edits or min_p:
    const std::int32_t* copies;                             // line of `changed`, or -1
    const std::int32_t* edit_starts;                        // [num_samples + 1], first of each row's `edits`
    const LogitEdit* edits;
    const float* min_ps;                                    // 0 is off
    float* changed;                                         // [.., vocab_size], rows as they are drawn from
};
struct DrawNeeds {                                          // whether some row ...
    bool draws = false;
    bool cuts = false;                                      // draws with a top_p below 1
    bool ranks = false;                                     // asks for alternatives
    bool changes = false;                                   // has edits or min_p
    bool cuts_unlikely = false;                             // draws with min_p
};
std::size_t draw_scratch_bytes(int max_samples, std::int64_t vocab_size);                               // zeroed once by the owner
void draw(const Context&, const Tensor& logits, const DrawInputs&, const DrawNeeds&, void* scratch, int max_samples, SampleOutput* outputs);

}  // namespace pocket::cuda
