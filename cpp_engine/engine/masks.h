// Masks of rows that have a constraint, or allow some ids alone: which each may draw next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/row.h"

namespace pocket {

// The masks of one step's rows. Rows without a constraint cost nothing. One thread calls this, the engine's.
class Masks {
public:
    explicit Masks(int vocab_size) : vocab_size_(vocab_size) {}

    // The next mask of a row that samples: what its constraint and its request allow, without what `edits`, of this draw, rule out; null where neither is
    // there. The words stay as they are until the next call for this `place` in a step. Throws what the constraint throws, and Error where no id is left.
    const std::uint32_t* fill(std::size_t place, Row& row, std::span<const LogitEdit> edits);

    // Tell the constraint of a row what it drew, before the scheduler resolves it, and note whether anything may follow. Throws what the constraint throws.
    static void accept(Row& row, std::int32_t token_id);

private:
    int vocab_size_;
    std::vector<std::vector<std::uint32_t>> words_;                    // by place
};

}  // namespace pocket
