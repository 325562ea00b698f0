// Which part of what is dealt out to ranks one of them has.
#pragma once

#include <cstdint>

namespace pocket {

// Places [begin, end) of things that lie one after another.
struct Range {
    std::int64_t begin = 0, end = 0;
    constexpr std::int64_t size() const noexcept { return end - begin; }
};

struct Share {
    int rank = 0;
    int size = 1;

    // An equal part of `count` things, which `size` divides.
    constexpr Range of(std::int64_t count) const noexcept { return {rank * (count / size), (rank + 1) * (count / size)}; }

    // A part that is equal up to one `unit`, whose inner borders are multiples of it.
    constexpr Range nearly(std::int64_t count, std::int64_t unit) const noexcept { return {border(rank, count, unit), border(rank + 1, count, unit)}; }

private:
    constexpr std::int64_t border(int before, std::int64_t count, std::int64_t unit) const noexcept {
        return before == size ? count : before * (count / unit) / size * unit;
    }
};

}  // namespace pocket
