// Slots of recurrent states: what is kept, what makes room, and the copies that follow from it.
#include "engine/state_pool.h"

#include "tests/check.h"

namespace {

using namespace pocket;
using Copies = std::vector<std::pair<int, int>>;

Copies taken(StatePool& pool) {
    Copies copies;
    for (const auto& [from, to] : pool.take_copies()) copies.emplace_back(from, to);
    return copies;
}

std::vector<bool> kept(const StatePool& pool, const std::vector<Prefix>& prefixes) {
    std::vector<bool> found;
    for (const Prefix& prefix : prefixes) found.push_back(pool.has(prefix));
    return found;
}

void check_newest(const StatePool& pool, const std::vector<std::shared_ptr<Snapshot>>& newest) { pool.check_integrity(newest); }

// Four prefixes of one block each.
struct Prefixes {
    PrefixTable table;
    Prefix a = make(1), b = make(2), c = make(3), d = make(4);
    std::vector<Prefix> all{a, b, c, d};

    Prefix make(std::int32_t id) { return table.extend({}, std::span(&id, 1)); }
};

TEST(a_new_row_starts_from_nothing) {
    StatePool pool(2, 2);
    pool.start(0, {});
    pool.start(1, {});
    CHECK(taken(pool) == (Copies{{-1, 0}, {-1, 1}}));
    CHECK(taken(pool).empty());
    check_newest(pool, {nullptr, nullptr});
}

TEST(a_row_goes_on_from_a_snapshot) {
    Prefixes of;
    StatePool pool(2, 2);
    pool.start(0, {});
    const auto snapshot = pool.save(0, of.a, nullptr, Worth::lasting);
    CHECK(pool.has(of.a) && !pool.has(of.b));
    pool.start(1, of.a);
    CHECK(taken(pool) == (Copies{{-1, 0}, {0, 2}, {2, 1}}));
    check_newest(pool, {snapshot, nullptr});
    pool.end(snapshot);
    pool.end(nullptr);
    check_newest(pool, {});
    CHECK(pool.has(of.a));
}

TEST(a_passing_snapshot_gives_way_to_the_rows_next) {
    Prefixes of;
    StatePool pool(1, 2);
    pool.start(0, {});
    const auto first = pool.save(0, of.a, nullptr, Worth::passing), second = pool.save(0, of.b, first, Worth::passing);
    CHECK_EQ(kept(pool, of.all), (std::vector{false, true, false, false}));
    const auto third = pool.save(0, of.c, second, Worth::lasting), fourth = pool.save(0, of.d, third, Worth::passing);
    CHECK_EQ(kept(pool, of.all), (std::vector{false, false, true, true}));
    check_newest(pool, {fourth});
}

TEST(the_last_one_of_a_row_that_ends_is_kept) {
    Prefixes of;
    StatePool pool(1, 2);
    pool.end(pool.save(0, of.a, nullptr, Worth::passing));
    pool.end(pool.save(0, of.b, pool.save(0, of.c, nullptr, Worth::passing), Worth::passing));
    CHECK_EQ(kept(pool, of.all), (std::vector{true, true, false, false}));
    check_newest(pool, {});
}

TEST(one_that_another_row_started_from_is_kept) {
    Prefixes of;
    StatePool pool(2, 3);
    const auto first = pool.save(0, of.a, nullptr, Worth::passing);
    pool.start(1, of.a);
    pool.save(0, of.b, first, Worth::passing);
    CHECK(pool.has(of.a));
}

TEST(rows_with_equal_prefixes_share_one_until_the_last_goes_on) {
    Prefixes of;
    StatePool pool(2, 3);
    auto mine = pool.save(0, of.a, nullptr, Worth::passing), other = pool.save(1, of.a, nullptr, Worth::passing);
    CHECK(mine == other);
    CHECK(taken(pool) == (Copies{{0, 2}}));
    mine = pool.save(0, of.b, mine, Worth::passing);
    CHECK(pool.has(of.a));
    other = pool.save(1, of.c, other, Worth::passing);
    CHECK(!pool.has(of.a));
    check_newest(pool, {mine, other});
}

TEST(the_least_recently_used_one_makes_room) {
    Prefixes of;
    StatePool pool(2, 2);
    for (const Prefix& prefix : {of.a, of.b}) pool.save(0, prefix, nullptr, Worth::lasting);
    pool.start(1, of.a);
    pool.save(0, of.c, nullptr, Worth::lasting);
    CHECK_EQ(kept(pool, of.all), (std::vector{true, false, true, false}));
    CHECK(taken(pool) == (Copies{{0, 2}, {0, 3}, {2, 1}, {0, 3}}));
}

TEST(marks_of_an_interval_make_room_first_unless_a_row_is_there_or_one_started_there) {
    Prefixes of;
    StatePool pool(3, 3);
    pool.save(0, of.a, nullptr, Worth::lasting);
    const auto mark = pool.save(0, of.b, nullptr, Worth::interval), held = pool.save(0, of.c, nullptr, Worth::interval);
    pool.save(1, of.d, mark, Worth::interval);                         // the row that left b has gone on
    CHECK_EQ(kept(pool, of.all), (std::vector{true, false, true, true}));
    pool.start(2, of.d);
    pool.save(1, of.b, held, Worth::passing);                          // now nobody is at c
    CHECK_EQ(kept(pool, of.all), (std::vector{true, true, false, true}));
}

TEST(a_row_outlives_its_snapshot) {
    Prefixes of;
    StatePool pool(2, 1);
    const auto lost = pool.save(0, of.a, nullptr, Worth::passing), held = pool.save(1, of.b, nullptr, Worth::passing);
    CHECK_EQ(lost->slot, -1);
    CHECK_EQ(held->slot, 2);
    const auto again = pool.save(1, of.a, held, Worth::passing);
    check_newest(pool, {lost, again});
    const auto newest = pool.save(0, of.c, lost, Worth::passing);      // takes the slot of `again`, not because of `lost`
    check_newest(pool, {newest, again});
    pool.end(newest);
    pool.end(again);
    check_newest(pool, {});
    CHECK_EQ(pool.num_snapshots(), 1);
}

TEST(without_room_for_any_nothing_is_copied) {
    Prefixes of;
    StatePool pool(1, 0);
    CHECK(pool.save(0, of.a, nullptr, Worth::lasting) == nullptr);
    CHECK(taken(pool).empty());
    check_newest(pool, {nullptr});
}

TEST(wrong_books_are_noticed) {
    Prefixes of;
    StatePool pool(2, 2);
    const auto snapshot = pool.save(0, of.a, nullptr, Worth::lasting);
    check_newest(pool, {snapshot});
    CHECK_THROWS(check_newest(pool, {}), "counts other rows");
    CHECK_THROWS(check_newest(pool, {nullptr}), "counts other rows");
    CHECK_THROWS(check_newest(pool, {snapshot, snapshot}), "counts other rows");
    snapshot->slot = 3;
    CHECK_THROWS(check_newest(pool, {snapshot}), "a snapshot's slot is lost");
}

}  // namespace
