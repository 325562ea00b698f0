// From logits to token ids for all rows of a step at once, as the CPU device and the torch plane draw them.
//
// 1. scan: a row's chunks side by side. Each finds its largest logit, its sums of exponentials, and the largest logit of each thread's few ids, its groups. The
//    last chunk of a row to arrive puts the row's numbers together, which is all that greedy rows need.
// 2. list: one block a row that draws, or that asked for alternatives. The k most likely ids are none below the k-th largest of the groups, so a list of few
//    hundred is collected and sorted. A draw is the id with the largest sum of its scaled logit and of Gumbel noise; without top_k and top_p, the ids beyond the
//    first kCandidates have one noise together, and their own only where that one wins.
// 3. what the list does not answer goes over the whole row, its chunks side by side again (sampler_cut.cu).
//
// A list that would be too long, of equal logits or a large top_k, is not made: then the block goes over the row itself, and counts digits of the logits' bits.
// Rows with edits or min_p are drawn from a copy of their logits (sampler_terms.cu); log probabilities are of the logits themselves. The kernels are made twice,
// so that a step without such rows does not ask for them.
//
// Sums that decide between ids are float64, as the CPU device's are.
#include "backends/cuda/sampler_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 128, kEach = kDrawChunk / kThreads;
constexpr int kListThreads = 1024;
constexpr int kHeldGroups = 16;                             // of a thread in registers: those of 262,144 ids
constexpr int kCandidates = 256;                            // ids with noise of their own
constexpr int kListSize = kListThreads;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

struct Partial {                                            // of one chunk
    float largest, exponentials;                            // of all ids, the sum relative to `largest`
    float largest_allowed, scaled;                          // of those that a mask allows, divided by the temperature, relative to `largest_allowed`
    std::int32_t largest_id;
    std::int32_t is_finite;
};

// groups [rows, 2, chunks * kThreads]: the largest of all ids, then of the allowed ones.
template <bool kChanged>
__global__ __launch_bounds__(kThreads) void scan_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, Partial* partials, RowState* states,
                                                       float* groups, std::int32_t* tickets, SampleOutput* outputs) {
    __shared__ float floats[32];
    __shared__ Best bests[32];
    __shared__ bool is_last;
    const int row = blockIdx.y, chunk = blockIdx.x, num_chunks = gridDim.x;
    const Row mine = row_at<kChanged>(logits, stride, vocab_size, how, row);
    float values[kEach], drawn[kEach], largest = -INFINITY, largest_allowed = -INFINITY;
    bool finite = true;
    Best greedy = no_best();
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const int id = chunk * kDrawChunk + index * kThreads + static_cast<int>(threadIdx.x);
        values[index] = id < vocab_size ? mine.model[id] : -INFINITY;
        drawn[index] = kChanged && id < vocab_size ? mine.logits[id] : values[index];
    }
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const int id = chunk * kDrawChunk + index * kThreads + static_cast<int>(threadIdx.x);
        finite = finite && values[index] < INFINITY && drawn[index] < INFINITY;  // false for NaN too; minus infinity is an id that is never drawn
        largest = fmaxf(largest, values[index]);
        if (id < vocab_size && mine.allows(id)) {
            largest_allowed = fmaxf(largest_allowed, drawn[index]);
            if (drawn[index] > -INFINITY) greedy.offer(drawn[index], id);
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
        const int id = chunk * kDrawChunk + index * kThreads + static_cast<int>(threadIdx.x);
        if (!finite || values[index] == -INFINITY) continue;
        exponentials += expf(values[index] - largest);
        if (draws && drawn[index] > -INFINITY && mine.allows(id)) scaled += expf((drawn[index] - largest_allowed) * inverse);
    }
    exponentials = block_sum(exponentials, floats);
    __syncthreads();
    scaled = block_sum(scaled, floats);
    Partial* parts = partials + static_cast<std::int64_t>(row) * num_chunks;
    if (threadIdx.x == 0) parts[chunk] = {largest, exponentials, largest_allowed, scaled, greedy.id, finite};
    if (!is_last_block(&tickets[row], num_chunks, &is_last) || threadIdx.x >= 32) return;
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
    best = warp_best(best);
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
        const bool can_draw = all_finite && best.id != kNoId;  // a mask that leaves nothing fails the row as well
        RowState state = {};
        state.log_scaled = log(total_scaled), state.largest_allowed = static_cast<float>(best.sum), state.log_sum = static_cast<float>(most + log(total));
        state.is_finite = can_draw, state.todo = Todo::nothing;
        states[row] = state;
        outputs[row].token_id = -1, outputs[row].logprob = 0.0f;
        if (can_draw) write_drawn(outputs[row], mine, state, best.id);
        outputs[row].is_finite = can_draw;
        outputs[row].num_top = 0;
    }
}

struct Memory {                                             // of a block that lists
    unsigned long long bins[kDigits];
    std::uint32_t counts[kDigits];
    DigitMemory digit;
    std::int32_t count;
    unsigned long long keys[kListSize];
    double doubles[32];
    Best bests[32];
};

// The `wanted` first ids that may be drawn, or all there are. All threads of the block take part.
__device__ Cut search(const Row& row, unsigned long long wanted, Memory& memory) {
    std::uint32_t prefix = 0, known = 0;                    // digits found so far, and a mask of them
    Digit digit = {};
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < kDigits; bin += kListThreads) memory.counts[bin] = 0;
        __syncthreads();
        for (std::int32_t id = threadIdx.x; id < row.vocab_size; id += kListThreads) {
            const std::uint32_t order = order_of(row.logits[id]);
            if ((order & known) == prefix && row.allows(id)) atomicAdd(&memory.counts[order >> shift & (kDigits - 1)], 1u);
        }
        __syncthreads();
        for (int bin = threadIdx.x; bin < kDigits; bin += kListThreads) memory.bins[bin] = memory.counts[bin];
        __syncthreads();
        digit = find_digit(memory.bins, kDigits, wanted, memory.digit);
        prefix |= static_cast<std::uint32_t>(digit.bin) << shift, known |= static_cast<std::uint32_t>(kDigits - 1) << shift, wanted = digit.wanted;
    }
    if (digit.total <= wanted) return {prefix, kNoId};      // all ids of that logit
    return {prefix, last_of_equals(row, Cut(), prefix, wanted, &memory.count)};
}

__device__ __forceinline__ unsigned long long key_of(float value, std::int32_t id) {
    return static_cast<unsigned long long>(order_of(value)) << 32 | (0xffffffffu - static_cast<std::uint32_t>(id));
}
__device__ __forceinline__ std::int32_t id_of(unsigned long long key) { return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key)); }

__device__ __forceinline__ int warp_total(int value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xffffffffu, value);
#else
    for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
#endif
}

// The `wanted` most likely ids that may be drawn, fewer where there are no more, sorted in memory.keys; -1 where the list would be too long.
__device__ int collect(const Row& row, const float* groups, int num_groups, int wanted, Memory& memory) {
    if (wanted > kListSize / 2) return -1;
    std::uint32_t held[kHeldGroups];
#pragma unroll
    for (int index = 0; index < kHeldGroups; ++index) {
        const int group = index * kListThreads + static_cast<int>(threadIdx.x);
        held[index] = group < num_groups ? order_of(groups[group]) : 0;
    }
    // A number that at least `wanted` groups are not below, bit by bit; a quarter more of them is soon found, and as good.
    std::uint32_t least = 0;
    const int enough = wanted + wanted / 4 + 8;
    for (int bit = 31; bit >= 0; --bit) {
        const std::uint32_t tried = least | 1u << bit;
        int above = 0;
#pragma unroll
        for (int index = 0; index < kHeldGroups; ++index) above += held[index] >= tried;
        for (int group = kHeldGroups * kListThreads + static_cast<int>(threadIdx.x); group < num_groups; group += kListThreads) above += order_of(groups[group]) >= tried;
        above = warp_total(above);
        std::uint32_t* sums = memory.counts + 32 * (bit & 1);  // the other half may still be read
        if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = static_cast<std::uint32_t>(above);
        __syncthreads();
        above = warp_total(static_cast<int>(sums[threadIdx.x & 31]));
        if (above >= wanted) least = tried;
        if (above >= wanted && above <= enough) break;
    }
    __syncthreads();
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
    const auto take = [&](int group) {
        float values[kEach];
        const std::int32_t first = group / kThreads * kDrawChunk + group % kThreads;
#pragma unroll
        for (int index = 0; index < kEach; ++index) values[index] = first + index * kThreads < row.vocab_size ? row.logits[first + index * kThreads] : -INFINITY;
#pragma unroll
        for (int index = 0; index < kEach; ++index) {
            const std::int32_t id = first + index * kThreads;
            if (values[index] == -INFINITY || order_of(values[index]) < least || !row.allows(id)) continue;
            const int place = atomicAdd(&memory.count, 1);
            if (place < kListSize) memory.keys[place] = key_of(values[index], id);
        }
    };
#pragma unroll 1
    for (int index = 0; index < kHeldGroups; ++index) {
        const int group = index * kListThreads + static_cast<int>(threadIdx.x);
        if (group < num_groups && order_of(groups[group]) >= least) take(group);
    }
#pragma unroll 1
    for (int group = kHeldGroups * kListThreads + static_cast<int>(threadIdx.x); group < num_groups; group += kListThreads)
        if (order_of(groups[group]) >= least) take(group);
    __syncthreads();
    const int count = memory.count;
    if (count > kListSize) return -1;
    // Bitonic, largest first; unused places are 0 and go last. Partners of one warp exchange by themselves.
    unsigned long long own = static_cast<int>(threadIdx.x) < count ? memory.keys[threadIdx.x] : 0;
    for (int size = 2; size < 2 * count; size *= 2) {
        for (int step = size / 2; step; step /= 2) {
            unsigned long long theirs;
            if (step < 32) {
                theirs = __shfl_xor_sync(0xffffffffu, own, step);
            } else {
                __syncthreads();
                memory.keys[threadIdx.x] = own;
                __syncthreads();
                theirs = memory.keys[threadIdx.x ^ step];
            }
            const bool takes_larger = ((threadIdx.x & size) == 0) == ((threadIdx.x & step) == 0);
            own = takes_larger == (own > theirs) ? own : theirs;
        }
    }
    __syncthreads();
    memory.keys[threadIdx.x] = own;
    __syncthreads();
    return min(count, wanted);
}

__device__ double block_total(double value, double* shared) {
    for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = value;
    __syncthreads();
    double total = 0.0;
    for (int warp = 0; warp < kListThreads / 32; ++warp) total += shared[warp];
    return total;
}

// Of what the threads before this one have.
__device__ double sum_before(double value, double* shared) {
    double sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, sum, step);
        if (static_cast<int>(threadIdx.x & 31) >= step) sum += other;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 31) shared[threadIdx.x >> 5] = sum;
    __syncthreads();
    double before = 0.0;
    for (int warp = 0; warp < static_cast<int>(threadIdx.x >> 5); ++warp) before += shared[warp];
    return before + (sum - value);
}

// The id that is drawn, as far as the list tells; what is left to do is written to `state`.
__device__ std::int32_t draw_row(const Row& row, RowState& state, const DrawInputs& how, int index, const float* groups, int num_groups, Memory& memory) {
    const double temperature = how.temperatures[index], top_p = how.top_ps[index];
    const int top_k = how.top_ks[index];
    const bool is_cut = top_k > 0 && top_k < row.vocab_size;
    const std::uint64_t stream = stream_of(how.seeds[index], how.draws[index]);
    const auto scaled = [&](float logit) { return (static_cast<double>(logit) - static_cast<double>(state.largest_allowed)) / temperature; };
    const int first_count = is_cut ? top_k : kCandidates;
    int count = collect(row, groups, num_groups, first_count, memory);
    Cut cut;                                                // of what is taken from the row, where there is no list
    if (count < 0) cut = search(row, static_cast<unsigned long long>(first_count), memory);
    // What `work` is called with: each id of the list, or of the row as far as the cut keeps it.
    const auto for_each = [&](const auto& work) {
        if (count >= 0) {
            if (static_cast<int>(threadIdx.x) < count) {
                const std::int32_t id = id_of(memory.keys[threadIdx.x]);
                work(row.logits[id], id);
            }
            return;
        }
        for (std::int32_t id = threadIdx.x; id < row.vocab_size; id += kListThreads) {
            const float value = row.logits[id];
            if (value > -INFINITY && cut.keeps(order_of(value), id) && row.allows(id)) work(value, id);
        }
    };
    double own = 0.0;                                       // mass of these ids, in units of the largest one's
    for_each([&](float value, std::int32_t) { own += exp(scaled(value)); });
    const double mass = block_total(own, memory.doubles), total = is_cut ? mass : exp(state.log_scaled);
    if (top_p < 1.0) {
        if (count < 0 || (!is_cut && mass < top_p * total)) {
            const double units = total * top_p * 0x1p40;
            state.todo = Todo::find_cut, state.cut = is_cut ? cut : Cut(), state.prefix = state.known = 0;
            state.wanted = units < 1.0 ? 1ull : static_cast<unsigned long long>(units);
            return kNoId;
        }
        // The id that crosses top_p is kept.
        const double before = sum_before(own / total, memory.doubles);
        count = max(1, __syncthreads_count(static_cast<int>(threadIdx.x) < count && before < top_p));
    }
    Best best = no_best();
    for_each([&](float value, std::int32_t id) { best.offer(scaled(value) + exact_noise(number_of(stream, id)), id); });
    best = block_best(best, memory.bests);
    const double rest = is_cut || top_p < 1.0 ? 0.0 : fmax(0.0, 1.0 - mass / total);
    if (rest > 0.0 && best.sum - log(total) < log(rest) + exact_noise(splitmix64(stream, 0) >> 11)) {
        // One of the others: each with its own noise.
        if (count > 0) cut = {static_cast<std::uint32_t>(memory.keys[count - 1] >> 32), id_of(memory.keys[count - 1])};
        state.todo = Todo::draw_rest, state.cut = cut;
    }
    return best.id;
}

template <bool kChanged>
__global__ __launch_bounds__(kListThreads) void list_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, RowState* states,
                                                           const float* groups, int num_groups, SampleOutput* outputs) {
    __shared__ Memory memory;
    const int index = blockIdx.x, wanted = min(min(how.num_logprobs[index], 20), vocab_size);
    RowState state = states[index];
    if (!state.is_finite) return;
    Row row = row_at<kChanged>(logits, stride, vocab_size, how, index);
    const float* own = groups + static_cast<std::int64_t>(index) * 2 * num_groups;
    if (!is_greedy(how, index)) {
        const std::int32_t id = draw_row(row, state, how, index, own + num_groups, num_groups, memory);
        if (threadIdx.x == 0) {
            states[index] = state;
            if (id != kNoId) write_drawn(outputs[index], row, state, id);
        }
    }
    if (wanted <= 0) return;
    __syncthreads();                                        // the list's memory is free again
    row.mask = nullptr, row.logits = row.model;             // alternatives are ranked before edits and mask
    int count = collect(row, own, num_groups, wanted, memory);
    if (count < 0) {                                        // very many equal logits
        const Cut cut = search(row, static_cast<unsigned long long>(wanted), memory);
        __syncthreads();
        if (threadIdx.x == 0) memory.count = 0;
        __syncthreads();
        for (std::int32_t id = threadIdx.x; id < vocab_size; id += kListThreads)
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

int num_chunks_of(std::int64_t vocab_size) { return ceil_div(vocab_size, kDrawChunk); }

// Where a draw's scratch has what: tickets first, then the histograms; their places hang on the most samples alone.
struct Layout {
    std::size_t histograms, partials, states, bests, groups, end;
    Layout(int max_samples, std::int64_t vocab_size) {
        const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
        const std::size_t rows = static_cast<std::size_t>(max_samples), chunks = rows * static_cast<std::size_t>(num_chunks_of(vocab_size));
        histograms = align(rows * sizeof(std::int32_t));
        partials = histograms + align(rows * kCutBins * sizeof(unsigned long long));
        states = partials + align(chunks * sizeof(Partial));
        bests = states + align(rows * sizeof(RowState));
        groups = bests + align(chunks * sizeof(Best));
        end = groups + chunks * 2 * kThreads * sizeof(float);
    }
};

}  // namespace

std::size_t draw_scratch_bytes(int max_samples, std::int64_t vocab_size) { return Layout(max_samples, vocab_size).end; }

void draw(const Context& context, const Tensor& logits, const DrawInputs& how, const DrawNeeds& needs, void* scratch, int max_samples, SampleOutput* outputs) {
    const int rows = static_cast<int>(logits.rows), vocab_size = static_cast<int>(logits.columns), chunks = num_chunks_of(vocab_size);
    const Layout layout(max_samples, vocab_size);
    auto* bytes = static_cast<std::byte*>(scratch);
    auto* tickets = reinterpret_cast<std::int32_t*>(bytes);
    auto* partials = reinterpret_cast<Partial*>(bytes + layout.partials);
    auto* states = reinterpret_cast<RowState*>(bytes + layout.states);
    auto* groups = reinterpret_cast<float*>(bytes + layout.groups);
    if (needs.changes) change_rows(context, logits, how);
    launch(context, needs.changes ? scan_kernel<true> : scan_kernel<false>, dim3(chunks, rows), kThreads, 0, logits.data, logits.stride, vocab_size, how, partials, states, groups, tickets, outputs);
    if (needs.cuts_unlikely) cut_unlikely(context, logits, how, states, reinterpret_cast<float*>(partials), tickets);
    if (needs.draws || needs.ranks) launch(context, needs.changes ? list_kernel<true> : list_kernel<false>, dim3(rows), kListThreads, 0, logits.data, logits.stride, vocab_size, how, states, groups, chunks * kThreads, outputs);
    if (needs.cuts) find_cuts(context, logits, how, needs, states, reinterpret_cast<unsigned long long*>(bytes + layout.histograms), tickets);
    if (needs.draws) draw_from_rows(context, logits, how, needs, states, reinterpret_cast<Best*>(bytes + layout.bests), tickets, outputs);
}

}  // namespace pocket::cuda
