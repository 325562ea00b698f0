// KV blocks as plain ints: who holds which, and which cached prefix each one carries. No tensors.
//
// A block is free (nothing refers to it), in use (reference count above zero), or evictable (reference count zero, but its content is a known prefix that
// a later request may take up again).
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/prefix.h"

namespace pocket {

// Hands out fixed-size KV blocks and remembers full ones by the prefix that they end. One thread uses it.
class BlockPool {
public:
    // Blocks [0, num_blocks) of `block_size` tokens. With prefix caching, freed full blocks are kept for reuse until the space is needed, the least
    // recently used first.
    BlockPool(int num_blocks, int block_size, bool enable_prefix_caching);

    // Told the prefix whose block is given away, where something else is kept for that prefix.
    std::function<void(const Prefix&)> on_evict;

    int num_blocks() const noexcept { return static_cast<int>(ref_counts_.size()); }
    int block_size() const noexcept { return block_size_; }
    bool enable_prefix_caching() const noexcept { return enable_prefix_caching_; }
    int num_available() const noexcept { return static_cast<int>(free_.size() + evictable_.size()); }  // that `allocate` can hand out now
    int num_used() const noexcept { return num_blocks() - num_available(); }
    PrefixTable& prefixes() noexcept { return prefixes_; }

    // Longest run of cached blocks that holds the beginning of `token_ids`, short of its last token, whose logits have to be computed. References are not
    // taken: call `share` next.
    std::vector<std::int32_t> match_prefix(std::span<const std::int32_t> token_ids) const;

    // The prefix that ends with `block`, which `match_prefix` found.
    const Prefix& prefix_of(std::int32_t block) const { return prefix_of_[static_cast<std::size_t>(block)]; }

    // Take one reference on each of `blocks`, which `match_prefix` found.
    void share(std::span<const std::int32_t> blocks);

    // `count` blocks with one reference each, or nothing, and nothing taken, when fewer are available.
    std::optional<std::vector<std::int32_t>> allocate(int count);

    // Give one reference back on each block of a row, in table order. The tail of a prefix is put up for eviction before its head, since a head is useful
    // without its tail but not the reverse.
    void free(std::span<const std::int32_t> blocks);

    // Record that the full, computed `block` ends `prefix`. The first block of a prefix stays its home.
    void register_block(std::int32_t block, const Prefix& prefix);

    // No row takes up `prefix` again; those that hold its block keep it. `on_evict` is told.
    void forget(const Prefix& prefix);

    // std::logic_error unless the reference counts are just those of `tables`, the block tables of all rows.
    void check_integrity(std::span<const std::span<const std::int32_t>> tables) const;

private:
    using Blocks = std::list<std::int32_t>;
    void move_to(Blocks& to, std::int32_t block);

    PrefixTable prefixes_;                                             // first, so that it outlives the handles below
    int block_size_;
    bool enable_prefix_caching_;
    std::vector<int> ref_counts_;
    Blocks free_, evictable_, used_;                                   // the one that is taken next comes first; each block is in one of them
    std::vector<Blocks::iterator> place_of_;
    std::vector<Blocks*> list_of_;
    std::vector<Prefix> prefix_of_;                                    // empty where a block holds no known prefix
    std::unordered_map<Prefix, std::int32_t> block_of_;
};

}  // namespace pocket
