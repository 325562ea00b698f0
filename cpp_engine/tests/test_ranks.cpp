// Engines over several ranks, as threads of this process, against one engine alone: ids, draws, log probabilities, and how they end.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/qwen_batch_scheduler.h"
#include "engine/qwen_engine.h"
#include "engine/step_order.h"
#include "models/qwen3_5.h"
#include "pocket/error.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

using TokenIds = std::vector<std::int32_t>;

QwenEngineOptions options_of(const TemporaryFolder& meeting, int rank, int size) {
    QwenEngineOptions options;
    options.num_threads = 1;
    options.max_batch_size = 4;
    options.max_model_len = 256;
    options.prefill_chunk_tokens = 32;
    options.tensor_parallel_size = size;
    options.tensor_parallel_rank = rank;
    options.rendezvous_dir = size > 1 ? meeting.path().string() : "";
    options.kv_cache_memory = 8 << 20;
    return options;
}

// The other ranks on threads of their own; they end with rank 0, which the test makes.
class Followers {
public:
    Followers(const std::string& checkpoint, int size) : size_(size) {
        for (int rank = 1; rank < size; ++rank) {
            threads_.emplace_back([this, checkpoint, rank] {
                try {
                    QwenEngine engine(checkpoint, options_of(meeting_, rank, size_));
                    weight_bytes = engine.config().weight_bytes;
                    engine.follow();
                    ++num_dismissed;
                } catch (const std::exception& error) {
                    error_ = error.what();
                }
            });
        }
    }
    ~Followers() { join(); }
    void join() {
        for (std::thread& thread : threads_) {
            if (thread.joinable()) thread.join();
        }
    }
    QwenEngineOptions options() const { return options_of(meeting_, 0, size_); }
    const std::string& error() { return join(), error_; }

    std::atomic<int> num_dismissed = 0;
    std::atomic<std::size_t> weight_bytes = 0;

private:
    TemporaryFolder meeting_;
    int size_;
    std::string error_;                                     // of one of them
    std::vector<std::thread> threads_;
};

TokenIds prompt_of(int length, int seed, int vocab_size) {
    TokenIds ids;
    for (int place = 0; place < length; ++place) ids.push_back((place * 7 + seed * 31 + 3) % vocab_size);
    return ids;
}

// Some ids, the first of them an even one.
class EveryOther final : public TokenConstraint {
public:
    void fill(std::span<std::uint32_t> mask) override { std::fill(mask.begin(), mask.end(), is_odd_ ? 0xaaaaaaaau : 0x55555555u); }
    void accept(std::int32_t) override { is_odd_ = !is_odd_; }
    bool is_complete() override { return false; }

private:
    bool is_odd_ = false;
};

struct Answers {
    std::vector<TokenIds> ids;
    std::vector<std::vector<TokenLogprobs>> logprobs;
};

// Rows that run together, greedy ones and draws of every kind.
Answers answers_of(QwenEngine& engine) {
    const int vocab_size = engine.config().vocab_size;
    std::vector<QwenBatchSamplingParams> all(13);
    for (std::size_t row = 0; row < all.size(); ++row) {
        all[row].max_new_tokens = 12;
        all[row].stop_token_ids.emplace();
        all[row].seed = 0x8000000000000005u + row;
        if (row % 2 == 1) all[row].logprobs = static_cast<int>(row);
    }
    all[2].temperature = 1.5f;
    all[3].temperature = 1, all[3].top_p = 0.5f;
    all[4].temperature = 40, all[4].top_p = 0.999f;  // beyond any number of candidates
    all[5].temperature = 2, all[5].top_k = 5;
    all[6].temperature = 2, all[6].top_k = 1'000'000;
    all[7].temperature = 3, all[7].constraint = std::make_shared<EveryOther>();
    all[8].constraint = std::make_shared<EveryOther>();
    all[9].prompt_logprobs = 3;
    for (std::size_t row = 10; row < all.size(); ++row) {
        LogitTerms& terms = all[row].terms.emplace();
        terms.frequency_penalty = 1, terms.presence_penalty = 0.5f, terms.repetition_penalty = 1.3f;
        terms.logit_bias = {{5, 3.0f}, {140, -2.0f}};
    }
    all[11].temperature = 1.2f, all[11].terms->min_p = 0.05f;
    all[12].terms->allowed_token_ids = TokenIds{1, 2, 3, 149, 150};
    QwenBatchScheduler scheduler(engine, 4);
    std::vector<RequestId> requests;
    for (std::size_t row = 0; row < all.size(); ++row) requests.push_back(scheduler.submit_request(prompt_of(1 + 13 * static_cast<int>(row), 1, vocab_size), all[row]));
    Answers answers;
    for (const RequestId request : requests) {
        const auto result = scheduler.poll_result(request, 60'000);
        if (!result) throw std::runtime_error("no answer");
        answers.ids.push_back(result->token_ids);
        answers.logprobs.push_back(result->logprobs);
    }
    return answers;
}

void check_equal(const Answers& found, const Answers& wanted) {
    CHECK_EQ(found.ids, wanted.ids);
    for (std::size_t row = 0; row < wanted.logprobs.size(); ++row) {
        CHECK_EQ(found.logprobs[row].size(), wanted.logprobs[row].size());
        for (std::size_t place = 0; place < wanted.logprobs[row].size(); ++place) {
            const TokenLogprobs &one = found.logprobs[row][place], &other = wanted.logprobs[row][place];
            CHECK_NEAR(one.logprob, other.logprob, 1e-3);
            CHECK_EQ(one.top.size(), other.top.size());
            for (std::size_t rank = 0; rank < other.top.size(); ++rank) CHECK_NEAR(one.top[rank].second, other.top[rank].second, 1e-3);
        }
    }
}

void check_as_alone(const std::string& checkpoint, int size) {
    const TemporaryFolder nowhere;
    QwenEngine alone(checkpoint, options_of(nowhere, 0, 1));
    const Answers wanted = answers_of(alone);
    const TokenIds prompt = prompt_of(40, 0, alone.config().vocab_size), generated = alone.generate(prompt, 10);
    const std::vector<float> logits = alone.logits(prompt);
    Followers others(checkpoint, size);
    {
        QwenEngine engine(checkpoint, others.options());
        engine.warmup();
        check_equal(answers_of(engine), wanted);
        CHECK_EQ(engine.generate(prompt, 10), generated);
        const std::vector<float> found = engine.logits(prompt);
        CHECK_EQ(found.size(), logits.size());
        double worst = 0;
        for (std::size_t place = 0; place < logits.size(); ++place) worst = std::max(worst, std::abs(static_cast<double>(found[place]) - logits[place]));
        CHECK(worst < 1e-2);
        CHECK(others.weight_bytes < alone.config().weight_bytes * 4 / 5);
    }
    others.join();
    CHECK_EQ(others.num_dismissed.load(), size - 1);
}

TinyCheckpoint sizes_for(int size) {
    TinyCheckpoint tiny;
    tiny.num_heads = 2 * size, tiny.num_kv_heads = size, tiny.num_key_heads = size, tiny.num_value_heads = 3 * size;
    tiny.intermediate_size = 30 * size;
    return tiny;
}

std::string written(TinyCheckpoint tiny, const TemporaryFolder& folder) {
    tiny.make();
    tiny.write(folder.path());
    return folder.path().string();
}

}  // namespace

TEST(two_and_three_ranks_answer_as_one) {
    for (const int size : {2, 3}) {
        const TemporaryFolder folder;
        check_as_alone(written(sizes_for(size), folder), size);
    }
}

TEST(a_tied_and_a_large_vocabulary_are_shared) {
    const TemporaryFolder tied, large;
    TinyCheckpoint tiny = sizes_for(2);
    tiny.is_tied = true;
    check_as_alone(written(tiny, tied), 2);
    tiny.is_tied = false;
    tiny.vocab_size = 1337;  // unequal parts, and more ids than candidates
    tiny.num_layers = 2;
    check_as_alone(written(tiny, large), 2);
}

TEST(blocks_of_fp8_are_kept_whole) {
    const TemporaryFolder folder, uneven;
    TinyCheckpoint tiny;
    tiny.is_fp8 = true;
    tiny.type = "BF16";
    tiny.num_layers = 2;
    tiny.hidden_size = 128, tiny.intermediate_size = 256;
    tiny.num_heads = 4, tiny.num_kv_heads = 2, tiny.head_dim = 128;
    tiny.num_key_heads = 2, tiny.num_value_heads = 4, tiny.key_dim = 128, tiny.value_dim = 128;
    const std::string path = written(tiny, folder);
    const TemporaryFolder nowhere;
    QwenEngine alone(path, options_of(nowhere, 0, 1));
    Followers others(path, 2);
    QwenEngine engine(path, others.options());
    const TokenIds prompt = prompt_of(20, 0, 151);
    const std::vector<float> wanted = alone.logits(prompt), found = engine.logits(prompt);
    double worst = 0, largest = 0;
    for (std::size_t place = 0; place < wanted.size(); ++place) {
        worst = std::max(worst, std::abs(static_cast<double>(found[place]) - wanted[place]));
        largest = std::max(largest, std::abs(static_cast<double>(wanted[place])));
    }
    CHECK(worst < 0.02 * largest);  // activations are rounded to bfloat16 at other places

    tiny.intermediate_size = 192;
    const std::string cut = written(tiny, uneven);
    Followers refused(cut, 2);
    CHECK_THROWS(QwenEngine(cut, refused.options()), "mlp.gate_proj.weight in FP8 blocks of 128 x 128, and 2 ranks would cut one at row 96");
    CHECK(refused.error().find("2 ranks would cut one at row 96") != std::string::npos);
}

TEST(what_ranks_can_not_share_is_refused_before_they_meet) {
    const TemporaryFolder folder;
    const std::string path = written(TinyCheckpoint(), folder);
    const TemporaryFolder meeting;
    CHECK_THROWS(QwenEngine(path, options_of(meeting, 0, 3)), "\"tensor_parallel_size\" = 3 does not divide num_attention_heads = 4 of " + path);
    CHECK_THROWS(QwenEngine(path, options_of(meeting, 2, 2)), "\"tensor_parallel_rank\" = 2 is not valid: send a whole number from 0 to 1");
    QwenEngineOptions options = options_of(meeting, 0, 2);
    options.rendezvous_dir.clear();
    CHECK_THROWS(QwenEngine(path, options), "\"rendezvous_dir\" is empty");
    options = options_of(meeting, 0, 2);
    CHECK_THROWS(QwenEngine(path, options, [](double, const std::string& message) { throw std::runtime_error(message); }), "waiting for the other ranks of 2");
}

TEST(a_rank_that_can_not_load_ends_the_load_of_the_others) {
    const TemporaryFolder folder, broken;
    TinyCheckpoint tiny = sizes_for(2);
    const std::string path = written(tiny, folder);
    tiny.make();
    tiny.tensors.erase("model.layers.4.mlp.down_proj.weight");
    tiny.write(broken.path());
    Followers others(broken.path().string(), 2);
    CHECK_THROWS(QwenEngine(path, others.options()), "rank 1 of 2 has failed: " + broken.path().string());
    CHECK(others.error().find("lacks the tensor model.layers.4.mlp.down_proj.weight") != std::string::npos);
}

TEST(a_lost_rank_ends_every_row_with_an_error) {
    const TemporaryFolder folder;
    const std::string path = written(sizes_for(2), folder);
    Followers others(path, 2);
    QwenEngine engine(path, others.options());
    QwenBatchSamplingParams sampling;
    sampling.max_new_tokens = 200;
    sampling.stop_token_ids.emplace();
    {
        QwenBatchScheduler scheduler(engine, 4);
        std::vector<RequestId> requests;
        for (int row = 0; row < 3; ++row) requests.push_back(scheduler.submit_request(prompt_of(20, row, 151), sampling));
        engine.abandon("rank 1 was ended by SIGKILL");
        for (const RequestId request : requests) {
            const auto result = scheduler.poll_result(request, 10'000);
            CHECK(result && result->finish_reason == FinishReason::error);
        }
        CHECK(scheduler.is_dead());
        CHECK(scheduler.death().find("rank 1 was ended by SIGKILL") != std::string::npos);
        CHECK_THROWS(scheduler.submit_request({1}, sampling), "rank 1 was ended by SIGKILL");
    }
    CHECK(others.error().find("rank 0 of 2 has failed: rank 1 was ended by SIGKILL") != std::string::npos);
}

TEST(ranks_have_their_own_calls) {
    const TemporaryFolder folder;
    const std::string path = written(sizes_for(2), folder);
    const TemporaryFolder meeting;
    std::thread other([&] {
        QwenEngine engine(path, options_of(meeting, 1, 2));
        CHECK_THROWS(engine.prefill(TokenIds{1}), "prefill can't be called on rank 1, which computes what rank 0 orders");
        CHECK_THROWS(QwenBatchScheduler(engine, 1), "runs on rank 0 alone");
        engine.follow();
    });
    {
        QwenEngine engine(path, options_of(meeting, 0, 2));
        CHECK_THROWS(engine.follow(), "follow can't be called on rank 0");
        engine.prefill(TokenIds{1, 2, 3});
        engine.dismiss();
    }
    other.join();
}

TEST(orders_are_read_as_they_were_written) {
    const TokenIds ids{5, 6, 7}, blocks{2, 9};
    const std::vector<std::uint32_t> mask{1, 2, 3};
    Request request;
    request.terms.emplace();
    request.temperature = 0.7f, request.top_p = 0.9f, request.top_k = 40, request.seed = ~std::uint64_t{0}, request.logprobs = 0;
    RunRow row;
    row.token_ids = ids, row.block_table = blocks, row.num_computed_tokens = 17, row.slot = 3, row.samples = true, row.request = &request, row.draw = 4;
    RunRow masked = row;
    masked.mask = mask.data();
    row.ranked = {1, ids, 2, nullptr};
    const RunRow rows[] = {row, masked};
    const StateCopy copies[] = {{1, 2}, {3, 4}};
    const std::vector<std::byte> bytes = write_order(OrderKind::run, rows, copies, 70);
    const StepOrder order(bytes, 70);
    CHECK(order.kind() == OrderKind::run);
    CHECK_EQ(order.copies().size(), std::size_t{2});
    CHECK_EQ(order.copies()[1].to, 4);
    CHECK_EQ(order.rows().size(), std::size_t{2});
    for (const RunRow& read : order.rows()) {
        CHECK_EQ(TokenIds(read.token_ids.begin(), read.token_ids.end()), ids);
        CHECK_EQ(TokenIds(read.block_table.begin(), read.block_table.end()), blocks);
        CHECK(read.num_computed_tokens == 17 && read.slot == 3 && read.samples && read.draw == 4);
        CHECK(read.request->temperature == 0.7f && read.request->top_p == 0.9f && read.request->top_k == 40 && read.request->seed == ~std::uint64_t{0});
        CHECK_EQ(read.request->logprobs.value_or(-1), 0);
        CHECK(read.request->terms.has_value());
    }
    CHECK(order.rows()[0].mask == nullptr);
    const RankedTokens& ranked = order.rows()[0].ranked;
    CHECK(ranked.first == 1 && ranked.num_top == 2 && ranked.found != nullptr);
    CHECK_EQ(TokenIds(ranked.ids.begin(), ranked.ids.end()), ids);
    CHECK(order.rows()[1].ranked.ids.empty());
    CHECK_EQ(std::vector<std::uint32_t>(order.rows()[1].mask, order.rows()[1].mask + 3), mask);
    const std::vector<std::byte> short_bytes(bytes.begin(), bytes.end() - 1);
    CHECK_THROWS(StepOrder(short_bytes, 70), "ends too early");
}
