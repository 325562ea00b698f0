// Beginnings of token sequences, in whole blocks, as values that compare in one instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

namespace pocket {

class PrefixTable;

// A beginning of so many whole blocks of token ids, or the empty one. Two prefixes of one table are equal if and only if all their ids are: the table
// holds each sequence of ids once, and compares ids, so no hash is ever taken for an equality.
//
// A handle counts as a reference, on the prefixes before it too; a prefix that nobody refers to leaves the table. One thread uses a table and its handles.
class Prefix {
public:
    Prefix() = default;
    Prefix(const Prefix& other) noexcept : node_(other.node_) { acquire(); }
    Prefix(Prefix&& other) noexcept : node_(other.node_) { other.node_ = nullptr; }
    Prefix& operator=(Prefix other) noexcept;
    ~Prefix() { release(); }

    bool is_empty() const noexcept { return node_ == nullptr; }
    friend bool operator==(const Prefix&, const Prefix&) = default;

private:
    friend class PrefixTable;
    friend struct std::hash<Prefix>;
    struct Node;
    explicit Prefix(Node* node) noexcept : node_(node) { acquire(); }
    void acquire() noexcept;
    void release() noexcept;

    Node* node_ = nullptr;
};

// The prefixes that somebody refers to. Outlives them.
class PrefixTable {
public:
    PrefixTable();
    PrefixTable(const PrefixTable&) = delete;
    PrefixTable& operator=(const PrefixTable&) = delete;

    // `parent` and then the ids of one more block.
    Prefix extend(const Prefix& parent, std::span<const std::int32_t> block_ids);

    // The same where somebody refers to it already, else the empty one.
    Prefix find(const Prefix& parent, std::span<const std::int32_t> block_ids) const;

    std::size_t size() const noexcept { return nodes_.size(); }

private:
    friend class Prefix;
    std::uint64_t hash(const Prefix& parent, std::span<const std::int32_t> block_ids) const noexcept;
    Prefix::Node* lookup(std::uint64_t hash, const Prefix& parent, std::span<const std::int32_t> block_ids) const;

    std::uint64_t key_;                                                // differs from run to run, so that nobody can choose prompts that collide
    std::unordered_multimap<std::uint64_t, Prefix::Node*> nodes_;
};

}  // namespace pocket

template <>
struct std::hash<pocket::Prefix> {
    std::size_t operator()(const pocket::Prefix& prefix) const noexcept { return std::hash<const void*>()(prefix.node_); }
};
