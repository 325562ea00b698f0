// From logits to token ids for all rows of a step at once. Sums of noise and logits are compared in float64, as the CPU device does, so that both draw the
// same id from the same logits.
//
// 1. scan: a row's chunks side by side. Each finds its largest logit, the sum of exponentials, and, for a row that draws from all ids, its largest sum of logit
//    and noise. The last chunk of a row to arrive puts them together, which is all that greedy rows and draws without top_k and top_p need.
// 2. cut, for the other rows: one block a row finds the place where top_k and top_p cut in the order (logit, largest first; id, lowest first), by counting
//    digits of the logits' bits from the highest on, and draws from what they keep. The mass of an id is an integer, in units of the largest id's mass / 2^40, so
//    that its sums do not depend on their order.
// 3. rank, for rows that asked for alternatives: the same search, for the 20 first ids at most.
#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 256, kChunk = 4096;
constexpr int kCutThreads = 1024;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr std::int32_t kNoId = 0x7fffffff;
constexpr float kLowestLogprob = -9999.0f;                  // finite, since JSON has no infinity

__device__ __forceinline__ std::uint64_t splitmix64(std::uint64_t start, std::uint64_t index) {
    std::uint64_t mixed = start + (index + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return mixed ^ mixed >> 31;
}
__device__ __forceinline__ std::uint64_t stream_of(std::uint64_t seed, std::int32_t draw) { return splitmix64(splitmix64(seed, 0), static_cast<std::uint64_t>(draw)); }

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
    double sum = -INFINITY;
    std::int32_t id = kNoId;
    __device__ __forceinline__ void offer(double other, std::int32_t other_id) {
        if (other > sum || (other == sum && other_id < id)) sum = other, id = other_id;
    }
};

// The noise of an id is taken exactly only where the rough one comes near the best so far.
__device__ __forceinline__ void offer_draw(Best& best, std::uint64_t stream, float logit, float largest, double inverse, std::int32_t id) {
    const std::uint64_t number = splitmix64(stream, static_cast<std::uint64_t>(id) + 1) >> 11;
    const double scaled = (static_cast<double>(logit) - static_cast<double>(largest)) * inverse;
    if (scaled + static_cast<double>(rough_noise(number)) < best.sum - 1e-3) return;
    best.offer(scaled + exact_noise(number), id);
}

// Of a whole block, in every thread.
__device__ Best block_best(Best mine, Best* shared) {
    for (int step = 16; step; step >>= 1) mine.offer(__shfl_xor_sync(0xffffffffu, mine.sum, step), __shfl_xor_sync(0xffffffffu, mine.id, step));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = mine;
    __syncthreads();
    Best all;
    for (int warp = 0; warp < static_cast<int>(blockDim.x >> 5); ++warp) all.offer(shared[warp].sum, shared[warp].id);
    return all;
}

struct Partial {                                            // of one chunk
    double sum;                                             // best sum of logit and noise, relative to `largest_allowed`
    float largest, exponentials, largest_allowed;           // exponentials: of raw logits, relative to `largest`
    std::int32_t largest_id, sum_id;
    std::int32_t is_finite;
};

struct RowState {
    float largest, largest_allowed, log_sum;                // log_sum: log of the sum of exp(raw)
    std::int32_t id, is_finite;
};

struct Row {
    const float* logits;
    const std::uint32_t* mask;                              // or null
    std::int32_t vocab_size;
    __device__ __forceinline__ bool allows(std::int32_t id) const { return !mask || (mask[id >> 5] >> (id & 31) & 1u); }
};

__device__ __forceinline__ Row row_at(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs& how, int row) {
    const std::int32_t line = how.mask_rows[row];
    return {static_cast<const float*>(logits) + row * stride, line < 0 ? nullptr : how.masks + static_cast<std::int64_t>(line) * how.mask_stride, vocab_size};
}

__device__ __forceinline__ bool is_greedy(const DrawInputs& how, int row) { return how.temperatures[row] < 1e-20f || how.top_ks[row] == 1; }
__device__ __forceinline__ bool has_cut(const DrawInputs& how, int row, int vocab_size) {
    return !is_greedy(how, row) && ((how.top_ks[row] > 0 && how.top_ks[row] < vocab_size) || how.top_ps[row] < 1.0f);
}

__global__ __launch_bounds__(kThreads) void scan_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, Partial* partials, RowState* states,
                                                       std::int32_t* tickets, SampleOutput* outputs) {
    __shared__ float floats[32];
    __shared__ Best bests[32];
    __shared__ bool is_last;
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.y, chunk = blockIdx.x, num_chunks = gridDim.x;
    const Row mine = row_at(logits, stride, vocab_size, how, row);
    constexpr int kEach = kChunk / kThreads;
    float values[kEach], largest = -INFINITY;
    bool finite = true;
    Best greedy;
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const int id = chunk * kChunk + index * kThreads + static_cast<int>(threadIdx.x);
        values[index] = id < vocab_size ? mine.logits[id] : -INFINITY;
        if (id >= vocab_size) continue;
        finite = finite && values[index] < INFINITY;        // false for NaN too; minus infinity is an id that is never drawn
        largest = fmaxf(largest, values[index]);
        if (mine.allows(id) && values[index] > -INFINITY) greedy.offer(values[index], id);
    }
    finite = __syncthreads_and(finite);
    greedy = block_best(greedy, bests);
    largest = warp_max(largest);
    if ((threadIdx.x & 31) == 0) floats[threadIdx.x >> 5] = largest;
    __syncthreads();
    largest = warp_max((threadIdx.x & 31) < kThreads / 32 ? floats[threadIdx.x & 31] : -INFINITY);
    __syncthreads();
    float exponentials = 0.0f;
    Best drawn;
    const bool draws_all = !is_greedy(how, row) && !has_cut(how, row, vocab_size) && greedy.id != kNoId;
    const double inverse = draws_all ? 1.0 / static_cast<double>(how.temperatures[row]) : 0.0;
    const std::uint64_t stream = draws_all ? stream_of(how.seeds[row], how.draws[row]) : 0;
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const int id = chunk * kChunk + index * kThreads + static_cast<int>(threadIdx.x);
        if (id >= vocab_size || !finite) continue;
        if (values[index] == -INFINITY) continue;
        exponentials += expf(values[index] - largest);
        if (draws_all && mine.allows(id)) offer_draw(drawn, stream, values[index], static_cast<float>(greedy.sum), inverse, id);
    }
    exponentials = block_sum(exponentials, floats);
    if (draws_all) drawn = block_best(drawn, bests);
    Partial* parts = partials + static_cast<std::int64_t>(row) * num_chunks;
    if (threadIdx.x == 0) {
        parts[chunk] = {drawn.sum, largest, exponentials, static_cast<float>(greedy.sum), greedy.id, drawn.id, finite};
        __threadfence();
        is_last = atomicAdd(&tickets[row], 1) == num_chunks - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x >= 32) return;
    const volatile Partial* all = parts;
    bool all_finite = true;
    float most = -INFINITY;
    Best best;
    for (int other = threadIdx.x; other < num_chunks; other += 32) {
        all_finite = all_finite && all[other].is_finite;
        most = fmaxf(most, all[other].largest);
        best.offer(all[other].largest_allowed, all[other].largest_id);
    }
    all_finite = __all_sync(0xffffffffu, all_finite);
    most = warp_max(most);
    for (int step = 16; step; step >>= 1) best.offer(__shfl_xor_sync(0xffffffffu, best.sum, step), __shfl_xor_sync(0xffffffffu, best.id, step));
    float total = 0.0f;
    Best choice;
    for (int other = threadIdx.x; other < num_chunks; other += 32) {
        if (all[other].largest > -INFINITY) total += all[other].exponentials * expf(all[other].largest - most);
        if (all[other].sum_id != kNoId)
            choice.offer((static_cast<double>(all[other].largest_allowed) - best.sum) / static_cast<double>(how.temperatures[row]) + all[other].sum, all[other].sum_id);
    }
    total = warp_sum(total);
    for (int step = 16; step; step >>= 1) choice.offer(__shfl_xor_sync(0xffffffffu, choice.sum, step), __shfl_xor_sync(0xffffffffu, choice.id, step));
    if (threadIdx.x == 0) {
        tickets[row] = 0;
        const bool can_draw = all_finite && best.id != kNoId;  // a mask may leave nothing, which fails the row as well
        const std::int32_t id = !can_draw ? -1 : choice.id != kNoId ? choice.id : best.id;
        const float log_sum = most + logf(total);
        states[row] = {most, static_cast<float>(best.sum), log_sum, id, can_draw};
        outputs[row].token_id = id;
        outputs[row].is_finite = can_draw;
        outputs[row].logprob = id < 0 ? 0.0f : fmaxf(mine.logits[id] - log_sum, kLowestLogprob);
        outputs[row].num_top = 0;
    }
}

// Bits that are ordered as the values are; both zeros are equal.
__device__ __forceinline__ std::uint32_t order_of(float value) {
    const std::uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What a search counts for each id: one, or its mass.
struct Measure {
    bool by_mass = false;
    float largest = 0.0f, inverse = 0.0f;
    __device__ __forceinline__ std::uint64_t of(float value) const {
        return by_mass ? static_cast<std::uint64_t>(exp2f((value - largest) * inverse * kLog2E) * 0x1p40f) : 1ull;
    }
};

// Ids at or above (order, id): the larger order first, of equal ones the lower id first.
struct Cut {
    std::uint32_t order = 0;
    std::int32_t last_id = kNoId;
    __device__ __forceinline__ bool keeps(std::uint32_t other, std::int32_t id) const { return other > order || (other == order && id <= last_id); }
};

struct SearchMemory {
    unsigned long long bins[kDigits];
    unsigned long long total;
    std::uint32_t prefix;
    unsigned long long wanted;
    std::int32_t low, high;
};

// The smallest set of first ids, within `within`, that measures at least `wanted`. All threads of the block take part.
__device__ Cut search(const Row& row, const Cut& within, const Measure& measure, unsigned long long wanted, SearchMemory& memory) {
    std::uint32_t prefix = 0, known = 0;                    // digits found so far, and a mask of them
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < kDigits; bin += blockDim.x) memory.bins[bin] = 0;
        __syncthreads();
        for (std::int32_t id = threadIdx.x; id < row.vocab_size; id += blockDim.x) {
            if (!row.allows(id)) continue;
            const float value = row.logits[id];
            const std::uint32_t order = order_of(value);
            if ((order & known) != prefix || !within.keeps(order, id)) continue;
            const unsigned long long weight = measure.of(value);
            if (weight) atomicAdd(&memory.bins[order >> shift & (kDigits - 1)], weight);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned long long above = 0;
            int bin = kDigits - 1, lowest = 0;
            while (lowest < kDigits - 1 && memory.bins[lowest] == 0) ++lowest;
            while (bin > lowest && above + memory.bins[bin] < wanted) above += memory.bins[bin--];
            memory.prefix = prefix | static_cast<std::uint32_t>(bin) << shift;
            memory.wanted = wanted > above ? wanted - above : 1;
            memory.total = memory.bins[bin];
        }
        __syncthreads();
        prefix = memory.prefix, wanted = memory.wanted, known |= static_cast<std::uint32_t>(kDigits - 1) << shift;
    }
    Cut cut = {prefix, kNoId};
    if (memory.total <= wanted) return cut;                 // all ids of that logit
    // The lowest id up to which the equal ones suffice: halving, from the count of those at or below the middle.
    std::int32_t low = 0, high = row.vocab_size - 1;
    while (low < high) {
        const std::int32_t middle = low + (high - low) / 2;
        __syncthreads();
        if (threadIdx.x == 0) memory.total = 0;
        __syncthreads();
        unsigned long long mine = 0;
        for (std::int32_t id = threadIdx.x; id <= middle; id += blockDim.x) {
            const float value = row.logits[id];
            if (order_of(value) == prefix && row.allows(id) && within.keeps(prefix, id)) mine += measure.of(value);
        }
        if (mine) atomicAdd(&memory.total, mine);
        __syncthreads();
        if (memory.total >= wanted) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    cut.last_id = low;
    return cut;
}

__global__ __launch_bounds__(kCutThreads) void cut_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, const RowState* states,
                                                         SampleOutput* outputs) {
    __shared__ SearchMemory memory;
    __shared__ Best bests[32];
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.x;
    const RowState state = states[row];
    if (!has_cut(how, row, vocab_size) || state.id < 0) return;
    const Row mine = row_at(logits, stride, vocab_size, how, row);
    Measure mass;
    mass.by_mass = true, mass.largest = state.largest_allowed, mass.inverse = 1.0f / how.temperatures[row];
    Cut cut;
    if (how.top_ks[row] > 0 && how.top_ks[row] < vocab_size) cut = search(mine, cut, Measure(), static_cast<unsigned long long>(how.top_ks[row]), memory);
    if (how.top_ps[row] < 1.0f) {
        __syncthreads();
        if (threadIdx.x == 0) memory.total = 0;
        __syncthreads();
        unsigned long long units = 0;
        for (std::int32_t id = threadIdx.x; id < vocab_size; id += kCutThreads) {
            const float value = mine.logits[id];
            if (mine.allows(id) && cut.keeps(order_of(value), id)) units += mass.of(value);
        }
        if (units) atomicAdd(&memory.total, units);
        __syncthreads();
        const double share = static_cast<double>(memory.total) * static_cast<double>(how.top_ps[row]);
        const unsigned long long wanted = share < 1.0 ? 1ull : static_cast<unsigned long long>(share);
        cut = search(mine, cut, mass, wanted, memory);
    }
    const double inverse = 1.0 / static_cast<double>(how.temperatures[row]);
    const std::uint64_t stream = stream_of(how.seeds[row], how.draws[row]);
    Best best;
    for (std::int32_t id = threadIdx.x; id < vocab_size; id += kCutThreads) {
        const float value = mine.logits[id];
        if (mine.allows(id) && cut.keeps(order_of(value), id)) offer_draw(best, stream, value, state.largest_allowed, inverse, id);
    }
    best = block_best(best, bests);
    if (threadIdx.x == 0) {
        outputs[row].token_id = best.id;
        outputs[row].logprob = fmaxf(mine.logits[best.id] - state.log_sum, kLowestLogprob);
    }
}

__global__ __launch_bounds__(kCutThreads) void rank_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, const RowState* states,
                                                          SampleOutput* outputs) {
    __shared__ SearchMemory memory;
    __shared__ std::int32_t ids[32], count;
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.x, wanted = min(min(how.num_logprobs[row], 20), vocab_size);
    const RowState state = states[row];
    if (wanted <= 0 || !state.is_finite) return;
    Row mine = row_at(logits, stride, vocab_size, how, row);
    mine.mask = nullptr;                                    // alternatives are ranked before the mask
    const Cut cut = search(mine, Cut(), Measure(), static_cast<unsigned long long>(wanted), memory);
    __syncthreads();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (std::int32_t id = threadIdx.x; id < vocab_size; id += kCutThreads)
        if (cut.keeps(order_of(mine.logits[id]), id)) ids[atomicAdd(&count, 1)] = id;
    __syncthreads();
    if (threadIdx.x < wanted) {
        const std::int32_t id = ids[threadIdx.x];
        const std::uint32_t order = order_of(mine.logits[id]);
        int rank = 0;
        for (int other = 0; other < wanted; ++other) {
            const std::uint32_t other_order = order_of(mine.logits[ids[other]]);
            rank += other_order > order || (other_order == order && ids[other] < id);
        }
        outputs[row].top_ids[rank] = id;
        outputs[row].top_logprobs[rank] = fmaxf(mine.logits[id] - state.log_sum, kLowestLogprob);
        if (threadIdx.x == 0) outputs[row].num_top = wanted;
    }
}

int num_chunks_of(std::int64_t vocab_size) { return ceil_div(vocab_size, kChunk); }
std::size_t tickets_bytes(int num_samples) { return (static_cast<std::size_t>(num_samples) * sizeof(std::int32_t) + 63) / 64 * 64; }
std::size_t partial_bytes(int num_samples, std::int64_t vocab_size) { return static_cast<std::size_t>(num_samples) * num_chunks_of(vocab_size) * sizeof(Partial); }

}  // namespace

std::size_t draw_scratch_bytes(int num_samples, std::int64_t vocab_size) {
    return tickets_bytes(num_samples) + partial_bytes(num_samples, vocab_size) + static_cast<std::size_t>(num_samples) * sizeof(RowState);
}

void draw(const Context& context, const Tensor& logits, const DrawInputs& how, bool has_cuts, bool has_ranks, void* scratch, int max_samples, SampleOutput* outputs) {
    const int rows = static_cast<int>(logits.rows), vocab_size = static_cast<int>(logits.columns);
    auto* tickets = static_cast<std::int32_t*>(scratch);
    auto* partials = reinterpret_cast<Partial*>(static_cast<std::byte*>(scratch) + tickets_bytes(max_samples));
    auto* states = reinterpret_cast<RowState*>(reinterpret_cast<std::byte*>(partials) + partial_bytes(max_samples, vocab_size));
    launch(context, scan_kernel, dim3(num_chunks_of(vocab_size), rows), kThreads, 0, logits.data, logits.stride, vocab_size, how, partials, states, tickets, outputs);
    if (has_cuts) launch(context, cut_kernel, dim3(rows), kCutThreads, 0, logits.data, logits.stride, vocab_size, how, states, outputs);
    if (has_ranks) launch(context, rank_kernel, dim3(rows), kCutThreads, 0, logits.data, logits.stride, vocab_size, how, states, outputs);
}

}  // namespace pocket::cuda
