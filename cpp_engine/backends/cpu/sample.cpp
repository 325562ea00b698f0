// Draws, and what a draw over several ranks' ids needs of one rank's. core/draw.h says how ids are drawn.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu/cpu_device.h"
#include "core/draw.h"

namespace pocket {
namespace {

constexpr int kStretch = 64 * kLogitBlock;  // logits of one task of the scan
constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool allows(const std::uint32_t* mask, int id) { return !mask || (mask[id / 32] >> (id % 32) & 1u) != 0; }

// One row's logits with what the scan found.
struct Row {
    const float* logits = nullptr;  // after edits and min_p
    const std::uint32_t* mask = nullptr;
    int vocab_size = 0;
    float largest = 0, largest_allowed = 0;
    double log_sum = 0, log_sum_scaled = 0;  // logarithm of the sum of exp(logit - largest), of exp((logit - largest_allowed) / temperature) over allowed ids
    bool has_nan = false;
    const float* block_largest = nullptr;  // largest allowed logit of each kLogitBlock

    // The `count` largest (fewer where there are no more), most likely first. Of allowed ids, where `masked`.
    std::vector<Candidate> top(int count, bool masked) const;
};

std::vector<Candidate> Row::top(int count, bool masked) const {
    const int num_blocks = (vocab_size + kLogitBlock - 1) / kLogitBlock;
    const std::uint32_t* allowed = masked ? mask : nullptr;
    float threshold = -std::numeric_limits<float>::infinity();  // at least `count` logits are not below it
    if (count < num_blocks && (masked || !mask)) {
        std::vector<float> largest_of(block_largest, block_largest + num_blocks);
        std::nth_element(largest_of.begin(), largest_of.begin() + count - 1, largest_of.end(), std::greater<>());
        threshold = largest_of[static_cast<std::size_t>(count - 1)];
    }
    std::vector<Candidate> found;
    for (int block = 0; block < num_blocks; ++block) {
        if ((masked || !mask) && block_largest[block] < threshold) continue;
        const int end = std::min(vocab_size, (block + 1) * kLogitBlock);
        for (int id = block * kLogitBlock; id < end; ++id)
            if (logits[id] >= threshold && allows(allowed, id)) found.push_back({logits[id], id});
    }
    const std::size_t size = std::min(found.size(), static_cast<std::size_t>(count));
    std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(size), found.end());
    found.resize(size);
    return found;
}

// One of the ids that are not among `found`, each with its own noise. None is likelier than the last of those found, so most numbers are too small to win,
// and need no logarithms.
std::int32_t draw_other(const Row& row, std::vector<Candidate> found, double temperature, const Gumbel& noise) {
    const auto scaled = [&](float logit) { return (static_cast<double>(logit) - row.largest_allowed) / temperature; };
    const double ceiling = scaled(found.back().logit);
    std::int32_t best_id = found[0].id;
    double best = -kInfinity, least = 0;
    std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    std::size_t next = 0;
    for (int id = 0; id < row.vocab_size; ++id) {
        if (next < found.size() && found[next].id == id) {
            ++next;
            continue;
        }
        if (noise.uniform(static_cast<std::uint64_t>(id) + 1) < least) continue;
        if (!allows(row.mask, id) || row.logits[id] == -std::numeric_limits<float>::infinity()) continue;
        const double sum = scaled(row.logits[id]) + noise(static_cast<std::uint64_t>(id) + 1);
        if (sum <= best) continue;
        best = sum;
        best_id = id;
        least = std::exp(-std::exp(ceiling - best)) * (1 - 1e-12);
    }
    return best_id;
}

// The row's allowed ids: temperature, then top_k, then top_p over what top_k left.
std::int32_t draw(const Row& row, double temperature, double top_p, int top_k, const Gumbel& noise) {
    const DrawTerms terms{temperature, top_p, top_k > 0 && top_k < row.vocab_size ? top_k : 0};
    for (int count = terms.top_k > 0 ? terms.top_k : std::min(kDrawCandidates, row.vocab_size);; count = std::min(count * 16, row.vocab_size)) {
        const std::vector<Candidate> found = row.top(count, true);
        const bool is_all = count == row.vocab_size || static_cast<int>(found.size()) < count;  // a mask allows no more
        if (const auto id = draw_among(found, is_all, row.largest_allowed, row.log_sum_scaled, terms, noise)) return *id;
        if (top_p >= 1) return draw_other(row, found, temperature, noise);
    }
}

// `model`: the row as the model gives it, whose log probabilities are told; where nothing was changed, `row` itself.
SampleOutput answer(const Row& row, const Row& model, const SampleInputs& inputs, std::size_t index) {
    SampleOutput output;
    output.is_finite = !row.has_nan && std::isfinite(row.largest) && std::isfinite(row.largest_allowed);
    if (!output.is_finite) return output;
    const float temperature = inputs.temperatures[index];
    if (temperature == 0 || inputs.top_ks[index] == 1) output.token_id = row.top(1, true)[0].id;
    else output.token_id = draw(row, temperature, inputs.top_ps[index], inputs.top_ks[index], Gumbel(inputs.seeds[index], inputs.draws[index]));
    const double total = model.largest + model.log_sum;
    const auto logprob = [&](float logit) { return static_cast<float>(std::max(static_cast<double>(logit) - total, kLowestLogprob)); };
    output.logprob = logprob(model.logits[output.token_id]);
    const int wanted = std::min<int>(inputs.num_logprobs[index], static_cast<int>(std::size(output.top_ids)));
    if (wanted <= 0) return output;
    for (const Candidate& one : model.top(std::min(wanted, row.vocab_size), false)) {
        output.top_ids[output.num_top] = one.id;
        output.top_logprobs[output.num_top++] = logprob(one.logit);
    }
    return output;
}

// Logits of a row with its edits.
void change(const float* logits, std::span<const LogitEdit> edits, int vocab_size, float* changed) {
    std::copy_n(logits, vocab_size, changed);
    for (const LogitEdit& edit : edits) {
        const double logit = changed[edit.id];
        changed[edit.id] = static_cast<float>((logit > 0 ? logit / edit.scale : logit * edit.scale) + edit.offset);
    }
}

// Minus infinity for what is less likely than min_p times the likeliest allowed id, and the row's sum without it.
void cut_unlikely(float* logits, float min_p, double temperature, Row& row) {
    const double lowest = std::log(static_cast<double>(min_p)), limit = row.largest_allowed + temperature * lowest;
    double sum = 0;
    for (int id = 0; id < row.vocab_size; ++id) {
        if (logits[id] < limit) {
            logits[id] = -std::numeric_limits<float>::infinity();
        } else if (allows(row.mask, id)) {
            sum += std::exp((static_cast<double>(logits[id]) - row.largest_allowed) / temperature);
        }
    }
    row.log_sum_scaled = std::log(sum);
}

// What the scans of a row's stretches found, put together.
Row gather(const float* logits, const std::uint32_t* mask, int vocab_size, double temperature, std::span<const LogitScan> scans, const float* block_largest) {
    Row row;
    row.logits = logits;
    row.mask = mask;
    row.vocab_size = vocab_size;
    row.block_largest = block_largest;
    row.largest = row.largest_allowed = -std::numeric_limits<float>::infinity();
    for (const LogitScan& scan : scans) {
        row.largest = std::max(row.largest, scan.largest);
        row.largest_allowed = std::max(row.largest_allowed, scan.largest_allowed);
        row.has_nan |= scan.has_nan;
    }
    double sum = 0, sum_scaled = 0;
    for (const LogitScan& scan : scans) {
        if (scan.sum > 0) sum += scan.sum * std::exp(static_cast<double>(scan.largest) - row.largest);
        if (scan.sum_scaled > 0) sum_scaled += scan.sum_scaled * std::exp((static_cast<double>(scan.largest_allowed) - row.largest_allowed) / temperature);
    }
    row.log_sum = std::log(sum);
    row.log_sum_scaled = std::log(sum_scaled);
    return row;
}

// As ranks tell it to each other.
LogitSummary summary_of(const Row& row, int num_candidates, int num_top) {
    LogitSummary summary{row.largest, row.largest_allowed, row.has_nan, row.log_sum, row.log_sum_scaled, {}, {}};
    if (row.has_nan || !std::isfinite(row.largest)) return summary;
    if (std::isfinite(row.largest_allowed)) summary.allowed = row.top(std::min(num_candidates, row.vocab_size), true);
    if (num_top > 0) summary.top = row.top(std::min(num_top, row.vocab_size), false);
    return summary;
}

}  // namespace

void CpuDevice::sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs) {
    const int num_samples = static_cast<int>(outputs.size()), vocab_size = static_cast<int>(logits.columns);
    const int stretches = (vocab_size + kStretch - 1) / kStretch, num_blocks = stretches * (kStretch / kLogitBlock);
    const auto at = [](auto values, std::int64_t sample) { return values[static_cast<std::size_t>(sample)]; };
    const auto draws = [&](std::int64_t sample) { return at(inputs.temperatures, sample) > 0 && at(inputs.top_ks, sample) != 1; };
    const auto min_p_of = [&](std::int64_t sample) { return !inputs.min_ps.empty() && draws(sample) ? at(inputs.min_ps, sample) : 0.0f; };
    // The samples that are drawn from changed logits, each with a copy of them, after which come those whose model's logits are scanned as well.
    std::vector<int> copies(outputs.size(), -1), ranked(outputs.size(), -1);
    int num_copies = 0, num_scanned = num_samples;
    for (int sample = 0; sample < num_samples; ++sample) {
        const bool is_edited = !inputs.edits.empty() && !at(inputs.edits, sample).empty();
        if (!is_edited && min_p_of(sample) <= 0) continue;
        copies[static_cast<std::size_t>(sample)] = num_copies++;
        if (at(inputs.num_logprobs, sample) >= 0) ranked[static_cast<std::size_t>(sample)] = num_scanned++;
    }
    shared_.reserve<float>(num_scanned, static_cast<std::size_t>(num_blocks));
    wide_.reserve<LogitScan>(num_scanned, static_cast<std::size_t>(stretches));
    if (num_copies > 0) changed_.reserve<float>(num_copies, static_cast<std::size_t>(vocab_size));
    const auto model_row = [&](std::int64_t sample) { return static_cast<const float*>(logits.data) + sample * logits.stride; };
    const auto row_of = [&](std::int64_t sample) { return at(copies, sample) < 0 ? model_row(sample) : changed_.of<float>(at(copies, sample)); };
    const auto temperature_of = [&](std::int64_t sample) { return at(inputs.temperatures, sample) > 0 ? at(inputs.temperatures, sample) : 1.0f; };
    const auto gathered = [&](const float* row, const std::uint32_t* mask, std::int64_t sample, int scanned) {
        return gather(row, mask, vocab_size, temperature_of(sample), {wide_.of<LogitScan>(scanned), static_cast<std::size_t>(stretches)}, shared_.of<float>(scanned));
    };
    const auto scan = [&](const float* row, const std::uint32_t* mask, std::int64_t sample, int scanned, std::int64_t stretch) {
        const int first = static_cast<int>(stretch) * kStretch;
        kernels_.scan_logits(row, mask, first, std::min(first + kStretch, vocab_size), 1.0f / temperature_of(sample), wide_.of<LogitScan>(scanned)[stretch],
                             shared_.of<float>(scanned) + first / kLogitBlock);
    };
    if (num_copies > 0) {
        pool_.parallel_for(num_samples, 1, [&](std::int64_t begin, std::int64_t end, int) {
            for (std::int64_t sample = begin; sample < end; ++sample) {
                if (at(copies, sample) < 0) continue;
                change(model_row(sample), inputs.edits.empty() ? std::span<const LogitEdit>() : at(inputs.edits, sample), vocab_size,
                       changed_.of<float>(at(copies, sample)));
            }
        });
    }
    pool_.parallel_for(static_cast<std::int64_t>(num_samples) * stretches, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t task = begin; task < end; ++task) {
            const std::int64_t sample = task / stretches, stretch = task % stretches;
            scan(row_of(sample), at(inputs.masks, sample), sample, static_cast<int>(sample), stretch);
            if (at(ranked, sample) >= 0) scan(model_row(sample), nullptr, sample, at(ranked, sample), stretch);
        }
    });
    pool_.parallel_for(num_samples, 1, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t sample = begin; sample < end; ++sample) {
            Row row = gathered(row_of(sample), at(inputs.masks, sample), sample, static_cast<int>(sample)), model = row;
            if (at(ranked, sample) >= 0) model = gathered(model_row(sample), nullptr, sample, at(ranked, sample));
            if (min_p_of(sample) > 0 && std::isfinite(row.largest_allowed)) {
                cut_unlikely(changed_.of<float>(at(copies, sample)), min_p_of(sample), temperature_of(sample), row);
            }
            outputs[static_cast<std::size_t>(sample)] = answer(row, model, inputs, static_cast<std::size_t>(sample));
        }
    });
}

bool CpuDevice::summarize(const Tensor& logits, const SampleInputs& inputs, std::span<const int> num_candidates, std::span<LogitSummary> summaries) {
    const int num_samples = static_cast<int>(summaries.size()), vocab_size = static_cast<int>(logits.columns);
    const int stretches = (vocab_size + kStretch - 1) / kStretch, num_blocks = stretches * (kStretch / kLogitBlock);
    shared_.reserve<float>(num_samples, static_cast<std::size_t>(num_blocks));
    wide_.reserve<LogitScan>(num_samples, static_cast<std::size_t>(stretches));
    pool_.parallel_for(num_samples, 1, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t sample = begin; sample < end; ++sample) {
            const auto index = static_cast<std::size_t>(sample);
            const int place = static_cast<int>(sample);
            const auto* row = static_cast<const float*>(logits.data) + sample * logits.stride;
            const float temperature = inputs.temperatures[index] > 0 ? inputs.temperatures[index] : 1.0f;
            for (int first = 0; first < vocab_size; first += kStretch) {
                kernels_.scan_logits(row, inputs.masks[index], first, std::min(first + kStretch, vocab_size), 1.0f / temperature,
                                     wide_.of<LogitScan>(place)[first / kStretch], shared_.of<float>(place) + first / kLogitBlock);
            }
            const std::span<const LogitScan> scans(wide_.of<LogitScan>(place), static_cast<std::size_t>(stretches));
            const Row found = gather(row, inputs.masks[index], vocab_size, temperature, scans, shared_.of<float>(place));
            summaries[index] = summary_of(found, num_candidates[index], inputs.num_logprobs[index]);
        }
    });
    return true;
}

}  // namespace pocket
