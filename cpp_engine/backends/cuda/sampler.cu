// From logits to token ids for all rows of a step at once, as the CPU device and the torch plane draw them.
//
// 1. scan: a row's chunks side by side. Each finds its largest logit, its sums of exponentials, and the largest logit of each thread's few ids, its groups. The
//    last chunk of a row to arrive puts the row's numbers together, which is all that greedy rows need.
// 2. choose: one block a row that draws, or that asked for alternatives. The k most likely ids are none below the k-th largest of the groups, so a list of few
//    hundred is collected and sorted in shared memory. A draw is the id with the largest sum of its scaled logit and of Gumbel noise; without top_k and top_p, the
//    ids beyond the first kCandidates have one noise together, and their own only where that one wins.
//
// A list that would be too long, of equal logits or a large top_k, is not made: then the place of the cut is found in the row itself, by counting digits of the
// logits' bits from the highest on. There the mass of an id is an integer, in units of the largest id's mass / 2^40, so that sums do not depend on their order.
// Sums that decide between ids are float64, as the CPU device's are.
#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 256, kChunk = 4096;
constexpr int kCutThreads = 1024;
constexpr int kCandidates = 256;                            // ids with noise of their own
constexpr int kListSize = 1024;
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
    double sum;
    std::int32_t id;
    __device__ __forceinline__ void offer(double other, std::int32_t other_id) {
        if (other > sum || (other == sum && other_id < id)) sum = other, id = other_id;
    }
};

__device__ __forceinline__ Best no_best() { return {-INFINITY, kNoId}; }

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
    Best all = no_best();
    for (int warp = 0; warp < static_cast<int>(blockDim.x >> 5); ++warp) all.offer(shared[warp].sum, shared[warp].id);
    return all;
}

struct Partial {                                            // of one chunk
    float largest, exponentials;                            // of all ids, the sum relative to `largest`
    float largest_allowed, scaled;                          // of those that a mask allows, divided by the temperature, relative to `largest_allowed`
    std::int32_t largest_id;
    std::int32_t is_finite;
};

struct RowState {
    double log_scaled;                                      // log of the sum of exp((logit - largest_allowed) / temperature) over the allowed ids
    float largest_allowed, log_sum;                         // log_sum: log of the sum of exp(logit)
    std::int32_t is_finite;
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
// groups [rows, 2, chunks * kThreads]: the largest of all ids, then of the allowed ones.
__global__ __launch_bounds__(kThreads) void scan_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, Partial* partials, RowState* states,
                                                       float* groups, std::int32_t* tickets, SampleOutput* outputs) {
    __shared__ float floats[32];
    __shared__ Best bests[32];
    __shared__ bool is_last;
    let_next_start();
    wait_for_inputs();
    const int row = blockIdx.y, chunk = blockIdx.x, num_chunks = gridDim.x;
    const Row mine = row_at(logits, stride, vocab_size, how, row);
    constexpr int kEach = kChunk / kThreads;
    float values[kEach], largest = -INFINITY, largest_allowed = -INFINITY;
    bool finite = true;
    Best greedy = no_best();
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const int id = chunk * kChunk + index * kThreads + static_cast<int>(threadIdx.x);
        values[index] = id < vocab_size ? mine.logits[id] : -INFINITY;
        finite = finite && values[index] < INFINITY;        // false for NaN too; minus infinity is an id that is never drawn
        largest = fmaxf(largest, values[index]);
        if (id < vocab_size && mine.allows(id)) {
            largest_allowed = fmaxf(largest_allowed, values[index]);
            if (values[index] > -INFINITY) greedy.offer(values[index], id);
        }
    }
    const std::int64_t group = static_cast<std::int64_t>(row) * 2 * num_chunks * kThreads + chunk * kThreads + threadIdx.x;
    const bool draws = !is_greedy(how, row);
    if (how.num_logprobs[row] > 0) groups[group] = largest;
    if (draws) groups[group + num_chunks * kThreads] = largest_allowed;
    finite = __syncthreads_and(finite);
    greedy = block_best(greedy, bests);
    largest_allowed = greedy.id == kNoId ? -INFINITY : static_cast<float>(greedy.sum);
    largest = warp_max(largest);
    if ((threadIdx.x & 31) == 0) floats[threadIdx.x >> 5] = largest;
    __syncthreads();
    largest = warp_max((threadIdx.x & 31) < kThreads / 32 ? floats[threadIdx.x & 31] : -INFINITY);
    __syncthreads();
    float exponentials = 0.0f, scaled = 0.0f;
    const float inverse = draws ? 1.0f / how.temperatures[row] : 1.0f;
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const int id = chunk * kChunk + index * kThreads + static_cast<int>(threadIdx.x);
        if (!finite || values[index] == -INFINITY) continue;
        exponentials += expf(values[index] - largest);
        if (draws && mine.allows(id)) scaled += expf((values[index] - largest_allowed) * inverse);
    }
    exponentials = block_sum(exponentials, floats);
    __syncthreads();
    scaled = block_sum(scaled, floats);
    Partial* parts = partials + static_cast<std::int64_t>(row) * num_chunks;
    if (threadIdx.x == 0) {
        parts[chunk] = {largest, exponentials, largest_allowed, scaled, greedy.id, finite};
        __threadfence();
        is_last = atomicAdd(&tickets[row], 1) == num_chunks - 1;
    }
    __syncthreads();
    if (!is_last || threadIdx.x >= 32) return;
    __threadfence();
    const volatile Partial* all = parts;
    bool all_finite = true;
    float most = -INFINITY;
    Best best = no_best();
    for (int other = threadIdx.x; other < num_chunks; other += 32) {
        all_finite = all_finite && all[other].is_finite;
        most = fmaxf(most, all[other].largest);
        if (all[other].largest_id != kNoId) best.offer(all[other].largest_allowed, all[other].largest_id);
    }
    all_finite = __all_sync(0xffffffffu, all_finite);
    most = warp_max(most);
    for (int step = 16; step; step >>= 1) best.offer(__shfl_xor_sync(0xffffffffu, best.sum, step), __shfl_xor_sync(0xffffffffu, best.id, step));
    double total = 0.0, total_scaled = 0.0;
    for (int other = threadIdx.x; other < num_chunks && all_finite; other += 32) {
        if (all[other].largest > -INFINITY) total += all[other].exponentials * exp(static_cast<double>(all[other].largest) - most);
        if (all[other].largest_id != kNoId) total_scaled += all[other].scaled * exp((static_cast<double>(all[other].largest_allowed) - best.sum) * inverse);
    }
    for (int step = 16; step; step >>= 1) {
        total += __shfl_xor_sync(0xffffffffu, total, step);
        total_scaled += __shfl_xor_sync(0xffffffffu, total_scaled, step);
    }
    if (threadIdx.x == 0) {
        tickets[row] = 0;
        const bool can_draw = all_finite && best.id != kNoId;  // a mask that leaves nothing fails the row as well
        const float log_sum = static_cast<float>(most + log(total));
        states[row] = {log(total_scaled), static_cast<float>(best.sum), log_sum, can_draw};
        outputs[row].token_id = can_draw ? best.id : -1;
        outputs[row].is_finite = can_draw;
        outputs[row].logprob = can_draw ? fmaxf(mine.logits[best.id] - log_sum, kLowestLogprob) : 0.0f;
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

struct Memory {                                             // of a block that chooses
    unsigned long long bins[kDigits];
    unsigned long long total, wanted;
    std::uint32_t prefix;
    std::int32_t count;
    unsigned long long keys[kListSize];
    double masses[kListSize];
    double doubles[32];
    Best bests[32];
};

// The digit at which counting from the highest bin on reaches `wanted`, into memory.prefix; what is still wanted of it, and what it holds. All threads.
__device__ void find_digit(Memory& memory, std::uint32_t prefix, int shift, unsigned long long wanted) {
    constexpr int kEach = kDigits / 32;
    __syncthreads();
    if (threadIdx.x < 32) {
        const int highest = kDigits - 1 - static_cast<int>(threadIdx.x) * kEach;  // lane 0 has the highest bins
        unsigned long long own = 0;
        for (int index = 0; index < kEach; ++index) own += memory.bins[highest - index];
        unsigned long long above = own;
        for (int step = 1; step < 32; step *= 2) {
            const unsigned long long other = __shfl_up_sync(0xffffffffu, above, step);
            if (static_cast<int>(threadIdx.x) >= step) above += other;
        }
        const unsigned long long total = __shfl_sync(0xffffffffu, above, 31);
        above -= own;
        if (wanted > total) wanted = total;                 // there are no more: through the lowest that holds any
        if (own && above < wanted && above + own >= wanted) {
            int bin = highest;
            while (above + memory.bins[bin] < wanted) above += memory.bins[bin--];
            memory.prefix = prefix | static_cast<std::uint32_t>(bin) << shift;
            memory.wanted = wanted - above;
            memory.total = memory.bins[bin];
        }
    }
    __syncthreads();
}

// The smallest set of first ids, within `within`, that measures at least `wanted`. All threads of the block take part.
__device__ Cut search(const Row& row, const Cut& within, const Measure& measure, unsigned long long wanted, Memory& memory) {
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
        find_digit(memory, prefix, shift, wanted);
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

__device__ __forceinline__ unsigned long long key_of(float value, std::int32_t id) {
    return static_cast<unsigned long long>(order_of(value)) << 32 | (0xffffffffu - static_cast<std::uint32_t>(id));
}
__device__ __forceinline__ std::int32_t id_of(unsigned long long key) { return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key)); }

// The `wanted` most likely ids that may be drawn, fewer where there are no more, sorted in memory.keys; -1 where the list would be too long.
__device__ int collect(const Row& row, const float* groups, int num_groups, int wanted, Memory& memory) {
    if (wanted > kListSize / 2) return -1;
    std::uint32_t prefix = 0, known = 0;
    unsigned long long left = static_cast<unsigned long long>(wanted);
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < kDigits; bin += kCutThreads) memory.bins[bin] = 0;
        __syncthreads();
        for (int group = threadIdx.x; group < num_groups; group += kCutThreads) {
            const std::uint32_t order = order_of(groups[group]);
            if ((order & known) == prefix) atomicAdd(&memory.bins[order >> shift & (kDigits - 1)], 1ull);
        }
        find_digit(memory, prefix, shift, left);
        prefix = memory.prefix, left = memory.wanted, known |= static_cast<std::uint32_t>(kDigits - 1) << shift;
    }
    __syncthreads();
    if (threadIdx.x == 0) memory.count = 0;
    memory.keys[threadIdx.x] = 0;
    __syncthreads();
    for (int group = threadIdx.x; group < num_groups; group += kCutThreads) {
        if (order_of(groups[group]) < prefix) continue;
        for (int index = 0; index < kChunk / kThreads; ++index) {
            const std::int32_t id = group / kThreads * kChunk + index * kThreads + group % kThreads;
            if (id >= row.vocab_size || !row.allows(id)) continue;
            const float value = row.logits[id];
            if (value == -INFINITY || order_of(value) < prefix) continue;
            const int place = atomicAdd(&memory.count, 1);
            if (place < kListSize) memory.keys[place] = key_of(value, id);
        }
    }
    __syncthreads();
    const int count = memory.count;
    if (count > kListSize) return -1;
    for (int size = 2; size <= kListSize; size *= 2) {      // bitonic, largest first; unused places are 0 and go last
        for (int step = size / 2; step; step /= 2) {
            const int other = static_cast<int>(threadIdx.x) ^ step;
            const unsigned long long mine = memory.keys[threadIdx.x], theirs = memory.keys[other];
            const bool takes_larger = ((threadIdx.x & size) == 0) == ((threadIdx.x & step) == 0);
            __syncthreads();
            memory.keys[threadIdx.x] = takes_larger == (mine > theirs) ? mine : theirs;
            __syncthreads();
        }
    }
    return min(count, wanted);
}

__device__ double block_total(double value, double* shared) {
    for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = value;
    __syncthreads();
    double total = 0.0;
    for (int warp = 0; warp < kCutThreads / 32; ++warp) total += shared[warp];
    return total;
}

__device__ std::int32_t draw_row(const Row& row, const RowState& state, const DrawInputs& how, int index, const float* groups, int num_groups, Memory& memory) {
    const double temperature = how.temperatures[index], top_p = how.top_ps[index];
    const int top_k = how.top_ks[index];
    const bool is_cut = top_k > 0 && top_k < row.vocab_size;
    const std::uint64_t stream = stream_of(how.seeds[index], how.draws[index]);
    const auto scaled = [&](float logit) { return (static_cast<double>(logit) - static_cast<double>(state.largest_allowed)) / temperature; };
    const int first_count = is_cut ? top_k : kCandidates;
    int count = collect(row, groups, num_groups, first_count, memory);
    Cut cut;                                                // of what is taken from the row, where there is no list
    if (count < 0) cut = search(row, cut, Measure(), static_cast<unsigned long long>(first_count), memory);
    // What `work` is called with: each id of the list, or of the row as far as the cut keeps it.
    const auto for_each = [&](const auto& work) {
        if (count >= 0) {
            if (static_cast<int>(threadIdx.x) < count) {
                const std::int32_t id = id_of(memory.keys[threadIdx.x]);
                work(row.logits[id], id);
            }
            return;
        }
        for (std::int32_t id = threadIdx.x; id < row.vocab_size; id += kCutThreads) {
            const float value = row.logits[id];
            if (row.allows(id) && value > -INFINITY && cut.keeps(order_of(value), id)) work(value, id);
        }
    };
    double mass = 0.0;                                      // of those ids, in units of the largest one's
    for_each([&](float value, std::int32_t) { mass += exp(scaled(value)); });
    mass = block_total(mass, memory.doubles);
    const double all = exp(state.log_scaled), total = is_cut ? mass : all;
    if (top_p < 1.0) {
        if (count >= 0 && (is_cut || mass >= top_p * total)) {
            if (static_cast<int>(threadIdx.x) < count) memory.masses[threadIdx.x] = exp(scaled(row.logits[id_of(memory.keys[threadIdx.x])])) / total;
            __syncthreads();
            if (threadIdx.x == 0) {
                double reached = 0.0;
                int size = 0;
                while (size < count && reached < top_p) reached += memory.masses[size++];  // the id that crosses top_p is kept
                memory.count = max(size, 1);
            }
            __syncthreads();
            count = memory.count;
        } else {
            Measure measure;
            measure.by_mass = true, measure.largest = state.largest_allowed, measure.inverse = static_cast<float>(1.0 / temperature);
            const double units = total * top_p * 0x1p40;
            const Cut within = is_cut ? cut : Cut();
            cut = search(row, within, measure, units < 1.0 ? 1ull : static_cast<unsigned long long>(units), memory);
            count = -1;
        }
    }
    Best best = no_best();
    for_each([&](float value, std::int32_t id) { best.offer(scaled(value) + exact_noise(splitmix64(stream, static_cast<std::uint64_t>(id) + 1) >> 11), id); });
    best = block_best(best, memory.bests);
    const double rest = is_cut || top_p < 1.0 ? 0.0 : fmax(0.0, 1.0 - mass / total);
    if (rest == 0.0 || best.sum - log(total) >= log(rest) + exact_noise(splitmix64(stream, 0) >> 11)) return best.id;
    // One of the others: each with its own noise.
    const unsigned long long last = count > 0 ? memory.keys[count - 1] : static_cast<unsigned long long>(cut.order) << 32 | (0xffffffffu - static_cast<std::uint32_t>(cut.last_id));
    Best other = no_best();
    const double inverse = 1.0 / temperature;
    for (std::int32_t id = threadIdx.x; id < row.vocab_size; id += kCutThreads) {
        const float value = row.logits[id];
        if (row.allows(id) && value > -INFINITY && key_of(value, id) < last) offer_draw(other, stream, value, state.largest_allowed, inverse, id);
    }
    other = block_best(other, memory.bests);
    return other.id == kNoId ? best.id : other.id;
}

__global__ __launch_bounds__(kCutThreads) void choose_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, const RowState* states,
                                                            const float* groups, int num_groups, SampleOutput* outputs) {
    __shared__ Memory memory;
    let_next_start();
    wait_for_inputs();
    const int index = blockIdx.x, wanted = min(min(how.num_logprobs[index], 20), vocab_size);
    const RowState state = states[index];
    if (!state.is_finite) return;
    Row row = row_at(logits, stride, vocab_size, how, index);
    const float* own = groups + static_cast<std::int64_t>(index) * 2 * num_groups;
    if (!is_greedy(how, index)) {
        const std::int32_t id = draw_row(row, state, how, index, own + num_groups, num_groups, memory);
        if (threadIdx.x == 0) {
            outputs[index].token_id = id;
            outputs[index].logprob = fmaxf(row.logits[id] - state.log_sum, kLowestLogprob);
        }
    }
    if (wanted <= 0) return;
    row.mask = nullptr;                                     // alternatives are ranked before the mask
    int count = collect(row, own, num_groups, wanted, memory);
    if (count < 0) {                                        // very many equal logits
        const Cut cut = search(row, Cut(), Measure(), static_cast<unsigned long long>(wanted), memory);
        __syncthreads();
        if (threadIdx.x == 0) memory.count = 0;
        __syncthreads();
        for (std::int32_t id = threadIdx.x; id < vocab_size; id += kCutThreads)
            if (cut.keeps(order_of(row.logits[id]), id)) memory.keys[atomicAdd(&memory.count, 1)] = key_of(row.logits[id], id);
        __syncthreads();
        count = memory.count;
    }
    if (static_cast<int>(threadIdx.x) < count) {
        const unsigned long long key = memory.keys[threadIdx.x];
        int rank = 0;
        for (int other = 0; other < count; ++other) rank += memory.keys[other] > key;
        outputs[index].top_ids[rank] = id_of(key);
        outputs[index].top_logprobs[rank] = fmaxf(row.logits[id_of(key)] - state.log_sum, kLowestLogprob);
    }
    if (threadIdx.x == 0) outputs[index].num_top = count;
}

int num_chunks_of(std::int64_t vocab_size) { return ceil_div(vocab_size, kChunk); }

// Where a draw's scratch has what: tickets first, which are the same for every size of a step.
struct Layout {
    std::size_t partials, states, groups, end;
    Layout(int max_samples, std::int64_t vocab_size) {
        const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
        const std::size_t rows = static_cast<std::size_t>(max_samples), chunks = rows * static_cast<std::size_t>(num_chunks_of(vocab_size));
        partials = align(rows * sizeof(std::int32_t));
        states = partials + align(chunks * sizeof(Partial));
        groups = states + align(rows * sizeof(RowState));
        end = groups + chunks * 2 * kThreads * sizeof(float);
    }
};

}  // namespace

std::size_t draw_scratch_bytes(int max_samples, std::int64_t vocab_size) { return Layout(max_samples, vocab_size).end; }

void draw(const Context& context, const Tensor& logits, const DrawInputs& how, bool has_choices, void* scratch, int max_samples, SampleOutput* outputs) {
    const int rows = static_cast<int>(logits.rows), vocab_size = static_cast<int>(logits.columns), chunks = num_chunks_of(vocab_size);
    const Layout layout(max_samples, vocab_size);
    auto* bytes = static_cast<std::byte*>(scratch);
    auto* tickets = reinterpret_cast<std::int32_t*>(bytes);
    auto* partials = reinterpret_cast<Partial*>(bytes + layout.partials);
    auto* states = reinterpret_cast<RowState*>(bytes + layout.states);
    auto* groups = reinterpret_cast<float*>(bytes + layout.groups);
    launch(context, scan_kernel, dim3(chunks, rows), kThreads, 0, logits.data, logits.stride, vocab_size, how, partials, states, groups, tickets, outputs);
    if (has_choices) launch(context, choose_kernel, dim3(rows), kCutThreads, 0, logits.data, logits.stride, vocab_size, how, states, groups, chunks * kThreads, outputs);
}

}  // namespace pocket::cuda
