#include "core/draw.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace pocket {

std::optional<std::int32_t> draw_among(const std::vector<Candidate>& found, bool is_all, float largest, double log_sum, const DrawTerms& terms,
                                       const Gumbel& noise) {
    const auto scaled = [&](float logit) { return (static_cast<double>(logit) - largest) / terms.temperature; };
    const bool is_cut = terms.top_k > 0;
    double total = log_sum;
    if (is_cut) {
        double sum = 0;
        for (const Candidate& one : found) sum += std::exp(scaled(one.logit));
        total = std::log(sum);
    }
    std::size_t size = found.size();
    double rest = 0;
    if (terms.top_p < 1) {
        double mass = 0;
        size = 0;
        while (size < found.size() && mass < terms.top_p) mass += std::exp(scaled(found[size++].logit) - total);  // the id that crosses top_p is kept
        if (mass < terms.top_p && !is_cut && !is_all) return std::nullopt;
        size = std::max<std::size_t>(size, 1);
    } else if (!is_cut && !is_all) {
        double mass = 0;
        for (const Candidate& one : found) mass += std::exp(scaled(one.logit) - total);
        rest = std::max(0.0, 1.0 - mass);
    }
    double best = -std::numeric_limits<double>::infinity();
    std::int32_t best_id = found[0].id;
    for (std::size_t place = 0; place < size; ++place) {
        const double sum = scaled(found[place].logit) - total + noise(static_cast<std::uint64_t>(found[place].id) + 1);
        if (sum > best) best = sum, best_id = found[place].id;
    }
    if (rest == 0 || best >= std::log(rest) + noise(0)) return best_id;
    return std::nullopt;
}

}  // namespace pocket
