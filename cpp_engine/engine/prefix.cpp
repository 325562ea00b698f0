#include "engine/prefix.h"

#include <algorithm>
#include <random>
#include <utility>

namespace pocket {

struct Prefix::Node {
    PrefixTable* table;
    Node* parent;                                                      // counts as a reference to it; null at the first block
    std::vector<std::int32_t> block_ids;
    std::uint64_t hash;                                                // of all ids up to here
    std::size_t references;
};

namespace {

// Both halves of a product of 128 bits: each bit of either factor reaches all of the result.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

Prefix& Prefix::operator=(Prefix other) noexcept {
    std::swap(node_, other.node_);
    return *this;
}

void Prefix::acquire() noexcept {
    if (node_ != nullptr) ++node_->references;
}

// A loop, since a chain is as long as a context has blocks, which is more than a stack has room for.
void Prefix::release() noexcept {
    Node* node = std::exchange(node_, nullptr);
    while (node != nullptr && --node->references == 0) {
        auto& nodes = node->table->nodes_;
        const auto [first, last] = nodes.equal_range(node->hash);
        nodes.erase(std::find_if(first, last, [node](const auto& entry) { return entry.second == node; }));
        Node* parent = node->parent;
        delete node;
        node = parent;
    }
}

PrefixTable::PrefixTable() {
    std::random_device device;
    key_ = (static_cast<std::uint64_t>(device()) << 32 | device()) | 1;
}

Prefix PrefixTable::extend(const Prefix& parent, std::span<const std::int32_t> block_ids) {
    const std::uint64_t key = hash(parent, block_ids);
    if (Prefix::Node* known = lookup(key, parent, block_ids)) return Prefix(known);
    const auto entry = nodes_.emplace(key, nullptr);
    try {
        entry->second = new Prefix::Node{this, parent.node_, {block_ids.begin(), block_ids.end()}, key, 0};
    } catch (...) {
        nodes_.erase(entry);
        throw;
    }
    if (parent.node_ != nullptr) ++parent.node_->references;
    return Prefix(entry->second);
}

Prefix PrefixTable::find(const Prefix& parent, std::span<const std::int32_t> block_ids) const {
    return Prefix(lookup(hash(parent, block_ids), parent, block_ids));
}

std::uint64_t PrefixTable::hash(const Prefix& parent, std::span<const std::int32_t> block_ids) const noexcept {
    std::uint64_t value = parent.node_ == nullptr ? ~key_ : parent.node_->hash;
    for (std::int32_t token_id : block_ids) value = fold(value ^ key_, (static_cast<std::uint64_t>(token_id) << 32 | 0x9e3779b9) ^ value);
    return value;
}

Prefix::Node* PrefixTable::lookup(std::uint64_t hash, const Prefix& parent, std::span<const std::int32_t> block_ids) const {
    const auto [first, last] = nodes_.equal_range(hash);
    const auto found = std::find_if(first, last, [&](const auto& entry) {
        return entry.second->parent == parent.node_ && std::ranges::equal(entry.second->block_ids, block_ids);
    });
    return found == last ? nullptr : found->second;
}

}  // namespace pocket
