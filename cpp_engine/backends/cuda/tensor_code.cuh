// Tensor cores by warps, from Ampere on (products of float16 on Turing too): copies to shared memory that go on behind the program, 8x8 matrices from there to
// registers, products of 16x8x16.
#pragma once

#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void copy_16_bytes(std::uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(std::uint32_t (&to)[4], std::uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// sums [16, 8] += left [16, 16] right [8, 16]^T; float16 on Turing too, in two halves.
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&left)[4], std::uint32_t right0, std::uint32_t right1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
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

// The same with 16 rows on the right: `first` are the sums of the first eight of them, `second` of the others.
template <typename T>
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const std::uint32_t (&left)[4], const std::uint32_t (&right)[4]) {
    multiply<T>(first, left, right[0], right[1]);
    multiply<T>(second, left, right[2], right[3]);
}

template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const std::uint32_t*>(&pair);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const std::uint32_t*>(&pair);
    }
}
template <typename T>
__device__ __forceinline__ float2 unpack(std::uint32_t word) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    } else {
        return __half22float2(*reinterpret_cast<const __half2*>(&word));
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

// A tile of 16-bit values in shared memory with kRowBytes a row. The 16 bytes number c of a row lie elsewhere in it, so that the same columns of eight rows that
// follow each other fall into different banks.
template <int kRowBytes>
struct Tile {
    std::uint32_t start;
    __device__ __forceinline__ std::uint32_t at(int row, int chunk) const {
        constexpr int kRowsOfLine = kRowBytes >= 128 ? 1 : 128 / kRowBytes, kChunks = kRowBytes >= 128 ? 8 : kRowBytes / 16;
        return start + static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row / kRowsOfLine & (kChunks - 1))) << 4));
    }
    // The left operand of a product: rows from `row` on, columns from 8 * `chunk` on, 16 of each.
    __device__ __forceinline__ void left(std::uint32_t (&to)[4], int row, int chunk) const {
        const int lane = threadIdx.x & 31;
        load_matrices(to, at(row + (lane & 15), chunk + (lane >> 4)));
    }
    // The same of the transposed tile: its rows are the tile's columns from 8 * `chunk` on, its columns the tile's rows from `row` on.
    __device__ __forceinline__ void left_of_transposed(std::uint32_t (&to)[4], int row, int chunk) const {
        const int lane = threadIdx.x & 31;
        load_transposed(to, at(row + (lane & 7) + ((lane >> 4) << 3), chunk + ((lane >> 3) & 1)));
    }
    // The right operands of two products: depth is the tile's rows from `row` on, the 8 columns of the first are those from 8 * `chunk` on.
    __device__ __forceinline__ void right(std::uint32_t (&to)[4], int row, int chunk) const {
        const int lane = threadIdx.x & 31;
        load_transposed(to, at(row + (lane & 15), chunk + (lane >> 4)));
    }
    // The same of the transposed tile: depth is the tile's columns from 8 * `chunk` on, the columns are the tile's rows from `row` on.
    __device__ __forceinline__ void right_of_transposed(std::uint32_t (&to)[4], int row, int chunk) const {
        const int lane = threadIdx.x & 31;
        load_matrices(to, at(row + (lane & 7) + ((lane >> 4) << 3), chunk + ((lane >> 3) & 1)));
    }
    // Rows of contiguous memory, kRowBytes each, `stride` bytes apart.
    template <int kThreads>
    __device__ __forceinline__ void fetch(const void* from, int rows, std::int64_t stride) const {
        for (int index = threadIdx.x; index < rows * (kRowBytes / 16); index += kThreads) {
            const int row = index / (kRowBytes / 16), chunk = index % (kRowBytes / 16);
            copy_16_bytes(at(row, chunk), static_cast<const std::byte*>(from) + row * stride + chunk * 16);
        }
    }
};

// One word of a tile, by its byte address in shared memory.
__device__ __forceinline__ void store_word(std::uint32_t to, std::uint32_t word) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory"); }
__device__ __forceinline__ std::uint32_t load_word(std::uint32_t from) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}
__device__ __forceinline__ void store_words(std::uint32_t to, const uint4& words) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
}
__device__ __forceinline__ uint4 load_words(std::uint32_t from) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(from) : "memory");
    return words;
}

}  // namespace pocket::cuda
