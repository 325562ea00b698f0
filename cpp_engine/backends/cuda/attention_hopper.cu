// Flash attention of prompts over the paged cache on Hopper's warpgroup products, for bfloat16 heads of 256 values.
//
// A block has 128 queries of one row and head and three warpgroups. One brings keys and values, 64 tokens at a time, through two places each; the others have 64
// queries each: S = q k^T of the next tile is computed behind the sums of this one, and while one of them takes maxima and exponentials, the other one multiplies.
// In shared memory 64 columns lie together, 128 bytes a row, the 16 bytes number c of row r at c ^ (r & 7), as the products want them. Scores and sums are float32;
// the weights of the values are rounded to bfloat16.
#include "backends/cuda/attention_code.cuh"
#include "backends/cuda/tensor_code.cuh"

namespace pocket::cuda {

namespace {

using Bfloat = __nv_bfloat16;

constexpr int kDim = 256, kPanels = kDim / 64, kTile = 64, kPlaces = 2, kGroupQueries = 64, kQueries = 2 * kGroupQueries, kThreads = 384;
constexpr std::uint32_t kPanelBytes = kTile * 128, kTileBytes = kPanels * kPanelBytes, kQueryPanelBytes = kQueries * 128, kQueryBytes = kPanels * kQueryPanelBytes;
constexpr std::size_t kSharedBytes = kQueryBytes + 2 * kPlaces * kTileBytes + 1024;  // and what aligns it

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kConsumers = 8;                               // warps that multiply

__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
__device__ __forceinline__ void arrive(std::uint32_t barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ bool has_passed(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t passed;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed;
}
__device__ __forceinline__ void wait_at(std::uint32_t barrier, std::uint32_t parity) {
    while (!has_passed(barrier, parity)) {
    }
}
// What this thread wrote to shared memory is there for products.
__device__ __forceinline__ void fence_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Keeps the compiler from touching registers that products in flight write.
template <int kCount>
__device__ __forceinline__ void hold(float (&values)[kCount]) {
#pragma unroll
    for (int index = 0; index < kCount; ++index) asm volatile("" : "+f"(values[index])::"memory");
}

// Of an operand with 128 bytes a row, swizzled: `step` bytes from 8 rows to the next 8, `panel` bytes from 64 columns to the next 64 (where it is read by columns).
__device__ __forceinline__ std::uint64_t operand_at(std::uint32_t address, std::uint32_t panel, std::uint32_t step) {
    return static_cast<std::uint64_t>(address >> 4 & 0x3fff) | static_cast<std::uint64_t>(panel >> 4) << 16 | static_cast<std::uint64_t>(step >> 4) << 32 | 1ull << 62;
}

#define POCKET_4(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
#define POCKET_16(v, i) POCKET_4(v, i), POCKET_4(v, i + 4), POCKET_4(v, i + 8), POCKET_4(v, i + 12)

// sums [64, 64] (+)= left [64, 16] right^T, both in shared memory by rows.
__device__ __forceinline__ void multiply_scores(float (&sums)[32], std::uint64_t left, std::uint64_t right, int adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0; }"
        : POCKET_16(sums, 0), POCKET_16(sums, 16)
        : "l"(left), "l"(right), "r"(adds));
}
// sums [64, 128] += left [64, 16] right [16, 128], right in shared memory by rows of 64 columns.
__device__ __forceinline__ void multiply_values(float (&sums)[64], const std::uint32_t (&left)[4], std::uint64_t right) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : POCKET_16(sums, 0), POCKET_16(sums, 16), POCKET_16(sums, 32), POCKET_16(sums, 48)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

#undef POCKET_16
#undef POCKET_4

struct Barriers {
    std::uint32_t start;
    // Of keys (0) and values (1) in a place: they are there; they are no longer needed.
    __device__ __forceinline__ std::uint32_t full(int which, int place) const { return start + 8 * (which * kPlaces + place); }
    __device__ __forceinline__ std::uint32_t empty(int which, int place) const { return start + 8 * (2 * kPlaces + which * kPlaces + place); }
};

struct Block {
    int row, head, kv_head, start, num_queries, first_query, length, first_position, num_tiles;
};

__device__ void bring(const AttentionCall& call, const Block& block, std::uint32_t tiles, const Barriers& barriers) {
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, block_size = call.cache.block_size;
    const std::int32_t* table = call.step.block_tables + static_cast<std::int64_t>(block.row) * call.step.max_blocks;
    const int end = min(block.first_position + kQueries, block.length);
    std::uint32_t pending = 0;                              // barrier of what is on its way
    const auto arrive_pending = [&] {
        fence_writes();
        arrive(pending);
        pending = 0;
    };
    for (int tile = 0; tile < block.num_tiles; ++tile) {
        const int place = tile % kPlaces, token = min(tile * kTile + warp * 16 + (lane & 15), end - 1);  // a tile's rest reads the last token again
        const std::int64_t own = ((static_cast<std::int64_t>(table[token / block_size]) * call.shape.num_kv_heads + block.kv_head) * block_size + token % block_size) * kDim;
#pragma unroll 1
        for (int which = 0; which < 2; ++which) {
            const std::uint32_t parity = (tile / kPlaces & 1) ^ 1;
            if (!has_passed(barriers.empty(which, place), parity)) {
                if (pending) {
                    wait_for_copies<0>();
                    arrive_pending();
                }
                wait_at(barriers.empty(which, place), parity);
            }
            const auto* from = static_cast<const Bfloat*>(which ? call.cache.values : call.cache.keys) + lane * 8;
            const std::uint32_t to = tiles + static_cast<std::uint32_t>(which * kPlaces + place) * kTileBytes + (lane >> 3) * kPanelBytes + warp * 16 * 128;
#pragma unroll
            for (int r = 0; r < 16; ++r) copy_16_bytes(to + r * 128 + (((lane & 7) ^ (r & 7)) << 4), from + __shfl_sync(0xffffffffu, own, r));
            end_copies();
            if (pending) {
                wait_for_copies<1>();
                arrive_pending();
            }
            pending = barriers.full(which, place);
        }
    }
    wait_for_copies<0>();
    if (pending) arrive_pending();
}

__device__ void attend(const AttentionCall& call, const Block& block, int group, std::uint32_t queries, std::uint32_t tiles, const Barriers& barriers) {
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, quarter = lane & 3;
    const float scale = kLog2E * rsqrtf(static_cast<float>(kDim));
    const int first_own = block.first_position + group * kGroupQueries + warp * 16, own = first_own + (lane >> 2);
    float maxima[2] = {-INFINITY, -INFINITY}, totals[2] = {};
    float scores[32], read[2][64] = {};
    const auto score = [&](int tile) {
        const int place = tile % kPlaces;
        wait_at(barriers.full(0, place), tile / kPlaces & 1);
        const std::uint32_t keys = tiles + place * kTileBytes, asked = queries + group * kGroupQueries * 128;
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step)
            multiply_scores(scores, operand_at(asked + step / 4 * kQueryPanelBytes + step % 4 * 32, 16, 1024), operand_at(keys + step / 4 * kPanelBytes + step % 4 * 32, 16, 1024), step > 0);
        end_products();
    };
    begin_products();
    score(0);
    wait_for_products();
    hold(scores);
    if (lane == 0) arrive(barriers.empty(0, 0));
#pragma unroll 1
    for (int tile = 0; tile < block.num_tiles; ++tile) {
        const int place = tile % kPlaces;
        if ((tile + 1) * kTile > first_own + 1) {           // not seen whole by the warp's first query
#pragma unroll
            for (int index = 0; index < 32; ++index) {
                const int token = tile * kTile + index / 4 * 8 + quarter * 2 + (index & 1);
                if (token > own + (index & 2) * 4) scores[index] = -INFINITY;
            }
        }
        float fades[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = maxima[half];
#pragma unroll
            for (int column = 0; column < 8; ++column) highest = fmaxf(highest, fmaxf(scores[4 * column + 2 * half], scores[4 * column + 2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            fades[half] = exp2f((maxima[half] - highest) * scale);  // token 0 is seen by every query, so `highest` is finite
            maxima[half] = highest;
            const float offset = highest * scale;
            float total = 0.0f;
#pragma unroll
            for (int column = 0; column < 8; ++column) {
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    float& one = scores[4 * column + 2 * half + which];
                    one = exp2f(fmaf(one, scale, -offset));
                    total += one;
                }
            }
            totals[half] = totals[half] * fades[half] + total;
        }
        if (__any_sync(0xffffffffu, fades[0] != 1.0f || fades[1] != 1.0f)) {
#pragma unroll
            for (int index = 0; index < 64; ++index) read[0][index] *= fades[index / 2 & 1], read[1][index] *= fades[index / 2 & 1];
        }
        std::uint32_t weights[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int word = 0; word < 4; ++word) weights[step][word] = pack<Bfloat>(scores[8 * step + 2 * word], scores[8 * step + 2 * word + 1]);
        }
        wait_at(barriers.full(1, place), tile / kPlaces & 1);
        const std::uint32_t values = tiles + (kPlaces + place) * kTileBytes;
        hold(scores);
        hold(read[0]);
        hold(read[1]);
        begin_products();
#pragma unroll
        for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
            for (int part = 0; part < 2; ++part) multiply_values(read[part], weights[step], operand_at(values + part * 2 * kPanelBytes + step * 2048, kPanelBytes, 1024));
        }
        end_products();
        const bool is_last = tile + 1 == block.num_tiles;
        if (!is_last) score(tile + 1);
        wait_for_products();
        hold(scores);
        hold(read[0]);
        hold(read[1]);
        if (lane == 0) {
            arrive(barriers.empty(1, place));
            if (!is_last) arrive(barriers.empty(0, (tile + 1) % kPlaces));
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = totals[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const int query = block.first_query + group * kGroupQueries + warp * 16 + (lane >> 2) + half * 8;
        if (query >= block.num_queries) continue;
        const std::int64_t token = block.start + query;
        const auto* gates = reinterpret_cast<const std::uint32_t*>(static_cast<const Bfloat*>(call.projections.data) + token * call.projections.stride + (2LL * block.head + 1) * kDim) + quarter;
        auto* to = reinterpret_cast<std::uint32_t*>(static_cast<Bfloat*>(call.out.data) + token * call.out.stride + block.head * kDim) + quarter;
        const float factor = 1.0f / total;
#pragma unroll
        for (int column = 0; column < kDim / 8; ++column) {
            const float2 gate = unpack<Bfloat>(gates[column * 4]);
            const float* sums = &read[column / 16][column % 16 * 4 + 2 * half];
            to[column * 4] = pack<Bfloat>(sums[0] * factor * sigmoid(gate.x), sums[1] * factor * sigmoid(gate.y));
        }
    }
}

#endif

__global__ __launch_bounds__(kThreads, 1) void hopper_kernel(const __grid_constant__ AttentionCall call, int first_token, const Bfloat* queries) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ std::uint8_t memory[];
    __shared__ __align__(8) std::uint64_t barrier_memory[4 * kPlaces];
    const AttentionShape& shape = call.shape;
    Block block;
    block.row = call.step.num_decode + static_cast<int>(blockIdx.z), block.head = blockIdx.y, block.kv_head = block.head / (shape.num_heads / shape.num_kv_heads);
    block.start = call.step.row_starts[block.row], block.num_queries = call.step.row_starts[block.row + 1] - block.start;
    block.first_query = (static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x)) * kQueries;  // the last ones see most, so they begin first
    block.length = call.step.lengths[block.row];
    block.first_position = block.length - block.num_queries + block.first_query;
    block.num_tiles = (min(block.first_position + kQueries, block.length) + kTile - 1) / kTile;
    const Barriers barriers = {shared_address(barrier_memory)};
    if (threadIdx.x == 0) {
        for (int which = 0; which < 2; ++which) {
            for (int place = 0; place < kPlaces; ++place) init_barrier(barriers.full(which, place), 128), init_barrier(barriers.empty(which, place), kConsumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (block.first_query >= block.num_queries) return;
    __syncthreads();
    const std::uint32_t asked = (shared_address(memory) + 1023) / 1024 * 1024, tiles = asked + kQueryBytes;
    const int group = static_cast<int>(threadIdx.x >> 7);
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        bring(call, block, tiles, barriers);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    // The warpgroup's own queries.
    for (int index = threadIdx.x & 127; index < kGroupQueries * kDim / 8; index += 128) {
        const int r = group * kGroupQueries + index / (kDim / 8), chunk = index % (kDim / 8), query = min(block.first_query + r, block.num_queries - 1);
        copy_16_bytes(asked + (chunk >> 3) * kQueryPanelBytes + r * 128 + (((chunk & 7) ^ (r & 7)) << 4),
                      queries + (static_cast<std::int64_t>(block.start - first_token + query) * shape.num_heads + block.head) * kDim + chunk * 8);
    }
    end_copies();
    wait_for_copies<0>();
    fence_writes();
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    attend(call, block, group, asked, tiles, barriers);
#endif
}

bool is_aligned(const void* data, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; }

#ifdef POCKET_HOPPER
constexpr bool kIsCompiled = true;
#else
constexpr bool kIsCompiled = false;
#endif

}  // namespace

bool takes_hopper(const Context& context, const AttentionCall& call) {
    return kIsCompiled && context.capability == 90 && call.shape.head_dim == kDim && call.cache.dtype == DType::bfloat16 && call.projections.dtype == DType::bfloat16 &&
           call.out.dtype == DType::bfloat16 && call.projections.stride % 2 == 0 && call.out.stride % 2 == 0 && is_aligned(call.projections.data, 4) && is_aligned(call.out.data, 4) &&
           kSharedBytes <= static_cast<std::size_t>(context.shared_memory);
}

void attention_prefill_hopper(const Context& context, const AttentionCall& call, int first_token, const void* queries) {
    const dim3 grid(ceil_div(call.step.max_query, kQueries), call.shape.num_heads, call.step.num_rows - call.step.num_decode);
    launch(context, hopper_kernel, grid, kThreads, kSharedBytes, call, first_token, static_cast<const Bfloat*>(queries));
}

}  // namespace pocket::cuda
