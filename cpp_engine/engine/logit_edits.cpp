#include "engine/logit_edits.h"

#include <algorithm>
#include <limits>

namespace pocket {

namespace {

constexpr float never = -std::numeric_limits<float>::infinity();

}  // namespace

LogitEdits::LogitEdits(const LogitTerms& terms, std::span<const std::int32_t> prompt, std::span<const std::int32_t> ends)
    : terms_(terms), counts_answer_(terms.repetition_penalty != 1 || terms.frequency_penalty != 0 || terms.presence_penalty != 0) {
    if (terms.repetition_penalty != 1) {
        for (const std::int32_t id : prompt) seen_[place_of(id)].is_in_prompt = true;
    }
    for (const auto& [id, bias] : terms.logit_bias) seen_[place_of(id)].bias = bias;
    for (const auto& word : terms.bad_words) {
        if (word.size() == 1) {
            seen_[place_of(word[0])].is_banned = true;
        } else if (!word.empty()) {
            words_[word[word.size() - 2]].push_back(&word);
        }
    }
    if (terms.min_tokens > 0) {
        for (const std::int32_t id : ends) {
            const std::size_t place = place_of(id);
            if (!seen_[place].is_banned) ends_.push_back(place);
        }
    }
    for (const std::size_t place : ends_) seen_[place].is_banned = true;
    for (std::size_t place = 0; place < entries_.size(); ++place) update(place);
}

std::span<const LogitEdit> LogitEdits::step(std::span<const std::int32_t> answer) {
    for (const std::size_t place : banned_now_) update(place);
    banned_now_.clear();
    if (!ends_.empty() && answer.size() >= static_cast<std::size_t>(terms_.min_tokens)) {
        for (const std::size_t place : ends_) seen_[place].is_banned = false, update(place);
        ends_.clear();
    }
    if (counts_answer_) {
        for (; num_counted_ < answer.size(); ++num_counted_) {
            const std::size_t place = place_of(answer[num_counted_]);
            ++seen_[place].count;
            update(place);
        }
    }
    if (answer.empty() || words_.empty()) return entries_;
    if (const auto found = words_.find(answer.back()); found != words_.end()) {
        for (const std::vector<std::int32_t>* word : found->second) {
            const std::span<const std::int32_t> before(word->data(), word->size() - 1);
            if (answer.size() >= before.size() && std::ranges::equal(answer.last(before.size()), before)) ban(place_of(word->back()));
        }
    }
    return entries_;
}

std::span<const std::uint32_t> LogitEdits::allowed(int vocab_size) {
    if (terms_.allowed_token_ids && allowed_.empty()) {
        allowed_.assign(static_cast<std::size_t>(vocab_size + 31) / 32, 0);
        for (const std::int32_t id : *terms_.allowed_token_ids) allowed_[static_cast<std::size_t>(id / 32)] |= 1U << id % 32;
    }
    return allowed_;
}

std::size_t LogitEdits::place_of(std::int32_t id) {
    const auto [found, is_new] = places_.try_emplace(id, entries_.size());
    if (is_new) {
        entries_.push_back({id, 1, 0});
        seen_.emplace_back();
    }
    return found->second;
}

void LogitEdits::update(std::size_t place) {
    const Seen& seen = seen_[place];
    LogitEdit& entry = entries_[place];
    entry.scale = seen.is_in_prompt || seen.count > 0 ? terms_.repetition_penalty : 1.0f;
    const double taken = static_cast<double>(terms_.frequency_penalty) * seen.count + (seen.count > 0 ? static_cast<double>(terms_.presence_penalty) : 0.0);
    entry.offset = seen.is_banned ? never : static_cast<float>(seen.bias - taken);
}

void LogitEdits::ban(std::size_t place) {
    entries_[place].offset = never;
    banned_now_.push_back(place);
}

}  // namespace pocket
