#include "engine/block_pool.h"

#include <algorithm>
#include <ranges>
#include <stdexcept>

namespace pocket {

BlockPool::BlockPool(int num_blocks, int block_size, bool enable_prefix_caching)
    : block_size_(block_size),
      enable_prefix_caching_(enable_prefix_caching),
      ref_counts_(static_cast<std::size_t>(num_blocks)),
      list_of_(static_cast<std::size_t>(num_blocks), &free_),
      prefix_of_(static_cast<std::size_t>(num_blocks)) {
    for (std::int32_t block = 0; block < num_blocks; ++block) place_of_.push_back(free_.insert(free_.end(), block));
}

std::vector<std::int32_t> BlockPool::match_prefix(std::span<const std::int32_t> token_ids) const {
    std::vector<std::int32_t> blocks;
    if (!enable_prefix_caching_) return blocks;
    const auto size = static_cast<std::size_t>(block_size_);
    Prefix prefix;
    for (std::size_t start = 0; start + size < token_ids.size(); start += size) {
        prefix = prefixes_.find(prefix, token_ids.subspan(start, size));
        const auto home = prefix.is_empty() ? block_of_.end() : block_of_.find(prefix);
        if (home == block_of_.end()) break;
        blocks.push_back(home->second);
    }
    return blocks;
}

void BlockPool::share(std::span<const std::int32_t> blocks) {
    for (std::int32_t block : blocks) {
        if (ref_counts_[static_cast<std::size_t>(block)]++ == 0) move_to(used_, block);
    }
}

std::optional<std::vector<std::int32_t>> BlockPool::allocate(int count) {
    if (count > num_available()) return std::nullopt;
    std::vector<std::int32_t> blocks;
    blocks.reserve(static_cast<std::size_t>(count));
    while (static_cast<int>(blocks.size()) < count) {
        if (free_.empty()) forget(Prefix(prefix_of(evictable_.front())));
        const std::int32_t block = free_.front();
        move_to(used_, block);
        ref_counts_[static_cast<std::size_t>(block)] = 1;
        blocks.push_back(block);
    }
    return blocks;
}

void BlockPool::free(std::span<const std::int32_t> blocks) {
    for (std::int32_t block : std::views::reverse(blocks)) {
        if (--ref_counts_[static_cast<std::size_t>(block)] == 0) move_to(prefix_of(block).is_empty() ? free_ : evictable_, block);
    }
}

void BlockPool::register_block(std::int32_t block, const Prefix& prefix) {
    Prefix& held = prefix_of_[static_cast<std::size_t>(block)];
    if (enable_prefix_caching_ && held.is_empty() && block_of_.try_emplace(prefix, block).second) held = prefix;
}

void BlockPool::forget(const Prefix& prefix) {
    const auto home = block_of_.find(prefix);
    if (home == block_of_.end()) return;
    const std::int32_t block = home->second;
    block_of_.erase(home);
    prefix_of_[static_cast<std::size_t>(block)] = Prefix();
    if (ref_counts_[static_cast<std::size_t>(block)] == 0) move_to(free_, block);
    if (on_evict) on_evict(prefix);
}

void BlockPool::move_to(Blocks& to, std::int32_t block) {
    Blocks*& from = list_of_[static_cast<std::size_t>(block)];
    to.splice(to.end(), *from, place_of_[static_cast<std::size_t>(block)]);
    from = &to;
}

void BlockPool::check_integrity(std::span<const std::span<const std::int32_t>> tables) const {
    const auto check = [](bool holds, const char* message) {
        if (!holds) throw std::logic_error(message);
    };
    std::vector<int> counts(ref_counts_.size());
    for (const auto table : tables) {
        for (std::int32_t block : table) ++counts[static_cast<std::size_t>(block)];
    }
    check(counts == ref_counts_, "reference counts differ from the block tables");
    check(free_.size() + evictable_.size() + used_.size() == counts.size(), "a block is lost or listed twice");
    std::size_t num_known = 0;
    for (std::size_t block = 0; block < counts.size(); ++block) {
        const Prefix& prefix = prefix_of_[block];
        check(*place_of_[block] == static_cast<std::int32_t>(block), "a block has another one's place");
        check(list_of_[block] == (counts[block] > 0 ? &used_ : prefix.is_empty() ? &free_ : &evictable_), "a block is in the wrong list");
        if (prefix.is_empty()) continue;
        ++num_known;
        const auto home = block_of_.find(prefix);
        check(home != block_of_.end() && home->second == static_cast<std::int32_t>(block), "the two prefix maps differ");
    }
    check(num_known == block_of_.size(), "a prefix has a block that does not know of it");
}

}  // namespace pocket
