// The engine's answers: whatever shares its steps, a request gets the ids that it gets alone.
#include "engine/engine.h"

#include <array>
#include <ctime>
#include <random>
#include <thread>

#include "tests/answer.h"
#include "tests/check.h"

namespace {

using namespace pocket;

// Requests whose prompts often begin alike.
std::vector<Request> random_requests(std::uint32_t seed, int count) {
    std::mt19937 random(seed);
    const auto up_to = [&random](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
    std::vector<Request> requests;
    for (int place = 0; place < count; ++place) {
        Request request = ask_for(10 * up_to(2), up_to(20), 1 + up_to(15));
        request.prompt_token_ids.push_back(up_to(toy_vocab_size - 1));
        if (up_to(2) == 0) request.temperature = 0.5F;
        request.seed = static_cast<std::uint64_t>(place);
        for (int stops = up_to(3); stops > 0; --stops) request.stop_token_ids.push_back(up_to(toy_vocab_size - 1));
        requests.push_back(request);
    }
    return requests;
}

void check_against_alone(Setup& setup, const std::vector<Request>& requests) {
    std::vector<Asked> asked;
    for (const Request& request : requests) asked.push_back(ask(*setup.engine, request));
    for (std::size_t place = 0; place < requests.size(); ++place) {
        const auto wanted = alone(requests[place], setup.runner.cache());
        const bool is_stopped = static_cast<int>(wanted.size()) < requests[place].max_tokens;
        CHECK_EQ(asked[place]->token_ids(), wanted);
        CHECK_EQ(asked[place]->reason(), is_stopped ? FinishReason::stop : FinishReason::length);
        CHECK_EQ(asked[place]->end().num_generated, static_cast<int>(wanted.size()) + is_stopped);
    }
    const EngineStats stats = setup.engine->stats();
    CHECK_EQ(stats.running + stats.waiting + stats.kv_blocks_used, 0);
    CHECK_EQ(setup.engine->death(), "");
}

TEST(one_request_gets_its_ids) {
    for (const CacheShape& cache : {attention_cache(32), hybrid_cache(32)}) {
        Setup setup(cache);
        check_against_alone(setup, {ask_for(1, 10, 12)});
        CHECK_EQ(setup.engine->stats().prompt_tokens, 10U);
        CHECK_EQ(setup.engine->stats().generated_tokens, 12U);
    }
}

TEST(many_requests_get_theirs_in_any_batch_and_by_any_pieces) {
    for (std::uint32_t seed = 0; seed < 40; ++seed) {
        const int number = static_cast<int>(seed), num_blocks = 12 + number % 30;
        const CacheShape cache = number % 2 ? hybrid_cache(num_blocks, 4, number % 7) : attention_cache(num_blocks);
        Setup setup(cache, std::array{0, 1, 3, 7, 16, 512}[seed % 6], seed % 5 != 0);
        check_against_alone(setup, random_requests(seed, 20));
    }
}

TEST(preempted_rows_lose_nothing) {
    for (const CacheShape& cache : {attention_cache(10), hybrid_cache(10)}) {
        Setup setup(cache, 8);
        std::vector<Request> requests;
        for (int place = 0; place < 4; ++place) requests.push_back(ask_for(20 * place, 5, 25));
        requests[1].temperature = 1;
        check_against_alone(setup, requests);
        CHECK(setup.engine->stats().preemptions > 0);
    }
}

TEST(a_prompt_is_computed_in_steps_of_the_budget) {
    Setup setup(attention_cache(32), 4);
    ask(*setup.engine, ask_for(0, 17, 1))->end();
    CHECK_EQ(setup.runner.num_steps.load(), 5);
    setup.engine->set_prefill_token_budget(0);
    ask(*setup.engine, ask_for(40, 17, 1))->end();
    CHECK_EQ(setup.runner.num_steps.load(), 6);
    CHECK_THROWS(setup.engine->set_prefill_token_budget(-1), "\"prefill_token_budget\" = -1 is not valid");
}

TEST(a_warm_prefix_is_not_computed_again) {
    for (const CacheShape& cache : {attention_cache(64), hybrid_cache(64, 4, 16)}) {
        Setup setup(cache);
        const Request first = ask_for(0, 19, 9);
        check_against_alone(setup, {first});
        const int computed = setup.runner.num_tokens;
        const auto again = ask(*setup.engine, first);
        CHECK_EQ(again->token_ids(), alone(first, cache));
        CHECK_EQ(again->end().cached_tokens, 16);
        CHECK_EQ(setup.runner.num_tokens - computed, 3 + 8);
        CHECK_EQ(setup.engine->stats().cached_tokens, 16U);

        Request appended = first;                                      // the next turn of the conversation
        for (std::int32_t id : alone(first, cache)) appended.prompt_token_ids.push_back(id);
        appended.prompt_token_ids.insert(appended.prompt_token_ids.end(), {5, 6});
        const auto turn = ask(*setup.engine, appended);
        CHECK_EQ(turn->token_ids(), alone(appended, cache));
        CHECK_EQ(turn->end().cached_tokens, 24);

        Request branch = first;                                        // differs in its third block
        branch.prompt_token_ids[10] = 90;
        const auto other = ask(*setup.engine, branch);
        CHECK_EQ(other->token_ids(), alone(branch, cache));
        CHECK_EQ(other->end().cached_tokens, 8);

        Request shortened = first;
        shortened.prompt_token_ids.resize(18);
        const auto shorter = ask(*setup.engine, shortened);
        CHECK_EQ(shorter->token_ids(), alone(shortened, cache));
        CHECK_EQ(shorter->end().cached_tokens, 16);
    }
}

TEST(without_prefix_caching_every_token_is_computed) {
    Setup setup(hybrid_cache(64), 0, false);
    for (int turn = 0; turn < 2; ++turn) CHECK_EQ(ask(*setup.engine, ask_for(0, 19, 3))->end().cached_tokens, 0);
    CHECK_EQ(setup.runner.num_tokens.load(), 2 * (19 + 2));
}

TEST(a_stop_id_ends_a_row_is_counted_and_left_out) {
    Setup setup(attention_cache(32));
    Request request = ask_for(0, 6, 10);
    const auto ids = alone(request, setup.runner.cache());
    std::size_t place = 3;
    while (std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(place), ids[place]) != ids.begin() + static_cast<std::ptrdiff_t>(place)) ++place;
    request.stop_token_ids = {toy_vocab_size + 5, ids[place]};
    request.logprobs = 2;
    const auto asked = ask(*setup.engine, request);
    CHECK_EQ(asked->token_ids(), std::vector(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(place)));
    CHECK_EQ(asked->reason(), FinishReason::stop);
    CHECK_EQ(asked->end().num_generated, static_cast<int>(place) + 1);
    CHECK_EQ(asked->logprobs().size(), place);
    request.max_tokens = static_cast<int>(place) + 1;                  // both reasons at once: it is a stop
    CHECK_EQ(ask(*setup.engine, request)->reason(), FinishReason::stop);
}

TEST(log_probabilities_come_with_their_ids) {
    Setup setup(attention_cache(32));
    Request request = ask_for(0, 6, 5);
    CHECK_EQ(ask(*setup.engine, request)->logprobs().size(), 0U);
    for (int count : {0, 3, 20}) {
        request.logprobs = count;
        const auto asked = ask(*setup.engine, request);
        const auto ids = asked->token_ids();
        const auto logprobs = asked->logprobs();
        CHECK_EQ(logprobs.size(), ids.size());
        for (std::size_t place = 0; place < ids.size(); ++place) {
            CHECK_EQ(logprobs[place].logprob, toy_logprobs(ids[place], count).logprob);
            CHECK(logprobs[place].top == toy_logprobs(ids[place], count).top);
        }
    }
}

// What a runner of `toy_ranks` says of `request`'s prompt.
void check_ranks(const Asked& asked, const Request& request) {
    const auto found = asked->prompt_logprobs();
    const auto& prompt = request.prompt_token_ids;
    CHECK_EQ(found.size(), request.prompt_logprobs ? prompt.size() - 1 : 0U);
    std::uint64_t digest = 0;
    for (std::size_t place = 0; place < found.size(); ++place) {
        digest = toy_mix(digest, static_cast<std::uint64_t>(prompt[place]));
        const TokenLogprobs wanted = toy_ranks(digest, prompt[place + 1], *request.prompt_logprobs);
        CHECK_EQ(found[place].logprob, wanted.logprob);
        CHECK(found[place].top == wanted.top);
    }
}

TEST(prompts_are_ranked_in_any_batch_and_by_any_pieces) {
    for (std::uint32_t seed = 0; seed < 40; ++seed) {
        const int number = static_cast<int>(seed), num_blocks = 12 + number % 30;  // few enough blocks that rows give way to each other
        const CacheShape cache = number % 2 ? hybrid_cache(num_blocks, 4, number % 7) : attention_cache(num_blocks);
        Setup setup(cache, std::array{0, 1, 3, 7, 16, 512}[seed % 6], seed % 5 != 0);
        std::vector<Request> requests = random_requests(seed, 20);
        std::vector<Asked> asked;
        for (std::size_t place = 0; place < requests.size(); ++place) {
            if (place % 3 != 0) requests[place].prompt_logprobs = static_cast<int>(place);
            if (place % 3 == 2) requests[place].max_tokens = 0;
            asked.push_back(ask(*setup.engine, requests[place]));
        }
        for (std::size_t place = 0; place < requests.size(); ++place) {
            CHECK_EQ(asked[place]->token_ids(), alone(requests[place], cache));
            check_ranks(asked[place], requests[place]);
            if (place % 3 == 0) continue;
            CHECK_EQ(asked[place]->end().cached_tokens, 0);
            if (place % 3 == 2) CHECK_EQ(asked[place]->reason(), FinishReason::length);
            if (place % 3 == 2) CHECK_EQ(asked[place]->end().num_generated, 0);
        }
        CHECK_EQ(setup.engine->stats().kv_blocks_used, 0);
        CHECK_EQ(setup.engine->death(), "");
    }
}

TEST(a_ranked_prompt_leaves_its_blocks_to_others) {
    Setup setup(attention_cache(64));
    Request request = ask_for(0, 19, 0);
    request.prompt_logprobs = 2;
    for (int turn = 0; turn < 2; ++turn) check_ranks(ask(*setup.engine, request), request);
    CHECK_EQ(ask(*setup.engine, ask_for(0, 19, 3))->end().cached_tokens, 16);
    CHECK_EQ(setup.engine->stats().generated_tokens, 3U);
}

TEST(a_cancelled_row_ends_and_others_go_on) {
    Setup setup(hybrid_cache(64, 2));
    Gate gate(setup.runner, 8);
    const Request lasting = ask_for(0, 5, 100);
    const auto running = ask(*setup.engine, ask_for(50, 5, 200)), other = ask(*setup.engine, lasting), waiting = ask(*setup.engine, ask_for(70, 5, 100));
    running->wait_for_tokens(3);
    CHECK(setup.engine->cancel(waiting.id));
    CHECK(setup.engine->cancel(running.id));
    gate.open();
    CHECK_EQ(running->reason(), FinishReason::cancelled);
    CHECK_EQ(waiting->reason(), FinishReason::cancelled);
    const auto ids = running->token_ids(), wanted = alone(ask_for(50, 5, 200), setup.runner.cache());
    CHECK(ids.size() >= 3 && std::equal(ids.begin(), ids.end(), wanted.begin()));
    CHECK_EQ(running->end().num_generated, static_cast<int>(ids.size()));
    CHECK_EQ(other->token_ids(), alone(lasting, setup.runner.cache()));
    CHECK(!setup.engine->cancel(running.id));
    CHECK(!setup.engine->cancel(12345));
    CHECK_EQ(setup.engine->stats().kv_blocks_used, 0);
}

// Allows the even ids, and is complete after a number of them.
class EvenIds : public TokenConstraint {
public:
    explicit EvenIds(int most) : most_(most) {}
    void fill(std::span<std::uint32_t> mask) override { ++num_fills, std::ranges::fill(mask, 0x55555555U); }
    void accept(std::int32_t token_id) override { accepted.push_back(token_id); }
    bool is_complete() override { return static_cast<int>(accepted.size()) == most_; }

    int num_fills = 0;
    std::vector<std::int32_t> accepted;

private:
    int most_;
};

TEST(a_constraint_masks_each_draw_and_may_end_its_row) {
    Setup setup(hybrid_cache(10), 6);
    const std::vector<std::uint32_t> even((toy_vocab_size + 31) / 32, 0x55555555U);
    std::vector<Asked> beside;
    for (int place = 0; place < 3; ++place) beside.push_back(ask(*setup.engine, ask_for(20 * place, 5, 25)));  // so many that some are preempted
    Request request = ask_for(80, 6, 20);
    const auto wanted = alone(request, setup.runner.cache(), even.data());
    const auto constraint = std::make_shared<EvenIds>(12);
    request.constraint = constraint;
    const auto asked = ask(*setup.engine, request);
    CHECK_EQ(asked->token_ids(), std::vector(wanted.begin(), wanted.begin() + 12));
    CHECK_EQ(asked->reason(), FinishReason::stop);
    CHECK_EQ(asked->end().num_generated, 12);
    for (const auto& one : beside) one->end();
    CHECK(setup.engine->stats().preemptions > 0);
    setup.engine->stop();
    CHECK_EQ(constraint->num_fills, 12);
    CHECK_EQ(constraint->accepted, asked->token_ids());

    Setup other(hybrid_cache(32));
    request.stop_token_ids = {wanted[2]};
    request.constraint = std::make_shared<EvenIds>(100);
    CHECK_EQ(ask(*other.engine, request)->reason(), FinishReason::stop);
    other.engine->stop();
    const auto& told = dynamic_cast<EvenIds&>(*request.constraint).accepted;
    CHECK_EQ(std::ranges::count(told, wanted[2]), 0);                  // an id that ends the row is not told
}

TEST(answers_are_the_same_for_requests_from_many_threads) {
    Setup setup(hybrid_cache(40), 16);
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&setup, thread] {
            for (const Request& request : random_requests(thread, 30)) CHECK_EQ(ask(*setup.engine, request)->token_ids(), alone(request, setup.runner.cache()));
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(setup.engine->stats().kv_blocks_used, 0);
}

TEST(an_idle_engine_sleeps) {
    Setup setup(attention_cache(32));
    ask(*setup.engine, ask_for(0, 6, 5))->end();
    const std::clock_t before = std::clock();                          // of all threads of the process
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC < 0.1);
}

}  // namespace
