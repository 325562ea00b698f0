// 16 float32 lanes in two registers. Included by kernels_avx2.cpp alone.
#pragma once

namespace pocket {

struct Avx2 {
    struct F {
        __m256 low, high;
    };
    static constexpr int kMaxRows = 6;  // twelve sums, two registers of weights, a broadcast
    static constexpr int kColumnVectors = 1;
    static constexpr int kDeltaChunk = 2;      // tokens that DeltaNet takes at once

    static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static void store(float* p, F x) {
        _mm256_storeu_ps(p, x.low);
        _mm256_storeu_ps(p + 8, x.high);
    }
    static F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
    static F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
    static F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
    static F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
    static F max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
    static F min(F a, F b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
    static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
    static float sum(F x) {
        const __m256 eight = _mm256_add_ps(x.low, x.high);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
    }
    static float largest(F x) {
        const __m256 eight = _mm256_max_ps(x.low, x.high);
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
    }
    static F round(F x) {
        return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    static F scale2(F x, F n) { return mul(x, {power(n.low), power(n.high)}); }  // n at least -126

    static unsigned unordered(F x) { return bits(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q)); }
    static unsigned at_least(F x, F y) { return bits(_mm256_cmp_ps(x.low, y.low, _CMP_GE_OQ), _mm256_cmp_ps(x.high, y.high, _CMP_GE_OQ)); }
    static F where(unsigned bits, F x, F y) { return {choose(bits, x.low, y.low), choose(bits >> 8, x.high, y.high)}; }

    static F load_bfloat16(const std::uint16_t* p) { return {widen(p), widen(p + 8)}; }
    static F load_float16(const std::uint16_t* p) { return {_mm256_cvtph_ps(eight(p)), _mm256_cvtph_ps(eight(p + 8))}; }
    static void store_bfloat16(std::uint16_t* p, F x) {
        const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(nearest(x.low), 16), _mm256_srli_epi32(nearest(x.high), 16));  // by halves of 128 bits
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    static void store_float16(std::uint16_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static F round_to_bfloat16(F x) { return {upper(nearest(x.low)), upper(nearest(x.high))}; }
    static F load_float8(const std::uint8_t* p) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
    }
    static void load_pairs(const std::uint16_t* p, F& first, F& second) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
        first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
        second = {upper(low), upper(high)};
    }
    // Lane j of x[i] becomes lane i of x[j].
    static void transpose(F (&x)[16]) {
        float lanes[16][16];
        for (int i = 0; i < 16; ++i) {
            float row[16];
            store(row, x[i]);
            for (int j = 0; j < 16; ++j) lanes[j][i] = row[j];
        }
        for (int i = 0; i < 16; ++i) x[i] = load(lanes[i]);
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

private:
    static unsigned bits(__m256 low, __m256 high) { return static_cast<unsigned>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8); }
    static __m256 choose(unsigned bits, __m256 x, __m256 y) {
        const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
        return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(set));
    }
    static __m256 power(__m256 n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
    static __m128i eight(const std::uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static __m256 widen(const std::uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight(p)), 16)); }
    static __m256 upper(__m256i bits) { return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
    static __m256i nearest(__m256 x) {
        const __m256i bits = _mm256_castps_si256(x);
        return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)));
    }
};

}  // namespace pocket
