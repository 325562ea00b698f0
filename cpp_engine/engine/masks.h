// Masks of constrained rows: which ids each may draw next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/row.h"

namespace pocket {

// The masks of one step's rows. Rows without a constraint cost nothing. One thread calls this, the engine's.
class Masks {
public:
    explicit Masks(int vocab_size) : vocab_size_(vocab_size) {}

    // Ask the constraint of a row that samples for its next mask; null where it has none. The words stay as they are until the next call for this `place`
    // in a step. Throws what the constraint throws, and Error where it allows no id.
    const std::uint32_t* fill(std::size_t place, const Row& row);

    // Tell the constraint of a row what it drew, before the scheduler resolves it, and note whether anything may follow. Throws what the constraint throws.
    static void accept(Row& row, std::int32_t token_id);

private:
    int vocab_size_;
    std::vector<std::vector<std::uint32_t>> words_;                    // by place
};

}  // namespace pocket
