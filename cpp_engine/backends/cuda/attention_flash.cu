// Flash attention (Dao, arXiv 2307.08691) of prompts over the paged cache, on tensor cores, from Ampere on.
//
// A block has up to 16 * kWarps queries of one row and head, 16 a warp; the context goes through shared memory in tiles of kTile tokens, the next tile on its way
// while one is multiplied. Rows of shared memory are kDim values; the 16 bytes number c of row r lie at c ^ (r & 7), so that eight rows' same columns fall into
// different banks. Scores and sums are float32; the weights of the values are rounded to the cache's type.
#include <algorithm>

#include "backends/cuda/attention_code.cuh"
#include "backends/cuda/tensor_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kTileStages = 2;

template <int kDim, int kWarps, int kTile>
constexpr std::size_t kSharedBytes = 2 * static_cast<std::size_t>(kDim) * (16 * kWarps + 2 * kTileStages * kTile);

template <typename T, int kDim, int kWarps, int kTile>
__global__ __launch_bounds__(32 * kWarps, 1) void flash_kernel(const AttentionCall call, int first_token, const T* queries) {
    constexpr int kThreads = 32 * kWarps, kQueries = 16 * kWarps, kChunks = kDim / 8, kRowBytes = 2 * kDim;
    extern __shared__ __align__(128) std::uint8_t memory[];
    const AttentionShape& shape = call.shape;
    const int row = call.step.num_decode + static_cast<int>(blockIdx.z), head = blockIdx.y, kv_head = head / (shape.num_heads / shape.num_kv_heads);
    const int start = call.step.row_starts[row], num_queries = call.step.row_starts[row + 1] - start;
    const int first_query = (static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x)) * kQueries;  // the last ones see most, so they begin first
    const int length = call.step.lengths[row];
    const std::int32_t* table = call.step.block_tables + static_cast<std::int64_t>(row) * call.step.max_blocks;
    if (first_query >= num_queries) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    const std::uint32_t asked = shared_address(memory), keys = asked + kQueries * kRowBytes, values = keys + kTileStages * kTile * kRowBytes;
    const auto place = [](int r, int chunk) { return static_cast<std::uint32_t>(r * kRowBytes + ((chunk ^ (r & 7)) << 4)); };

    for (int index = threadIdx.x; index < kQueries * kChunks; index += kThreads) {
        const int r = index / kChunks, chunk = index % kChunks, query = min(first_query + r, num_queries - 1);
        copy_16_bytes(asked + place(r, chunk), queries + (static_cast<std::int64_t>(start - first_token + query) * shape.num_heads + head) * kDim + chunk * 8);
    }
    const int first_position = length - num_queries + first_query, end = min(first_position + kQueries, length);
    const int num_tiles = (end + kTile - 1) / kTile;
    const auto load_tile = [&](int tile) {
        const std::uint32_t at = static_cast<std::uint32_t>(tile % kTileStages * kTile * kRowBytes);
        for (int index = threadIdx.x; index < kTile * kChunks; index += kThreads) {
            const int r = index / kChunks, chunk = index % kChunks, token = min(tile * kTile + r, end - 1);  // a tile's rest reads the last token again
            const int block = table[token / call.cache.block_size];
            const std::int64_t from = cache_place(call.cache, shape.num_kv_heads, kDim, static_cast<std::int64_t>(block) * call.cache.block_size + token % call.cache.block_size, kv_head) + chunk * 8;
            copy_16_bytes(keys + at + place(r, chunk), static_cast<const T*>(call.cache.keys) + from);
            copy_16_bytes(values + at + place(r, chunk), static_cast<const T*>(call.cache.values) + from);
        }
        end_copies();
    };
    load_tile(0);

    const float scale = kLog2E * rsqrtf(static_cast<float>(kDim));
    const int own_positions[2] = {first_position + warp * 16 + group, first_position + warp * 16 + group + 8};
    float maxima[2] = {-INFINITY, -INFINITY}, totals[2] = {};
    float read[kDim / 8][4] = {};
    for (int tile = 0; tile < num_tiles; ++tile) {
        if (tile + 1 < num_tiles) {
            load_tile(tile + 1);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        const std::uint32_t at = static_cast<std::uint32_t>(tile % kTileStages * kTile * kRowBytes);
        float scores[kTile / 8][4] = {};
#pragma unroll 4
        for (int step = 0; step < kDim / 16; ++step) {
            std::uint32_t left[4];
            load_matrices(left, asked + place(warp * 16 + (lane & 15), 2 * step + (lane >> 4)));
#pragma unroll
            for (int pair = 0; pair < kTile / 16; ++pair) {
                std::uint32_t right[4];
                load_matrices(right, keys + at + place(pair * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * step + ((lane >> 3) & 1)));
                multiply<T>(scores[2 * pair], scores[2 * pair + 1], left, right);
            }
        }
        const bool is_whole = (tile + 1) * kTile <= first_position + warp * 16 + 1;  // seen whole by the warp's first query, so by all
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = maxima[half];
#pragma unroll
            for (int column = 0; column < kTile / 8; ++column) {
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    float& score = scores[column][2 * half + which];
                    score *= scale;
                    if (!is_whole && tile * kTile + column * 8 + quarter * 2 + which > own_positions[half]) score = -INFINITY;
                    highest = fmaxf(highest, score);
                }
            }
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            const float fade = exp2f(maxima[half] - highest);  // token 0 is seen by every query, so `highest` is finite
            maxima[half] = highest;
            float total = 0.0f;
#pragma unroll
            for (int column = 0; column < kTile / 8; ++column) {
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    float& score = scores[column][2 * half + which];
                    score = exp2f(score - highest);
                    total += score;
                }
            }
            totals[half] = totals[half] * fade + total;
#pragma unroll
            for (int column = 0; column < kDim / 8; ++column) read[column][2 * half] *= fade, read[column][2 * half + 1] *= fade;
        }
#pragma unroll
        for (int step = 0; step < kTile / 16; ++step) {
            const std::uint32_t left[4] = {pack<T>(scores[2 * step][0], scores[2 * step][1]), pack<T>(scores[2 * step][2], scores[2 * step][3]),
                                           pack<T>(scores[2 * step + 1][0], scores[2 * step + 1][1]), pack<T>(scores[2 * step + 1][2], scores[2 * step + 1][3])};
#pragma unroll
            for (int pair = 0; pair < kDim / 16; ++pair) {
                std::uint32_t right[4];
                load_transposed(right, values + at + place(step * 16 + (lane & 15), 2 * pair + (lane >> 4)));
                multiply<T>(read[2 * pair], read[2 * pair + 1], left, right);
            }
        }
        __syncthreads();  // the tile after the next goes where this one was
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = totals[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const int query = first_query + warp * 16 + group + half * 8;
        if (query >= num_queries) continue;
        const std::int64_t token = start + query, gates = token * call.projections.stride + static_cast<std::int64_t>(head) * 2 * kDim + kDim;
        const std::int64_t to = token * call.out.stride + head * kDim;
        const float factor = 1.0f / total;
#pragma unroll
        for (int column = 0; column < kDim / 8; ++column) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int dim = column * 8 + quarter * 2 + which;
                const float gate = load_value(call.projections.data, call.projections.dtype, gates + dim);
                store_value(call.out.data, call.out.dtype, to + dim, read[column][2 * half + which] * factor * sigmoid(gate));
            }
        }
    }
}

template <typename T, int kDim, int kWarps, int kTile>
void launch_flash(const Context& context, const AttentionCall& call, int first_token, const void* queries) {
    const dim3 grid(ceil_div(call.step.max_query, 16 * kWarps), call.shape.num_heads, call.step.num_rows - call.step.num_decode);
    launch(context, flash_kernel<T, kDim, kWarps, kTile>, grid, 32 * kWarps, kSharedBytes<kDim, kWarps, kTile>, call, first_token, static_cast<const T*>(queries));
}

template <typename T>
void launch_dim(const Context& context, const AttentionCall& call, int first_token, const void* queries) {
    if (call.shape.head_dim == 64) {
        launch_flash<T, 64, 8, 64>(context, call, first_token, queries);
    } else if (call.shape.head_dim == 128) {
        launch_flash<T, 128, 8, 64>(context, call, first_token, queries);
    } else if (kSharedBytes<256, 8, 64> <= static_cast<std::size_t>(context.shared_memory)) {
        launch_flash<T, 256, 8, 64>(context, call, first_token, queries);
    } else {
        launch_flash<T, 256, 4, 32>(context, call, first_token, queries);
    }
}

}  // namespace

bool takes_flash(const Context& context, const AttentionShape& shape, const KvCache& cache) {
    const bool has_dim = shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256;
    return context.capability >= 80 && has_dim && (cache.dtype == DType::bfloat16 || cache.dtype == DType::float16);
}

void attention_prefill_flash(const Context& context, const AttentionCall& call, int first_token, const void* queries) {
    if (call.cache.dtype == DType::bfloat16) {
        launch_dim<__nv_bfloat16>(context, call, first_token, queries);
    } else {
        launch_dim<__half>(context, call, first_token, queries);
    }
}

}  // namespace pocket::cuda
