// Products of 1 to 64 rows, which wait for their weights: each weight is read once, and goes into the tensor cores as it lies in device memory.
//
// In mma.m16n8k16 x is the left operand (16 rows of the batch) and 8 rows of the weight are the right one. A dot product does not mind the order of its
// columns, as long as both sides have the same: so a thread takes 16 adjacent bytes of a weight row and the same columns of x, and no weight changes its
// layout. What a thread has asked for waits in shared memory of its own, so that much is on its way without registers, across tiles. The warps of a block share
// out the columns; their sums meet in shared memory once in kSlots tiles.
//
// float8_e4m3 values are exact in float16, so x (rounded to bfloat16, as the contract says) is brought into float16's range by a power of two a row.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/tensor_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// How a kernel is cut. kTiles: of 8 weight rows each, loaded and multiplied in one step; for swiglu half of them are the gate's and half the up's.
// kRowTiles: of eight rows of x, which is prepared and comes with the weights; 0 is one row, staged by each block. kAhead: steps that are on their way.
template <int row_tiles, int tiles, int ahead>
struct Cut {
    static constexpr int kRowTiles = row_tiles, kBatchTiles = (row_tiles + 1) / 2, kTiles = tiles, kAhead = ahead;
    static constexpr int kSlots = row_tiles == 0 ? 4 : 1;  // tiles between two meetings of the warps
    static constexpr int kRegions = row_tiles == 0 ? 2 : 1;  // places for their sums: with two the next ones need not wait until these are read
    static constexpr int kWidth = 8 * tiles;                 // weight rows of a tile
    static constexpr int ring_bytes(int halves) { return (tiles + row_tiles * halves) * ahead * kWarps * 512; }
};
// One block a multiprocessor.
using OneRow6 = Cut<0, 4, 6>;
using OneRow5 = Cut<0, 4, 5>;
using OneRow4 = Cut<0, 4, 4>;
using OneRow2 = Cut<0, 2, 4>;                                // for multiprocessors of little shared memory
using OneRowSmall = Cut<0, 2, 8>;                            // for weights of so few rows that a block has no more
using OneRowSmallest = Cut<0, 1, 8>;
using Rows8 = Cut<1, 4, 5>;
using Rows16 = Cut<2, 4, 4>;
using Rows32 = Cut<4, 4, 2>;
using Rows64 = Cut<8, 4, 2>;
using RowsSlim = Cut<2, 2, 2>;                               // for multiprocessors of little shared memory
using Float8Rows8 = Cut<1, 4, 4>;                            // a step of float8 weights takes twice as much of x
using Float8Rows16 = Cut<2, 4, 3>;

enum class Kind { bfloat16, float16, float8 };

struct Arguments {
    const void* x;
    const float *norm, *row_scales;
    const std::uint8_t* weight;
    const float* scales;
    void* out;
    std::int64_t out_stride;
    std::int64_t row_bytes;                                 // of the weight
    float eps;
    int rows, columns, weight_rows, scale_stride;
    DType x_dtype, out_dtype;
    bool adds;
    bool is_prepared;                                       // x is; else it is one row, which each block stages
};

// 16 bytes on their way to shared memory; before Ampere they are there at once.
__device__ __forceinline__ void load_weights(uint4* to, const std::uint8_t* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
    *to = __ldg(reinterpret_cast<const uint4*>(from));
#endif
}

// One row of x into shared memory, normalized where there is a norm, in the kind that is multiplied; returns what the sums have to be multiplied with.
// All loads of a thread are on their way at once: the row comes from L2, and everybody waits for it.
template <Kind kKind>
__device__ float stage_row(const Arguments& a, void* to, float* shared) {
    constexpr int kHeld = 5, kStretch = 4 * kThreads * kHeld;
    auto* staged = static_cast<std::uint16_t*>(to);
    if (kKind != Kind::float8 && !a.norm && a.x_dtype == (kKind == Kind::bfloat16 ? DType::bfloat16 : DType::float16)) {
#pragma unroll 6
        for (int column = 8 * threadIdx.x; column < a.columns; column += 8 * kThreads)
            *reinterpret_cast<uint4*>(staged + column) = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(a.x) + column);
        return 1.0f;
    }
    const auto load_four = [&](int column) {
        if (a.x_dtype == DType::float32) return *reinterpret_cast<const float4*>(static_cast<const float*>(a.x) + column);
        const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(a.x) + column);
        const auto value = [&](std::uint32_t bits) {
            return a.x_dtype == DType::bfloat16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        };
        return make_float4(value(words.x & 0xffffu), value(words.x >> 16), value(words.y & 0xffffu), value(words.y >> 16));
    };
    const auto weights_at = [&](int column) {
        return a.norm ? *reinterpret_cast<const float4*>(a.norm + column) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    };
    float4 held[kHeld];
    const auto load_stretch = [&](int first) {
#pragma unroll
        for (int index = 0; index < kHeld; ++index) {
            const int column = first + 4 * (static_cast<int>(threadIdx.x) + index * kThreads);
            if (column < a.columns) held[index] = load_four(column);
        }
    };
    const auto for_stretch = [&](int first, const auto& work) {
#pragma unroll
        for (int index = 0; index < kHeld; ++index) {
            const int column = first + 4 * (static_cast<int>(threadIdx.x) + index * kThreads);
            if (column < a.columns) work(held[index], column);
        }
    };
    float factor = 1.0f, squares = 0.0f, most = 0.0f;
    if (a.norm || kKind == Kind::float8) {
        for (int first = 0; first < a.columns; first += kStretch) {
            load_stretch(first);
            for_stretch(first, [&](const float4& x, int column) {
                squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
                if constexpr (kKind == Kind::float8) {
                    const float4 w = weights_at(column);
                    most = fmaxf(most, fmaxf(fmaxf(fabsf(x.x * w.x), fabsf(x.y * w.y)), fmaxf(fabsf(x.z * w.z), fabsf(x.w * w.w))));
                }
            });
        }
        squares = warp_sum(squares), most = warp_max(most);
        if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = squares, shared[kWarps + (threadIdx.x >> 5)] = most;
        __syncthreads();
        squares = warp_sum((threadIdx.x & 31) < kWarps ? shared[threadIdx.x & 31] : 0.0f);
        most = warp_max((threadIdx.x & 31) < kWarps ? shared[kWarps + (threadIdx.x & 31)] : 0.0f);
        if (a.norm) factor = rsqrtf(squares / a.columns + a.eps);
    }
    float shrink = 1.0f;
    if constexpr (kKind == Kind::float8) {
        most *= factor;
        const int exponent = most > 0.0f && most < INFINITY ? max(ilogbf(most), -100) : 0;
        shrink = ldexpf(1.0f, 14 - exponent);
    }
    const bool is_held = (a.norm || kKind == Kind::float8) && a.columns <= kStretch;
    for (int first = 0; first < a.columns; first += kStretch) {
        if (!is_held) load_stretch(first);
        for_stretch(first, [&](float4 x, int column) {
            const float4 w = weights_at(column);
            if (a.norm) x = make_float4(x.x * factor * w.x, x.y * factor * w.y, x.z * factor * w.z, x.w * factor * w.w);
            uint2 words;
            if constexpr (kKind == Kind::bfloat16) {
                const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
                words = make_uint2(*reinterpret_cast<const std::uint32_t*>(&low), *reinterpret_cast<const std::uint32_t*>(&high));
            } else {
                if constexpr (kKind == Kind::float8) {
                    const auto rounded = [&](float value) { return __bfloat162float(__float2bfloat16_rn(value)) * shrink; };
                    x = make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
                }
                const __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
                words = make_uint2(*reinterpret_cast<const std::uint32_t*>(&low), *reinterpret_cast<const std::uint32_t*>(&high));
            }
            *reinterpret_cast<uint2*>(staged + column) = words;
        });
    }
    return 1.0f / shrink;
}

template <Kind kKind, typename C, bool kSwiglu>
__global__ __launch_bounds__(kThreads, 2) void few_kernel(const Arguments a) {
    constexpr int kBatchTiles = C::kBatchTiles, kRowTiles = C::kRowTiles, kTiles = C::kTiles, kAhead = C::kAhead, kSlots = C::kSlots, kWidth = C::kWidth;
    constexpr int kBatch = kBatchTiles == 0 ? 1 : kBatchTiles;
    constexpr int kChunk = kKind == Kind::float8 ? 64 : 32; // columns of a weight row that four threads load at once, 64 bytes
    constexpr int kHalves = kChunk / 32;                    // two multiplications each
    constexpr int kParts = kTiles + kRowTiles * kHalves;    // 16 bytes each that a thread loads a step: of weights, then of x
    constexpr int kGroups = kSwiglu ? kTiles / 2 : kTiles;  // of 8 results each, of a tile and row of x
    constexpr int kOutputs = 8 * kGroups;
    extern __shared__ __align__(16) std::uint8_t memory[];
    __shared__ float reduction[2 * kWarps];
    uint4* ring = reinterpret_cast<uint4*>(memory) + threadIdx.x;  // [kAhead][kParts][kThreads]; each thread's own loads
    float* partial = reinterpret_cast<float*>(memory + C::ring_bytes(kHalves));  // [kRegions][kSlots][kWarps][rows][kWidth]
    const int region = kSlots * kWarps * a.rows * kWidth;
    const std::uint16_t* staged = reinterpret_cast<const std::uint16_t*>(partial + C::kRegions * region);

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    const int limit = kSwiglu ? a.weight_rows / 2 : a.weight_rows;
    const int num_groups = (limit + 7) / 8, blocks = gridDim.x;
    // In each round the blocks read neighbouring tiles; rounds and tiles are as equal as they can be.
    const int num_tiles = (num_groups + blocks * kGroups - 1) / (blocks * kGroups);
    const auto tile_start = [&](int tile, int block) {
        const int first = num_groups * tile / num_tiles;
        return first + (num_groups * (tile + 1) / num_tiles - first) * block / blocks;
    };
    const int block = blockIdx.x;
    const int num_chunks = a.columns / kChunk;
    const int first_chunk = num_chunks * warp / kWarps, end_chunk = num_chunks * (warp + 1) / kWarps;

    [[maybe_unused]] float scales[kAhead][kTiles];
    const std::uint8_t* from[kTiles];
    [[maybe_unused]] const float* scale_from[kTiles];
    int load_tile = 0, load_chunk = first_chunk, load_groups = 0;
    const std::uint16_t* x_from = static_cast<const std::uint16_t*>(a.x) + static_cast<std::int64_t>(group) * a.columns + quarter * (kChunk / 4);
    const auto row_of = [&](int start, int part, int within) {
        const int row = (start + (kSwiglu ? part % kGroups : part)) * 8 + within;
        return min(row, limit - 1) + (kSwiglu && part >= kGroups ? limit : 0);
    };
    const auto aim = [&] {
        const int start = tile_start(load_tile, block);
        load_groups = tile_start(load_tile, block + 1) - start;
#pragma unroll
        for (int part = 0; part < kTiles; ++part) {
            from[part] = a.weight + row_of(start, part, group) * a.row_bytes + 16 * quarter;
            if constexpr (kKind == Kind::float8) scale_from[part] = a.scales + static_cast<std::int64_t>(row_of(start, part, 0) >> 7) * a.scale_stride;
        }
    };
    const auto load_x = [&](int step, int chunk) {          // rows that are not there stay what they are: so do their results
#pragma unroll
        for (int part = 0; part < kRowTiles * kHalves; ++part) {
            const int row = part / kHalves * 8;
            if (row + group < a.rows)
                load_weights(ring + (step * kParts + kTiles + part) * kThreads,
                             reinterpret_cast<const std::uint8_t*>(x_from + static_cast<std::int64_t>(row) * a.columns + chunk * kChunk + part % kHalves * 8));
        }
    };
    const auto load_next = [&](int step, float (&scale)[kTiles], bool with_x) {
        if (load_tile >= num_tiles) return;
        if (with_x) load_x(step, load_chunk);
#pragma unroll
        for (int part = 0; part < kTiles; ++part) {
            if ((kSwiglu ? part % kGroups : part) >= load_groups) continue;
            load_weights(ring + (step * kParts + part) * kThreads, from[part] + load_chunk * 64);
            if constexpr (kKind == Kind::float8) scale[part] = __ldg(scale_from[part] + (load_chunk >> 1)) * kFloat8Factor;
        }
        if (++load_chunk == end_chunk) {
            load_chunk = first_chunk;
            if (++load_tile < num_tiles) aim();
        }
    };
    if (first_chunk < end_chunk) {
        aim();
#pragma unroll
        for (int step = 0; step < kAhead; ++step) load_next(step, scales[step], false), end_copies();
    }
    if constexpr (kBatchTiles == 0) {
        for (int column = 4 * threadIdx.x; a.norm && column < a.columns; column += 4 * kThreads) touch(a.norm + column);
    }
    float enlarge = 1.0f;
    if constexpr (kBatchTiles == 0) {
        enlarge = stage_row<kKind>(a, const_cast<std::uint16_t*>(staged), reduction);
        __syncthreads();
    }

    // Groups of loads end in order, so the one for a step's x, asked for after all first weights, stands for both.
    if constexpr (kRowTiles > 0) {
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            if (first_chunk < end_chunk) load_x(step, first_chunk + step % (end_chunk - first_chunk));
            end_copies();
        }
    }

    float sums[kBatch][kTiles][4] = {};
    int slot = 0, parity = 0, first_tile = 0;               // of those whose partial sums wait
    const auto finish_tile = [&](int tile) {
        float* mine = partial + parity * region + (slot * kWarps + warp) * a.rows * kWidth;
#pragma unroll
        for (int batch = 0; batch < kBatch; ++batch) {
#pragma unroll
            for (int part = 0; part < kTiles; ++part) {
                const int row = batch * 16 + group, column = part * 8 + quarter * 2;
                if (row < a.rows) *reinterpret_cast<float2*>(mine + row * kWidth + column) = make_float2(sums[batch][part][0], sums[batch][part][1]);
                if (kBatchTiles > 0 && row + 8 < a.rows)
                    *reinterpret_cast<float2*>(mine + (row + 8) * kWidth + column) = make_float2(sums[batch][part][2], sums[batch][part][3]);
#pragma unroll
                for (float& sum : sums[batch][part]) sum = 0.0f;
            }
        }
        if (++slot < kSlots && tile + 1 < num_tiles) return;
        __syncthreads();  // the other region is free: all have left the last meeting's sums behind to come here
        const int per_tile = a.rows * kOutputs;
        for (int index = threadIdx.x; index < slot * per_tile; index += kThreads) {
            const int which = index / per_tile, row = index % per_tile / kOutputs, column = index % kOutputs;
            const float* parts = partial + parity * region + (which * kWarps * a.rows + row) * kWidth + column;
            float value = 0.0f, up = 0.0f;
#pragma unroll
            for (int other = 0; other < kWarps; ++other) {
                value += parts[other * a.rows * kWidth];
                if constexpr (kSwiglu) up += parts[other * a.rows * kWidth + kOutputs];
            }
            const int start = tile_start(first_tile + which, block), to = start * 8 + column;
            if (to >= limit || start + (column >> 3) >= tile_start(first_tile + which, block + 1)) continue;
            if constexpr (kKind == Kind::float8) {
                const float factor = kBatchTiles == 0 ? enlarge : a.row_scales[row];
                value *= factor, up *= factor;
            }
            if constexpr (kSwiglu) value = silu(value) * up;
            const std::int64_t place = row * a.out_stride + to;
            if (a.adds) value += load_value(a.out, a.out_dtype, place);
            store_value(a.out, a.out_dtype, place, value);
        }
        if constexpr (C::kRegions == 1) {
            __syncthreads();
        } else {
            parity ^= 1;
        }
        slot = 0, first_tile = tile + 1;
    };

    if (first_chunk == end_chunk) {  // fewer chunks than warps
        for (int tile = 0; tile < num_tiles; ++tile) finish_tile(tile);
        return;
    }
    int tile = 0, chunk = first_chunk;
    constexpr int kUnrolled = kKind == Kind::float8 ? kAhead : 1;  // scales are in registers; else little code starts faster
    while (tile < num_tiles) {
#pragma unroll kUnrolled
        for (int step = 0; step < kAhead; ++step) {
            if (tile >= num_tiles) break;
            wait_for_copies<kAhead - 1>();
            uint4 words[kTiles];
#pragma unroll
            for (int part = 0; part < kTiles; ++part) words[part] = ring[(step * kParts + part) * kThreads];
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                std::uint32_t left[kBatch][2][4];           // words of rows `group` and `group + 8`
#pragma unroll
                for (int batch = 0; batch < kBatch; ++batch) {
#pragma unroll
                    for (int lower = 0; lower < 2; ++lower) {
                        uint4 four = make_uint4(0, 0, 0, 0);
                        if constexpr (kRowTiles == 0) {
                            if (lower == 0 && group == 0) four = *reinterpret_cast<const uint4*>(staged + chunk * kChunk + quarter * (kChunk / 4) + half * 8);
                        } else if (2 * batch + lower < kRowTiles) {
                            four = ring[(step * kParts + kTiles + (2 * batch + lower) * kHalves + half) * kThreads];
                        }
                        left[batch][lower][0] = four.x, left[batch][lower][1] = four.y, left[batch][lower][2] = four.z, left[batch][lower][3] = four.w;
                    }
                }
#pragma unroll
                for (int part = 0; part < kTiles; ++part) {
                    const uint4& word = words[part];
                    std::uint32_t right[4];
                    if constexpr (kKind == Kind::float8) {
                        unpack_float8(half == 0 ? word.x : word.z, right[0], right[1]);
                        unpack_float8(half == 0 ? word.y : word.w, right[2], right[3]);
                    } else {
                        right[0] = word.x, right[1] = word.y, right[2] = word.z, right[3] = word.w;
                    }
#pragma unroll
                    for (int batch = 0; batch < kBatch; ++batch) {
                        float block[4] = {};
                        float(&into)[4] = kKind == Kind::float8 ? block : sums[batch][part];
#pragma unroll
                        for (int pair = 0; pair < 2; ++pair) {
                            const std::uint32_t x[4] = {left[batch][0][2 * pair], left[batch][1][2 * pair], left[batch][0][2 * pair + 1], left[batch][1][2 * pair + 1]};
                            multiply<std::conditional_t<kKind == Kind::bfloat16, __nv_bfloat16, __half>>(into, x, right[2 * pair], right[2 * pair + 1]);
                        }
                        if constexpr (kKind == Kind::float8) {
#pragma unroll
                            for (int index = 0; index < (kBatchTiles == 0 ? 2 : 4); ++index) sums[batch][part][index] += scales[step][part] * block[index];
                        }
                    }
                }
            }
            load_next(step, scales[step], true);
            end_copies();
            if (++chunk == end_chunk) {
                finish_tile(tile);
                chunk = first_chunk, ++tile;
            }
        }
    }
}

constexpr std::size_t kStaticBytes = 256;                    // of shared memory, beside those

template <Kind kKind, typename C>
std::size_t shared_bytes(int rows, std::int64_t columns) {
    return C::ring_bytes(kKind == Kind::float8 ? 2 : 1) + sizeof(float) * C::kRegions * C::kSlots * kWarps * rows * C::kWidth +
           (C::kRowTiles == 0 ? 2 * static_cast<std::size_t>(columns) : 0);
}

std::size_t room(const Context& context) { return static_cast<std::size_t>(context.shared_memory) - kStaticBytes; }  // of a block's

// Rows of x that one launch takes.
int most_rows(const Context& context) { return shared_bytes<Kind::float8, Rows64>(64, 0) + kStaticBytes <= static_cast<std::size_t>(context.shared_memory) ? 64 : 16; }

template <Kind kKind, bool kSwiglu, typename C>
void launch_cut(const Context& context, const Arguments& a) {
    launch(context, few_kernel<kKind, C, kSwiglu>, dim3(context.num_multiprocessors), kThreads, shared_bytes<kKind, C>(a.rows, a.columns), a);
}

template <Kind kKind, bool kSwiglu>
void launch_one(const Context& context, const Arguments& a) {
    const int parts = ceil_div(a.weight_rows, 8 * context.num_multiprocessors);  // of 8 weight rows, that a block has
    const auto fits = [&](std::size_t bytes) { return bytes <= room(context); };
    if (!fits(shared_bytes<kKind, OneRow4>(1, a.columns))) return launch_cut<kKind, kSwiglu, OneRow2>(context, a);
    if (parts == 1 && !kSwiglu) return launch_cut<kKind, false, OneRowSmallest>(context, a);
    if (parts <= 2) return launch_cut<kKind, kSwiglu, OneRowSmall>(context, a);
    if (fits(shared_bytes<kKind, OneRow6>(1, a.columns))) return launch_cut<kKind, kSwiglu, OneRow6>(context, a);
    if (fits(shared_bytes<kKind, OneRow5>(1, a.columns))) return launch_cut<kKind, kSwiglu, OneRow5>(context, a);
    launch_cut<kKind, kSwiglu, OneRow4>(context, a);
}

template <Kind kKind, bool kSwiglu>
void launch_rows(const Context& context, const Arguments& a) {
    constexpr bool is_float8 = kKind == Kind::float8;
    if (most_rows(context) < 64) return launch_cut<kKind, kSwiglu, RowsSlim>(context, a);
    if (a.rows <= 8) return launch_cut<kKind, kSwiglu, std::conditional_t<is_float8, Float8Rows8, Rows8>>(context, a);
    if (a.rows <= 16) return launch_cut<kKind, kSwiglu, std::conditional_t<is_float8, Float8Rows16, Rows16>>(context, a);
    if (a.rows <= 32) return launch_cut<kKind, kSwiglu, Rows32>(context, a);
    launch_cut<kKind, kSwiglu, Rows64>(context, a);
}

template <Kind kKind, bool kSwiglu>
void launch_kind(const Context& context, const Arguments& a) {
    a.is_prepared ? launch_rows<kKind, kSwiglu>(context, a) : launch_one<kKind, kSwiglu>(context, a);
}

}  // namespace

bool takes_few(const Context& context, DType weight, std::int64_t columns, const void* values) {
    if (weight == DType::float32 || (weight == DType::bfloat16 && context.capability < 80)) return false;
    if (columns % (weight == DType::float8_e4m3 ? 64 : 32) != 0 || reinterpret_cast<std::uintptr_t>(values) % 16 != 0) return false;
    return shared_bytes<Kind::float8, OneRow2>(1, columns) + kStaticBytes <= static_cast<std::size_t>(context.shared_memory);
}

void product_few(const Context& context, const FewProduct& product) {
    Arguments a = {};
    a.norm = product.norm.weight;
    a.eps = product.norm.eps;
    a.weight = static_cast<const std::uint8_t*>(product.weight.values);
    a.scales = product.weight.scales;
    a.scale_stride = product.weight.scale_stride;
    a.row_bytes = product.columns * static_cast<std::int64_t>(item_size(product.weight.dtype));
    a.columns = static_cast<int>(product.columns);
    a.weight_rows = static_cast<int>(product.weight.rows);
    a.x_dtype = product.x_dtype;
    a.out_dtype = product.out.dtype;
    a.out_stride = product.out.stride;
    a.adds = product.epilogue == Epilogue::add;
    a.is_prepared = product.rows > 1;
    const std::int64_t x_bytes = product.columns * static_cast<std::int64_t>(sizeof(std::uint16_t));
    const int most = most_rows(context);
    for (int first = 0; first < product.rows; first += most) {
        a.rows = std::min(most, product.rows - first);
        a.x = product.rows == 1 ? product.x : static_cast<const std::uint8_t*>(product.x) + first * x_bytes;
        a.row_scales = product.row_scales ? product.row_scales + first : nullptr;
        a.out = static_cast<std::byte*>(product.out.data) + first * product.out.stride * static_cast<std::int64_t>(item_size(product.out.dtype));
        const bool swiglu = product.epilogue == Epilogue::swiglu;
        if (product.weight.dtype == DType::bfloat16) {
            swiglu ? launch_kind<Kind::bfloat16, true>(context, a) : launch_kind<Kind::bfloat16, false>(context, a);
        } else if (product.weight.dtype == DType::float16) {
            swiglu ? launch_kind<Kind::float16, true>(context, a) : launch_kind<Kind::float16, false>(context, a);
        } else {
            swiglu ? launch_kind<Kind::float8, true>(context, a) : launch_kind<Kind::float8, false>(context, a);
        }
    }
}

}  // namespace pocket::cuda
