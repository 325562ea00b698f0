// A whole decode step of up to 8 rows as one kernel, one block on each multiprocessor.
//
// Weights do not depend on what is computed, so two warps of each block copy the block's rows of all matrices, in their order, into a ring of shared memory and run
// ahead of the eight warps that compute, also across the meetings of all blocks between two phases: while blocks wait for each other, stage their x, or
// compute a mixer, the memory goes on reading. A stage of the ring has 16 rows of a weight, 1,024 bytes of each; each of the eight warps multiplies 128 bytes of
// all rows by x, which lies in shared memory too, in mma.m16n8k16 with the weights on the left and the rows of x on the right. As in product_few.cu a thread
// takes 16 adjacent bytes and the same columns of x. The warps' sums of a tile of 16 rows meet in shared memory.
//
// x comes as bfloat16, rounded before its norm's factor: whoever adds to the residual stream leaves it so for the next product, with the sums of squares for the
// factor. Beside float8_e4m3 weights each row of x is also brought into float16's range.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/attention_decode.cuh"
#include "backends/cuda/decode_step.h"
#include "backends/cuda/delta_step.cuh"

namespace pocket::cuda {

namespace {

constexpr int kWarps = kStepConsumers / 32;
[[maybe_unused]] constexpr int kHeldSquares = 6;

constexpr int round_up(int bytes, int to) { return (bytes + to - 1) / to * to; }

// Of shared memory, in bytes from its start.
template <bool kOne>
struct Layout {
    static constexpr int kColumns = kOne ? 1 : kStepRows;
    static constexpr int kSumBytes = static_cast<int>(sizeof(float)) * kWarps * kStageRows * kColumns;  // of one region
    // At 0: [2][kMostStages]: stages that are full, and that are empty
    static constexpr int kScales = 16 * kMostStages;        // [2][kStepRows]: x's scale and its norm's factor
    static constexpr int kReduce = kScales + 64;            // [kWarps]: largest values of the warps
    static constexpr int kPhases = kReduce + 64;            // this one and the next
    static constexpr int kSums = round_up(kPhases + 2 * static_cast<int>(sizeof(Phase)), 128);
    static constexpr int kKept = kSums + 2 * kSumBytes;     // [kKeptRows][kStepRows], of x that comes in parts
    static constexpr int kWork = round_up(kKept + (kOne ? 0 : static_cast<int>(sizeof(float)) * kKeptRows * kStepRows), 128);
};

struct Ring {
    std::uint32_t start, barriers;
    int num_stages, stage = 0;
    std::uint32_t parity = 0;
    __device__ std::uint32_t full() const { return barriers + 8 * stage; }
    __device__ std::uint32_t empty() const { return barriers + 8 * (kMostStages + stage); }
    __device__ std::uint32_t place() const { return start + stage * kStageBytes; }
    __device__ void advance() {
        if (++stage == num_stages) stage = 0, parity ^= 1;
    }
};

// Rows of a product that this block has, in tiles.
struct Share {
    int begin, end, per_tile, num_tiles;
    __device__ explicit Share(int limit, bool is_swiglu) {
        const auto all = static_cast<std::uint32_t>(limit);  // times the blocks: below 2^32
        begin = static_cast<int>(all * blockIdx.x / gridDim.x), end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
        per_tile = is_swiglu ? kStageRows / 2 : kStageRows;
        num_tiles = (end - begin + per_tile - 1) / per_tile;
    }
};

[[maybe_unused]] __device__ __forceinline__ void store_float(std::uint32_t to, float value) { store_word(to, __float_as_uint(value)); }
[[maybe_unused]] __device__ __forceinline__ float load_float(std::uint32_t from) { return __uint_as_float(load_word(from)); }

// --- the warp that copies ---

// All products' stages in their order, which the warps share out. Only so many may be on their way, since what else the multiprocessor asks of the memory waits
// behind them. Every warp waits for each stage that is so many back: so none is a round of the ring behind another one, where a barrier's parity would deceive it.
[[maybe_unused]] __device__ void copy_weights(const StepPlan& plan, Ring ring) {
    constexpr int kMostPending = 4;                         // 64 KB: as many as the memory takes to keep busy, on an H200
    const int lane = threadIdx.x & 31;
    Ring arrived = ring;                                    // the stage before those that may be on their way
    int to_come = min(kMostPending, (plan.num_stages - 1) / 2), turns = static_cast<int>(threadIdx.x - kStepConsumers) / 32;
    CopyRun next = plan.runs[0];
    for (int index = 0; index < plan.num_runs; ++index) {
        const CopyRun run = next;
        if (index + 1 < plan.num_runs) next = plan.runs[index + 1];  // on its way while this one's stages are copied
        const Share share(run.limit, run.is_swiglu);
        for (int first = 0; first < run.row_bytes; first += run.staged_bytes) {
            const int part_end = min(first + run.staged_bytes, run.row_bytes);
            for (int tile = 0; tile < share.num_tiles; ++tile) {
                const int start = share.begin + tile * share.per_tile, count = min(share.per_tile, share.end - start), within = lane % share.per_tile;
                const bool has_row = lane < kStageRows && within < count;
                const std::uint8_t* row = run.values + static_cast<std::int64_t>(start + within + (lane >= share.per_tile ? run.limit : 0)) * run.row_bytes;
                for (int at = first; at < part_end; at += kPieceBytes, ring.advance()) {
                    if (to_come > 0) {
                        --to_come;
                    } else {
                        wait_for(arrived.full(), arrived.parity);
                        arrived.advance();
                    }
                    if (turns-- > 0) continue;
                    turns = kStepCopiers - 1;
                    const int bytes = min(kPieceBytes, part_end - at);
                    wait_for(ring.empty(), ring.parity ^ 1);
                    fill_stage(ring.place(), kPieceStride, has_row ? row + at : nullptr, bytes, bytes * count * (run.is_swiglu ? 2 : 1), ring.full());
                }
            }
        }
    }
}

// --- the warps that compute ---

template <bool kOne>
struct Worker {
    using At = Layout<kOne>;
    std::uint8_t* memory;                                   // shared
    std::uint32_t shared;                                   // the same
    const StepPlan& plan;
    Ring ring;
    int sums_parity = 0;
    float squares = 0.0f;                                   // of the results that this thread stored

    // 16 bytes of staged x, eight values, as `change` makes them.
    template <typename To, typename Change>
    __device__ __forceinline__ void change_eight(std::uint32_t place, const Change& change) const {
        uint4 words = load_words(place);
        const auto pair = [&](std::uint32_t word) {
            const float2 both = unpack<__nv_bfloat16>(word);
            return pack<To>(change(both.x), change(both.y));
        };
        words = make_uint4(pair(words.x), pair(words.y), pair(words.z), pair(words.w));
        store_words(place, words);
    }

    // Columns [first, first + count) of all rows of x to shared memory, as bfloat16, or as float16 beside float8_e4m3 weights.
    __device__ void stage_x(const ProductPhase& p, const DeltaNetCall* moved, int first, int count, int stride) {
        const int rows = kOne ? 1 : plan.rows, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const int threads = kOne ? kStepConsumers : kStepConsumers / (rows > 4 ? 8 : rows > 2 ? 4 : 2);  // of a row
        const int row = threadIdx.x / threads, thread = threadIdx.x % threads;
        const bool is_float8 = p.weight.dtype == DType::float8_e4m3, has_heads = p.norm_columns > 0 && p.norm_columns < p.columns;
        const std::uint32_t to = shared + At::kWork + row * stride, factors = shared + At::kSums;
        const std::int64_t from = row < rows && p.x_rows ? p.x_rows[row] : row;
        if (row < rows) {
            const std::uint16_t* x = p.x + from * p.x_stride + first;
            for (int column = 8 * thread; column < count; column += 8 * threads) copy_16_bytes(to + 2 * column, x + column);
        }
        end_copies();
        if (has_heads) {                                    // a factor for each head
            if (first > 0) meet<kStepConsumers>();          // the sums before this part were there
            const int heads = p.columns / p.norm_columns;
            for (int index = threadIdx.x; index < rows * heads; index += kStepConsumers) {
                float sum = 0.0f;
                for (int part = 0; part < p.num_squares; ++part) sum += __ldcg(p.squares + index * p.num_squares + part);
                store_float(factors + 4 * index, rsqrtf(sum / p.norm_columns + p.eps));
            }
        } else if (p.squares && warp < rows) {              // one for the row, which its sums are multiplied with
            const std::int64_t at = (p.x_rows ? p.x_rows[warp] : warp) * static_cast<std::int64_t>(p.num_squares);
            float sum = 0.0f;
            for (int first_index = 0; first_index < p.num_squares; first_index += 32 * kHeldSquares) {  // all loads together
                float held[kHeldSquares];
#pragma unroll
                for (int turn = 0; turn < kHeldSquares; ++turn) {
                    const int index = first_index + 32 * turn + lane;
                    held[turn] = index < p.num_squares ? __ldcg(p.squares + at + index) : 0.0f;
                }
#pragma unroll
                for (const float one : held) sum += one;
            }
            sum = warp_sum(sum);
            if (lane == 0) store_float(shared + At::kScales + 4 * (kStepRows + warp), rsqrtf(sum / p.columns + p.eps));
        }
        if (moved && first == 0) move_tails(*moved, rows);
        wait_for_copies<0>();
        meet<kStepConsumers>();
        if (has_heads) {
            const int heads = p.columns / p.norm_columns;
            for (int column = 8 * thread; row < rows && column < count; column += 8 * threads) {
                const float factor = load_float(factors + 4 * (row * heads + (first + column) / p.norm_columns));
                change_eight<__nv_bfloat16>(to + 2 * column, [&](float value) { return value * factor; });
            }
            meet<kStepConsumers>();
        }
        if (!is_float8) return;
        float largest = 0.0f;
        for (int column = 8 * thread; row < rows && column < count; column += 8 * threads) {
            const uint4 words = load_words(to + 2 * column);
            const auto most = [&](std::uint32_t word) {
                const float2 both = unpack<__nv_bfloat16>(word);
                largest = fmaxf(largest, fmaxf(fabsf(both.x), fabsf(both.y)));
            };
            most(words.x), most(words.y), most(words.z), most(words.w);
        }
        largest = warp_max(largest);
        if (lane == 0) store_float(shared + At::kReduce + 4 * warp, largest);
        meet<kStepConsumers>();
        for (int other = row * (threads / 32); other < (row + 1) * (threads / 32); ++other) largest = fmaxf(largest, load_float(shared + At::kReduce + 4 * other));
        const int exponent = largest > 0.0f && largest < INFINITY ? max(ilogbf(largest), -100) : 0;
        const float shrink = ldexpf(1.0f, 14 - exponent);   // the largest becomes 2^14 to 2^15
        for (int column = 8 * thread; row < rows && column < count; column += 8 * threads)
            change_eight<__half>(to + 2 * column, [&](float value) { return value * shrink; });
        if (thread == 0 && row < rows) store_float(shared + At::kScales + 4 * row, 1.0f / shrink);
        meet<kStepConsumers>();
    }

    // The warp's 128 bytes of each of the stage's rows by the same columns of x.
    __device__ __forceinline__ void multiply_dense(float (&sums)[4], int bytes, std::uint32_t x) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
        const std::uint32_t from = ring.place() + group * kPieceStride + warp * 128 + quarter * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (bytes <= 64 * half) break;
            const uint4 low = load_words(from + 64 * half), high = load_words(from + 8 * kPieceStride + 64 * half);
            uint4 right = make_uint4(0, 0, 0, 0);
            if (group < (kOne ? 1 : plan.rows)) right = load_words(x + 64 * half);
            const std::uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
            multiply<__nv_bfloat16>(sums, first, right.x, right.y);
            multiply<__nv_bfloat16>(sums, second, right.z, right.w);
        }
    }
    __device__ __forceinline__ void multiply_float8(float (&sums)[4], int bytes, std::uint32_t x, float low_scale, float high_scale) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
        const std::uint32_t from = ring.place() + group * kPieceStride + warp * 128 + quarter * 16;
        float block[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (bytes <= 64 * half) break;
            const uint4 low = load_words(from + 64 * half), high = load_words(from + 8 * kPieceStride + 64 * half);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                uint4 right = make_uint4(0, 0, 0, 0);
                if (group < (kOne ? 1 : plan.rows)) right = load_words(x + 128 * half + 16 * pair);
                std::uint32_t left[4];
                unpack_float8(pair == 0 ? low.x : low.z, left[0], left[2]);
                unpack_float8(pair == 0 ? high.x : high.z, left[1], left[3]);
                multiply<__half>(block, left, right.x, right.y);
                unpack_float8(pair == 0 ? low.y : low.w, left[0], left[2]);
                unpack_float8(pair == 0 ? high.y : high.w, left[1], left[3]);
                multiply<__half>(block, left, right.z, right.w);
            }
        }
        sums[0] += low_scale * block[0], sums[1] += low_scale * block[1], sums[2] += high_scale * block[2], sums[3] += high_scale * block[3];
    }

    // What the eight warps have of a tile, put together; `column` counts its rows of x.
    __device__ void finish_tile(const ProductPhase& p, int start, int end, int tile, bool is_first, bool is_last, const float (&sums)[4]) {
        constexpr int kColumns = At::kColumns;
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
        const std::uint32_t region = shared + At::kSums + sums_parity * At::kSumBytes;
        sums_parity ^= 1;
        const std::uint32_t mine = region + 4 * (warp * kStageRows + group) * kColumns;
        if constexpr (kOne) {
            if (quarter == 0) store_float(mine, sums[0]), store_float(mine + 32, sums[2]);
        } else {
            store_float(mine + 8 * quarter, sums[0]), store_float(mine + 8 * quarter + 4, sums[1]);
            store_float(mine + 32 * kColumns + 8 * quarter, sums[2]), store_float(mine + 32 * kColumns + 8 * quarter + 4, sums[3]);
        }
        meet<kStepConsumers>();
        const int within = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
        if (within >= kStageRows) return;
        float value = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) value += load_float(region + 4 * ((other * kStageRows + within) * kColumns + column));
        if (p.weight.dtype == DType::float8_e4m3) value *= load_float(shared + At::kScales + 4 * column);
        if constexpr (!kOne) {
            const std::uint32_t kept = shared + At::kKept + 4 * ((tile * kStageRows + within) * kStepRows + column);
            if (!is_first) value += load_float(kept);
            if (!is_last) return store_float(kept, value);
        }
        if (p.norm_columns == p.columns) value *= load_float(shared + At::kScales + 4 * (kStepRows + column));
        if (p.is_swiglu) {                                  // of one warp with one row of x, of two neighbouring ones with more: rows 8 to 15 are the ups
            store_float(region + 4 * (within * kColumns + column), value);
            if constexpr (kOne) {
                __syncwarp(0xffffu);
            } else {
                asm volatile("bar.sync 2, 128;" ::: "memory");
            }
            if (within >= kStageRows / 2) return;
            value = silu(value) * load_float(region + 4 * ((within + kStageRows / 2) * kColumns + column));
        }
        const int row = start + within;
        if (row >= end || column >= plan.rows) return;
        const std::int64_t to = column * p.out_stride + row;
        if (p.adds) value += load_value(p.out, p.out_dtype, to);
        store_value(p.out, p.out_dtype, to, value);
        if (p.rounded.norm) {
            store_value(p.rounded.values, DType::bfloat16, column * p.rounded.stride + row, value * p.rounded.norm[row]);
            squares += value * value;
        }
    }

    // What this block has of each row's squares.
    __device__ void leave_squares(const Rounded& rounded) {
        constexpr int kColumns = At::kColumns;
        const std::uint32_t region = shared + At::kSums + sums_parity * At::kSumBytes;
        if (threadIdx.x < kStageRows * kColumns) store_float(region + 4 * threadIdx.x, squares);
        squares = 0.0f;
        meet<kStepConsumers>();
        if (threadIdx.x >= plan.rows) return;
        float sum = 0.0f;
#pragma unroll
        for (int within = 0; within < kStageRows; ++within) sum += load_float(region + 4 * (within * kColumns + threadIdx.x));
        rounded.squares[threadIdx.x * gridDim.x + blockIdx.x] = sum;
    }

    __device__ void multiply_all(const ProductPhase& p, const DeltaNetCall* moved) {
        const Share share(p.limit, p.is_swiglu);
        if (share.num_tiles == 0) {
            if (moved) move_tails(*moved, plan.rows);
            if (p.rounded.norm) leave_squares(p.rounded);
            return;
        }
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
        const bool is_float8 = p.weight.dtype == DType::float8_e4m3;
        const int per_piece = is_float8 ? kPieceBytes : kPieceBytes / 2;  // columns
        const int stride = 2 * p.staged_columns + (is_float8 ? 16 : 64);
        const std::uint32_t x = shared + At::kWork + group * stride + (is_float8 ? warp * 256 + quarter * 32 : warp * 128 + quarter * 16);
        for (int first = 0; first < p.columns; first += p.staged_columns) {
            const int count = min(p.staged_columns, p.columns - first);
            const bool is_last = first + count == p.columns;
            stage_x(p, moved, first, count, stride);
            for (int tile = 0; tile < share.num_tiles; ++tile) {
                float sums[4] = {};
                const int start = share.begin + tile * share.per_tile, end = min(start + share.per_tile, share.end);
                const int low_row = min(start + group, end - 1), high_row = min(p.is_swiglu ? low_row : start + group + 8, end - 1) + (p.is_swiglu ? p.limit : 0);
                if (is_float8) {
                    const float* low = p.weight.scales + static_cast<std::int64_t>(low_row >> 7) * p.weight.scale_stride;
                    const float* high = p.weight.scales + static_cast<std::int64_t>(high_row >> 7) * p.weight.scale_stride;
                    const int most = p.weight.scale_stride - 1;
                    const auto block_of = [&](int column) { return min((first + column + warp * 128) >> 7, most); };
                    float low_next = low[block_of(0)], high_next = high[block_of(0)];
                    for (int column = 0; column < count; column += per_piece, ring.advance()) {
                        const float low_scale = low_next * kFloat8Factor, high_scale = high_next * kFloat8Factor;
                        low_next = low[block_of(column + per_piece)], high_next = high[block_of(column + per_piece)];
                        wait_for(ring.full(), ring.parity);
                        multiply_float8(sums, min(per_piece, count - column) - warp * 128, x + 2 * column, low_scale, high_scale);
                        __syncwarp();
                        if (lane == 0) arrive(ring.empty());
                    }
                } else {
                    for (int column = 0; column < count; column += per_piece, ring.advance()) {
                        wait_for(ring.full(), ring.parity);
                        multiply_dense(sums, 2 * min(per_piece, count - column) - warp * 128, x + 2 * column);
                        __syncwarp();
                        if (lane == 0) arrive(ring.empty());
                    }
                }
                finish_tile(p, start, end, tile, first == 0, is_last, sums);
            }
        }
        if (p.rounded.norm) leave_squares(p.rounded);
    }

    // Neighbouring columns of all rows.
    __device__ void embed(const EmbedPhase& e) {
        const int begin = static_cast<int>(e.columns * blockIdx.x / gridDim.x), end = static_cast<int>(e.columns * (blockIdx.x + 1) / gridDim.x);
        const int column = threadIdx.x % At::kColumns;      // of the sums of squares: a row of x
        if (threadIdx.x < kStageRows * At::kColumns && column < plan.rows) {
            for (int at = begin + static_cast<int>(threadIdx.x) / At::kColumns; at < end; at += kStageRows) {
                const float value = load_value(e.table.values, e.table.dtype, e.ids[column] * e.columns + at);
                e.out[column * e.out_stride + at] = value;
                if (e.rounded.norm) store_value(e.rounded.values, DType::bfloat16, column * e.rounded.stride + at, value * e.rounded.norm[at]);
                squares += value * value;
            }
        }
        if (e.rounded.norm) leave_squares(e.rounded);
    }

    // This block's parts of attention: work(place).
    template <int kGroup, typename Work>
    __device__ void for_attention(const AttentionShape& shape, const Work& work) const {
        const int groups = shape.num_heads / kGroup, splits = plan.num_splits, tasks = splits * groups * plan.rows;
        for (int task = blockIdx.x; task < tasks; task += gridDim.x) work(AttentionPlace{task % splits, splits, task / splits % groups, groups, task / (splits * groups)});
    }

    template <int kGroup>
    __device__ void attend_all(const AttentionCall& call) const {
        float* work = reinterpret_cast<float*>(memory + At::kWork);
        auto& notes = *reinterpret_cast<AttentionNotes<kGroup>*>(memory + At::kWork + plan.work_bytes - round_up(sizeof(AttentionNotes<kGroup>), 16));
        for_attention<kGroup>(call.shape, [&](const AttentionPlace& place) {
            attend<__nv_bfloat16, kGroup, false>(call, place, plan.partial, nullptr, work, notes);
            meet<kStepConsumers>();
        });
    }

    template <int kGroup>
    __device__ void combine_all(const AttentionCall& call) const {
        const int parts = (call.shape.head_dim + 63) / 64, of_row = call.shape.num_heads * parts, tasks = of_row * plan.rows;
        for (int task = blockIdx.x + (threadIdx.x >> 5) * gridDim.x; task < tasks; task += gridDim.x * kWarps)
            combine_splits<kGroup>(call, plan.num_splits, plan.partial, task / of_row, task % of_row / parts, task % parts * 64);
    }

    // Value channels of heads, of all rows, that the part of this block has: work(row, head, first value channel, channels). One row has so few that each takes a
    // whole block.
    static constexpr int kDeltaThreads = kOne ? kStepConsumers : 64, kDeltaParts = kStepConsumers / kDeltaThreads;
    template <typename Work>
    __device__ void for_deltas(const DeltaNetShape& shape, int part, const Work& work) const {
        const int width = plan.delta_width, parts = shape.value_dim / width, of_row = parts * shape.num_value_heads;
        for (int task = blockIdx.x + part * gridDim.x; task < of_row * plan.rows; task += gridDim.x * kDeltaParts) work(task / of_row, task / parts % shape.num_value_heads, task % parts * width, width);
    }

    __device__ void step_deltas(const DeltaNetCall& call, const DeltaResults& results) const {
        const int part = threadIdx.x / kDeltaThreads;
        auto& notes = reinterpret_cast<DeltaNotes*>(memory + At::kWork)[part];
        for_deltas(call.shape, part, [&](int row, int head, int first, int width) {
            step_delta<kDeltaThreads>(call, row, head, first, width, results, notes);
            meet_part<kDeltaThreads>(part);
        });
    }

    // While the others come to the meeting before `next`; not for the first warp, which waits for them.
    template <int kGroup>
    __device__ void prepare(const Phase& next) const {
        const int thread = static_cast<int>(threadIdx.x) - 32;
        if (thread < 0) return;
        if (next.kind == PhaseKind::delta_net) {
            for (int part = 0; part < kDeltaParts; ++part)
                for_deltas(next.delta_net.shape, part, [&](int row, int head, int first, int) { prefetch_delta(next.delta_net, row, head, first, thread); });
        }
        if (next.kind == PhaseKind::attention)
            for_attention<kGroup>(next.attention.shape, [&](const AttentionPlace& place) { prefetch_attention<__nv_bfloat16>(next.attention, place, kGroup, thread, kStepConsumers - 32); });
    }
};

template <bool kOne, int kGroup>
__device__ void run_step(const StepPlan& plan) {
    using At = Layout<kOne>;
    extern __shared__ __align__(128) std::uint8_t memory[];
    const std::uint32_t shared = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < plan.num_stages; ++stage) {
            start_barrier(shared + 8 * stage, kCopyArrivals);
            start_barrier(shared + 8 * (kMostStages + stage), kWarps);
        }
        publish_barriers();
    }
    __syncthreads();
    const Ring ring = {shared + At::kWork + static_cast<std::uint32_t>(plan.work_bytes), shared, plan.num_stages};
    if (threadIdx.x >= kStepConsumers) return copy_weights(plan, ring);

    Worker<kOne> worker = {memory, shared, plan, ring};
    auto* phases = reinterpret_cast<Phase*>(memory + At::kPhases);
    const auto fetch_phase = [&](int index) {
        constexpr int kParts = sizeof(Phase) / 16;
        if (index >= plan.num_phases) return;
        for (int part = threadIdx.x; part < kParts; part += kStepConsumers)
            copy_16_bytes(shared + At::kPhases + index % 2 * static_cast<int>(sizeof(Phase)) + 16 * part, reinterpret_cast<const uint4*>(plan.phases + index) + part);
    };
    const std::uint32_t come_before = plan.meetings[1];
    std::uint32_t count = come_before;
    fetch_phase(0);
    end_copies();
    wait_for_copies<0>();
    meet<kStepConsumers>();
    for (int index = 0; index < plan.num_phases; ++index) {
        const Phase& phase = phases[index % 2];
        fetch_phase(index + 1);
        if (phase.kind == PhaseKind::product) worker.multiply_all(phase.product, phase.moves_tails ? &phase.delta_net : nullptr);
        else if (phase.kind == PhaseKind::delta_net) worker.step_deltas(phase.delta_net, phase.results);
        else if (phase.kind == PhaseKind::attention) worker.template attend_all<kGroup>(phase.attention);
        else if (phase.kind == PhaseKind::combine) worker.template combine_all<kGroup>(phase.attention);
        else worker.embed(phase.embed);
        const bool meets = phase.meets;
        end_copies();
        wait_for_copies<0>();
        meet<kStepConsumers>();
        if (!meets) continue;
        worker.template prepare<kGroup>(phases[(index + 1) % 2]);
        count += gridDim.x;
        if (threadIdx.x == 0) meet_blocks(plan.meetings, count);
        meet<kStepConsumers>();
    }
    // All blocks came to a meeting, so all have read this.
    if (blockIdx.x == 0 && threadIdx.x == 0) plan.meetings[1] = come_before + plan.num_meetings * gridDim.x;
}

template <bool kOne, int kGroup>
__global__ __launch_bounds__(kStepConsumers + 32 * kStepCopiers, 1) void step_kernel(const StepPlan plan) {
    if constexpr (kHasStreams) run_step<kOne, kGroup>(plan);  // StepRecorder makes no plan for GPUs that have none
}

template <bool kOne>
void launch_rows(const Context& context, const StepPlan& plan) {
    const auto go = [&](auto kernel) { launch_together(context, kernel, context.num_multiprocessors, kStepConsumers + 32 * kStepCopiers, decode_step_bytes(plan.rows, plan.num_stages, plan.work_bytes), plan); };
    if (plan.attention_group == 6) go(step_kernel<kOne, 6>);
    else if (plan.attention_group == 4) go(step_kernel<kOne, 4>);
    else go(step_kernel<kOne, 2>);
}

}  // namespace

std::size_t decode_step_bytes(int rows, int num_stages, int work_bytes) {
    return static_cast<std::size_t>(rows == 1 ? Layout<true>::kWork : Layout<false>::kWork) + work_bytes + static_cast<std::size_t>(num_stages) * kStageBytes;
}

std::size_t attention_step_bytes(const AttentionShape& shape, int group, int num_splits) {
    return sizeof(float) * static_cast<std::size_t>(std::max(kWarps * group * shape.head_dim, num_splits * group)) + round_up(sizeof(AttentionNotes<6>), 16) + 16;
}

std::size_t delta_step_bytes() { return sizeof(DeltaNotes) * Worker<false>::kDeltaParts; }

// Narrow, so that all multiprocessors have a part, but not so many that some have two.
int delta_step_width(const Context& context, const DeltaNetShape& shape, int rows) {
    const bool is_narrow = rows > 1 || shape.num_value_heads * shape.value_dim <= 32 * context.num_multiprocessors;
    return std::min(shape.value_dim, is_narrow ? 32 : kDeltaWidth);
}

bool takes_delta_step(const DeltaNetShape& shape) {
    const bool is_power = shape.value_dim >= 4 && shape.value_dim <= 128 && (shape.value_dim & (shape.value_dim - 1)) == 0;
    return is_power && shape.key_dim <= kDeltaKeys && shape.conv_kernel <= kDeltaTaps;
}

void decode_step(const Context& context, const StepPlan& plan) { plan.rows == 1 ? launch_rows<true>(context, plan) : launch_rows<false>(context, plan); }

}  // namespace pocket::cuda
