// Products of 1 to 64 rows, which wait for their weights: each weight is read once, from device memory straight into the registers that the tensor cores take.
//
// In mma.m16n8k16 x is the left operand (16 rows of the batch) and 8 rows of the weight are the right one. A dot product does not mind the order of its
// columns, as long as both sides have the same: so a thread takes 16 adjacent bytes of a weight row and the same columns of x, and no weight passes through
// shared memory or changes its layout. The warps of a block share out the columns; a block goes from tile to tile of weight rows, and the next weights are on
// their way across tiles. Partial sums meet in shared memory once in kSlots tiles.
//
// With programmatic dependent launch a block asks for its first weights, and brings more into L2, while the kernel ahead still runs.
//
// float8_e4m3 values are exact in float16, so x (rounded to bfloat16, as the contract says) is brought into float16's range by a power of two a row.
#include <algorithm>

#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// How a kernel is cut. kBatchTiles: tiles of 16 rows of x, which is prepared and lies in device memory; 0 is one row, staged by each block.
// kTiles: of 8 weight rows each, loaded and multiplied in one step; for swiglu half of them are the gate's and half the up's.
// kAhead: steps whose weights are on their way. A thread has kTiles * kAhead loads of 16 bytes in flight, in as many times four registers.
template <int batch_tiles, int tiles, int ahead>
struct Cut {
    static constexpr int kBatchTiles = batch_tiles, kTiles = tiles, kAhead = ahead;
    static constexpr int kSlots = batch_tiles == 0 ? 8 : 1;  // tiles between two meetings of the warps
    static constexpr int kWidth = 8 * tiles;                 // weight rows of a tile
};
using OneRow = Cut<0, 4, 4>;                                 // 64 KiB in flight a block, one block a multiprocessor: two kernels fit beside each other
using OneRowSmall = Cut<0, 2, 4>;                            // for weights of so few rows that some multiprocessors would have no tile
using Rows16 = Cut<1, 4, 2>;
using Rows32 = Cut<2, 2, 4>;
using Rows64 = Cut<4, 2, 4>;

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
    int rows, columns, weight_rows, scale_stride, prefetch_steps;
    DType x_dtype, out_dtype;
    bool adds;
    bool is_prepared;                                       // x is; else it is one row, which each block stages
};

__device__ __forceinline__ uint4 load_weights(const std::uint8_t* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

// sums [16, 8] += left [16, 16] right [8, 16]^T
template <Kind kKind>
__device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&left)[4], std::uint32_t right0, std::uint32_t right1) {
    if constexpr (kKind == Kind::bfloat16) {
#if __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
#endif
    } else {
#if __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
#else
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(left[0]), "r"(left[1]), "r"(right0));
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(left[2]), "r"(left[3]), "r"(right1));
#endif
    }
}

// Four float8_e4m3 as two pairs of float16; before Ada they come out divided by 256, which their scale makes good.
__device__ __forceinline__ void unpack_float8(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(word));
#else
    const std::uint32_t first = __byte_perm(word, 0, 0x1404), second = __byte_perm(word, 0, 0x3424);  // each byte to the top of its 16 bits
    low = (first & 0x80008000u) | ((first >> 1) & 0x3f803f80u);
    high = (second & 0x80008000u) | ((second >> 1) & 0x3f803f80u);
#endif
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr float kFloat8Factor = 256.0f;
#else
constexpr float kFloat8Factor = 1.0f;
#endif

// One row of x into shared memory, normalized where there is a norm, in the kind that is multiplied; returns what the sums have to be multiplied with.
template <Kind kKind>
__device__ float stage_row(const Arguments& a, void* to, float* shared) {
    float squares = 0.0f, most = 0.0f;
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
    float factor = 1.0f;
    if (a.norm || kKind == Kind::float8) {
        for (int column = 4 * threadIdx.x; column < a.columns; column += 4 * kThreads) {
            const float4 x = load_four(column);
            squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
            if constexpr (kKind == Kind::float8) {
                const float4 w = weights_at(column);
                most = fmaxf(most, fmaxf(fmaxf(fabsf(x.x * w.x), fabsf(x.y * w.y)), fmaxf(fabsf(x.z * w.z), fabsf(x.w * w.w))));
            }
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
    for (int column = 4 * threadIdx.x; column < a.columns; column += 4 * kThreads) {
        float4 x = load_four(column);
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
        *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(to) + column) = words;
    }
    return 1.0f / shrink;
}

template <Kind kKind, typename C, bool kSwiglu>
__global__ __launch_bounds__(kThreads, 2) void few_kernel(const Arguments a) {
    constexpr int kBatchTiles = C::kBatchTiles, kTiles = C::kTiles, kAhead = C::kAhead, kSlots = C::kSlots, kWidth = C::kWidth;
    constexpr int kBatch = kBatchTiles == 0 ? 1 : kBatchTiles;
    constexpr int kChunk = kKind == Kind::float8 ? 64 : 32; // columns of a weight row that four threads load at once, 64 bytes
    constexpr int kHalves = kChunk / 32;                    // two multiplications each
    constexpr int kOutputs = kSwiglu ? kWidth / 2 : kWidth; // results of a tile and row of x
    extern __shared__ __align__(16) std::uint8_t memory[];
    __shared__ float reduction[2 * kWarps];
    float* partial = reinterpret_cast<float*>(memory);      // [2][kSlots][kWarps][rows][kWidth]
    const int region = kSlots * kWarps * a.rows * kWidth;
    const std::uint16_t* staged = reinterpret_cast<const std::uint16_t*>(partial + 2 * region);

    let_next_start();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    const int limit = kSwiglu ? a.weight_rows / 2 : a.weight_rows;
    const int num_tiles = (limit + kOutputs - 1) / kOutputs;
    const int num_chunks = a.columns / kChunk;
    const int first_chunk = num_chunks * warp / kWarps, end_chunk = num_chunks * (warp + 1) / kWarps;

    uint4 words[kAhead][kTiles];
    [[maybe_unused]] float scales[kAhead][kTiles];
    const std::uint8_t* from[kTiles];
    [[maybe_unused]] const float* scale_from[kTiles];
    int load_tile = blockIdx.x, load_chunk = first_chunk;
    const auto row_of = [&](int tile, int part, int within) {
        const int row = tile * kOutputs + (kSwiglu ? part % (kTiles / 2) : part) * 8 + within;
        return min(row, limit - 1) + (kSwiglu && part >= kTiles / 2 ? limit : 0);
    };
    const auto aim = [&] {
#pragma unroll
        for (int part = 0; part < kTiles; ++part) {
            from[part] = a.weight + row_of(load_tile, part, group) * a.row_bytes + 16 * quarter;
            if constexpr (kKind == Kind::float8) scale_from[part] = a.scales + static_cast<std::int64_t>(row_of(load_tile, part, 0) >> 7) * a.scale_stride;
        }
    };
    const auto load_next = [&](uint4 (&into)[kTiles], float (&scale)[kTiles]) {
        if (load_tile >= num_tiles) return;
#pragma unroll
        for (int part = 0; part < kTiles; ++part) {
            into[part] = load_weights(from[part] + load_chunk * 64);
            if constexpr (kKind == Kind::float8) scale[part] = __ldg(scale_from[part] + (load_chunk >> 1)) * kFloat8Factor;
        }
        if (++load_chunk == end_chunk) {
            load_chunk = first_chunk, load_tile += gridDim.x;
            if (load_tile < num_tiles) aim();
        }
    };
    if (first_chunk < end_chunk) {
        aim();
#pragma unroll
        for (int step = 0; step < kAhead; ++step) load_next(words[step], scales[step]);
    }
    // What the warp loads after that, line by line of all the tile's rows.
    for (int step = 0, tile = blockIdx.x, at = (first_chunk + kAhead) * 64; step < a.prefetch_steps && first_chunk < end_chunk; ++step, at += 128) {
        while (at >= end_chunk * 64) at -= (end_chunk - first_chunk) * 64, tile += gridDim.x;
        if (tile >= num_tiles) break;
        if (lane < kWidth) prefetch_l2(a.weight + row_of(tile, lane >> 3, lane & 7) * a.row_bytes + at);
    }

    wait_for_inputs();
    float enlarge = 1.0f;
    if constexpr (kBatchTiles == 0) {
        enlarge = stage_row<kKind>(a, const_cast<std::uint16_t*>(staged), reduction);
        __syncthreads();
    }

    float sums[kBatch][kTiles][4] = {};
    int slot = 0, parity = 0, first_tile = blockIdx.x;      // of those whose partial sums wait
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
        if (++slot < kSlots && tile + static_cast<int>(gridDim.x) < num_tiles) return;
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
            const int to = (first_tile + which * static_cast<int>(gridDim.x)) * kOutputs + column;
            if (to >= limit) continue;
            if constexpr (kKind == Kind::float8) {
                const float factor = kBatchTiles == 0 ? enlarge : a.row_scales[row];
                value *= factor, up *= factor;
            }
            if constexpr (kSwiglu) value = silu(value) * up;
            const std::int64_t place = row * a.out_stride + to;
            if (a.adds) value += load_value(a.out, a.out_dtype, place);
            store_value(a.out, a.out_dtype, place, value);
        }
        slot = 0, parity ^= 1, first_tile = tile + gridDim.x;
    };

    if (first_chunk == end_chunk) {  // fewer chunks than warps
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) finish_tile(tile);
        return;
    }
    int tile = blockIdx.x, chunk = first_chunk;
    while (tile < num_tiles) {
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            if (tile >= num_tiles) break;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                std::uint32_t left[kBatch][2][4];           // words of rows `group` and `group + 8`
                const int column = chunk * kChunk + quarter * (kChunk / 4) + half * 8;
#pragma unroll
                for (int batch = 0; batch < kBatch; ++batch) {
#pragma unroll
                    for (int lower = 0; lower < 2; ++lower) {
                        uint4 four = make_uint4(0, 0, 0, 0);
                        if constexpr (kBatchTiles == 0) {
                            if (lower == 0 && group == 0) four = *reinterpret_cast<const uint4*>(staged + column);
                        } else {
                            const int row = batch * 16 + lower * 8 + group;
                            if (row < a.rows)
                                four = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(a.x) + static_cast<std::int64_t>(row) * a.columns + column);
                        }
                        left[batch][lower][0] = four.x, left[batch][lower][1] = four.y, left[batch][lower][2] = four.z, left[batch][lower][3] = four.w;
                    }
                }
#pragma unroll
                for (int part = 0; part < kTiles; ++part) {
                    const uint4& word = words[step][part];
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
                            multiply<kKind>(into, x, right[2 * pair], right[2 * pair + 1]);
                        }
                        if constexpr (kKind == Kind::float8) {
#pragma unroll
                            for (int index = 0; index < (kBatchTiles == 0 ? 2 : 4); ++index) sums[batch][part][index] += scales[step][part] * block[index];
                        }
                    }
                }
            }
            load_next(words[step], scales[step]);
            if (++chunk == end_chunk) {
                finish_tile(tile);
                chunk = first_chunk, tile += gridDim.x;
            }
        }
    }
}

template <typename C>
std::size_t shared_bytes(int rows, std::int64_t columns) {
    return 2 * sizeof(float) * C::kSlots * kWarps * rows * C::kWidth + (C::kBatchTiles == 0 ? 2 * static_cast<std::size_t>(columns) : 0);
}

template <Kind kKind, bool kSwiglu, typename C>
void launch_cut(const Context& context, const Arguments& a) {
    const int outputs = kSwiglu ? C::kWidth / 2 : C::kWidth, limit = kSwiglu ? a.weight_rows / 2 : a.weight_rows;
    const int blocks = context.num_multiprocessors * (C::kBatchTiles == 0 ? 1 : 2);
    launch(context, few_kernel<kKind, C, kSwiglu>, dim3(std::min(ceil_div(limit, outputs), blocks)), kThreads, shared_bytes<C>(a.rows, a.columns), a);
}

template <Kind kKind, bool kSwiglu>
void launch_kind(const Context& context, const Arguments& a) {
    if (!a.is_prepared) {
        const int outputs = kSwiglu ? OneRow::kWidth / 2 : OneRow::kWidth, limit = kSwiglu ? a.weight_rows / 2 : a.weight_rows;
        const bool fills = 10 * ceil_div(limit, outputs) >= 9 * context.num_multiprocessors;
        fills ? launch_cut<kKind, kSwiglu, OneRow>(context, a) : launch_cut<kKind, kSwiglu, OneRowSmall>(context, a);
    } else if (a.rows <= 16) {
        launch_cut<kKind, kSwiglu, Rows16>(context, a);
    } else if (a.rows <= 32) {
        launch_cut<kKind, kSwiglu, Rows32>(context, a);
    } else {
        launch_cut<kKind, kSwiglu, Rows64>(context, a);
    }
}

}  // namespace

bool takes_few(const Context& context, DType weight, std::int64_t columns, const void* values) {
    if (weight == DType::float32 || (weight == DType::bfloat16 && context.capability < 80)) return false;
    if (columns % (weight == DType::float8_e4m3 ? 64 : 32) != 0 || reinterpret_cast<std::uintptr_t>(values) % 16 != 0) return false;
    return shared_bytes<OneRow>(1, columns) <= static_cast<std::size_t>(context.shared_memory);
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
    a.prefetch_steps = context.starts_early ? static_cast<int>(product.prefetch_bytes / (128 * 8 * OneRow::kTiles * kWarps * context.num_multiprocessors)) : 0;
    const std::int64_t x_bytes = product.columns * static_cast<std::int64_t>(sizeof(std::uint16_t));
    int most = 64;  // rows of a launch
    while (most > 16 && shared_bytes<Rows64>(most, 0) > static_cast<std::size_t>(context.shared_memory)) most -= 16;
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
