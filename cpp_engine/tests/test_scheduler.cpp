// The scheduler alone, in the loop of either kind of device: one that has a step's ids at once, and one that has them a step later.
#include "engine/scheduler.h"

#include <map>
#include <optional>
#include <random>

#include "tests/answer.h"
#include "tests/check.h"

namespace {

using namespace pocket;
using Shares = std::vector<std::pair<RequestId, int>>;

// Plays a device that computes as late as it may: what a step needs is read when it is chosen, and computed when its ids are asked for.
class Driver {
public:
    Driver(const CacheShape& cache, const SchedulerOptions& options, bool runs_ahead = false)
        : scheduler(cache, options), runner(cache), runs_ahead_(runs_ahead), drawn_(static_cast<std::size_t>(cache.num_row_slots)) {}

    std::shared_ptr<Row> add(const Request& request) {
        auto row = std::make_shared<Row>(++last_id_, request);
        scheduler.add(row);
        return row;
    }

    // One turn of the loop; what each row computes.
    Shares turn() {
        Shares shares;
        if (flying_ && !scheduler.can_run_ahead()) return land(), shares;
        const auto preemptions = scheduler.num_preemptions();
        const StepPlan step = scheduler.schedule();
        scheduler.check_integrity();
        if (step.empty() && !flying_ && !scheduler.is_idle()) throw std::logic_error("there are rows and none is scheduled");
        if (flying_ && scheduler.num_preemptions() > preemptions) throw std::logic_error("a row is preempted that may be about to end");
        for (const auto& [row, num_tokens, samples] : step) shares.emplace_back(row->id, num_tokens);
        std::optional<Flight> launched;
        if (!step.empty()) launched = prepare(step);
        if (flying_) land();
        if (launched) {
            scheduler.advance(step);
            scheduler.check_integrity();
            flying_ = std::move(launched);
            if (!runs_ahead_) land();
        }
        return shares;
    }

    std::vector<Shares> run() {
        std::vector<Shares> turns;
        while (flying_ || !scheduler.is_idle()) turns.push_back(turn());
        return turns;
    }

    bool is_busy() const { return flying_ || !scheduler.is_idle(); }

    Scheduler scheduler;
    ToyRunner runner;
    std::map<RequestId, std::vector<std::int32_t>> answers;
    std::map<RequestId, FinishReason> reasons;

private:
    struct Work {
        std::vector<std::int32_t> token_ids, block_table;
        int start, slot, draw;
        bool samples;
        std::shared_ptr<Row> row;
    };
    struct Flight {
        StepPlan step;
        std::vector<Work> rows;
        std::vector<StateCopy> copies;
    };

    Flight prepare(const StepPlan& step) {
        Flight flight{step, {}, scheduler.take_copies()};
        std::erase_if(flight.copies, [](const StateCopy& copy) { return copy.from < 0; });
        for (const auto& [row, num_tokens, samples] : step) {
            const auto first = row->token_ids.begin() + row->num_computed_tokens;
            flight.rows.push_back({{first, first + num_tokens}, row->block_table, row->num_computed_tokens, row->slot, row->num_generated(), samples, row});
            CHECK(row->num_generated() < row->request.max_tokens);
        }
        return flight;
    }

    void land() {
        Flight flight = *std::exchange(flying_, std::nullopt);
        std::vector<RunRow> rows;
        for (Work& work : flight.rows) {
            if (work.token_ids.back() == unknown_token) work.token_ids.back() = drawn_[static_cast<std::size_t>(work.slot)];
            rows.push_back({work.token_ids, work.start, work.block_table, work.slot, work.samples, &work.row->request, work.draw, nullptr});
        }
        const auto draws = runner.run(rows, flight.copies);
        std::vector<std::int32_t> drawn(flight.step.size(), -1);
        auto next = draws.begin();
        for (std::size_t place = 0; place < drawn.size(); ++place) {
            if (flight.rows[place].samples) drawn_[static_cast<std::size_t>(flight.rows[place].slot)] = drawn[place] = next++->token_id;
        }
        for (const RowUpdate& update : scheduler.resolve(flight.step, drawn)) {
            CHECK(!reasons.contains(update.row->id));
            if (update.token_id) answers[update.row->id].push_back(*update.token_id);
            CHECK_EQ(update.num_generated, update.row->num_generated());
            if (update.finish_reason) reasons[update.row->id] = *update.finish_reason;
        }
        scheduler.check_integrity();
    }

    bool runs_ahead_;
    RequestId last_id_ = 0;
    std::vector<std::int32_t> drawn_;                                  // by slot, the newest
    std::optional<Flight> flying_;
};

SchedulerOptions options(int rows, int budget = 0, bool caches = true) { return {rows, budget, 0, caches}; }

TEST(nothing_to_do_is_an_empty_step) { CHECK(Driver(attention_cache(8), options(4)).scheduler.schedule().empty()); }

TEST(requests_are_admitted_in_order_of_arrival) {
    Driver driver(attention_cache(64), options(2));
    driver.add(ask_for(0, 3, 2)), driver.add(ask_for(20, 4, 3)), driver.add(ask_for(40, 5, 2));
    CHECK(driver.run() == (std::vector<Shares>{{{1, 3}, {2, 4}}, {{1, 1}, {2, 1}}, {{2, 1}, {3, 5}}, {{3, 1}}}));
}

TEST(a_large_request_at_the_head_is_not_overtaken) {
    Driver driver(attention_cache(4), options(4));
    driver.add(ask_for(0, 8, 2)), driver.add(ask_for(20, 12, 1)), driver.add(ask_for(40, 1, 1));
    CHECK(driver.run() == (std::vector<Shares>{{{1, 8}}, {{1, 1}}, {{2, 12}, {3, 1}}}));
}

TEST(the_budget_is_shared_by_all_prompts_of_a_step_and_decoding_costs_none) {
    Driver driver(attention_cache(64), options(4, 8));
    driver.add(ask_for(0, 5, 2)), driver.add(ask_for(20, 5, 2)), driver.add(ask_for(40, 5, 1));
    CHECK(driver.run() == (std::vector<Shares>{{{1, 5}, {2, 3}}, {{1, 1}, {2, 2}, {3, 5}}, {{2, 1}}}));
}

TEST(the_youngest_is_preempted_and_comes_back_before_those_that_never_ran) {
    Driver driver({2, 4, 4, 0, 0, 0}, options(4, 0, false));
    const auto first = driver.add(ask_for(0, 3, 4)), second = driver.add(ask_for(20, 3, 3)), third = driver.add(ask_for(40, 1, 1));
    CHECK(driver.turn() == (Shares{{1, 3}, {2, 3}}));
    CHECK(driver.turn() == (Shares{{1, 1}, {2, 1}}));
    CHECK(driver.turn() == (Shares{{1, 1}}));
    CHECK_EQ(driver.scheduler.num_preemptions(), 1U);
    CHECK(driver.scheduler.waiting() == (std::deque{second, third}));
    CHECK(second->block_table.empty() && second->num_generated() == 2);
    CHECK(driver.run() == (std::vector<Shares>{{{1, 1}}, {{2, 5}, {3, 1}}}));
    for (const auto& row : {first, second, third}) CHECK_EQ(driver.answers[row->id], alone(row->request, driver.runner.cache()));
}

TEST(a_preempted_row_does_not_come_back_in_the_same_step) {
    // Both computed the same prompt, so the younger could share the older one's blocks at once: it waits for the next step all the same.
    Driver driver({2, 4, 4, 0, 0, 0}, options(4));
    driver.add(ask_for(0, 4, 3)), driver.add(ask_for(0, 4, 2));
    driver.turn();
    CHECK(driver.turn() == (Shares{{1, 1}}));
    CHECK(driver.turn() == (Shares{{1, 1}, {2, 1}}));
    CHECK_EQ(driver.scheduler.num_preemptions(), 1U);
}

class AnyId : public TokenConstraint {
public:
    void fill(std::span<std::uint32_t> mask) override { std::ranges::fill(mask, ~0U); }
    void accept(std::int32_t) override {}
    bool is_complete() override { return false; }
};

TEST(a_constraint_waits_for_its_ids_running_or_next_to_run) {
    Driver driver(attention_cache(32), options(2), true);
    driver.add(ask_for(0, 4, 9));
    driver.turn();
    CHECK(driver.scheduler.can_run_ahead());
    Request request = ask_for(20, 4, 2);
    request.constraint = std::make_shared<AnyId>();
    const auto row = driver.add(request);
    CHECK(!driver.scheduler.can_run_ahead());
    CHECK(driver.turn().empty());                                      // the ids of the step before
    CHECK(driver.turn() == (Shares{{1, 1}, {2, 4}}));
    CHECK(row->is_running() && !driver.scheduler.can_run_ahead());
    driver.run();
    CHECK_EQ(driver.answers[row->id], alone(row->request, driver.runner.cache()));
}

TEST(no_snapshot_stays_of_a_step_whose_result_nobody_looks_at) {
    Driver driver(hybrid_cache(32), options(3), true);
    const auto row = driver.add(ask_for(0, 9, 3));
    driver.turn();                                                     // to 8, where a snapshot is written down
    CHECK_EQ(driver.scheduler.num_snapshots(), 1);
    driver.scheduler.remove(row);
    driver.scheduler.check_integrity();
    CHECK_EQ(driver.scheduler.num_snapshots(), 0);
}

TEST(a_hybrid_prompt_is_cut_where_a_snapshot_is_kept) {
    using Pieces = std::vector<int>;
    const std::vector<std::tuple<int, int, Pieces>> wanted{{3, 0, {3}},           {4, 0, {4}},          {5, 0, {4, 1}},
                                                           {8, 0, {4, 4}},        {9, 0, {8, 1}},       {21, 0, {8, 8, 4, 1}},
                                                           {21, 6, {6, 2, 6, 2, 4, 1}}, {21, 16, {8, 8, 4, 1}}};
    for (const auto& [length, budget, pieces] : wanted) {
        Driver driver(hybrid_cache(32), options(3, budget));
        driver.add(ask_for(0, length, 1));
        Pieces found;
        for (const Shares& shares : driver.run()) found.push_back(shares.at(0).second);
        CHECK_EQ(found, pieces);
    }
}

TEST(a_snapshot_goes_with_the_block_at_its_end) {
    Driver driver(hybrid_cache(6), options(3));
    driver.add(ask_for(0, 9, 1));
    driver.run();
    CHECK_EQ(driver.scheduler.num_snapshots(), 1);
    driver.add(ask_for(40, 21, 1));
    driver.run();
    const auto again = driver.add(ask_for(0, 9, 1));
    driver.run();
    CHECK_EQ(*again->cached_tokens, 0);
}

TEST(what_a_broken_row_left_is_not_taken_up_again) {
    Driver driver(hybrid_cache(32), options(3, 8));
    const auto row = driver.add(ask_for(0, 20, 5));
    driver.turn(), driver.turn();
    driver.scheduler.discard(row);
    driver.scheduler.check_integrity();
    CHECK_EQ(driver.scheduler.num_snapshots(), 0);
    const auto again = driver.add(ask_for(0, 20, 5));
    driver.run();
    CHECK_EQ(*again->cached_tokens, 0);
    CHECK_EQ(driver.answers[again->id], alone(again->request, driver.runner.cache()));
}

TEST(wrong_books_are_noticed) {
    Driver driver(hybrid_cache(32), options(3));
    const auto row = driver.add(ask_for(0, 9, 9));
    driver.turn();
    driver.scheduler.check_integrity();
    row->block_table.pop_back();
    CHECK_THROWS(driver.scheduler.check_integrity(), "reference counts differ");
    row->block_table.push_back(2);
    row->slot = 1;
    CHECK_THROWS(driver.scheduler.check_integrity(), "a slot is lost or held twice");
    row->slot = 0;
    row->num_computed_tokens = 9;
    CHECK_THROWS(driver.scheduler.check_integrity(), "nothing to compute");
}

// Random arrivals, cancels, preemptions, sizes and either kind of device: each row's ids are those that it has alone, and everything ends.
void play(std::uint32_t seed) {
    std::mt19937 random(seed);
    const auto up_to = [&random](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
    const int block_size = 1 + up_to(4), max_batch_size = 1 + up_to(4);
    const bool is_hybrid = up_to(1), runs_ahead = up_to(1);
    CacheShape cache{block_size, 0, max_batch_size + up_to(1), is_hybrid ? up_to(6) : 0, is_hybrid ? block_size * (1 + up_to(3)) : 0, 0};
    std::vector<Request> requests;
    std::vector<int> arrivals, cancels;
    int largest = 0;
    for (int place = up_to(6); place >= 0; --place) {
        Request request = ask_for(10 * up_to(1), up_to(20), 1 + up_to(11));
        for (int more = up_to(3); more >= 0; --more) request.prompt_token_ids.push_back(up_to(2));
        for (int stops = up_to(6); stops > 0; --stops) request.stop_token_ids.push_back(up_to(toy_vocab_size - 1));
        largest = std::max(largest, (static_cast<int>(request.prompt_token_ids.size()) + request.max_tokens + block_size - 1) / block_size);
        requests.push_back(request);
        arrivals.push_back(up_to(12));
        cancels.push_back(arrivals.back() + (up_to(2) ? 1000 : up_to(8)));
    }
    cache.num_blocks = largest + up_to(12);
    Driver driver(cache, {max_batch_size, up_to(9), up_to(6), up_to(4) > 0}, runs_ahead);
    std::map<std::size_t, std::shared_ptr<Row>> rows;
    for (int turn = 0; turn < 24 || driver.is_busy(); ++turn) {
        if (turn == 10000) throw std::logic_error("the scheduler goes round in circles");
        for (std::size_t place = 0; place < requests.size(); ++place) {
            if (arrivals[place] == turn) rows[place] = driver.add(requests[place]);
            if (cancels[place] != turn || driver.reasons.contains(rows[place]->id)) continue;
            driver.scheduler.remove(rows[place]);
            driver.scheduler.check_integrity();
            driver.reasons[rows[place]->id] = FinishReason::cancelled;
            CHECK_EQ(rows[place]->num_generated(), static_cast<int>(driver.answers[rows[place]->id].size()));
        }
        driver.turn();
    }
    CHECK_EQ(driver.scheduler.pool().num_used(), 0);
    for (const auto& [place, row] : rows) {
        auto wanted = alone(requests[place], cache);
        const auto& found = driver.answers[row->id];
        const FinishReason reason = driver.reasons.at(row->id);
        if (reason == FinishReason::cancelled) {
            CHECK(found.size() <= wanted.size());
            wanted.resize(std::min(found.size(), wanted.size()));
        } else {
            CHECK_EQ(reason, static_cast<int>(wanted.size()) < requests[place].max_tokens ? FinishReason::stop : FinishReason::length);
        }
        CHECK_EQ(found, wanted);
    }
}

TEST(every_row_ends_with_the_ids_that_it_has_alone) {
    for (std::uint32_t seed = 0; seed < 1500; ++seed) {
        const int before = check::failures;
        try {
            play(seed);
        } catch (const std::exception& error) {
            check::fail("seed", static_cast<int>(seed), error.what());
        }
        if (check::failures > before) check::fail("seed", static_cast<int>(seed), "failed");
    }
}

}  // namespace
