// engine/model_runner: rows of any kind in one step give what each gives alone, in the caller's order, and states follow their copies.
#include "engine/model_runner.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "check.h"
#include "engine/cache_plan.h"
#include "engine/warm_up.h"
#include "models/qwen3_5.h"
#include "pocket/error.h"
#include "reference_model.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

// A model and its runner, on the CPU with two threads; 4 rows and 3 snapshots.
struct Loaded {
    TemporaryFolder folder;
    TinyCheckpoint tiny;
    std::unique_ptr<Device> device;
    std::unique_ptr<Qwen3_5> model;
    std::unique_ptr<ModelRunner> runner;

    explicit Loaded(const std::string& name) : device(make_device(name, 2)) {
        tiny.make();
        tiny.write(folder.path());
        Checkpoint checkpoint(folder.path());
        model = std::make_unique<Qwen3_5>(checkpoint, *device, DType::float32);
        CacheShape shape;
        shape.num_blocks = 40;
        shape.num_row_slots = 4;
        shape.num_snapshot_slots = 3;
        runner = std::make_unique<ModelRunner>(*device, *model, shape, DType::float32, 32);
    }
};

void on_each_device(const std::function<void(Loaded&)>& test) {
    for (const std::string& name : linked_devices()) {
        Loaded loaded(name);
        test(loaded);
    }
}

// One row of the test's own: its tokens, how many are computed, its blocks and slot.
struct TestRow {
    std::vector<std::int32_t> token_ids, block_table;
    int num_computed_tokens = 0, slot = 0, num_drawn = 0;
    Request request;

    TestRow(int length, int new_slot, std::vector<std::int32_t> blocks) : block_table(std::move(blocks)), slot(new_slot) {
        Noise noise(static_cast<std::uint64_t>(length));
        for (int place = 0; place < length; ++place) token_ids.push_back(static_cast<std::int32_t>(noise.uniform() * 151));
    }

    // The next `count` tokens of this row; all that are left where `count` is 0.
    RunRow next(int count = 0) const {
        const auto left = std::span(token_ids).subspan(static_cast<std::size_t>(num_computed_tokens));
        RunRow row;
        row.token_ids = count ? left.first(static_cast<std::size_t>(count)) : left;
        row.num_computed_tokens = num_computed_tokens;
        row.block_table = block_table;
        row.slot = slot;
        row.samples = row.token_ids.size() == left.size();
        row.request = &request;
        row.draw = num_drawn;
        return row;
    }

    void advance(const RunRow& row, std::int32_t token_id = -1) {
        num_computed_tokens += static_cast<int>(row.token_ids.size());
        if (row.samples) token_ids.push_back(token_id), ++num_drawn;
    }
};

// Runs one step of `parts` of `rows`.
void step(Runner& runner, const std::vector<TestRow*>& rows, const std::vector<int>& parts, std::span<const StateCopy> copies = {}) {
    std::vector<RunRow> step;
    for (std::size_t place = 0; place < rows.size(); ++place) step.push_back(rows[place]->next(parts[place]));
    const std::vector<Draw> draws = runner.run(step, copies);
    std::size_t drawn = 0;
    for (std::size_t place = 0; place < rows.size(); ++place) {
        if (step[place].samples) CHECK(draws.at(drawn).is_finite);
        rows[place]->advance(step[place], step[place].samples ? draws.at(drawn++).token_id : -1);
    }
    CHECK_EQ(drawn, draws.size());
}

// The greedy continuation of the reference, which must be the row's from its prompt of `length` tokens on.
void check_greedy(const Loaded& loaded, const TestRow& row, std::size_t length) {
    const auto logits = ReferenceModel(loaded.tiny).logits(row.token_ids);
    for (std::size_t place = length; place < row.token_ids.size(); ++place) {
        const auto& before = logits[place - 1];
        CHECK_EQ(row.token_ids[place], static_cast<std::int32_t>(std::max_element(before.begin(), before.end()) - before.begin()));
    }
}

}  // namespace

TEST(rows_of_one_step_do_not_touch_each_other) {
    on_each_device([](Loaded& loaded) {
        TestRow a(37, 2, {7, 3, 30, 11}), b(3, 0, {5}), c(70, 1, {39, 0, 38, 1, 37, 2}), d(1, 3, {20, 21});
        step(*loaded.runner, {&b}, {0});
        step(*loaded.runner, {&a, &b, &c}, {20, 0, 33});         // chunks around a row that decodes
        step(*loaded.runner, {&c, &d, &b, &a}, {1, 0, 0, 0});    // a chunk of one token, a prompt of one
        step(*loaded.runner, {&a, &c, &d, &b}, {0, 0, 0, 0});
        step(*loaded.runner, {&d, &c, &b, &a}, {0, 0, 0, 0});
        for (int count = 0; count < 6; ++count) step(*loaded.runner, {&c, &a, &d, &b}, {0, 0, 0, 0});
        check_greedy(loaded, a, 37);
        check_greedy(loaded, b, 3);
        check_greedy(loaded, c, 70);
        check_greedy(loaded, d, 1);
        CHECK_EQ(a.token_ids.size(), 37u + 9u);
        CHECK_EQ(b.token_ids.size(), 3u + 11u);
        CHECK_EQ(c.token_ids.size(), 70u + 8u);
        CHECK_EQ(d.token_ids.size(), 1u + 9u);
    });
}

// On a device with graphs the first step of a size is computed and recorded, the others are replayed; three rows are padded to four.
TEST(rows_that_only_decode) {
    on_each_device([](Loaded& loaded) {
        TestRow a(30, 2, {7, 3, 30, 11}), b(15, 0, {5, 6, 8}), c(2, 3, {20, 21});
        step(*loaded.runner, {&b, &a}, {0, 0});
        for (int count = 0; count < 4; ++count) step(*loaded.runner, {&a, &b}, {0, 0});
        step(*loaded.runner, {&c, &a}, {0, 0});
        for (int count = 0; count < 8; ++count) step(*loaded.runner, {&a, &b, &c}, {0, 0, 0});
        for (int count = 0; count < 3; ++count) step(*loaded.runner, {&c}, {0});
        check_greedy(loaded, a, 30);
        check_greedy(loaded, b, 15);
        check_greedy(loaded, c, 2);
        CHECK_EQ(a.token_ids.size(), 30u + 14u);
        CHECK_EQ(c.token_ids.size(), 2u + 12u);
    });
}

TEST(a_step_that_draws_nothing) {
    on_each_device([](Loaded& loaded) {
        TestRow a(37, 0, {1, 2, 3});
        const RunRow part = a.next(16);
        CHECK(loaded.runner->run(std::span(&part, 1), {}).empty());
    });
}

TEST(a_slot_that_was_used_starts_empty) {
    on_each_device([](Loaded& loaded) {
        TestRow a(30, 1, {1, 2}), b(30, 1, {2, 1});
        step(*loaded.runner, {&a}, {0});
        step(*loaded.runner, {&b}, {0});
        CHECK_EQ(a.token_ids, b.token_ids);
    });
}

TEST(states_follow_their_copies) {
    on_each_device([](Loaded& loaded) {
        TestRow a(48, 0, {1, 2, 3, 4});
        step(*loaded.runner, {&a}, {32});
        const StateCopy keep[] = {{0, 5}};  // a snapshot of the first two blocks
        step(*loaded.runner, {&a}, {0}, keep);
        for (int count = 0; count < 5; ++count) step(*loaded.runner, {&a}, {0});
        TestRow b(48, 3, {1, 2, 8, 9});  // the same prompt, its first blocks shared
        b.num_computed_tokens = 32;
        const StateCopy restore[] = {{5, 6}, {6, 3}};  // in this order
        step(*loaded.runner, {&b}, {0}, restore);
        for (int count = 0; count < 5; ++count) step(*loaded.runner, {&b}, {0});
        CHECK_EQ(a.token_ids, b.token_ids);
        check_greedy(loaded, b, 48);
        TestRow c(48, 2, {1, 2, 10, 11});  // and without the state another answer
        c.num_computed_tokens = 32;
        step(*loaded.runner, {&c}, {0});
        const auto last = [&](const TestRow& row) {
            const std::vector<std::int32_t> token = {0};
            RunRow one;
            one.token_ids = token;
            one.num_computed_tokens = 48;
            one.block_table = row.block_table;
            one.slot = row.slot;
            return loaded.runner->logits(one, {});
        };
        CHECK(last(c) != last(a));
    });
}

TEST(draws_come_in_the_order_of_the_rows) {
    on_each_device([](Loaded& loaded) {
        TestRow a(9, 0, {1}), b(1, 1, {2}), c(5, 2, {3});
        b.request.logprobs = 3;
        c.request.logprobs = 0;
        const RunRow rows[] = {a.next(), b.next(), c.next()};  // on the device b comes first
        const std::vector<Draw> draws = loaded.runner->run(rows, {});
        CHECK_EQ(draws.size(), 3u);
        const TestRow* all[] = {&a, &b, &c};
        for (std::size_t place = 0; place < 3; ++place) {
            const auto logits = ReferenceModel(loaded.tiny).logits(all[place]->token_ids).back();
            const auto best = std::max_element(logits.begin(), logits.end());
            CHECK_EQ(draws[place].token_id, static_cast<std::int32_t>(best - logits.begin()));
            double total = 0;
            for (const double value : logits) total += std::exp(value - *best);
            CHECK_EQ(draws[place].logprobs.top.size(), place == 1 ? 3u : 0u);
            if (place > 0) CHECK_NEAR(draws[place].logprobs.logprob, -std::log(total), 1e-4);
        }
        CHECK_EQ(draws[1].logprobs.top[0].first, draws[1].token_id);
        CHECK(draws[1].logprobs.top[0].second >= draws[1].logprobs.top[1].second);
    });
}

TEST(each_row_is_drawn_by_its_own_request) {
    on_each_device([](Loaded& loaded) {
        std::vector<std::uint32_t> mask(5, 0);
        mask[77 / 32] = 1u << 77 % 32;
        TestRow a(9, 0, {1}), b(9, 1, {2}), c(1, 2, {3}), d(9, 3, {4});
        for (TestRow* row : {&b, &d}) row->request.temperature = 30, row->request.seed = 7;
        d.num_drawn = 1;  // another draw of the same seed
        RunRow rows[] = {a.next(), b.next(), c.next(), d.next()};
        rows[2].mask = mask.data();
        const std::vector<Draw> draws = loaded.runner->run(rows, {});
        CHECK_EQ(draws[2].token_id, 77);
        CHECK(draws[1].token_id != draws[3].token_id);
        const RunRow alone[] = {b.next()};
        CHECK_EQ(loaded.runner->run(alone, {})[0].token_id, draws[1].token_id);
    });
}

TEST(logits_of_each_token) {
    on_each_device([](Loaded& loaded) {
        TestRow a(150, 1, {9, 8, 7, 6, 5, 4, 3, 2, 1, 0});
        const auto wanted = ReferenceModel(loaded.tiny).logits(a.token_ids);
        const std::vector<float> found = loaded.runner->logits(a.next(), {});
        CHECK_EQ(found.size(), 150u * 151u);
        double most = 0;
        for (std::size_t place = 0; place < found.size(); ++place) {
            most = std::max(most, std::abs(static_cast<double>(found[place]) - wanted[place / 151][place % 151]));
        }
        CHECK_NEAR(most, 0, 1e-3);
    });
}

// Of two prompts, one of them in chunks, beside a row that decodes.
TEST(prompts_are_ranked_where_they_are_computed) {
    on_each_device([](Loaded& loaded) {
        TestRow a(150, 1, {9, 8, 7, 6, 5, 4, 3, 2, 1, 0}), b(20, 0, {20, 21}), c(3, 2, {30});
        step(*loaded.runner, {&c}, {0});
        const auto run = [&](std::vector<RunRow> rows, const std::vector<TestRow*>& owners, std::vector<std::vector<TokenLogprobs>>& found) {
            for (std::size_t place = 0; place < rows.size(); ++place) {
                const TestRow& owner = *owners[place];
                const std::size_t begin = static_cast<std::size_t>(owner.num_computed_tokens) + 1, end = begin + rows[place].token_ids.size();
                if (&owner == &c) continue;
                const std::span<const std::int32_t> ids = std::span(owner.token_ids).subspan(begin, std::min(end, owner.token_ids.size()) - begin);
                rows[place].ranked = {0, ids, static_cast<int>(4 * place), &found[place]};
            }
            const std::vector<Draw> draws = loaded.runner->run(rows, {});
            std::size_t drawn = 0;
            for (std::size_t place = 0; place < rows.size(); ++place) owners[place]->advance(rows[place], rows[place].samples ? draws.at(drawn++).token_id : -1);
        };
        const TestRow prompts[] = {a, b};
        std::vector<std::vector<TokenLogprobs>> found(3);
        run({a.next(101), b.next(), c.next()}, {&a, &b, &c}, found);
        run({a.next()}, {&a}, found);
        for (std::size_t place = 0; place < 2; ++place) {
            const auto& ids = prompts[place].token_ids;
            const auto logits = ReferenceModel(loaded.tiny).logits(ids);
            CHECK_EQ(found[place].size(), ids.size() - 1);
            for (std::size_t token = 0; token + 1 < ids.size(); ++token) {
                const auto& row = logits[token];
                const double best = *std::max_element(row.begin(), row.end());
                double total = 0;
                for (const double value : row) total += std::exp(value - best);
                const auto logprob = [&](std::int32_t id) { return row[static_cast<std::size_t>(id)] - best - std::log(total); };
                CHECK_NEAR(found[place][token].logprob, logprob(ids[token + 1]), 1e-3);
                CHECK_EQ(found[place][token].top.size(), 4 * place);
                for (const auto& [id, value] : found[place][token].top) CHECK_NEAR(value, logprob(id), 1e-3);
                if (place > 0) CHECK_NEAR(found[place][token].top[0].second, -std::log(total), 1e-3);
            }
        }
        for (int count = 0; count < 3; ++count) step(*loaded.runner, {&c, &a, &b}, {0, 0, 0});
        check_greedy(loaded, a, 150);
        check_greedy(loaded, b, 20);
        check_greedy(loaded, c, 3);
    });
}

TEST(what_the_device_does_not_compute_is_refused_at_once) {
    const TemporaryFolder folder;
    TinyCheckpoint tiny;
    tiny.value_dim = 8;
    tiny.make();
    tiny.write(folder.path());
    const auto device = make_device("cpu", 1);
    Checkpoint checkpoint(folder.path());
    Qwen3_5 model(checkpoint, *device, DType::float32);
    CacheShape shape;
    shape.num_blocks = 4;
    shape.num_row_slots = 1;
    CHECK_THROWS(ModelRunner(*device, model, shape, DType::float32, 8), "DeltaNet heads");
}

TEST(slots_are_as_large_as_planned) {
    on_each_device([](Loaded& loaded) {
        CHECK_EQ(slot_bytes(*loaded.model), 3 * static_cast<std::size_t>(loaded.model->delta_net_shape().state_size()) * sizeof(float));
    });
}

// Prompts are tried on caches of their own; what runs before and after them is the same.
TEST(prompts_that_are_tried_leave_no_trace) {
    on_each_device([](Loaded& loaded) {
        TestRow row(37, 2, {7, 3, 30, 11});
        step(*loaded.runner, {&row}, {20});
        for (const int budget : {0, 1, 7, 100}) {
            CacheOptions options;
            options.prefill_token_budget = budget;
            try_prompts(*loaded.device, *loaded.model, options);
        }
        step(*loaded.runner, {&row}, {0});
        for (int count = 0; count < 4; ++count) step(*loaded.runner, {&row}, {0});
        check_greedy(loaded, row, 37);
    });
}
