#include "engine/sharded_sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "core/draw.h"
#include "engine/sample_rows.h"

namespace pocket {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// What one rank says of one row, before its candidates.
struct Line {
    float largest, largest_allowed;
    std::int32_t has_nan;
    std::int32_t num_allowed, num_top;
    std::int32_t unused;
    double log_sum, log_sum_scaled;
};

// The bits of a mask from id `first` on, `count` of them.
std::vector<std::uint32_t> cut_mask(const std::uint32_t* mask, int vocab_size, int first, int count) {
    std::vector<std::uint32_t> part(static_cast<std::size_t>((count + 31) / 32));
    const int num_words = (vocab_size + 31) / 32, shift = first % 32;
    for (std::size_t word = 0; word < part.size(); ++word) {
        const int from = first / 32 + static_cast<int>(word);
        part[word] = mask[from] >> shift;
        if (shift > 0 && from + 1 < num_words) part[word] |= mask[from + 1] << (32 - shift);
    }
    return part;
}

// The inputs of some rows.
SampleRows inputs_of(const SampleInputs& all, const std::vector<std::size_t>& places) {
    SampleRows some;
    for (const std::size_t place : places) {
        some.temperatures.push_back(all.temperatures[place]);
        some.top_ps.push_back(all.top_ps[place]);
        some.top_ks.push_back(all.top_ks[place]);
        some.seeds.push_back(all.seeds[place]);
        some.draws.push_back(all.draws[place]);
        some.num_logprobs.push_back(all.num_logprobs[place]);
        some.masks.push_back(all.masks[place]);
        if (!all.edits.empty()) some.edits.push_back(all.edits[place]);
        if (!all.min_ps.empty()) some.min_ps.push_back(all.min_ps[place]);
    }
    return some;
}

bool is_greedy(const SampleInputs& inputs, std::size_t place) { return inputs.temperatures[place] == 0 || inputs.top_ks[place] == 1; }

// The logarithm of the sum of exp(values).
double log_sum_of(const std::vector<double>& values) {
    const double largest = *std::max_element(values.begin(), values.end());
    if (largest == -infinity) return -infinity;
    double sum = 0;
    for (const double value : values) sum += std::exp(value - largest);
    return largest + std::log(sum);
}

}  // namespace

// One row as all ranks tell of it.
struct ShardedSampler::Row {
    bool is_finite = true;
    float largest_allowed = 0;
    double log_sum = 0;                                     // of exp(logit)
    double log_sum_scaled = 0;                              // of exp((logit - largest_allowed) / temperature) over allowed ids
    std::vector<Candidate> allowed, top;                    // of all ranks, most likely first

    Row(const std::vector<const std::byte*>& told, double temperature, std::size_t num_allowed, std::size_t num_top) {
        float largest = -std::numeric_limits<float>::infinity();
        largest_allowed = largest;
        std::vector<double> sums, sums_scaled;
        std::vector<Line> lines;
        for (const std::byte* place : told) {
            Line& line = lines.emplace_back();
            std::memcpy(&line, place, sizeof line);
            largest = std::max(largest, line.largest);
            largest_allowed = std::max(largest_allowed, line.largest_allowed);
            is_finite = is_finite && !line.has_nan;
            const auto take = [&](std::vector<Candidate>& all, std::int32_t count, std::size_t skipped) {
                const std::size_t before = all.size();
                all.resize(before + static_cast<std::size_t>(count));
                if (count > 0) std::memcpy(all.data() + before, place + sizeof line + skipped * sizeof(Candidate), static_cast<std::size_t>(count) * sizeof(Candidate));
            };
            take(allowed, line.num_allowed, 0);
            take(top, line.num_top, num_allowed);
        }
        is_finite = is_finite && std::isfinite(largest) && std::isfinite(largest_allowed);
        if (!is_finite) return;
        for (const Line& line : lines) {
            sums.push_back(std::isfinite(line.largest) ? line.largest + line.log_sum : -infinity);
            const double behind = (static_cast<double>(line.largest_allowed) - largest_allowed) / temperature;
            sums_scaled.push_back(std::isfinite(line.largest_allowed) ? behind + line.log_sum_scaled : -infinity);
        }
        log_sum = log_sum_of(sums);
        log_sum_scaled = log_sum_of(sums_scaled);
        for (auto [all, count] : {std::pair(&allowed, num_allowed), std::pair(&top, num_top)}) {
            std::sort(all->begin(), all->end());
            all->resize(std::min(all->size(), count));
        }
    }
};

ShardedSampler::ShardedSampler(Device& device, Communicator& ranks, int vocab_size, const LogitShare& share)
    : device_(device), ranks_(ranks), vocab_size_(vocab_size), share_(share), firsts_(static_cast<std::size_t>(ranks.size())) {
    ranks_.exchange(&share_.first, sizeof share_.first, firsts_.data());
    firsts_.push_back(vocab_size);
}

int ShardedSampler::num_candidates(const SampleInputs& inputs, std::size_t place) const {
    if (is_greedy(inputs, place)) return 1;
    const int top_k = inputs.top_ks[place];
    return top_k > 0 && top_k < vocab_size_ ? top_k : std::min(kDrawCandidates, vocab_size_);
}

bool ShardedSampler::may_need_all(const SampleInputs& inputs, std::size_t place) const {
    const int top_k = inputs.top_ks[place];
    return !is_greedy(inputs, place) && (top_k == 0 || top_k >= vocab_size_);
}

void ShardedSampler::sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs, const std::vector<bool>& changes) {
    std::vector<std::size_t> places = draw(logits, inputs, outputs, changes);
    bool may_need = false;
    for (std::size_t place = 0; place < outputs.size(); ++place) may_need = may_need || changes[place] || may_need_all(inputs, place);
    if (places.empty() && !may_need) return;
    std::vector<std::byte> told(places.size() * sizeof(std::size_t));  // as rank 0 says
    if (!places.empty()) std::memcpy(told.data(), places.data(), told.size());
    ranks_.broadcast(told);
    places.resize(told.size() / sizeof(std::size_t));
    if (places.empty()) return;
    std::memcpy(places.data(), told.data(), told.size());
    draw_whole(logits, inputs, places, outputs);
}

// Places of the rows that are left to draw, on rank 0; on the others where none could be drawn.
std::vector<std::size_t> ShardedSampler::draw(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs,
                                              const std::vector<bool>& changes) {
    const std::size_t count = outputs.size();
    std::vector<std::size_t> places(count);
    std::iota(places.begin(), places.end(), std::size_t{0});
    SampleRows own = inputs_of(inputs, places);
    std::vector<std::vector<std::uint32_t>> masks;
    masks.reserve(count);
    for (const std::uint32_t*& mask : own.masks) {
        if (mask != nullptr) mask = masks.emplace_back(cut_mask(mask, vocab_size_, share_.first, share_.count)).data();
    }
    std::vector<int> wanted, tops;
    for (const std::size_t place : places) {
        wanted.push_back(num_candidates(inputs, place));
        tops.push_back(std::clamp(inputs.num_logprobs[place], 0, static_cast<int>(std::size(SampleOutput().top_ids))));
    }
    std::vector<LogitSummary> summaries(count);
    if (!device_.summarize(logits, own.view(), wanted, summaries)) return places;
    std::vector<std::size_t> starts(1);                     // of each row in what a rank tells
    for (const std::size_t place : places) {
        starts.push_back(starts.back() + sizeof(Line) + static_cast<std::size_t>(wanted[place] + tops[place]) * sizeof(Candidate));
    }
    std::vector<std::byte> mine(starts.back()), all(mine.size() * static_cast<std::size_t>(ranks_.size()));
    for (const std::size_t place : places) {
        const LogitSummary& found = summaries[place];
        const Line line{found.largest, found.largest_allowed, found.has_nan, static_cast<std::int32_t>(found.allowed.size()),
                        static_cast<std::int32_t>(found.top.size()), 0, found.log_sum, found.log_sum_scaled};
        std::byte* to = mine.data() + starts[place];
        std::memcpy(to, &line, sizeof line);
        to += sizeof line;
        for (Candidate one : found.allowed) one.id += share_.first, std::memcpy(to, &one, sizeof one), to += sizeof one;
        to = mine.data() + starts[place] + sizeof line + static_cast<std::size_t>(wanted[place]) * sizeof(Candidate);
        for (Candidate one : found.top) one.id += share_.first, std::memcpy(to, &one, sizeof one), to += sizeof one;
    }
    ranks_.exchange(mine.data(), mine.size(), all.data());
    if (ranks_.rank() != 0) return {};
    std::vector<std::size_t> left;
    for (const std::size_t place : places) {
        if (changes[place]) {
            left.push_back(place);
            continue;
        }
        std::vector<const std::byte*> told;
        for (int rank = 0; rank < ranks_.size(); ++rank) told.push_back(all.data() + static_cast<std::size_t>(rank) * mine.size() + starts[place]);
        const double temperature = inputs.temperatures[place] > 0 ? inputs.temperatures[place] : 1.0;
        const Row row(told, temperature, static_cast<std::size_t>(wanted[place]), static_cast<std::size_t>(tops[place]));
        SampleOutput& output = outputs[place] = {};
        output.is_finite = row.is_finite;
        if (!row.is_finite) continue;
        std::optional<std::int32_t> id = row.allowed[0].id;
        if (!is_greedy(inputs, place)) {
            const bool is_all = wanted[place] == vocab_size_ || static_cast<int>(row.allowed.size()) < wanted[place];
            const DrawTerms terms{temperature, inputs.top_ps[place], may_need_all(inputs, place) ? 0 : inputs.top_ks[place]};
            id = draw_among(row.allowed, is_all, row.largest_allowed, row.log_sum_scaled, terms, Gumbel(inputs.seeds[place], inputs.draws[place]));
        }
        if (!id) {
            left.push_back(place);
            continue;
        }
        const auto logprob = [&](float logit) { return static_cast<float>(std::max(static_cast<double>(logit) - row.log_sum, kLowestLogprob)); };
        output.token_id = *id;
        output.logprob = logprob(std::ranges::find(row.allowed, *id, &Candidate::id)->logit);
        for (const Candidate& one : row.top) {
            output.top_ids[output.num_top] = one.id;
            output.top_logprobs[output.num_top++] = logprob(one.logit);
        }
    }
    return left;
}

// The rows at `places`, of which every rank sends its logits.
void ShardedSampler::draw_whole(const Tensor& logits, const SampleInputs& inputs, const std::vector<std::size_t>& places, std::span<SampleOutput> outputs) {
    const std::size_t row_bytes = static_cast<std::size_t>(share_.widest) * sizeof(float);
    std::byte* own = room(own_, places.size() * row_bytes);
    for (std::size_t index = 0; index < places.size(); ++index) {
        const auto* from = static_cast<const float*>(logits.data) + static_cast<std::int64_t>(places[index]) * logits.stride;
        device_.copy(own + index * row_bytes, from, static_cast<std::size_t>(share_.count) * sizeof(float));
    }
    const Tensor all = whole({own, DType::float32, static_cast<std::int64_t>(places.size()), share_.count, share_.widest});
    if (ranks_.rank() != 0) return;
    const SampleRows chosen = inputs_of(inputs, places);
    std::vector<SampleOutput> drawn(places.size());
    device_.sample(all, chosen.view(), drawn);
    for (std::size_t index = 0; index < places.size(); ++index) outputs[places[index]] = drawn[index];
}

Tensor ShardedSampler::whole(const Tensor& logits) {
    const auto num_rows = static_cast<std::size_t>(logits.rows), row_bytes = static_cast<std::size_t>(share_.widest) * sizeof(float);
    const std::size_t part_bytes = num_rows * row_bytes;
    std::byte* parts = room(parts_, part_bytes * static_cast<std::size_t>(ranks_.size()));
    std::byte* whole = room(whole_, num_rows * static_cast<std::size_t>(vocab_size_) * sizeof(float));
    ranks_.gather(logits.data, part_bytes, parts);
    for (std::size_t rank = 0; rank + 1 < firsts_.size(); ++rank) {
        const auto first = static_cast<std::size_t>(firsts_[rank]), count = static_cast<std::size_t>(firsts_[rank + 1]) - first;
        for (std::size_t row = 0; row < num_rows; ++row) {
            device_.copy(whole + (row * static_cast<std::size_t>(vocab_size_) + first) * sizeof(float), parts + rank * part_bytes + row * row_bytes,
                         count * sizeof(float));
        }
    }
    return {whole, DType::float32, logits.rows, vocab_size_, vocab_size_};
}

std::byte* ShardedSampler::room(std::unique_ptr<Buffer>& buffer, std::size_t num_bytes) {
    if (!buffer || buffer->num_bytes() < num_bytes) {
        device_.synchronize();  // what still reads the old one
        buffer.reset();
        buffer = device_.allocate(num_bytes);
    }
    return static_cast<std::byte*>(buffer->data());
}

}  // namespace pocket
