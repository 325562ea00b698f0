// 16 float32 lanes in an array, which the compiler spreads over whatever registers the processor has.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/number_formats.h"

namespace pocket {

struct Plain {
    struct F {
        float v[16];
    };
    static constexpr int kMaxRows = 2;
    static constexpr int kColumnVectors = 1;
    static constexpr int kDeltaChunk = 1;      // tokens that DeltaNet takes at once

#define POCKET_LANES(expression)                        \
    F y;                                                \
    for (int i = 0; i < 16; ++i) y.v[i] = (expression); \
    return y

    static F zero() { return {}; }
    static F set(float x) { POCKET_LANES(x); }
    static F load(const float* p) { POCKET_LANES(p[i]); }
    static void store(float* p, F x) { std::memcpy(p, x.v, sizeof(x.v)); }
    static F add(F a, F b) { POCKET_LANES(a.v[i] + b.v[i]); }
    static F sub(F a, F b) { POCKET_LANES(a.v[i] - b.v[i]); }
    static F mul(F a, F b) { POCKET_LANES(a.v[i] * b.v[i]); }
    static F div(F a, F b) { POCKET_LANES(a.v[i] / b.v[i]); }
    static F max(F a, F b) { POCKET_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
    static F min(F a, F b) { POCKET_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
    static F fma(F a, F b, F c) { POCKET_LANES(a.v[i] * b.v[i] + c.v[i]); }
    static float sum(F x) {
        for (int width = 8; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
        return x.v[0];
    }
    static float largest(F x) {
        for (int i = 1; i < 16; ++i) x.v[0] = x.v[i] > x.v[0] ? x.v[i] : x.v[0];
        return x.v[0];
    }
    static F round(F x) { POCKET_LANES(std::nearbyintf(x.v[i])); }
    static F scale2(F x, F n) { POCKET_LANES(x.v[i] * std::bit_cast<float>((static_cast<std::int32_t>(n.v[i]) + 127) << 23)); }  // n at least -126

    static unsigned unordered(F x) {
        unsigned bits = 0;
        for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(x.v[i] != x.v[i]) << i;
        return bits;
    }
    static unsigned at_least(F x, F y) {
        unsigned bits = 0;
        for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(x.v[i] >= y.v[i]) << i;
        return bits;
    }
    static F where(unsigned bits, F a, F b) { POCKET_LANES((bits >> i & 1u) != 0 ? a.v[i] : b.v[i]); }

    static F load_bfloat16(const std::uint16_t* p) { POCKET_LANES(from_bfloat16(p[i])); }
    static F load_float16(const std::uint16_t* p) { POCKET_LANES(from_float16(p[i])); }
    static void store_bfloat16(std::uint16_t* p, F x) {
        for (int i = 0; i < 16; ++i) p[i] = to_bfloat16(x.v[i]);
    }
    static void store_float16(std::uint16_t* p, F x) {
        for (int i = 0; i < 16; ++i) p[i] = to_float16(x.v[i]);
    }
    static F round_to_bfloat16(F x) { POCKET_LANES(from_bfloat16(to_bfloat16(x.v[i]))); }
    static F load_float8(const std::uint8_t* p) { POCKET_LANES(from_float16(static_cast<std::uint16_t>((p[i] & 0x80u) << 8 | (p[i] & 0x7fu) << 7))); }
    static void load_pairs(const std::uint16_t* p, F& first, F& second) {
        for (int i = 0; i < 16; ++i) {
            first.v[i] = from_bfloat16(p[2 * i]);
            second.v[i] = from_bfloat16(p[2 * i + 1]);
        }
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
    static void prefetch(const void*) {}

#undef POCKET_LANES
};

}  // namespace pocket
