// The engine when something goes wrong, and its end.
#include <array>
#include <future>
#include <limits>
#include <thread>

#include "pocket/error.h"
#include "tests/answer.h"
#include "tests/check.h"

namespace {

using namespace pocket;

// Misbehaves in one of its three questions once it has accepted so many ids.
class FailingConstraint : public TokenConstraint {
public:
    enum Where { in_fill, in_accept, in_is_complete, with_nothing_allowed };
    FailingConstraint(Where where, int after) : where_(where), after_(after) {}

    void fill(std::span<std::uint32_t> mask) override {
        fail(in_fill);
        // Bits of ids that the vocabulary does not have must not count.
        std::ranges::fill(mask.first(mask.size() - 1), where_ == with_nothing_allowed && num_accepted_ >= after_ ? 0U : ~0U);
        mask.back() = ~1U;
    }
    void accept(std::int32_t) override { fail(in_accept), ++num_accepted_; }
    bool is_complete() override { return fail(in_is_complete), false; }

private:
    void fail(Where where) const {
        if (where == where_ && num_accepted_ >= after_) throw std::runtime_error("the grammar gave up");
    }

    Where where_;
    int after_, num_accepted_ = 0;
};

TEST(a_constraint_that_fails_ends_its_row_alone) {
    using Failing = FailingConstraint;
    for (const auto where : {Failing::in_fill, Failing::in_accept, Failing::in_is_complete, Failing::with_nothing_allowed}) {
        for (int after : {0, 1, 3}) {
            Setup setup(hybrid_cache(64));
            const Request plain = ask_for(0, 9, 12);
            Request request = ask_for(30, 9, 12);
            request.constraint = std::make_shared<Failing>(where, after);
            const auto failing = ask(*setup.engine, request), beside = ask(*setup.engine, plain);
            CHECK_EQ(failing->reason(), FinishReason::error);
            const char* part = where == Failing::with_nothing_allowed ? "allows no token here" : "the grammar gave up";
            CHECK(failing->error().find(part) != std::string::npos);
            CHECK_EQ(static_cast<int>(failing->token_ids().size()), where == Failing::in_is_complete && after > 0 ? after - 1 : after);
            CHECK_EQ(failing->end().num_generated, static_cast<int>(failing->token_ids().size()));
            CHECK_EQ(beside->token_ids(), alone(plain, setup.runner.cache()));
            CHECK_EQ(ask(*setup.engine, plain)->token_ids(), alone(plain, setup.runner.cache()));
            CHECK_EQ(setup.engine->stats().kv_blocks_used, 0);
        }
    }
}

TEST(a_row_whose_logits_are_not_finite_ends_alone_and_leaves_nothing_to_reuse) {
    for (const CacheShape& cache : {attention_cache(64), hybrid_cache(64)}) {
        Setup setup(cache, 4);
        setup.runner.broken_token = 93;
        const Request plain = ask_for(0, 9, 12);
        Request request = ask_for(85, 16, 5);                          // 93 is in its third block
        for (int turn = 0; turn < 2; ++turn) {
            const auto failing = ask(*setup.engine, request), beside = ask(*setup.engine, plain);
            CHECK_EQ(failing->reason(), FinishReason::error);
            CHECK(failing->error().find("The model's logits are not finite") == 0);
            CHECK_EQ(failing->end().cached_tokens, 0);
            CHECK_EQ(beside->token_ids(), alone(plain, cache));
        }
        CHECK_EQ(setup.engine->stats().kv_blocks_used, 0);
        CHECK(!setup.engine->is_dead());
    }
}

TEST(a_step_that_fails_ends_every_row_and_the_engine) {
    Setup setup(hybrid_cache(64, 1));
    Gate gate(setup.runner, 3);
    setup.runner.before_step = [&setup, wait = setup.runner.before_step] {
        wait();
        if (setup.runner.num_steps == 3) throw std::runtime_error("a fault was asked for");
    };
    const auto first = ask(*setup.engine, ask_for(0, 4, 9)), second = ask(*setup.engine, ask_for(30, 5, 9)), third = ask(*setup.engine, ask_for(60, 5, 9));
    gate.open();
    for (const auto& one : {first, second, third}) {
        CHECK_EQ(one->reason(), FinishReason::error);
        CHECK_EQ(one->error(), "The engine is dead: a step failed: a fault was asked for. Load the model again.");
    }
    CHECK_EQ(first->token_ids().size(), 3U);
    CHECK_EQ(first->end().num_generated, 3);
    CHECK(setup.engine->is_dead());
    CHECK_EQ(setup.engine->death(), "a step failed: a fault was asked for");
    CHECK_EQ(setup.engine->stats().running + setup.engine->stats().waiting + setup.engine->stats().kv_blocks_used, 0);
    CHECK_THROWS(ask(*setup.engine, ask_for(0, 4, 1)), "The engine is dead: a step failed: a fault was asked for");
    CHECK(!setup.engine->cancel(first.id));
    setup.engine->stop();
    CHECK(setup.engine->is_dead());
}

// Draws what no runner may draw.
class WrongRunner : public ToyRunner {
public:
    WrongRunner(std::vector<Draw> draws) : ToyRunner(attention_cache(8)), draws_(std::move(draws)) {}
    std::vector<Draw> run(std::span<const RunRow>, std::span<const StateCopy>) override { return draws_; }

private:
    std::vector<Draw> draws_;
};

TEST(draws_that_no_row_asked_for_end_the_engine) {
    const Draw fine{5, true, {}};
    const Draw too_large{toy_vocab_size, true, {}}, none{-1, true, {}};
    for (const auto& draws : {std::vector<Draw>{}, std::vector{fine, fine}, std::vector{too_large}, std::vector{none}}) {
        WrongRunner runner(draws);
        Engine engine(runner, {4, 0, 0, true, true});
        CHECK_EQ(ask(engine, ask_for(0, 4, 3))->reason(), FinishReason::error);
        CHECK(engine.death().find("the runner drew") != std::string::npos);
    }
}

TEST(requests_that_break_their_terms_are_refused_by_name) {
    CacheShape cache = attention_cache(8);
    Setup setup(cache);
    const auto refuses = [&setup](auto change, const std::string& field, const std::string& message) {
        Request request = ask_for(0, 4, 3);
        change(request);
        CHECK_THROWS(ask(*setup.engine, request), message);
        try {
            ask(*setup.engine, request);
        } catch (const Error& error) {
            CHECK_EQ(error.field(), field);
            CHECK_EQ(error.kind(), ErrorKind::configuration);
        }
    };
    refuses([](Request& request) { request.prompt_token_ids.clear(); }, "prompt_token_ids", "\"prompt_token_ids\" is empty");
    refuses([](Request& request) { request.prompt_token_ids[2] = 97; }, "prompt_token_ids", "\"prompt_token_ids\" has 97 at place 2: send ids from 0 to 96.");
    refuses([](Request& request) { request.prompt_token_ids[0] = -1; }, "prompt_token_ids", "\"prompt_token_ids\" has -1 at place 0");
    refuses([](Request& request) { request.max_tokens = 0; }, "max_tokens", "\"max_tokens\" = 0 is not valid: send a whole number of at least 1.");
    refuses([](Request& request) { request.max_tokens = 29; }, "max_tokens",
            "\"max_tokens\" = 29 after a prompt of 4 tokens is more than the 32 tokens that fit into the KV cache");
    refuses([](Request& request) { request.max_tokens = std::numeric_limits<int>::max(); }, "max_tokens", "is more than the 32 tokens");
    refuses([](Request& request) { request.temperature = -1; }, "temperature", "\"temperature\" = -1 is not valid");
    refuses([](Request& request) { request.temperature = std::numeric_limits<float>::quiet_NaN(); }, "temperature", "\"temperature\" = nan");
    refuses([](Request& request) { request.temperature = std::numeric_limits<float>::infinity(); }, "temperature", "\"temperature\" = inf");
    refuses([](Request& request) { request.top_p = 0; }, "top_p", "\"top_p\" = 0 is not valid");
    refuses([](Request& request) { request.top_p = 1.5F; }, "top_p", "\"top_p\" = 1.5 is not valid");
    refuses([](Request& request) { request.top_k = -1; }, "top_k", "\"top_k\" = -1 is not valid");
    refuses([](Request& request) { request.prompt_logprobs = 21; }, "prompt_logprobs", "\"prompt_logprobs\" = 21 is not valid");
    refuses([](Request& request) { request.prompt_logprobs = 0, request.max_tokens = -1; }, "max_tokens", "\"max_tokens\" = -1 is not valid");
    refuses([](Request& request) { request.logprobs = 21; }, "logprobs", "\"logprobs\" = 21 is not valid");
    refuses([](Request& request) { request.logprobs = -1; }, "logprobs", "\"logprobs\" = -1 is not valid");
    CHECK_EQ(ask(*setup.engine, ask_for(0, 4, 28))->token_ids().size(), 28U);

    cache.max_model_len = 10;
    Setup shorter(cache);
    CHECK_THROWS(ask(*shorter.engine, ask_for(0, 4, 7)), "is more than the 10 tokens that fit into the context");
    CHECK_EQ(ask(*shorter.engine, ask_for(0, 4, 6))->token_ids().size(), 6U);
}

TEST(options_out_of_their_range_are_refused_by_name) {
    ToyRunner runner(attention_cache(8));
    CHECK_THROWS(Engine(runner, {0, 0, 0, true, true}), "\"max_batch_size\" = 0 is not valid: take a whole number from 1 to 4");
    CHECK_THROWS(Engine(runner, {5, 0, 0, true, true}), "\"max_batch_size\" = 5");
    CHECK_THROWS(Engine(runner, {4, -1, 0, true, true}), "\"prefill_token_budget\" = -1");
    CHECK_THROWS(Engine(runner, {4, 0, -1, true, true}), "\"prefill_budget_beside_answers\" = -1");
}

TEST(stop_cancels_what_is_active) {
    Setup setup(hybrid_cache(64, 1));
    Gate gate(setup.runner, 4);
    const auto running = ask(*setup.engine, ask_for(0, 4, 250)), waiting = ask(*setup.engine, ask_for(30, 5, 9));
    running->wait_for_tokens(2);
    std::vector<std::thread> threads;
    for (int count = 0; count < 3; ++count) threads.emplace_back([&setup] { setup.engine->stop(); });
    const auto is_stopping = [&setup] {
        try {
            setup.engine->submit(ask_for(0, 1, 1), nullptr);
            return false;
        } catch (const Error&) {
            return true;
        }
    };
    while (!is_stopping()) std::this_thread::yield();
    gate.open();
    for (auto& thread : threads) thread.join();
    CHECK_EQ(running->reason(), FinishReason::cancelled);
    CHECK_EQ(waiting->reason(), FinishReason::cancelled);
    CHECK_EQ(waiting->end().num_generated, 0);
    CHECK_EQ(running->token_ids().size(), static_cast<std::size_t>(running->end().num_generated));
    CHECK_THROWS(ask(*setup.engine, ask_for(0, 4, 1)), "The engine is stopped");
    CHECK(!setup.engine->is_dead());
    CHECK_EQ(setup.engine->stats().running + setup.engine->stats().waiting + setup.engine->stats().kv_blocks_used, 0);
}

TEST(an_engine_that_is_destroyed_at_once_answers_all_the_same) {
    for (int turn = 0; turn < 50; ++turn) {
        Setup setup(attention_cache(64));
        const auto asked = ask(*setup.engine, ask_for(0, 4, 200));
        setup.engine.reset();
        CHECK(asked->reason() == FinishReason::cancelled || asked->token_ids().size() == 200);
    }
}

TEST(an_engine_that_was_stopped_may_be_destroyed_by_a_new_thread) {
    for (int turn = 0; turn < 20; ++turn) {
        auto setup = std::make_unique<Setup>(attention_cache(64));
        const auto asked = ask(*setup->engine, ask_for(0, 4, 5));
        CHECK_EQ(asked->token_ids().size(), 5U);
        setup->engine->stop();
        CHECK(!setup->engine->is_own_thread());
        std::thread([&setup] {                                         // which mostly gets the number of the thread that was joined
            CHECK(!setup->engine->is_own_thread());
            setup->engine->stop();
            setup.reset();
        }).join();
    }
}

TEST(what_a_callback_throws_is_swallowed) {
    Setup setup(attention_cache(64));
    const Request plain = ask_for(0, 4, 9);
    Answer heard;
    setup.engine->submit(plain, [&heard](const StepOutput& output) {
        heard.hear(output);
        if (output.num_generated % 2) throw std::runtime_error("this is the test's own");
        throw 5;
    });
    const auto beside = ask(*setup.engine, plain);
    CHECK_EQ(heard.token_ids(), alone(plain, setup.runner.cache()));
    CHECK_EQ(beside->token_ids(), alone(plain, setup.runner.cache()));
    setup.engine->submit(plain, nullptr);                              // nobody listens
    CHECK_EQ(ask(*setup.engine, plain)->token_ids(), alone(plain, setup.runner.cache()));
}

TEST(a_callback_may_submit_and_cancel) {
    Setup setup(attention_cache(64));
    Answer first, second, third;
    std::atomic<RequestId> own = 0;
    const RequestId cancelled = setup.engine->submit(ask_for(40, 5, 200), [&third](const StepOutput& output) { third.hear(output); });
    own = setup.engine->submit(ask_for(0, 4, 200), [&](const StepOutput& output) {
        first.hear(output);
        if (output.num_generated == 3 && !output.finish_reason) {
            setup.engine->submit(ask_for(60, 3, 5), [&second](const StepOutput& next) { second.hear(next); });
            CHECK(setup.engine->cancel(cancelled));
        }
        if (output.num_generated == 5 && !output.finish_reason) CHECK(setup.engine->cancel(own));
        if (output.finish_reason) CHECK(!setup.engine->cancel(own));
    });
    CHECK_EQ(first.reason(), FinishReason::cancelled);
    CHECK_EQ(third.reason(), FinishReason::cancelled);
    CHECK_EQ(second.token_ids(), alone(ask_for(60, 3, 5), setup.runner.cache()));
}

TEST(a_callback_may_stop_the_engine) {
    Setup setup(attention_cache(64));
    Answer heard;
    setup.engine->submit(ask_for(0, 4, 200), [&](const StepOutput& output) {
        heard.hear(output);
        CHECK(setup.engine->is_own_thread());
        if (output.num_generated == 3) setup.engine->stop();
    });
    CHECK(!setup.engine->is_own_thread());
    CHECK_EQ(heard.reason(), FinishReason::cancelled);
    CHECK_EQ(heard.end().num_generated, 3);
    setup.engine->stop();
}

TEST(a_callback_may_destroy_the_engine_and_its_runner) {
    for (int turn = 0; turn < 20; ++turn) {
        auto setup = std::make_shared<Setup>(hybrid_cache(64));
        Gate gate(setup->runner, 0);
        Answer heard;
        const auto beside = ask(*setup->engine, ask_for(30, 4, 200));
        Request request = ask_for(0, 4, 200);
        // Half of the times its constraint fails, and the callback comes before the runner would be called, in the middle of a step.
        if (turn % 2) request.constraint = std::make_shared<FailingConstraint>(FailingConstraint::in_fill, 1);
        auto owner = std::make_shared<std::shared_ptr<Setup>>();
        setup->engine->submit(request, [&heard, owner](const StepOutput& output) {
            if (output.finish_reason == FinishReason::error || output.num_generated == 2) owner->reset();
            heard.hear(output);
        });
        *owner = std::move(setup);                                     // read behind the gate
        gate.open();
        CHECK_EQ(heard.reason(), turn % 2 ? FinishReason::error : FinishReason::cancelled);
        CHECK_EQ(beside->reason(), FinishReason::cancelled);
    }
}

}  // namespace
