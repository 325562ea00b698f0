// What a device does for a model: the contract of the native operators.
//
// Calls take effect in the order in which they are made; on a device that runs behind the host they only enqueue, and `synchronize` waits.
// One thread calls a device, the engine's. No operator allocates: what it needs beside its arguments it reserved in `reserve`.
// The CPU device is complete, and is the oracle that the others are tested against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pocket/communicator.h"
#include "pocket/error.h"
#include "pocket/tensor.h"

namespace pocket {

// Device memory, freed with its last owner. `data` is an address of the device.
class Buffer {
public:
    virtual ~Buffer() = default;
    void* data() const noexcept { return data_; }
    std::size_t num_bytes() const noexcept { return num_bytes_; }

protected:
    void* data_ = nullptr;
    std::size_t num_bytes_ = 0;
};

// A weight [rows, columns] in the layout that the device's products want, made once at load.
class Matrix {
public:
    Matrix(std::int64_t rows, std::int64_t columns, DType dtype) : rows_(rows), columns_(columns), dtype_(dtype) {}
    virtual ~Matrix() = default;
    std::int64_t rows() const noexcept { return rows_; }
    std::int64_t columns() const noexcept { return columns_; }
    DType dtype() const noexcept { return dtype_; }               // of the stored values
    virtual std::size_t num_bytes() const noexcept = 0;           // that one product of one row reads

private:
    std::int64_t rows_, columns_;
    DType dtype_;
};

// Rows of a Matrix as a checkpoint holds them: a weight [rows, columns] and, for float8_e4m3, the scales [ceil(rows / 128), ceil(columns / 128)] of
// its blocks (W = value * scale), float32 or bfloat16. Both are read during `load_matrix` only.
struct MatrixPart {
    const HostTensor* weight = nullptr;
    const HostTensor* scales = nullptr;
};

// Facts by which a caller may branch.
struct DeviceInfo {
    std::string name;                                       // "cpu", "cuda:0"
    std::string description;                                // for people: the processor and what of it is used
    DType activation_dtype = DType::float32;                // of everything between operators except the residual stream, which is float32
    DType kv_cache_dtype = DType::float32;                  // default of the KV cache
    std::size_t total_memory = 0;                           // bytes
    std::size_t free_memory = 0;                            // bytes, at the time of the question
    int num_threads = 1;
    // What an engine is to take where nobody says: of the free memory at most cache_share, and all but kept_memory bytes, for caches; rows that run at once.
    double cache_share = 0.25;
    std::size_t kept_memory = 0;                            // 0: the memory is the system's, and may become free; else what steps may still ask for
    int default_rows = 8;
    bool warms_up = false;                                  // the first prompt of a size takes memory and time that later ones do not
};

// One step's rows on the device. Rows that compute one token (decode) come first, then the others (prefill); the tokens of a row are neighbours.
// All pointers are device memory, int32.
struct Step {
    int num_tokens = 0;
    int num_rows = 0;
    int num_decode = 0;                                     // leading rows of one token
    int num_samples = 0;
    int max_blocks = 0;                                     // width of block_tables
    int max_query = 0;                                      // most tokens of a row
    int max_length = 0;                                     // most tokens that a row attends to
    const std::int32_t* token_ids = nullptr;                // [num_tokens]
    const std::int32_t* positions = nullptr;                // [num_tokens]; a row whose first position is 0 starts from an empty state
    const std::int32_t* slot_mapping = nullptr;             // [num_tokens], block * block_size + offset of a token's keys and values
    const std::int32_t* row_starts = nullptr;               // [num_rows + 1], first token of each row
    const std::int32_t* lengths = nullptr;                  // [num_rows], tokens that the row's last token attends to, itself included
    const std::int32_t* block_tables = nullptr;             // [num_rows, max_blocks]
    const std::int32_t* state_slots = nullptr;              // [num_rows], slot of the recurrent state
    const std::int32_t* sample_tokens = nullptr;            // [num_samples], tokens whose logits are wanted, in the order of their rows
};

// RMS norm before a product: x * rsqrt(mean(x^2) + eps) * weight, in float32. Qwen3.5 stores weight - 1; here it is whole.
struct Norm {
    const float* weight = nullptr;                          // [columns], device memory
    float eps = 0;
};

// What becomes of a product x W^T.
enum class Epilogue : std::uint8_t {
    store,   // out = x W^T
    add,     // out += x W^T; out is the residual stream
    swiglu,  // W is gate rows then as many up rows: out = silu(x gate^T) * (x up^T)
};

struct AttentionShape {
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;                                     // leading values of a head that are rotated, half-split pairs (i, i + rotary_dim / 2)
};

struct AttentionWeights {
    Norm query_norm;                                        // weight [head_dim]
    Norm key_norm;                                          // weight [head_dim]
    const float* cosines = nullptr;                         // [max_positions, rotary_dim / 2]
    const float* sines = nullptr;                           // [max_positions, rotary_dim / 2]
};

// One layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each.
struct KvCache {
    void* keys = nullptr;
    void* values = nullptr;
    DType dtype = DType::float32;
    int num_blocks = 0;
    int block_size = 0;
};

struct DeltaNetShape {
    int num_key_heads = 0;
    int num_value_heads = 0;
    int key_dim = 0;                                        // of a head
    int value_dim = 0;                                      // of a head
    int conv_kernel = 0;

    constexpr std::int64_t conv_dim() const noexcept { return 2LL * num_key_heads * key_dim + static_cast<std::int64_t>(num_value_heads) * value_dim; }
    constexpr std::int64_t value_size() const noexcept { return static_cast<std::int64_t>(num_value_heads) * value_dim; }
    constexpr std::int64_t projection_size() const noexcept { return conv_dim() + value_size() + 2LL * num_value_heads; }
    // float32 values of one layer's state: the recurrent matrices [num_value_heads, key_dim, value_dim], then the conv tail [conv_kernel - 1, conv_dim]
    constexpr std::int64_t state_size() const noexcept {
        return static_cast<std::int64_t>(num_value_heads) * key_dim * value_dim + (conv_kernel - 1LL) * conv_dim();
    }
};

struct DeltaNetWeights {
    const float* conv = nullptr;                            // [conv_kernel, conv_dim]
    const float* rate = nullptr;                            // [num_value_heads], -exp(A_log)
    const float* dt_bias = nullptr;                         // [num_value_heads]
    Norm norm;                                              // weight [value_dim], not shifted by 1
};

// One layer's states: the state of slot s is the state_size() float32 values from states + s * slot_stride on.
struct StateCache {
    float* states = nullptr;
    std::int64_t slot_stride = 0;                           // float32 values
    int num_slots = 0;
};

// One id whose logit changes before a row is drawn from: what is above 0 is divided by `scale`, anything else multiplied; then `offset` is added.
struct LogitEdit {
    std::int32_t id = 0;
    float scale = 1;
    float offset = 0;                                       // minus infinity: the id is not drawn
};

// How each sample is drawn; arrays of num_samples in host memory, read during the call.
struct SampleInputs {
    std::span<const float> temperatures;                    // 0 is greedy
    std::span<const float> top_ps;                          // 1 is off
    std::span<const std::int32_t> top_ks;                   // 0 is off
    std::span<const std::uint64_t> seeds;
    std::span<const std::int32_t> draws;                    // number of the draw in its row, from 0
    std::span<const std::int32_t> num_logprobs;             // alternatives to rank, 0 to 20; -1 ranks nothing
    std::span<const std::uint32_t* const> masks;            // allowed ids, bit i % 32 of word i / 32; null allows all
    std::span<const std::span<const LogitEdit>> edits = {}; // of each sample, its ids all different; none at all: no sample has any
    std::span<const float> min_ps = {};                     // least probability that is drawn, as a part of the likeliest id's; 0 is off; none at all: off
};

struct SampleOutput {
    std::int32_t token_id = -1;
    bool is_finite = true;                                  // false: a logit was NaN or plus infinity, or no finite one is allowed; nothing was drawn
    float logprob = 0;                                      // of the drawn id, natural, over the whole vocabulary, before edits, temperature, min_p, top_k, top_p and mask
    int num_top = 0;
    std::int32_t top_ids[20] = {};                          // most likely first; of equal ones the lower id first
    float top_logprobs[20] = {};
};

struct Candidate {
    float logit = 0;
    std::int32_t id = 0;
    bool operator<(const Candidate& other) const noexcept { return logit != other.logit ? logit > other.logit : id < other.id; }  // most likely first
};

// What the logits of some ids say of one row, so that a draw over more ids than these need not see them.
struct LogitSummary {
    float largest = 0;
    float largest_allowed = 0;                              // of the ids that the mask allows
    bool has_nan = false;
    double log_sum = 0;                                     // logarithm of the sum of exp(logit - largest)
    double log_sum_scaled = 0;                              // of exp((logit - largest_allowed) / temperature) over allowed ids
    std::vector<Candidate> allowed;                         // the most likely allowed ids, most likely first; of equal ones the lower id first
    std::vector<Candidate> top;                             // the most likely ids, as many as num_logprobs asks for, in the same order
};

// Operators that a device has recorded, to be enqueued together with little work of the host.
class Graph {
public:
    virtual ~Graph() = default;
    virtual void replay() = 0;                              // enqueues what was recorded, on the same memory; what that holds may have changed
};

class Device {
public:
    virtual ~Device() = default;

    virtual DeviceInfo info() const = 0;

    // --- memory ---
    virtual std::unique_ptr<Buffer> allocate(std::size_t num_bytes) = 0;  // zeroed, aligned to 64 bytes; Error(device) with the figures when there is no room
    virtual void upload(void* to, const void* from, std::size_t num_bytes) = 0;    // from host memory, which may be reused at once
    virtual void download(void* to, const void* from, std::size_t num_bytes) = 0;  // to host memory; waits for it
    virtual void copy(void* to, const void* from, std::size_t num_bytes) = 0;      // within the device
    virtual void synchronize() = 0;

    // A weight of the parts' rows one below the other, all with the same number of columns. `dtype`: what dense values are stored as (float32, float16 or
    // bfloat16; each value rounded to nearest even); float8_e4m3 parts stay as they are. Parts of different kinds in one matrix are allowed.
    // Error(configuration) naming file and tensor when a value is NaN or infinite.
    virtual std::unique_ptr<Matrix> load_matrix(std::span<const MatrixPart> parts, DType dtype) = 0;

    // Make room for steps of up to these sizes. Called again when they grow.
    virtual void reserve(int max_tokens, int max_rows) = 0;

    // The operators that `work` calls, recorded instead of computed; null, and `work` is not called, on a device that has no graphs. Numbers of a Step are
    // recorded as they are (max_length is the most that a replay may have), its arrays are read at each replay. Compute the same step once before: nothing may be
    // allocated, downloaded or waited for while it is recorded. A row that stands for none has length 0, slot -1 in slot_mapping and state_slots, and any token:
    // nothing is written for it, and its results mean nothing.
    virtual std::unique_ptr<Graph> capture(const std::function<void()>& work) {
        (void)work;
        return nullptr;
    }

    // --- operators ---
    // out [num_tokens, columns] float32 = rows `step.token_ids` of the table.
    virtual void embed(const Step& step, const Matrix& table, const Tensor& out) = 0;

    // out [x.rows, weight.rows] (swiglu: half as many) from x [x.rows, weight.columns]. x is float32 where `norm` is given, else float32 or the activation
    // dtype; out is float32 or the activation dtype. x is rounded to the weight's dtype (float8_e4m3: bfloat16; float16: or not at all), products are
    // summed in float32. Of some hundred rows, a device whose tensor cores take float8_e4m3 rounds x beside such weights to that type as well, with a scale for
    // each 128 values of a row.
    virtual void linear(const Tensor& x, const Norm* norm, const Matrix& weight, Epilogue epilogue, const Tensor& out) = 0;

    // Gated attention with paged keys and values. projections [num_tokens, 2 * num_heads * head_dim + 2 * num_kv_heads * head_dim]: for each head its
    // query then its gate, then the keys, then the values. Queries and keys are normalized, then rotated; keys and values go to their slots of the
    // cache; out [num_tokens, num_heads * head_dim] = softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate), causal.
    virtual void attention(const Step& step, const AttentionShape& shape, const AttentionWeights& weights, const Tensor& projections, const KvCache& cache,
                           const Tensor& out) = 0;

    // Gated DeltaNet (Yang et al., arXiv 2412.06464). projections [num_tokens, projection_size()]: q, k, v of all heads before the convolution, the
    // output gate z, then b and a, one a value head. Causal depthwise convolution and SiLU of q, k, v; q and k to unit length, q also / sqrt(key_dim);
    // per token S = exp(rate * softplus(a + dt_bias)) S; S += k (sigmoid(b) (v - S^T k))^T; o = S^T q. Key head h serves num_value_heads / num_key_heads
    // consecutive value heads. out [num_tokens, value_size()] = norm(o) * silu(z). Reads and writes the states of the step's rows.
    virtual void delta_net(const Step& step, const DeltaNetShape& shape, const DeltaNetWeights& weights, const Tensor& projections, const StateCache& states,
                           const Tensor& out) = 0;

    // out [step.num_samples, columns] = rows step.sample_tokens of x; both float32.
    virtual void take_samples(const Step& step, const Tensor& x, const Tensor& out) = 0;

    // Draw from logits [num_samples, vocab_size] float32. Waits for the results. Edits, temperature, min_p, top_k, top_p, then the largest of logit + Gumbel noise,
    // which is keyed by seed, draw and id, so that an answer does not hang on what shares its batch.
    virtual void sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs) = 0;

    // What the logits [num_samples, some ids] float32 say, with up to `num_candidates` allowed ids a row; ids count from 0 on, in the masks too. Waits for the
    // results. False, and nothing is done, on a device that has no such operator: ranks that share a vocabulary then gather all logits for `sample`.
    virtual bool summarize(const Tensor& logits, const SampleInputs& inputs, std::span<const int> num_candidates, std::span<LogitSummary> summaries) {
        (void)logits, (void)inputs, (void)num_candidates, (void)summaries;
        return false;
    }

    // --- ranks ---
    // A communicator for this device's memory among the ranks of `host`, which is for memory of the host and is taken over.
    // Error(unsupported) naming the field "tensor_parallel_size" where the device has none.
    virtual std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> host) {
        (void)host;
        throw Error(ErrorKind::unsupported, "\"tensor_parallel_size\" of more than 1 is not supported on the device " + info().name + ": use another one, or leave it out.",
                    "tensor_parallel_size");
    }
};

// Devices linked into this build, best first: "cuda" where there is one, then "cpu".
std::vector<std::string> linked_devices();

// `name`: "auto", "cpu", "cuda", "cuda:N". `num_threads` 0 takes the cores that the process may use.
// Error(unsupported) naming the field "device" where the build or the machine has none such.
std::unique_ptr<Device> make_device(const std::string& name, int num_threads);

}  // namespace pocket
