#include "engine/session.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "pocket/error.h"

namespace pocket {

namespace {

[[noreturn]] void refuse_logits(std::int64_t num_tokens) {
    throw Error(ErrorKind::device, "The model's logits after " + std::to_string(num_tokens) +
                                       " tokens are not finite: its weights or this compute type don't fit. Try dtype = float32.");
}

// The most likely id of one row of logits; of equal ones the lowest. -1 where a logit is NaN or the largest is infinite, as for Device::sample.
std::int32_t greedy(const float* logits, int vocab_size) {
    const float* best = logits;
    for (const float* logit = logits; logit < logits + vocab_size; ++logit) {
        if (std::isnan(*logit)) return -1;
        if (*logit > *best) best = logit;
    }
    return std::isfinite(*best) ? static_cast<std::int32_t>(best - logits) : -1;
}

}  // namespace

Session::Session(Runner& runner, const SessionOptions& options) : runner_(runner), options_(options) {
    const CacheShape& cache = runner.cache();
    const int most = cache.max_model_len > 0 ? (cache.max_model_len + cache.block_size - 1) / cache.block_size : cache.num_blocks;
    block_table_.resize(static_cast<std::size_t>(std::min(most, cache.num_blocks)));
    std::iota(block_table_.begin(), block_table_.end(), 0);
    reset();
}

void Session::reset() {
    token_ids_.clear();
    snapshots_.clear();
    copies_.clear();
    cached_tokens_ = 0;
    free_slots_.resize(static_cast<std::size_t>(runner_.cache().num_row_slots + runner_.cache().num_snapshot_slots - 1));
    std::iota(free_slots_.begin(), free_slots_.end(), 1);
}

void Session::check(std::span<const std::int32_t> token_ids, std::int64_t before) const {
    if (token_ids.empty()) throw Error(ErrorKind::configuration, "\"tokens\" is empty: send at least one token id.", "tokens");
    const int vocab_size = runner_.vocab_size();
    for (const std::int32_t token_id : token_ids) {
        if (token_id < 0 || token_id >= vocab_size) {
            throw Error(ErrorKind::configuration,
                        "\"tokens\" holds " + std::to_string(token_id) + ", which is no token of this model: ids are whole numbers from 0 to " +
                            std::to_string(vocab_size - 1) + ".",
                        "tokens");
        }
    }
    const CacheShape& cache = runner_.cache();
    const std::int64_t blocks = static_cast<std::int64_t>(block_table_.size()) * cache.block_size;
    const std::int64_t room = cache.max_model_len > 0 ? std::min<std::int64_t>(cache.max_model_len, blocks) : blocks;
    const std::int64_t wanted = before + static_cast<std::int64_t>(token_ids.size());
    if (wanted > room) {
        throw Error(ErrorKind::configuration,
                    "The session would hold " + std::to_string(wanted) + " tokens, and its context is " + std::to_string(room) +
                        ": send fewer, or make the engine with a larger max_model_len.",
                    "tokens");
    }
}

Draw Session::prefill(std::span<const std::int32_t> token_ids, const Request& request) {
    check(token_ids, 0);
    cached_tokens_ = restore(token_ids);
    const int total = static_cast<int>(token_ids.size());
    const CacheShape& cache = runner_.cache();
    const bool keeps = options_.enable_prefix_caching && options_.has_states;
    // A prompt that comes again needs the state of before its last token. At an end of a block, so that prompts are cut at the same places as by a scheduler.
    const int last_cut = (total - 1) / cache.block_size * cache.block_size;
    for (int done = cached_tokens_;;) {
        int end = options_.prefill_chunk_tokens > 0 ? std::min(total, done + options_.prefill_chunk_tokens) : total;
        if (keeps && cache.snapshot_interval > 0) end = std::min(end, (done / cache.snapshot_interval + 1) * cache.snapshot_interval);
        if (keeps && done < last_cut) end = std::min(end, last_cut);
        const auto part = token_ids.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(end - done));
        if (end == total) {
            Draw draw = compute(part, &request, 0);
            if (keeps) keep(false);  // for a prompt that goes on from here, whatever is decoded now
            return draw;
        }
        compute(part, nullptr, 0);
        done = end;
        const bool is_mark = end != last_cut;
        if (keeps && (!is_mark || (cache.snapshot_interval > 0 && end % cache.snapshot_interval == 0))) keep(is_mark);
    }
}

Draw Session::decode_step(std::int32_t token_id, const Request& request, int draw) {
    const std::span<const std::int32_t> one(&token_id, 1);
    if (token_ids_.empty()) throw Error(ErrorKind::configuration, "The session is empty: call prefill before decode_step.", "token");
    check(one, num_tokens());
    return compute(one, &request, draw);
}

std::vector<std::int32_t> Session::verify(std::span<const std::int32_t> token_ids) {
    if (token_ids_.empty()) throw Error(ErrorKind::configuration, "The session is empty: call prefill before verify.", "tokens");
    check(token_ids, num_tokens());
    const std::size_t before = token_ids_.size();
    const bool returns = options_.has_states && token_ids.size() > 1;
    const auto is_before = [before](const Snapshot& one) { return one.position == static_cast<int>(before); };
    const bool was_kept = std::any_of(snapshots_.begin(), snapshots_.end(), is_before);
    if (returns) keep(false);
    const auto kept = std::find_if(snapshots_.begin(), snapshots_.end(), is_before);
    if (returns && kept == snapshots_.end()) {
        throw Error(ErrorKind::unsupported, "verify needs a second state slot to return to: make the engine with max_batch_size of at least 2.", "tokens");
    }
    const int slot = returns ? kept->slot : -1;
    const std::vector<float> logits = compute_logits(token_ids);
    const int vocab_size = runner_.vocab_size();
    std::vector<std::int32_t> ids(token_ids.size());
    for (std::size_t place = 0; place < ids.size(); ++place) {
        ids[place] = greedy(logits.data() + place * static_cast<std::size_t>(vocab_size), vocab_size);
        if (ids[place] >= 0) continue;
        reset();
        refuse_logits(static_cast<std::int64_t>(before + place + 1));
    }
    std::size_t accepted = 1;
    while (accepted < ids.size() && token_ids[accepted] == ids[accepted - 1]) ++accepted;
    if (accepted < ids.size()) {
        token_ids_.resize(before);
        if (returns) {
            copies_.push_back({slot, 0});
            compute(token_ids.first(accepted), nullptr, 0);
        } else {  // keys and values of the right guesses are in place
            token_ids_.insert(token_ids_.end(), token_ids.begin(), token_ids.begin() + static_cast<std::ptrdiff_t>(accepted));
        }
    }
    if (returns && !was_kept && std::erase_if(snapshots_, is_before) > 0) free_slots_.push_back(slot);  // a state a call would drive the prompts' out
    return ids;
}

std::vector<float> Session::logits(std::span<const std::int32_t> token_ids) {
    check(token_ids, 0);
    reset();
    const std::size_t chunk = options_.prefill_chunk_tokens > 0 ? static_cast<std::size_t>(options_.prefill_chunk_tokens) : token_ids.size();
    std::vector<float> all;
    all.reserve(token_ids.size() * static_cast<std::size_t>(runner_.vocab_size()));
    for (std::size_t done = 0; done < token_ids.size(); done += chunk) {
        const std::vector<float> part = compute_logits(token_ids.subspan(done, std::min(chunk, token_ids.size() - done)));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

int Session::restore(std::span<const std::int32_t> token_ids) {
    const std::size_t limit = std::min(token_ids_.size(), token_ids.size());
    const auto common = static_cast<int>(std::mismatch(token_ids_.begin(), token_ids_.begin() + static_cast<std::ptrdiff_t>(limit), token_ids.begin()).first -
                                         token_ids_.begin());
    const int most = std::min(common, static_cast<int>(token_ids.size()) - 1);  // the last token is computed for its logits
    int found = 0;
    if (options_.enable_prefix_caching && !options_.has_states) {
        found = most;
    } else if (options_.enable_prefix_caching && num_tokens() <= most) {
        found = static_cast<int>(num_tokens());  // the prompt goes on where the session is; another one may go on from here too
        if (found > 0) keep(false);
    } else if (options_.enable_prefix_caching) {
        Snapshot* best = nullptr;
        for (Snapshot& one : snapshots_) {
            if (one.position <= most && (best == nullptr || one.position > best->position)) best = &one;
        }
        if (best != nullptr) {
            found = best->position;
            best->last_use = ++uses_;
            copies_.push_back({best->slot, 0});
        }
    }
    token_ids_.resize(static_cast<std::size_t>(found));
    // What lies behind is overwritten now, and states of it are of no more use.
    std::erase_if(snapshots_, [&](const Snapshot& one) {
        if (one.position > found) free_slots_.push_back(one.slot);
        return one.position > found;
    });
    return found;
}

void Session::keep(bool is_mark) {
    const int position = static_cast<int>(num_tokens());
    for (Snapshot& one : snapshots_) {
        if (one.position == position) {
            one.last_use = ++uses_;
            one.is_mark = one.is_mark && is_mark;
            return;
        }
    }
    if (free_slots_.empty()) {
        if (snapshots_.empty()) return;
        const auto least = std::min_element(snapshots_.begin(), snapshots_.end(), [](const Snapshot& a, const Snapshot& b) {
            return std::pair(!a.is_mark, a.last_use) < std::pair(!b.is_mark, b.last_use);
        });
        free_slots_.push_back(least->slot);
        snapshots_.erase(least);
    }
    snapshots_.push_back({position, free_slots_.back(), is_mark, ++uses_});
    copies_.push_back({0, free_slots_.back()});
    free_slots_.pop_back();
}

RunRow Session::row(std::span<const std::int32_t> token_ids) const {
    RunRow row;
    row.token_ids = token_ids;
    row.num_computed_tokens = static_cast<int>(num_tokens());
    const auto block_size = static_cast<std::size_t>(runner_.cache().block_size);
    row.block_table = std::span(block_table_).first((token_ids_.size() + token_ids.size() + block_size - 1) / block_size);
    row.slot = 0;
    return row;
}

std::vector<float> Session::compute_logits(std::span<const std::int32_t> token_ids) {
    try {
        std::vector<float> logits = runner_.logits(row(token_ids), std::exchange(copies_, {}));
        token_ids_.insert(token_ids_.end(), token_ids.begin(), token_ids.end());
        return logits;
    } catch (...) {
        reset();
        throw;
    }
}

Draw Session::compute(std::span<const std::int32_t> token_ids, const Request* request, int draw) {
    static const Request none;
    RunRow one = row(token_ids);
    one.samples = request != nullptr;
    one.request = request != nullptr ? request : &none;
    one.draw = draw;
    try {
        const std::vector<StateCopy> copies = std::exchange(copies_, {});
        std::vector<Draw> draws = runner_.run(std::span<const RunRow>(&one, 1), copies);
        token_ids_.insert(token_ids_.end(), token_ids.begin(), token_ids.end());
        if (request == nullptr) return {};
        if (!draws.at(0).is_finite) refuse_logits(num_tokens());
        return std::move(draws[0]);
    } catch (...) {
        reset();
        throw;
    }
}

}  // namespace pocket
