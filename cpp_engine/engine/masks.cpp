#include "engine/masks.h"

#include <algorithm>
#include <cmath>

#include "pocket/error.h"

namespace pocket {

namespace {

// A row whose request has terms can draw nothing; the first of them that may be why is named.
[[noreturn]] void refuse(const LogitTerms& terms) {
    throw Error(ErrorKind::configuration,
                "What this request allows leaves no token here, so its answer can be neither continued nor ended: relax \"allowed_token_ids\", \"bad_words\", "
                "\"min_tokens\", or the form that the answer is held to.",
                terms.allowed_token_ids ? "allowed_token_ids" : !terms.bad_words.empty() ? "bad_words" : "min_tokens");
}

}  // namespace

const std::uint32_t* Masks::fill(std::size_t place, Row& row, std::span<const LogitEdit> edits) {
    TokenConstraint* constraint = row.request.constraint.get();
    const std::span<const std::uint32_t> allowed = row.edits ? row.edits->allowed(vocab_size_) : std::span<const std::uint32_t>();
    const auto is_banned = [](const LogitEdit& edit) { return std::isinf(edit.offset); };
    if (constraint == nullptr && allowed.empty()) {
        const auto vocab_size = static_cast<std::size_t>(vocab_size_);
        if (edits.size() >= vocab_size && static_cast<std::size_t>(std::ranges::count_if(edits, is_banned)) >= vocab_size) refuse(*row.request.terms);
        return nullptr;
    }
    if (words_.size() <= place) words_.resize(place + 1);
    auto& words = words_[place];
    words.assign(static_cast<std::size_t>(vocab_size_ + 31) / 32, 0);
    if (constraint != nullptr) {
        constraint->fill(words);
        if (vocab_size_ % 32 != 0) words.back() &= (1U << vocab_size_ % 32) - 1;  // there are no such ids, so they must not count as allowed
        for (std::size_t word = 0; word < allowed.size(); ++word) words[word] &= allowed[word];
    } else {
        std::ranges::copy(allowed, words.begin());
    }
    for (const LogitEdit& edit : edits) {
        if (is_banned(edit)) words[static_cast<std::size_t>(edit.id / 32)] &= ~(1U << edit.id % 32);
    }
    if (std::ranges::all_of(words, [](std::uint32_t word) { return word == 0; })) {
        if (row.request.terms) refuse(*row.request.terms);
        throw Error(ErrorKind::configuration, "The constraint on this answer allows no token here, so it can be neither continued nor ended: relax it.",
                    "constraint");
    }
    return words.data();
}

void Masks::accept(Row& row, std::int32_t token_id) {
    TokenConstraint* constraint = row.request.constraint.get();
    if (constraint == nullptr || row.is_stop(token_id)) return;
    constraint->accept(token_id);
    row.is_complete = constraint->is_complete();
}

}  // namespace pocket
