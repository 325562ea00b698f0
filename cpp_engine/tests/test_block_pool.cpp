// Prefixes and the blocks that hold them.
#include "engine/block_pool.h"

#include <numeric>

#include "tests/check.h"

namespace {

using namespace pocket;
using Ids = std::vector<std::int32_t>;

Ids count_from(int first, int length) {
    Ids ids(static_cast<std::size_t>(length));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

void check_tables(const BlockPool& pool, const std::vector<Ids>& tables) {
    const std::vector<std::span<const std::int32_t>> spans(tables.begin(), tables.end());
    pool.check_integrity(spans);
}

// Blocks for `ids`, registered as a row that has computed them does.
Ids hold(BlockPool& pool, const Ids& ids) {
    const int size = pool.block_size();
    const Ids blocks = *pool.allocate((static_cast<int>(ids.size()) + size - 1) / size);
    Prefix prefix;
    for (int place = 0; (place + 1) * size <= static_cast<int>(ids.size()); ++place) {
        prefix = pool.prefixes().extend(prefix, std::span(ids).subspan(static_cast<std::size_t>(place * size), static_cast<std::size_t>(size)));
        pool.register_block(blocks[static_cast<std::size_t>(place)], prefix);
    }
    return blocks;
}

TEST(equal_prefixes_are_one) {
    PrefixTable table;
    const Ids ab{1, 2}, cd{3, 4};
    const Prefix root, first = table.extend(root, ab), second = table.extend(first, cd);
    CHECK(root.is_empty() && !first.is_empty());
    CHECK(table.extend(table.extend(root, ab), cd) == second);
    CHECK(table.find(first, cd) == second);
    CHECK(table.extend(root, cd) != second);
    CHECK(table.find(root, Ids{1, 3}).is_empty());
    CHECK(table.find(second, cd).is_empty());
    CHECK_EQ(table.size(), 3U - 1U);                                   // that of `cd` alone is gone again
}

TEST(a_prefix_keeps_those_before_it) {
    PrefixTable table;
    Prefix last;
    for (int block = 0; block < 100; ++block) last = table.extend(last, Ids{block});
    CHECK_EQ(table.size(), 100U);
    Prefix again;
    for (int block = 0; block < 100; ++block) again = table.find(again, Ids{block});
    CHECK(again == last);
    last = Prefix();
    CHECK_EQ(table.size(), 100U);
    again = Prefix();
    CHECK_EQ(table.size(), 0U);
}

TEST(a_chain_longer_than_a_stack_is_freed) {
    PrefixTable table;
    Prefix last;
    for (int block = 0; block < 300'000; ++block) last = table.extend(last, std::span(&block, 1));
    last = Prefix();
    CHECK_EQ(table.size(), 0U);
}

TEST(blocks_are_handed_out_once_and_come_back) {
    BlockPool pool(4, 2, true);
    const Ids first = *pool.allocate(3);
    CHECK_EQ(first, (Ids{0, 1, 2}));
    CHECK_EQ(pool.num_used(), 3);
    CHECK(!pool.allocate(2));
    CHECK_EQ(pool.num_available(), 1);
    check_tables(pool, {first});
    pool.free(first);
    CHECK_EQ(*pool.allocate(4), (Ids{3, 2, 1, 0}));                    // the one that has been free the longest first
}

TEST(a_cached_prefix_is_found_short_of_the_last_token) {
    BlockPool pool(8, 4, true);
    const Ids ids = count_from(10, 12), blocks = hold(pool, ids);
    CHECK_EQ(pool.match_prefix(ids), (Ids{blocks[0], blocks[1]}));
    CHECK_EQ(pool.match_prefix(count_from(10, 13)), blocks);
    CHECK_EQ(pool.match_prefix(count_from(10, 4)), Ids{});
    CHECK_EQ(pool.match_prefix(count_from(11, 12)), Ids{});
    Ids branch = ids;
    branch[5] = 99;
    CHECK_EQ(pool.match_prefix(branch), (Ids{blocks[0]}));
    pool.free(blocks);
    CHECK_EQ(pool.num_used(), 0);
    CHECK_EQ(pool.match_prefix(count_from(10, 13)), blocks);           // after its row has left
}

TEST(without_prefix_caching_nothing_is_found) {
    BlockPool pool(8, 4, false);
    const Ids blocks = hold(pool, count_from(0, 8));
    pool.free(blocks);
    CHECK_EQ(pool.match_prefix(count_from(0, 9)), Ids{});
    CHECK_EQ(pool.num_available(), 8);
}

TEST(shared_blocks_leave_with_their_last_row) {
    BlockPool pool(4, 2, true);
    const Ids blocks = hold(pool, {1, 2, 3, 4});
    pool.share(blocks);
    check_tables(pool, {blocks, blocks});
    pool.free(blocks);
    CHECK_EQ(pool.num_used(), 2);
    pool.free(blocks);
    CHECK_EQ(pool.num_used(), 0);
    pool.share(blocks);                                                // out of those that could be evicted
    CHECK_EQ(pool.num_used(), 2);
    check_tables(pool, {blocks});
}

TEST(the_tail_of_the_least_recently_used_prefix_makes_room) {
    BlockPool pool(4, 2, true);
    std::vector<Prefix> evicted;
    pool.on_evict = [&evicted](const Prefix& prefix) { evicted.push_back(prefix); };
    const Ids old_ids{1, 2, 3, 4}, new_ids{5, 6, 7, 8};
    pool.free(hold(pool, old_ids));
    pool.free(hold(pool, new_ids));
    const Ids taken = *pool.allocate(1);
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 3, 4, 0}).size(), 1U);
    CHECK_EQ(pool.match_prefix(Ids{5, 6, 7, 8, 0}).size(), 2U);
    CHECK_EQ(evicted.size(), 1U);
    CHECK(evicted[0] == pool.prefixes().extend(pool.prefixes().extend({}, Ids{1, 2}), Ids{3, 4}));
    check_tables(pool, {taken});
    pool.share(pool.match_prefix(Ids{1, 2, 0}));                       // used again, so the other one goes first
    pool.free(Ids{pool.match_prefix(Ids{1, 2, 0})[0]});
    const Ids more = *pool.allocate(2);
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 0}).size(), 1U);
    CHECK_EQ(pool.match_prefix(Ids{5, 6, 0}).size(), 0U);
    check_tables(pool, {taken, more});
}

TEST(the_first_block_of_a_prefix_stays_its_home) {
    BlockPool pool(4, 2, true);
    const Ids ids{1, 2}, one = hold(pool, ids), two = hold(pool, ids);
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 3}), one);
    pool.free(two);
    CHECK_EQ(pool.num_available(), 3);
    pool.free(one);
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 3}), one);
    check_tables(pool, {});
}

TEST(a_tail_is_found_again_when_its_head_comes_back) {
    BlockPool pool(6, 2, true);
    const Ids head = hold(pool, {1, 2}), both = hold(pool, {1, 2, 3, 4});
    pool.free(head);
    const Ids rest = *pool.allocate(4);                                // takes the home of the head, and not the tail, which is held
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 3, 4, 5}), Ids{});
    pool.free(rest);
    const Ids again = hold(pool, {1, 2});
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 3, 4, 5}), (Ids{again[0], both[1]}));
    check_tables(pool, {both, again});
}

TEST(what_is_forgotten_is_not_found) {
    BlockPool pool(4, 2, true);
    const Ids blocks = hold(pool, {1, 2, 3, 4});
    const Prefix head = pool.prefix_of(blocks[0]);
    pool.forget(head);
    CHECK_EQ(pool.match_prefix(Ids{1, 2, 3, 4, 5}), Ids{});
    check_tables(pool, {blocks});
    pool.free(blocks);
    check_tables(pool, {});
    pool.forget(pool.prefix_of(blocks[1]));                            // which nobody holds
    check_tables(pool, {});
    CHECK_EQ(pool.num_available(), 4);
}

TEST(wrong_books_are_noticed) {
    BlockPool pool(4, 2, true);
    const Ids blocks = *pool.allocate(2);
    CHECK_THROWS(check_tables(pool, {}), "reference counts differ");
    CHECK_THROWS(check_tables(pool, {blocks, blocks}), "reference counts differ");
    CHECK_THROWS(check_tables(pool, {{0, 2}}), "reference counts differ");
    check_tables(pool, {blocks});
}

}  // namespace
