// Draws that need the whole row once more, its chunks side by side: top_p over a flat distribution, and an id outside the list of the most likely ones.
//
// The place of a cut is found in the row itself, by adding up the ids' masses for each digit of the logits' bits, from the highest digit on. A mass is an integer,
// in units of the largest id's / 2^40, so that sums do not depend on their order; its halves are added up apart, which shared memory does in 32 bits at once.
#include <utility>

#include "backends/cuda/sampler_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kEach = kDrawChunk / kDrawThreads;
constexpr int kHalf = 20;                                   // bits of a mass's lower half: kDrawChunk sums of such stay below 2^32

__device__ __forceinline__ unsigned long long mass_of(float value, float largest, float inverse) {
    const auto units = static_cast<unsigned long long>(exp2f((value - largest) * inverse * kLog2E) * 0x1p40f);
    return min(units, (1ull << 2 * kHalf) - 1);
}

template <bool kChanged>
__global__ __launch_bounds__(kDrawThreads) void cut_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, RowState* states,
                                                           unsigned long long* histograms, std::int32_t* tickets, int shift, int num_bins) {
    __shared__ union {
        std::uint32_t halves[2][kCutBins];
        unsigned long long sums[kCutBins];
    } bins;
    __shared__ DigitMemory memory;
    __shared__ std::int32_t count;
    __shared__ bool is_last;
    const int row = blockIdx.y;
    RowState& state = states[row];
    if (state.todo != Todo::find_cut) return;
    for (int bin = threadIdx.x; bin < 2 * kCutBins; bin += kDrawThreads) bins.halves[0][bin] = 0;
    __syncthreads();
    const Row mine = row_at<kChanged>(logits, stride, vocab_size, how, row);
    const Cut within = state.cut;
    const std::uint32_t prefix = state.prefix, known = state.known;
    const float largest = state.largest_allowed, inverse = static_cast<float>(1.0 / static_cast<double>(how.temperatures[row]));
    unsigned long long* sums = histograms + static_cast<std::int64_t>(row) * kCutBins;
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const std::int32_t id = blockIdx.x * kDrawChunk + index * kDrawThreads + threadIdx.x;
        if (id >= vocab_size || !mine.allows(id)) continue;
        const float value = mine.logits[id];
        const std::uint32_t order = order_of(value);
        if ((order & known) != prefix || !within.keeps(order, id)) continue;
        const unsigned long long mass = mass_of(value, largest, inverse);
        const std::uint32_t bin = order >> shift & (num_bins - 1), low = static_cast<std::uint32_t>(mass) & ((1u << kHalf) - 1), high = static_cast<std::uint32_t>(mass >> kHalf);
        if (low) atomicAdd(&bins.halves[0][bin], low);
        if (high) atomicAdd(&bins.halves[1][bin], high);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < num_bins; bin += kDrawThreads) {
        const unsigned long long sum = bins.halves[0][bin] + (static_cast<unsigned long long>(bins.halves[1][bin]) << kHalf);
        if (sum) atomicAdd(&sums[bin], sum);
    }
    if (!is_last_block(&tickets[row], gridDim.x, &is_last)) return;
    for (int bin = threadIdx.x; bin < num_bins; bin += kDrawThreads) {
        bins.sums[bin] = __ldcg(&sums[bin]);
        sums[bin] = 0;
    }
    __syncthreads();
    const Digit digit = find_digit(bins.sums, num_bins, state.wanted, memory);
    const std::uint32_t found = prefix | static_cast<std::uint32_t>(digit.bin) << shift;
    std::int32_t last_id = kNoId;                           // all ids of that logit, but where fewer do
    if (shift == 0) {
        const std::uint32_t bits = found & 0x80000000u ? found ^ 0x80000000u : ~found;
        const unsigned long long each = mass_of(__uint_as_float(bits), largest, inverse), needed = (digit.wanted + each - 1) / each;
        if (needed * each < digit.total) last_id = last_of_equals(mine, within, found, needed, &count);
    }
    if (found == within.order) last_id = min(last_id, within.last_id);
    if (threadIdx.x != 0) return;
    state.prefix = found, state.wanted = digit.wanted, state.known = known | static_cast<std::uint32_t>(num_bins - 1) << shift;
    if (shift == 0) state.cut = {found, last_id}, state.todo = Todo::draw_kept;
}

// The noise of an id is taken exactly only where the rough one comes near the block's best.
template <bool kChanged>
__global__ __launch_bounds__(kDrawThreads) void draw_kernel(const void* logits, std::int64_t stride, int vocab_size, const DrawInputs how, const RowState* states,
                                                            Best* bests, std::int32_t* tickets, SampleOutput* outputs) {
    __shared__ Best shared[32];
    __shared__ bool is_last;
    const int row = blockIdx.y, num_chunks = gridDim.x;
    const RowState state = states[row];
    if (state.todo != Todo::draw_kept && state.todo != Todo::draw_rest) return;
    const Row mine = row_at<kChanged>(logits, stride, vocab_size, how, row);
    const bool wants_kept = state.todo == Todo::draw_kept;
    const std::uint64_t stream = stream_of(how.seeds[row], how.draws[row]);
    const double temperature = how.temperatures[row], inverse = 1.0 / temperature;
    double sums[kEach];
    Best best = no_best();
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        const std::int32_t id = blockIdx.x * kDrawChunk + index * kDrawThreads + threadIdx.x;
        const float value = id < vocab_size && mine.allows(id) ? mine.logits[id] : -INFINITY;
        const bool is_in = value > -INFINITY && state.cut.keeps(order_of(value), id) == wants_kept;
        sums[index] = is_in ? (static_cast<double>(value) - static_cast<double>(state.largest_allowed)) * inverse + static_cast<double>(rough_noise(number_of(stream, id))) : -INFINITY;
        best.offer(sums[index], id);
    }
    const double enough = block_best(best, shared).sum - 1e-3;
    best = no_best();
#pragma unroll
    for (int index = 0; index < kEach; ++index) {
        if (sums[index] == -INFINITY || sums[index] < enough) continue;
        const std::int32_t id = blockIdx.x * kDrawChunk + index * kDrawThreads + threadIdx.x;
        best.offer((static_cast<double>(mine.logits[id]) - static_cast<double>(state.largest_allowed)) / temperature + exact_noise(number_of(stream, id)), id);
    }
    best = block_best(best, shared);
    Best* all = bests + static_cast<std::int64_t>(row) * num_chunks;
    if (threadIdx.x == 0) all[blockIdx.x] = best;
    if (!is_last_block(&tickets[row], num_chunks, &is_last)) return;
    best = no_best();
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += kDrawThreads) best.offer(__ldcg(&all[chunk].sum), __ldcg(&all[chunk].id));
    best = block_best(best, shared);
    if (threadIdx.x == 0 && best.id != kNoId) write_drawn(outputs[row], mine, state, best.id);  // there are no others: what the list gave stays
}

dim3 chunks_of(const Tensor& logits) { return dim3(ceil_div(logits.columns, kDrawChunk), static_cast<unsigned>(logits.rows)); }

}  // namespace

void find_cuts(const Context& context, const Tensor& logits, const DrawInputs& how, const DrawNeeds& needs, RowState* states, unsigned long long* histograms,
               std::int32_t* tickets) {
    const auto kernel = needs.changes ? cut_kernel<true> : cut_kernel<false>;
    for (const auto& [shift, num_bins] : {std::pair(21, 2048), std::pair(10, 2048), std::pair(0, 1024)})
        launch(context, kernel, chunks_of(logits), kDrawThreads, 0, logits.data, logits.stride, static_cast<int>(logits.columns), how, states, histograms, tickets, shift, num_bins);
}

void draw_from_rows(const Context& context, const Tensor& logits, const DrawInputs& how, const DrawNeeds& needs, const RowState* states, Best* bests, std::int32_t* tickets,
                    SampleOutput* outputs) {
    launch(context, needs.changes ? draw_kernel<true> : draw_kernel<false>, chunks_of(logits), kDrawThreads, 0, logits.data, logits.stride, static_cast<int>(logits.columns), how, states, bests, tickets, outputs);
}

}  // namespace pocket::cuda
