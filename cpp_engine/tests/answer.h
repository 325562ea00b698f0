// What a test's listener heard of one request, and the requests that tests send.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tests/toy_runner.h"

namespace pocket {

// Written on the engine's thread, read on the test's.
class Answer {
public:
    void hear(const StepOutput& output) {
        const std::lock_guard lock(mutex_);
        if (end_.finish_reason) fault_ = "something follows a finish";
        if (output.num_generated < num_generated_ || output.num_generated > num_generated_ + 1) fault_ = "a token is lost or counted twice";
        num_generated_ = output.num_generated;
        token_ids_.insert(token_ids_.end(), output.token_ids.begin(), output.token_ids.end());
        logprobs_.insert(logprobs_.end(), output.logprobs.begin(), output.logprobs.end());
        if (!output.prompt_logprobs.empty() && num_outputs_ > 0) fault_ = "what was told of the prompt comes late";
        if (num_outputs_++ == 0) prompt_logprobs_ = output.prompt_logprobs;
        if (output.finish_reason) end_ = output;
        changed_.notify_all();
    }

    // The last output. Throws where it does not come, or what came broke the terms of StepOutput.
    StepOutput end() { return wait([this] { return end_.finish_reason.has_value(); }), end_; }

    void wait_for_tokens(int count) {
        wait([this, count] { return num_generated_ >= count || end_.finish_reason; });
    }

    std::vector<std::int32_t> token_ids() { return end(), token_ids_; }
    std::vector<TokenLogprobs> logprobs() { return end(), logprobs_; }
    std::vector<TokenLogprobs> prompt_logprobs() { return end(), prompt_logprobs_; }
    FinishReason reason() { return *end().finish_reason; }

    std::string error() {
        try {
            if (const auto error = end().error) std::rethrow_exception(error);
        } catch (const std::exception& error) {
            return error.what();
        }
        return "";
    }

private:
    template <typename Condition>
    void wait(Condition condition) {
        std::unique_lock lock(mutex_);
        if (!changed_.wait_for(lock, std::chrono::seconds(60), condition)) throw std::runtime_error("the engine does not answer");
        if (!fault_.empty()) throw std::runtime_error(fault_);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::int32_t> token_ids_;
    std::vector<TokenLogprobs> logprobs_, prompt_logprobs_;
    int num_generated_ = 0, num_outputs_ = 0;
    StepOutput end_;
    std::string fault_;
};

struct Asked {
    RequestId id = 0;
    std::shared_ptr<Answer> answer;
    Answer* operator->() const { return answer.get(); }
};

inline Asked ask(Engine& engine, const Request& request) {
    const auto answer = std::make_shared<Answer>();
    return {engine.submit(request, [answer](const StepOutput& output) { answer->hear(output); }), answer};
}

// A greedy request whose prompt is `length` ids from `first` on.
inline Request ask_for(int first, int length, int max_tokens) {
    Request request;
    request.prompt_token_ids.resize(static_cast<std::size_t>(length));
    std::iota(request.prompt_token_ids.begin(), request.prompt_token_ids.end(), first);
    for (auto& id : request.prompt_token_ids) id %= toy_vocab_size;
    request.max_tokens = max_tokens;
    return request;
}

inline CacheShape attention_cache(int num_blocks, int rows = 4) { return {4, num_blocks, rows, 0, 0, 0}; }
inline CacheShape hybrid_cache(int num_blocks, int rows = 4, int snapshots = 6) { return {4, num_blocks, rows, snapshots, 8, 0}; }

// Holds a runner before one of its steps until it is opened, so that a test knows where the engine is.
class Gate {
public:
    Gate(ToyRunner& runner, int steps) {
        runner.before_step = [this, &runner, steps] {
            if (runner.num_steps == steps) opened_.wait(false);
        };
    }
    void open() {
        opened_ = true;
        opened_.notify_all();
    }

private:
    std::atomic<bool> opened_ = false;
};

// An engine whose books are verified after every step. Members are destroyed in the order that the engine needs.
struct Setup {
    explicit Setup(const CacheShape& cache, int prefill_token_budget = 0, bool caches = true)
        : runner(cache), engine(std::make_unique<Engine>(runner, EngineOptions{cache.num_row_slots, prefill_token_budget, 0, caches, true})) {}

    ToyRunner runner;
    std::unique_ptr<Engine> engine;
};

}  // namespace pocket
