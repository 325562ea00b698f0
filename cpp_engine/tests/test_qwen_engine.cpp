// QwenEngine, QwenBatchScheduler and PersistentEngine on the CPU device: what the sanitizers are to see of them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/persistent_engine.h"
#include "engine/qwen_batch_scheduler.h"
#include "engine/qwen_engine.h"
#include "pocket/error.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

using TokenIds = std::vector<std::int32_t>;

struct Fixture {
    TemporaryFolder folder;

    Fixture() {
        TinyCheckpoint tiny;
        tiny.value_dim = 16;
        tiny.make();
        tiny.write(folder.path());
    }

    std::string path() const { return folder.path().string(); }

    static QwenEngineOptions options() {
        QwenEngineOptions options;
        options.num_threads = 2;
        options.max_batch_size = 4;
        options.max_model_len = 256;
        return options;
    }
};

TokenIds prompt_of(int length, int seed) {
    TokenIds ids;
    for (int place = 0; place < length; ++place) ids.push_back((place * 7 + seed * 31 + 3) % 151);
    return ids;
}

QwenBatchSamplingParams greedy(int tokens) {
    QwenBatchSamplingParams sampling;
    sampling.max_new_tokens = tokens;
    sampling.stop_token_ids.emplace();
    return sampling;
}

}  // namespace

TEST(steps_are_what_generate_does) {
    const Fixture fixture;
    QwenEngine engine(fixture.path(), Fixture::options());
    const TokenIds prompt = prompt_of(40, 0), ids = engine.generate(prompt, 20);
    engine.reset();
    TokenIds stepped{engine.prefill(prompt)};
    while (stepped.size() < ids.size()) stepped.push_back(engine.decode_step(stepped.back()));
    CHECK_EQ(stepped, ids);
    CHECK_EQ(engine.num_tokens(), 59);
    CHECK_EQ(engine.prefill(prompt), ids[0]);
    CHECK_EQ(engine.cached_tokens(), 32);
    const std::vector<float> logits = engine.logits(prompt);
    CHECK_EQ(logits.size(), prompt.size() * 151);
    CHECK_EQ(std::max_element(logits.end() - 151, logits.end()) - (logits.end() - 151), ids[0]);
}

TEST(a_wrong_guess_leaves_no_trace) {
    const Fixture fixture;
    QwenEngine engine(fixture.path(), Fixture::options());
    const TokenIds prompt = prompt_of(30, 1), ids = engine.generate(prompt, 12);
    for (int round = 0; round < 40; ++round) {  // more rounds than there are slots
        const std::size_t wrong = 1 + static_cast<std::size_t>(round) % 5;
        engine.prefill(prompt);
        TokenIds guesses(ids.begin(), ids.begin() + 6);
        guesses[wrong] = (guesses[wrong] + 1) % 151;
        const TokenIds found = engine.verify(guesses);
        CHECK(std::equal(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(wrong), ids.begin() + 1));
        CHECK_EQ(engine.num_tokens(), 30 + static_cast<std::int64_t>(wrong));
        CHECK_EQ(engine.decode_step(ids[wrong]), ids[wrong + 1]);
    }
}

TEST(a_batch_gives_what_each_alone_gives) {
    const Fixture fixture;
    QwenEngine engine(fixture.path(), Fixture::options());
    std::vector<TokenIds> alone;
    for (int row = 0; row < 9; ++row) {
        engine.reset();
        alone.push_back(engine.generate(prompt_of(5 + 6 * row, row), 16));
    }
    QwenBatchScheduler scheduler(engine, 100);
    CHECK_EQ(scheduler.max_batch_size(), 4);
    CHECK_THROWS(engine.prefill(prompt_of(3, 0)), "can't be called while a QwenBatchScheduler runs");
    CHECK_THROWS(QwenBatchScheduler(engine, 1), "runs on this engine already");
    std::vector<RequestId> requests;
    for (int row = 0; row < 9; ++row) requests.push_back(scheduler.submit_request(prompt_of(5 + 6 * row, row), greedy(16)));
    for (std::size_t row = 0; row < requests.size(); ++row) {
        const auto result = scheduler.poll_result(requests[row], 60'000);
        CHECK(result.has_value());
        if (result) CHECK_EQ(result->token_ids, alone[row]);
        CHECK_THROWS(scheduler.poll_result(requests[row], 0), "has no result to poll");
    }
    scheduler.stop();
    engine.reset();
    CHECK_EQ(engine.generate(prompt_of(5, 0), 16), alone[0]);
}

TEST(callbacks_and_threads) {
    const Fixture fixture;
    QwenEngine engine(fixture.path(), Fixture::options());
    std::atomic<int> tokens{0}, completed{0}, cancelled{0};
    {
        QwenBatchScheduler scheduler(engine, 4);
        std::vector<std::thread> threads;
        for (int thread = 0; thread < 4; ++thread) {
            threads.emplace_back([&, thread] {
                for (int round = 0; round < 6; ++round) {
                    QwenBatchCallbacks callbacks;
                    callbacks.on_token = [&](RequestId, std::int32_t) {
                        ++tokens;
                        throw std::runtime_error("a fault in a callback");
                    };
                    callbacks.on_complete = [&](const QwenBatchResult& result) {
                        ++completed;
                        if (result.finish_reason == FinishReason::cancelled) ++cancelled;
                        CHECK_THROWS(scheduler.stop(), "from a callback");
                    };
                    const RequestId request = scheduler.submit_request(prompt_of(8, thread + round), greedy(12), callbacks);
                    if (round % 3 == 0) scheduler.cancel(request);
                    if (round % 2 == 0) scheduler.poll_result(scheduler.submit_request(prompt_of(4, round), greedy(3)), -1);
                    scheduler.set_prefill_token_budget(1 + round);
                    CHECK(scheduler.stats().running >= 0);
                }
            });
        }
        for (std::thread& one : threads) one.join();
    }
    CHECK_EQ(completed.load(), 24);
    CHECK(tokens > 0);
    CHECK(cancelled <= 24);
    CHECK_EQ(engine.prefill(prompt_of(8, 0)), engine.prefill(prompt_of(8, 0)));
}

TEST(a_poll_ends_with_the_scheduler) {
    const Fixture fixture;
    QwenEngine engine(fixture.path(), Fixture::options());
    QwenBatchScheduler scheduler(engine, 1);
    const RequestId request = scheduler.submit_request(prompt_of(8, 0), greedy(240));
    std::thread waiting([&] {
        const auto result = scheduler.poll_result(request, -1);
        CHECK(result && (result->finish_reason == FinishReason::cancelled || result->finish_reason == FinishReason::length));
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    scheduler.stop();
    waiting.join();
    CHECK_THROWS(scheduler.submit_request({1}, greedy(1)), "");
}

TEST(a_persistent_engine_goes_on_from_the_last_answer) {
    const Fixture fixture;
    PersistentOptions options;
    static_cast<QwenEngineOptions&>(options) = Fixture::options();
    PersistentEngine engine(fixture.path(), options);
    PersistentRequest request;
    request.token_ids = prompt_of(20, 2);
    request.max_new_tokens = 8;
    request.logprobs = 3;
    const PersistentResult first = engine.run(request);
    CHECK_EQ(first.token_ids.size(), std::size_t{8});
    CHECK_EQ(first.logprobs.size(), std::size_t{8});
    CHECK_EQ(first.logprobs[0].top[0].first, first.token_ids[0]);
    request.token_ids.insert(request.token_ids.end(), first.token_ids.begin(), first.token_ids.end());
    CHECK_EQ(engine.run(request).cached_tokens, 27);
    request.stop_token_ids = TokenIds{first.token_ids[2]};
    request.token_ids = prompt_of(20, 2);
    const PersistentResult stopped = engine.run(request);
    CHECK_EQ(stopped.token_ids.size(), std::size_t{2});
    CHECK_EQ(stopped.completion_tokens, 3);
    request.max_new_tokens = 1000;
    CHECK_THROWS(engine.run(request), "\"max_new_tokens\" = 1000 is not valid");
}

TEST(what_can_not_be_made_is_refused) {
    const Fixture fixture;
    QwenEngineOptions options = Fixture::options();
    options.dtype = "int4";
    CHECK_THROWS(QwenEngine(fixture.path(), options), "\"dtype\" = \"int4\" is not valid");
    options = Fixture::options();
    CHECK_THROWS(QwenEngine(fixture.path(), options, [](double, const std::string&) { throw std::runtime_error("enough"); }), "enough");
    options.kv_cache_memory = 100;
    CHECK_THROWS(QwenEngine(fixture.path(), options), "KV cache");
    CHECK_THROWS(QwenEngine(fixture.path() + "/none", Fixture::options()), "none");
}
