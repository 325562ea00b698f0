// Requests from any thread onto one QwenEngine, batched by the engine's scheduler: callbacks, or results to be polled.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/qwen_engine.h"
#include "engine/request.h"

namespace pocket {

struct QwenBatchSamplingParams {
    int max_new_tokens = 128;                               // at least 1, or 0 with prompt_logprobs, where nothing is generated
    float temperature = 0;                                  // 0 is greedy
    float top_p = 1;                                        // (0, 1]; 1 is off
    int top_k = 0;                                          // 0 is off
    std::optional<std::uint64_t> seed;                      // without one, a stream from the engine's seed, by order of arrival
    std::optional<std::vector<std::int32_t>> stop_token_ids;  // without them, the EOS ids of the checkpoint
    std::optional<int> logprobs;                            // alternatives to rank at each token, 0 to 20
    std::shared_ptr<TokenConstraint> constraint;
    std::optional<LogitTerms> terms;                        // what changes the logits
    int priority = 0;                                       // lower numbers are started first and preempted last
    std::optional<int> prompt_logprobs;                     // alternatives to rank at each token of the prompt but the first, 0 to 20
};

struct QwenBatchUsage {
    int prompt_tokens = 0;
    int completion_tokens = 0;                              // that the engine generated, the one that ended the request included
    int cached_tokens = 0;                                  // of the prompt, found in the prefix cache
};

struct QwenBatchResult {
    RequestId request_id = 0;
    std::vector<std::int32_t> token_ids;                    // an id that ended the request is left out
    FinishReason finish_reason = FinishReason::stop;
    QwenBatchUsage usage;
    std::vector<TokenLogprobs> logprobs;                    // one for each of token_ids where they were asked for
    std::vector<TokenLogprobs> prompt_logprobs;             // one for each token of the prompt but the first, where they were asked for
    std::exception_ptr error;                               // with FinishReason::error
};

// All are called on the scheduler's thread, must return at once, and may throw: it goes to stderr and is swallowed. For one step `on_step` comes first, then
// `on_token` for each id, and after the last step `on_complete`.
struct QwenBatchCallbacks {
    std::function<void(const QwenBatchResult&)> on_complete;
    std::function<void(RequestId, std::int32_t)> on_token;
    std::function<void(const StepOutput&)> on_step;
};

// Holds no ownership of the engine, which must outlive it. Every method may be called from any thread; stop() and the destructor not from a callback.
class QwenBatchScheduler {
public:
    // Error(configuration) when another scheduler runs on `engine`, or max_batch_size is below 1.
    explicit QwenBatchScheduler(QwenEngine& engine, int max_batch_size = 4);
    ~QwenBatchScheduler();
    QwenBatchScheduler(const QwenBatchScheduler&) = delete;
    QwenBatchScheduler& operator=(const QwenBatchScheduler&) = delete;

    // Queue a request; never blocks on the device. Callbacks may come before it returns. Without `on_complete` the result waits for poll_result.
    RequestId submit_request(std::vector<std::int32_t> prompt_token_ids, const QwenBatchSamplingParams& sampling, QwenBatchCallbacks callbacks = {});

    // Wait for a result and take it: a second call for the same request throws. Nothing after `timeout_ms`; below 0 waits without end.
    std::optional<QwenBatchResult> poll_result(RequestId request_id, std::int64_t timeout_ms);

    // End an active request between two steps. False if it is not active.
    bool cancel(RequestId request_id);

    // End every request with "cancelled" and join the thread; the engine's session calls work again. May be called more than once.
    void stop();

    const EngineCaps& engine_caps() const noexcept { return engine_.capabilities(); }
    int max_batch_size() const noexcept { return max_batch_size_; }     // effective: no more than engine_caps().max_slots
    void set_prefill_token_budget(int tokens);
    EngineStats stats() const;
    bool is_dead() const;                                               // a step failed, and every request is refused
    std::string death() const;
    bool is_stopped() const;
    bool is_in_callback() const noexcept;                               // whether the caller is a callback of this scheduler, or freed by its end

private:
    struct Record;                                          // of a request whose result is polled or handed to on_complete

    void publish(const std::shared_ptr<Record>& record, const StepOutput& output);

    QwenEngine& engine_;
    int max_batch_size_ = 0;
    std::unique_ptr<Engine> loop_;
    mutable std::mutex mutex_;
    std::condition_variable finished_;
    std::unordered_map<RequestId, std::shared_ptr<Record>> polled_;  // guarded by mutex_
    bool is_stopped_ = false;                                        // guarded by mutex_
    std::mutex stopping_;
};

}  // namespace pocket
