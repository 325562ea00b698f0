// What the kernels of a draw share: its noise, a row of logits, and what one kernel leaves for the next.
#pragma once

#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

constexpr int kDrawChunk = 2048;                            // ids of a block that goes over a row beside others
constexpr int kDrawThreads = 256;                           // of a block that looks for a cut or draws
constexpr std::int32_t kNoId = 0x7fffffff;
constexpr float kLowestLogprob = -9999.0f;                  // finite, since JSON has no infinity

__device__ __forceinline__ std::uint64_t splitmix64(std::uint64_t start, std::uint64_t index) {
    std::uint64_t mixed = start + (index + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return mixed ^ mixed >> 31;
}
__device__ __forceinline__ std::uint64_t stream_of(std::uint64_t seed, std::int32_t draw) { return splitmix64(splitmix64(seed, 0), static_cast<std::uint64_t>(draw)); }
// The 53 bits of an id's noise.
__device__ __forceinline__ std::uint64_t number_of(std::uint64_t stream, std::int32_t id) { return splitmix64(stream, static_cast<std::uint64_t>(id) + 1) >> 11; }

// Gumbel noise -log(-log(u)) with u = (n + 0.5) / 2^53. `rough` is within 1e-4 of it; the upper half is computed from 1 - u, which float32 tells apart from 0.
__device__ __forceinline__ float rough_noise(std::uint64_t number) {
    const bool is_low = number < (1ull << 52);
    const float end = (static_cast<float>(is_low ? number : (1ull << 53) - 1 - number) + 0.5f) * 0x1p-53f;
    return -logf(is_low ? -logf(end) : -log1pf(-end));
}
__device__ __forceinline__ double exact_noise(std::uint64_t number) {
    const double uniform = (static_cast<double>(number) + 0.5) * 0x1p-53;
    return -log(-log(uniform));
}

struct Best {
    double sum;
    std::int32_t id;
    __device__ __forceinline__ void offer(double other, std::int32_t other_id) {
        if (other > sum || (other == sum && other_id < id)) sum = other, id = other_id;
    }
};

__device__ __forceinline__ Best no_best() { return {-INFINITY, kNoId}; }

__device__ __forceinline__ Best warp_best(Best mine) {
    for (int step = 16; step; step >>= 1) mine.offer(__shfl_xor_sync(0xffffffffu, mine.sum, step), __shfl_xor_sync(0xffffffffu, mine.id, step));
    return mine;
}

// Of a whole block, in every thread.
__device__ inline Best block_best(Best mine, Best* shared) {
    mine = warp_best(mine);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = mine;
    __syncthreads();
    Best all = no_best();
    for (int warp = 0; warp < static_cast<int>(blockDim.x >> 5); ++warp) all.offer(shared[warp].sum, shared[warp].id);
    return all;
}

// Bits that are ordered as the values are; both zeros are equal.
__device__ __forceinline__ std::uint32_t order_of(float value) {
    const std::uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Ids at or above (order, id): the larger order first, of equal ones the lower id first. As it is, all ids.
struct Cut {
    std::uint32_t order = 0;
    std::int32_t last_id = kNoId;
    __device__ __forceinline__ bool keeps(std::uint32_t other, std::int32_t id) const { return other > order || (other == order && id <= last_id); }
};

enum class Todo : std::int32_t {
    nothing,
    find_cut,   // of the ids within `cut`, the first ones whose mass reaches `wanted`; then draw_kept
    draw_kept,  // among the ids within `cut`
    draw_rest,  // among the others
};

struct RowState {
    double log_scaled;                                      // log of the sum of exp((logit - largest_allowed) / temperature) over the allowed ids
    float largest_allowed, log_sum;                         // log_sum: log of the sum of exp(logit)
    std::int32_t is_finite;
    Todo todo;                                              // what is left after the list of the most likely ids
    Cut cut;
    std::uint32_t prefix, known;                            // digits of the cut's order that were found, and a mask of them
    unsigned long long wanted;                              // mass that ids of that prefix still have to bring, in units of the largest id's / 2^40
};

struct Row {
    const float* logits;                                    // that it is drawn from
    const std::uint32_t* mask;                              // or null
    std::int32_t vocab_size;
    const float* model;                                     // logits as the model gives them, of which log probabilities are told
    __device__ __forceinline__ bool allows(std::int32_t id) const { return !mask || (mask[id >> 5] >> (id & 31) & 1u); }
};

// kChanged: some row of the step has a copy of its logits with edits in it.
template <bool kChanged>
__device__ __forceinline__ Row row_at(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs& how, int row) {
    const std::int32_t line = how.mask_rows[row];
    const float* model = static_cast<const float*>(logits) + row * stride;
    Row mine = {model, line < 0 ? nullptr : how.masks + static_cast<std::int64_t>(line) * how.mask_stride, vocab_size, model};
    if constexpr (kChanged) {
        if (how.copies[row] >= 0) mine.logits = how.changed + static_cast<std::int64_t>(how.copies[row]) * vocab_size;
    }
    return mine;
}

__device__ __forceinline__ bool is_greedy(const DrawInputs& how, int row) { return how.temperatures[row] < 1e-20f || how.top_ks[row] == 1; }

__device__ __forceinline__ void write_drawn(SampleOutput& output, const Row& row, const RowState& state, std::int32_t id) {
    output.token_id = id;
    output.logprob = fmaxf(row.model[id] - state.log_sum, kLowestLogprob);
}

// Whether this block is the last one of its row to come here: then it sees what the others wrote, and the ticket is 0 again. All threads.
__device__ __forceinline__ bool is_last_block(std::int32_t* ticket, int num_blocks, bool* shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *shared = atomicAdd(ticket, 1) == num_blocks - 1;
        if (*shared) *ticket = 0;
    }
    __syncthreads();
    if (*shared) __threadfence();
    return *shared;
}

// Which bin it is at which counting from the highest one on reaches `wanted`, or all there is; what is still wanted of it, and what it holds.
struct Digit {
    int bin;
    unsigned long long wanted, total;
};

struct DigitMemory {
    unsigned long long warps[32];
    Digit found;
};

// All threads of the block; some bin holds something. The memory is free for the next use after the block's next barrier.
__device__ inline Digit find_digit(const unsigned long long* bins, int num_bins, unsigned long long wanted, DigitMemory& memory) {
    const int threads = static_cast<int>(blockDim.x), each = num_bins > threads ? num_bins / threads : 1, highest = num_bins - 1 - static_cast<int>(threadIdx.x) * each;
    unsigned long long own = 0;
    for (int index = 0; index < each && highest >= 0; ++index) own += bins[highest - index];
    unsigned long long above = own;
    for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, above, step);
        if (static_cast<int>(threadIdx.x & 31) >= step) above += other;
    }
    if ((threadIdx.x & 31) == 31) memory.warps[threadIdx.x >> 5] = above;
    __syncthreads();
    above -= own;
    unsigned long long total = 0;
    for (int warp = 0; warp < threads / 32; ++warp) {
        if (warp < static_cast<int>(threadIdx.x >> 5)) above += memory.warps[warp];
        total += memory.warps[warp];
    }
    if (wanted > total) wanted = total;
    if (own && above < wanted && above + own >= wanted) {
        int bin = highest;
        while (above + bins[bin] < wanted) above += bins[bin--];
        memory.found = {bin, wanted - above, bins[bin]};
    }
    __syncthreads();
    return memory.found;
}

// The id up to which there are `wanted` allowed ids of this order within the cut: halving, from the count of those at or below the middle. All threads.
__device__ inline std::int32_t last_of_equals(const Row& row, const Cut& within, std::uint32_t order, unsigned long long wanted, std::int32_t* shared) {
    std::int32_t low = 0, high = row.vocab_size - 1;
    while (low < high) {
        const std::int32_t middle = low + (high - low) / 2;
        __syncthreads();
        if (threadIdx.x == 0) *shared = 0;
        __syncthreads();
        std::int32_t mine = 0;
        for (std::int32_t id = threadIdx.x; id <= middle; id += blockDim.x) mine += order_of(row.logits[id]) == order && row.allows(id) && within.keeps(order, id);
        if (mine) atomicAdd(shared, mine);
        __syncthreads();
        if (static_cast<unsigned long long>(*shared) >= wanted) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// --- sampler_cut.cu: what a list of the most likely ids does not answer ---
// Rows whose `todo` is find_cut, by three digits of their logits' bits; histograms [rows, kCutBins], zeros, left as zeros.
constexpr int kCutBins = 2048;
void find_cuts(const Context&, const Tensor& logits, const DrawInputs&, const DrawNeeds&, RowState* states, unsigned long long* histograms, std::int32_t* tickets);
// Rows whose `todo` is draw_kept or draw_rest; bests [rows, ceil(vocab_size / kDrawChunk)].
void draw_from_rows(const Context&, const Tensor& logits, const DrawInputs&, const DrawNeeds&, const RowState* states, Best* bests, std::int32_t* tickets, SampleOutput* outputs);

// --- sampler_terms.cu: rows that are drawn from other logits than the model's ---
// Copies with edits, of rows that have one.
void change_rows(const Context&, const Tensor& logits, const DrawInputs&);
// Minus infinity for what is less likely than min_p times the likeliest allowed id, and the states' sums without it; sums [rows, ceil(vocab_size / kDrawChunk)].
void cut_unlikely(const Context&, const Tensor& logits, const DrawInputs&, RowState* states, float* sums, std::int32_t* tickets);

}  // namespace pocket::cuda
