// core/number_formats: every value of each small type comes back, and what lies between two of them goes to the nearer, ties to the even one.
#include "core/number_formats.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "check.h"

using namespace pocket;

namespace {

// Round-trips all bit patterns of a type, and checks the neighbours of each midpoint.
template <typename Bits>
void check_type(Bits (*encode)(float), float (*decode)(Bits), unsigned count) {
    for (unsigned pattern = 0; pattern < count; ++pattern) {
        const Bits bits = static_cast<Bits>(pattern);
        const float value = decode(bits);
        if (std::isnan(value)) {
            CHECK(std::isnan(decode(encode(value))));
            continue;
        }
        if (encode(value) != bits) CHECK_EQ(static_cast<unsigned>(encode(value)), pattern);
        const bool is_last = pattern % (count / 2) == count / 2 - 1;
        if (is_last || !std::isfinite(value)) continue;
        const float next = decode(static_cast<Bits>(pattern + 1));  // away from zero
        if (!std::isfinite(next)) continue;
        const float middle = static_cast<float>((static_cast<double>(value) + next) / 2);
        const unsigned even = pattern % 2 ? pattern + 1 : pattern;
        if (static_cast<double>(middle) * 2 != static_cast<double>(value) + next) continue;  // of bfloat16's subnormals float32 has no midpoint
        CHECK_EQ(static_cast<unsigned>(encode(middle)), even);
        CHECK_EQ(static_cast<unsigned>(encode(std::nextafter(middle, value))), pattern);
        CHECK_EQ(static_cast<unsigned>(encode(std::nextafter(middle, next))), pattern + 1);
    }
}

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

TEST(bfloat16) {
    check_type(to_bfloat16, from_bfloat16, 65536);
    CHECK_EQ(from_bfloat16(0x3f80), 1.0f);
    CHECK_EQ(to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
    CHECK_EQ(to_bfloat16(-infinity), 0xff80);
    CHECK(std::isnan(from_bfloat16(to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(float16) {
    check_type(to_float16, from_float16, 65536);
    CHECK_EQ(from_float16(0x3c00), 1.0f);
    CHECK_EQ(from_float16(0x0001), 0x1p-24f);
    CHECK_EQ(from_float16(0x7bff), 65504.0f);
    CHECK_EQ(to_float16(65519.996f), 0x7bff);
    CHECK_EQ(to_float16(65520.0f), 0x7c00);
    CHECK_EQ(to_float16(-infinity), 0xfc00);
    CHECK_EQ(to_float16(0x1p-25f), 0);
    CHECK_EQ(to_float16(1e-30f), 0);
}

TEST(float8_e4m3) {
    check_type(to_float8_e4m3, from_float8_e4m3, 256);
    CHECK_EQ(from_float8_e4m3(0x38), 1.0f);
    CHECK_EQ(from_float8_e4m3(0x01), 0x1p-9f);
    CHECK_EQ(from_float8_e4m3(0x7e), 448.0f);
    CHECK(std::isnan(from_float8_e4m3(0xff)));
    CHECK_EQ(to_float8_e4m3(464.0f), 0x7e);
    CHECK_EQ(to_float8_e4m3(std::nextafter(464.0f, 500.0f)), 0x7f);
    CHECK_EQ(to_float8_e4m3(infinity), 0x7f);
}
