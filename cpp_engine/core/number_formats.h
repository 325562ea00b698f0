// Single numbers of the formats that weights and caches are stored in, as bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace pocket {

inline float from_bfloat16(std::uint16_t bits) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// To nearest, ties to even; NaN stays NaN.
inline std::uint16_t to_bfloat16(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float from_float16(std::uint16_t bits) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // The exponent's bias is 15 there and 127 here. Scaling brings subnormal numbers along.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f));
}

// To nearest, ties to even; what is too large becomes infinity, NaN stays NaN.
inline std::uint16_t to_float16(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and more
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the multiples of 2^-24 in the last bits
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
    }
    return static_cast<std::uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

// E4M3 without infinities ("fn"): 0x7f and 0xff are NaN, 448 is the largest.
inline float from_float8_e4m3(std::uint8_t bits) noexcept {
    if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(static_cast<std::uint32_t>(bits & 0x80u) << 24 | 0x7fc00000u);
    return from_float16(static_cast<std::uint16_t>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7)) * 256.0f;  // the exponents' biases differ by 8
}

// To nearest, ties to even; what would round to more than 448 becomes NaN, and NaN stays NaN.
inline std::uint8_t to_float8_e4m3(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const std::uint32_t sign = bits >> 24 & 0x80u;
    if (magnitude > 0x43e80000u) return static_cast<std::uint8_t>(sign | 0x7fu);  // 464 lies between 448 and what would be 480
    if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 leaves the multiples of 2^-9 in the last bits
        return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u));
    }
    return static_cast<std::uint8_t>(sign | (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20);
}

}  // namespace pocket
