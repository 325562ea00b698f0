// SplitMix64 (Steele, Lea and Flood, 2014): numbers that depend on a start and an index alone.
#pragma once

#include <cstdint>

namespace pocket {

// Output number `index`, from 0, of the stream that begins at `start`.
constexpr std::uint64_t splitmix64(std::uint64_t start, std::uint64_t index) noexcept {
    std::uint64_t mixed = start + (index + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return mixed ^ mixed >> 31;
}

}  // namespace pocket
