#include "engine/qwen_batch_scheduler.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <utility>

#include "pocket/error.h"

namespace pocket {

namespace {

// A callback's own fault ends nothing but its call.
template <typename Call>
void guarded(const char* what, RequestId request_id, Call&& call) noexcept {
    try {
        call();
    } catch (const std::exception& error) {
        std::cerr << "pocketllm: " << what << " of request " << request_id << " failed: " << error.what() << std::endl;
    } catch (...) {
        std::cerr << "pocketllm: " << what << " of request " << request_id << " failed." << std::endl;
    }
}

}  // namespace

struct QwenBatchScheduler::Record {
    QwenBatchResult result;
    QwenBatchCallbacks callbacks;
    bool is_done = false;                                   // guarded by the scheduler's mutex_
};

QwenBatchScheduler::QwenBatchScheduler(QwenEngine& engine, int max_batch_size) : engine_(engine) {
    if (max_batch_size < 1) {
        throw Error(ErrorKind::configuration, "\"max_batch_size\" = " + std::to_string(max_batch_size) + " is not valid: send a whole number of at least 1.",
                    "max_batch_size");
    }
    max_batch_size_ = std::min(max_batch_size, engine.capabilities().max_slots);
    Runner& runner = engine.attach();
    try {
        EngineOptions options;
        options.max_batch_size = max_batch_size_;
        options.prefill_token_budget = engine.options().prefill_chunk_tokens;
        options.enable_prefix_caching = engine.options().enable_prefix_caching;
        loop_ = std::make_unique<Engine>(runner, options);
    } catch (...) {
        engine.detach();
        throw;
    }
}

QwenBatchScheduler::~QwenBatchScheduler() {
    if (engine_.is_foreign()) {
        (void)loop_.release();  // its thread did not come along into this fork, so nothing could join it
    } else {
        stop();
    }
}

RequestId QwenBatchScheduler::submit_request(std::vector<std::int32_t> prompt_token_ids, const QwenBatchSamplingParams& sampling,
                                             QwenBatchCallbacks callbacks) {
    engine_.check_process();
    Request request;
    request.prompt_token_ids = std::move(prompt_token_ids);
    request.max_tokens = sampling.max_new_tokens;
    request.temperature = sampling.temperature;
    request.top_p = sampling.top_p;
    request.top_k = sampling.top_k;
    request.seed = sampling.seed ? *sampling.seed : engine_.next_seed();
    request.stop_token_ids = sampling.stop_token_ids ? *sampling.stop_token_ids : engine_.config().eos_token_ids;
    request.logprobs = sampling.logprobs;
    request.constraint = sampling.constraint;
    request.terms = sampling.terms;
    request.priority = sampling.priority;
    request.prompt_logprobs = sampling.prompt_logprobs;
    auto record = std::make_shared<Record>();
    record->result.usage.prompt_tokens = static_cast<int>(request.prompt_token_ids.size());
    record->callbacks = std::move(callbacks);
    const bool is_polled = !record->callbacks.on_complete;
    const RequestId request_id = loop_->submit(std::move(request), [this, record](const StepOutput& output) { publish(record, output); });
    if (is_polled) {
        const std::lock_guard lock(mutex_);
        polled_.emplace(request_id, std::move(record));
    }
    return request_id;
}

void QwenBatchScheduler::publish(const std::shared_ptr<Record>& record, const StepOutput& output) {
    QwenBatchResult& result = record->result;
    const QwenBatchCallbacks& callbacks = record->callbacks;
    result.request_id = output.request_id;
    result.token_ids.insert(result.token_ids.end(), output.token_ids.begin(), output.token_ids.end());
    result.logprobs.insert(result.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
    result.prompt_logprobs.insert(result.prompt_logprobs.end(), output.prompt_logprobs.begin(), output.prompt_logprobs.end());
    result.usage.completion_tokens = output.num_generated;
    result.usage.cached_tokens = std::max(result.usage.cached_tokens, output.cached_tokens);
    if (callbacks.on_step) guarded("on_step", output.request_id, [&] { callbacks.on_step(output); });
    if (callbacks.on_token) {
        for (const std::int32_t token_id : output.token_ids) guarded("on_token", output.request_id, [&] { callbacks.on_token(output.request_id, token_id); });
    }
    if (!output.finish_reason) return;
    result.finish_reason = *output.finish_reason;
    result.error = output.error;
    if (callbacks.on_complete) {
        guarded("callback", output.request_id, [&] { callbacks.on_complete(result); });
    } else {
        const std::lock_guard lock(mutex_);
        record->is_done = true;
        finished_.notify_all();
    }
}

std::optional<QwenBatchResult> QwenBatchScheduler::poll_result(RequestId request_id, std::int64_t timeout_ms) {
    std::shared_ptr<Record> record;  // freed once the lock is given up: it owns callbacks, whose end may wait for the caller's own locks
    std::unique_lock lock(mutex_);
    const auto place = polled_.find(request_id);
    if (place == polled_.end()) {
        throw Error(ErrorKind::configuration,
                    "Request " + std::to_string(request_id) + " has no result to poll: it is unknown, was submitted with a callback, or its result was taken.",
                    "request_id");
    }
    record = place->second;
    const auto is_done = [&] { return record->is_done; };
    if (timeout_ms < 0) {
        finished_.wait(lock, is_done);
    } else {
        // A deadline that the clock can hold; nobody waits for a hundred years.
        const auto wait = std::chrono::milliseconds(std::min<std::int64_t>(timeout_ms, 3'153'600'000'000));
        if (!finished_.wait_for(lock, wait, is_done)) return std::nullopt;
    }
    if (polled_.erase(request_id) == 0) {
        throw Error(ErrorKind::configuration, "Request " + std::to_string(request_id) + " has no result to poll: another thread took it.", "request_id");
    }
    return std::move(record->result);
}

bool QwenBatchScheduler::cancel(RequestId request_id) { return loop_->cancel(request_id); }

bool QwenBatchScheduler::is_in_callback() const noexcept { return loop_->is_own_thread(); }

void QwenBatchScheduler::stop() {
    if (is_in_callback()) {
        throw Error(ErrorKind::configuration, "stop was called from a callback, which runs on the thread that stop waits for: call it from another thread.");
    }
    if (engine_.is_foreign()) return;
    const std::lock_guard one_at_a_time(stopping_);
    {
        const std::lock_guard lock(mutex_);
        if (is_stopped_) return;
    }
    loop_->stop();
    engine_.detach();
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
}

void QwenBatchScheduler::set_prefill_token_budget(int tokens) {
    if (tokens < 0) {
        throw Error(ErrorKind::configuration, "\"tokens\" = " + std::to_string(tokens) + " is not valid: send a whole number of at least 0, where 0 is off.",
                    "tokens");
    }
    loop_->set_prefill_token_budget(tokens);
}

EngineStats QwenBatchScheduler::stats() const { return loop_->stats(); }

bool QwenBatchScheduler::is_dead() const { return loop_->is_dead(); }

std::string QwenBatchScheduler::death() const { return loop_->death(); }

bool QwenBatchScheduler::is_stopped() const {
    const std::lock_guard lock(mutex_);
    return is_stopped_;
}

}  // namespace pocket
