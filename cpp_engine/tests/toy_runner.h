// A language model of integer arithmetic, for tests of what drives a model. It is a whole Runner: it keeps a value for each token in blocks, reads the values
// of all earlier tokens of a row back through the row's block table, and carries a state in the row's slot. The id that it draws is a digest of all of these,
// so a wrong block, slot, copy, order or token changes it, and `alone` says which ids a request gets that has a machine to itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/runner.h"

namespace pocket {

inline constexpr int toy_vocab_size = 97;

inline std::uint64_t toy_mix(std::uint64_t before, std::uint64_t value) {
    std::uint64_t mixed = (before ^ (value + 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
}

// The id that follows when the digest of all tokens is `digest`; the first that the mask allows from there on.
inline std::int32_t toy_draw(std::uint64_t digest, const Request& request, int draw, const std::uint32_t* mask) {
    if (request.temperature > 0) digest = toy_mix(toy_mix(digest, request.seed), static_cast<std::uint64_t>(draw));
    auto id = static_cast<std::int32_t>(digest % toy_vocab_size);
    while (mask != nullptr && (mask[id / 32] >> id % 32 & 1) == 0) id = (id + 1) % toy_vocab_size;
    return id;
}

inline TokenLogprobs toy_logprobs(std::int32_t id, int count) {
    TokenLogprobs logprobs{-0.25F * static_cast<float>(id), {}};
    for (int place = 0; place < count; ++place) logprobs.top.emplace_back((id + place) % toy_vocab_size, -static_cast<float>(place));
    return logprobs;
}

// Of a prompt's token with `id`, behind tokens with the digest `before`.
inline TokenLogprobs toy_ranks(std::uint64_t before, std::int32_t id, int count) {
    TokenLogprobs logprobs = toy_logprobs(id, count);
    logprobs.logprob -= static_cast<float>(before % 1000);
    return logprobs;
}

class ToyRunner : public Runner {
public:
    explicit ToyRunner(const CacheShape& cache)
        : cache_(cache),
          values_(static_cast<std::size_t>(cache.num_blocks * cache.block_size)),
          states_(static_cast<std::size_t>(cache.num_row_slots + cache.num_snapshot_slots)) {}

    std::function<void()> before_step;                                 // called on the engine's thread; may wait or throw
    std::int32_t broken_token = -1;                                    // a row that has this id gets no finite logits
    std::atomic<int> num_steps = 0;
    std::atomic<int> num_tokens = 0;                                   // computed

    int vocab_size() const noexcept override { return toy_vocab_size; }
    const CacheShape& cache() const noexcept override { return cache_; }

    std::vector<Draw> run(std::span<const RunRow> rows, std::span<const StateCopy> copies) override {
        if (before_step) before_step();
        if (rows.empty()) throw std::runtime_error("a step without rows");
        for (const StateCopy& copy : copies) states_.at(static_cast<std::size_t>(copy.to)) = states_.at(static_cast<std::size_t>(copy.from));
        std::vector<Draw> draws;
        for (const RunRow& row : rows) {
            State& state = states_.at(static_cast<std::size_t>(row.slot));
            if (row.num_computed_tokens == 0) state = {};
            int position = row.num_computed_tokens;
            for (std::int32_t id : row.token_ids) {
                if (cache_.snapshot_interval > 0 && state.position != position) throw std::runtime_error("a state is of another position than its row");
                state.digest = toy_mix(state.digest, static_cast<std::uint64_t>(id));
                const std::uint64_t before = position == 0 ? 0 : value(row, position - 1).digest;
                value(row, position) = {id, toy_mix(before, static_cast<std::uint64_t>(id))};
                state.position = ++position;
            }
            num_tokens += static_cast<int>(row.token_ids.size());
            for (std::size_t place = 0; place < row.ranked.ids.size(); ++place) {  // by the token before, so that a wrong place shows
                const Value& before = value(row, row.num_computed_tokens + row.ranked.first + static_cast<int>(place));
                row.ranked.found->push_back(toy_ranks(before.digest, row.ranked.ids[place], row.ranked.num_top));
            }
            if (row.samples) draws.push_back(draw(row, position, state));
        }
        ++num_steps;
        return draws;
    }

private:
    struct Value {
        std::int32_t id = -1;
        std::uint64_t digest = 0;
    };
    struct State {
        int position = 0;
        std::uint64_t digest = 0;
    };

    Value& value(const RunRow& row, int position) {
        const std::int32_t block = row.block_table[static_cast<std::size_t>(position / cache_.block_size)];
        return values_.at(static_cast<std::size_t>(block * cache_.block_size + position % cache_.block_size));
    }

    Draw draw(const RunRow& row, int length, const State& state) {
        Draw drawn;
        std::uint64_t digest = 0;
        for (int position = 0; position < length; ++position) {
            const Value& seen = value(row, position);
            digest = toy_mix(digest, static_cast<std::uint64_t>(seen.id));
            if (seen.digest != digest) throw std::runtime_error("a row reads a value that was computed after other tokens");
            drawn.is_finite = drawn.is_finite && seen.id != broken_token;
        }
        if (cache_.snapshot_interval > 0) digest = toy_mix(digest, state.digest);
        drawn.token_id = toy_draw(digest, *row.request, row.draw, row.mask);
        if (row.request->logprobs) drawn.logprobs = toy_logprobs(drawn.token_id, *row.request->logprobs);
        return drawn;
    }

    CacheShape cache_;
    std::vector<Value> values_;                                        // [num_blocks * block_size]
    std::vector<State> states_;                                        // [num_row_slots + num_snapshot_slots]
};

// The ids that `request` gets from a runner with `cache` by itself, without the one that ends it, if its constraint allows those of `mask` at every step.
inline std::vector<std::int32_t> alone(const Request& request, const CacheShape& cache, const std::uint32_t* mask = nullptr) {
    std::uint64_t digest = 0;
    for (std::int32_t id : request.prompt_token_ids) digest = toy_mix(digest, static_cast<std::uint64_t>(id));
    std::vector<std::int32_t> ids;
    while (static_cast<int>(ids.size()) < request.max_tokens) {
        const std::uint64_t seen = cache.snapshot_interval > 0 ? toy_mix(digest, digest) : digest;
        const std::int32_t id = toy_draw(seen, request, static_cast<int>(ids.size()), mask);
        if (std::ranges::count(request.stop_token_ids, id) > 0) break;
        ids.push_back(id);
        digest = toy_mix(digest, static_cast<std::uint64_t>(id));
    }
    return ids;
}

}  // namespace pocket
