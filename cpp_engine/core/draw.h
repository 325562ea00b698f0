// Draws, with the noise and the order of the torch plane's sampler: a seed gives the same answer on both.
//
// A draw is the id with the largest sum of its log probability and of Gumbel noise (Gumbel, 1954; Maddison, Tarlow and Minka, 2014). The noise hangs on the
// row's seed, on the number of the draw and on the id alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/splitmix.h"
#include "pocket/device.h"

namespace pocket {

constexpr int kDrawCandidates = 256;                        // ids with noise of their own; beside them the others are rarely drawn
constexpr double kLowestLogprob = -9999.0;                  // finite, since JSON has no infinity

// Noise of id `index - 1`, and for index 0 that of all ids without their own.
class Gumbel {
public:
    Gumbel(std::uint64_t seed, std::int32_t draw) : start_(splitmix64(splitmix64(seed, 0), static_cast<std::uint64_t>(draw))) {}
    double uniform(std::uint64_t index) const { return (static_cast<double>(splitmix64(start_, index) >> 11) + 0.5) * 0x1p-53; }  // in (0, 1)
    double operator()(std::uint64_t index) const { return -std::log(-std::log(uniform(index))); }

private:
    std::uint64_t start_;
};

// How a row that is not greedy is drawn.
struct DrawTerms {
    double temperature = 1;
    double top_p = 1;
    int top_k = 0;                                          // 0 where it cuts nothing off
};

// The draw, where `found`, the most likely ids of those that may be drawn, most likely first, decide it: top_k of them where that cuts; else nothing where top_p
// or the noise reaches beyond them. `is_all`: there are no others. `largest` is the logit of the first, `log_sum` the logarithm of the sum of
// exp((logit - largest) / temperature) over all that may be drawn.
std::optional<std::int32_t> draw_among(const std::vector<Candidate>& found, bool is_all, float largest, double log_sum, const DrawTerms& terms,
                                       const Gumbel& noise);

}  // namespace pocket
