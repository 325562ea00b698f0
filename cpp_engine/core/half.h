// bfloat16, float16 and float8_e4m3 as bits, to and from float32, one value at a time. Every conversion from float32 rounds to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace pocket {

inline float bfloat16_to_float(std::uint16_t bits) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// A NaN stays one; what is too large becomes infinite.
inline std::uint16_t float_to_bfloat16(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float16_to_float(std::uint16_t bits) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x007fffffu));  // infinite or NaN
    // Read as float32 the exponent is 112 too small; the product is exact, and makes float16's subnormals normal.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p112f));
}

// A NaN stays one; what is too large becomes infinite.
inline std::uint16_t float_to_float16(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14 float16 has steps of 2^-24: adding 0.5, whose own steps are that, rounds to them.
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f)));
    }
    return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13));
}

// float8_e4m3 has no infinity: 0x7f and 0xff are NaN, and the largest value is 448.
inline float float8_e4m3_to_float(std::uint8_t bits) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24, rest = bits & 0x7fu;
    if (rest == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
    // As float16 above: the exponent read as float32's is 120 too small.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest << 20) * 0x1p120f));
}

// A NaN stays one; so becomes what would round to more than 448.
inline std::uint8_t float_to_float8_e4m3(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const std::uint32_t sign = (bits >> 24) & 0x80u;
    if (magnitude > 0x43e80000u) return static_cast<std::uint8_t>(sign | 0x7fu);  // 464 lies between 448 and what would be 480
    if (magnitude < 0x3c800000u) {
        // Below 2^-6 the steps are 2^-9, those of 2^14.
        const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
        return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0x1p14f)));
    }
    return static_cast<std::uint8_t>(sign | ((magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20));
}

}  // namespace pocket
