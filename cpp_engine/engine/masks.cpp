#include "engine/masks.h"

#include <algorithm>

#include "pocket/error.h"

namespace pocket {

const std::uint32_t* Masks::fill(std::size_t place, const Row& row) {
    if (row.request.constraint == nullptr) return nullptr;
    if (words_.size() <= place) words_.resize(place + 1);
    auto& words = words_[place];
    words.assign(static_cast<std::size_t>(vocab_size_ + 31) / 32, 0);
    row.request.constraint->fill(words);
    if (vocab_size_ % 32 != 0) words.back() &= (1U << vocab_size_ % 32) - 1;  // there are no such ids, so they must not count as allowed
    if (std::ranges::all_of(words, [](std::uint32_t word) { return word == 0; })) {
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
