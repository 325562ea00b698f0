// 16 float32 lanes in one register. Included by kernels_avx512.cpp alone.
#pragma once

namespace pocket {

struct Avx512 {
    using F = __m512;
    static constexpr int kMaxRows = 14;       // of a panel's product: its sums, the weights and a broadcast fill the 32 registers at two sums a row
    static constexpr int kColumnVectors = 2;  // of the inner loops of attention and DeltaNet
    static constexpr int kDeltaChunk = 4;      // tokens that DeltaNet takes at once

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
    static float sum(F x) { return _mm512_reduce_add_ps(x); }
    static float largest(F x) { return _mm512_reduce_max_ps(x); }
    static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F scale2(F x, F n) { return _mm512_scalef_ps(x, n); }  // x * 2^n, n whole

    static unsigned unordered(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }         // bit i: lane i is NaN
    static unsigned at_least(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ); }       // bit i: x >= y
    static F where(unsigned bits, F x, F y) { return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), y, x); }  // bit i: x, else y

    static F load_bfloat16(const std::uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half(p)), 16)); }
    static F load_float16(const std::uint16_t* p) { return _mm512_cvtph_ps(half(p)); }
    static void store_bfloat16(std::uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest(x), 16)));
    }
    static void store_float16(std::uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static F round_to_bfloat16(F x) { return _mm512_castsi512_ps(_mm512_and_si512(nearest(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
    // float8_e4m3 / 256: as float16 bits the exponent is off by 8, and nothing else is.
    static F load_float8(const std::uint8_t* p) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff))));
    }
    // 16 pairs of bfloat16: the first and the second numbers.
    static void load_pairs(const std::uint16_t* p, F& first, F& second) {
        const __m512i pairs = _mm512_loadu_si512(p);
        first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    // Lane j of x[i] becomes lane i of x[j].
    static void transpose(F (&x)[16]) {
        F y[16];
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {  // x[i + j]: column j of each 128 bits, four rows of it
            x[i] = pairs<0>(y[i], y[i + 2]);
            x[i + 1] = pairs<1>(y[i], y[i + 2]);
            x[i + 2] = pairs<0>(y[i + 1], y[i + 3]);
            x[i + 3] = pairs<1>(y[i + 1], y[i + 3]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {  // 128 bits each: the four quarters of x[j], x[4 + j], x[8 + j], x[12 + j]
            const F low = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x44), high = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xee);
            const F low2 = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x44), high2 = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xee);
            y[j] = _mm512_shuffle_f32x4(low, low2, 0x88);
            y[4 + j] = _mm512_shuffle_f32x4(low, low2, 0xdd);
            y[8 + j] = _mm512_shuffle_f32x4(high, high2, 0x88);
            y[12 + j] = _mm512_shuffle_f32x4(high, high2, 0xdd);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) x[i] = y[i];
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

private:
    template <int Half>  // the lower or the upper 64 of each 128 bits, of a then of b
    static F pairs(F a, F b) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(Half == 0 ? _mm512_unpacklo_pd(x, y) : _mm512_unpackhi_pd(x, y));
    }
    static __m256i half(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static __m512i nearest(F x) {  // bits to be cut after the upper 16: to nearest, ties to even
        const __m512i bits = _mm512_castps_si512(x);
        return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1)));
    }
};

}  // namespace pocket
