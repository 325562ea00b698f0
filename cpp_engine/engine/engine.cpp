#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <limits>
#include <mutex>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/masks.h"
#include "engine/scheduler.h"
#include "pocket/error.h"

namespace pocket {
namespace {

constexpr int max_logprobs = 20;

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

std::string what(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const std::exception& known) {
        return known.what();
    } catch (...) {
        return "something that is no std::exception";
    }
}

void require(bool holds, const char* field, const auto& value, const char* remedy) {
    if (!holds) throw Error(ErrorKind::configuration, text('"', field, "\" = ", value, " is not valid: ", remedy, "."), field);
}

void require_id(std::int32_t id, const char* field, int vocab_size) {
    require(id >= 0 && id < vocab_size, field, id, text("send ids from 0 to ", vocab_size - 1).c_str());
}

void check_terms(const LogitTerms& terms, int vocab_size) {
    const auto is_finite = [](float value) { return std::isfinite(value); };
    require(is_finite(terms.repetition_penalty) && terms.repetition_penalty > 0, "repetition_penalty", terms.repetition_penalty, "send a number above 0");
    require(is_finite(terms.frequency_penalty), "frequency_penalty", terms.frequency_penalty, "send a finite number");
    require(is_finite(terms.presence_penalty), "presence_penalty", terms.presence_penalty, "send a finite number");
    require(terms.min_p >= 0 && terms.min_p <= 1, "min_p", terms.min_p, "send a number from 0 to 1");
    require(terms.min_tokens >= 0, "min_tokens", terms.min_tokens, "send a whole number of at least 0");
    for (const auto& [id, bias] : terms.logit_bias) {
        require_id(id, "logit_bias", vocab_size);
        require(is_finite(bias), "logit_bias", bias, "send finite numbers");
    }
    if (terms.allowed_token_ids) {
        require(!terms.allowed_token_ids->empty(), "allowed_token_ids", "[]", "send at least one id");
        for (const std::int32_t id : *terms.allowed_token_ids) require_id(id, "allowed_token_ids", vocab_size);
    }
    for (const auto& word : terms.bad_words) {
        require(!word.empty(), "bad_words", "[[]]", "send at least one id for each");
        for (const std::int32_t id : word) require_id(id, "bad_words", vocab_size);
    }
}

// Refuse what would fail in a step, and take every row with it, or wait for blocks for ever.
void check_terms(const Request& request, const CacheShape& cache, int vocab_size) {
    const auto& prompt = request.prompt_token_ids;
    if (prompt.empty()) throw Error(ErrorKind::configuration, "\"prompt_token_ids\" is empty: send at least one token id.", "prompt_token_ids");
    const auto unknown = std::ranges::find_if(prompt, [vocab_size](std::int32_t id) { return id < 0 || id >= vocab_size; });
    if (unknown != prompt.end()) {
        throw Error(ErrorKind::configuration,
                    text("\"prompt_token_ids\" has ", *unknown, " at place ", unknown - prompt.begin(), ": send ids from 0 to ", vocab_size - 1, "."),
                    "prompt_token_ids");
    }
    require(request.max_tokens >= (request.prompt_logprobs ? 0 : 1), "max_tokens", request.max_tokens, "send a whole number of at least 1");
    const std::int64_t held = static_cast<std::int64_t>(cache.num_blocks) * cache.block_size;
    const std::int64_t most = cache.max_model_len > 0 ? std::min<std::int64_t>(held, cache.max_model_len) : held;
    if (static_cast<std::int64_t>(prompt.size()) + request.max_tokens > most) {
        throw Error(ErrorKind::configuration,
                    text("\"max_tokens\" = ", request.max_tokens, " after a prompt of ", prompt.size(), " tokens is more than the ", most, " tokens that fit ",
                         most < held ? "into the context: send less, or start the engine with a larger max_model_len."
                                     : "into the KV cache: send less, or start the engine with a larger kv_cache_memory."),
                    "max_tokens");
    }
    constexpr float largest = std::numeric_limits<float>::max();       // neither NaN nor infinite
    require(request.temperature >= 0 && request.temperature <= largest, "temperature", request.temperature, "send a number of at least 0");
    require(request.top_p > 0 && request.top_p <= 1, "top_p", request.top_p, "send a number above 0 and at most 1");
    require(request.top_k >= 0, "top_k", request.top_k, "send a whole number of at least 0");
    if (request.logprobs) {
        require(*request.logprobs >= 0 && *request.logprobs <= max_logprobs, "logprobs", *request.logprobs, "send a whole number from 0 to 20");
    }
    if (request.terms) check_terms(*request.terms, vocab_size);
    if (request.prompt_logprobs) {
        const int count = *request.prompt_logprobs;
        require(count >= 0 && count <= max_logprobs, "prompt_logprobs", count, "send a whole number from 0 to 20");
    }
}

SchedulerOptions scheduler_options(const EngineOptions& options, const CacheShape& cache) {
    require(options.max_batch_size >= 1 && options.max_batch_size <= cache.num_row_slots, "max_batch_size", options.max_batch_size,
            text("take a whole number from 1 to ", cache.num_row_slots, ", the rows that the cache has room for").c_str());
    const int beside = options.prefill_budget_beside_answers;
    require(options.prefill_token_budget >= 0, "prefill_token_budget", options.prefill_token_budget, "take a whole number of at least 0");
    require(beside >= 0, "prefill_budget_beside_answers", beside, "take a whole number of at least 0");
    return {options.max_batch_size, options.prefill_token_budget, beside, options.enable_prefix_caching};
}

}  // namespace

// Lives as long as its thread or its engine, whichever is longer.
class Engine::Loop {
public:
    Loop(Runner& runner, const EngineOptions& options)
        : runner_(runner),
          cache_(runner.cache()),
          vocab_size_(runner.vocab_size()),
          checks_integrity_(options.check_integrity),
          scheduler_(cache_, scheduler_options(options, cache_)),
          masks_(vocab_size_),
          prefill_token_budget_(options.prefill_token_budget) {
        stats_.kv_blocks_total = totals_.kv_blocks_total = cache_.num_blocks;
    }

    static void begin(const std::shared_ptr<Loop>& loop) {
        try {
            loop->thread_ = std::thread([loop] { loop->run(); });
        } catch (const std::system_error& error) {
            throw Error(ErrorKind::unavailable, text("The engine's thread could not be started (", error.what(), "): raise the limit on threads."));
        }
    }

    RequestId submit(Request request, StepCallback on_step) {
        check_terms(request, cache_, vocab_size_);
        std::erase_if(request.stop_token_ids, [this](std::int32_t id) { return id < 0 || id >= vocab_size_; });  // some checkpoints name ends that they don't have
        const RequestId id = ++last_id_;
        Active active{std::make_shared<Row>(id, std::move(request)), std::move(on_step)};
        const std::lock_guard lock(mutex_);
        if (!death_.empty()) throw Error(ErrorKind::unavailable, text("The engine is dead: ", death_, ". Load the model again."));
        if (stopping_) throw Error(ErrorKind::unavailable, "The engine is stopped: it takes no more requests.");
        active_.emplace(id, std::move(active));
        inbox_.push_back({id, false});
        wake_.notify_one();
        return id;
    }

    bool cancel(RequestId id) {
        const std::lock_guard lock(mutex_);
        if (!active_.contains(id)) return false;
        inbox_.push_back({id, true});
        wake_.notify_one();
        return true;
    }

    void set_prefill_token_budget(int tokens) {
        require(tokens >= 0, "prefill_token_budget", tokens, "take a whole number of at least 0");
        prefill_token_budget_ = tokens;
    }

    EngineStats stats() const {
        const std::lock_guard lock(mutex_);
        EngineStats stats = stats_;
        stats.waiting = std::max(0, static_cast<int>(active_.size()) - stats.running);
        return stats;
    }

    std::string death() const {
        const std::lock_guard lock(mutex_);
        return death_;
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            wake_.notify_one();
        }
        if (is_own_thread()) return;
        const std::lock_guard lock(join_mutex_);
        if (thread_.joinable()) thread_.join();
    }

    bool is_own_thread() const noexcept { return own_thread_.load() == std::this_thread::get_id(); }

    // Nobody will join.
    void leave() {
        if (is_own_thread()) thread_.detach();
    }

private:
    struct Active {
        std::shared_ptr<Row> row;
        StepCallback on_step;
    };
    struct Message {
        RequestId id = 0;
        bool cancels = false;                                          // else the row joins
    };

    void run() noexcept {
        own_thread_ = std::this_thread::get_id();
        try {
            while (await_work()) {
                StepPlan step = scheduler_.schedule();
                const std::vector<RunRow> rows = take_masks(step);
                if (stopping_ || rows.empty()) continue;
                std::vector<Draw> draws = runner_.run(rows, take_copies());
                scheduler_.advance(step);
                land(step, draws);
                if (checks_integrity_) scheduler_.check_integrity();
                record();
            }
            finish(nullptr);
        } catch (...) {
            finish(std::current_exception());
        }
        own_thread_ = std::thread::id();                               // once it is joined, another thread may get its number
    }

    // Take what other threads handed over; sleep while there is nothing to do. False when the engine is to stop.
    bool await_work() {
        while (true) {
            std::vector<Message> messages;
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [this] { return stopping_ || !inbox_.empty() || !scheduler_.is_idle(); });
                messages.swap(inbox_);
            }
            for (const Message& message : messages) {
                if (!stopping_) deliver(message);
            }
            if (stopping_) return false;
            if (!scheduler_.is_idle()) break;
        }
        scheduler_.set_prefill_token_budget(prefill_token_budget_);
        return true;
    }

    void deliver(const Message& message) {
        std::shared_ptr<Row> row;
        {
            const std::lock_guard lock(mutex_);
            const auto active = active_.find(message.id);
            if (active == active_.end()) return;                       // it finished before its cancel was read
            row = active->second.row;
        }
        if (message.cancels) {
            end(row, nullptr);
        } else {
            totals_.prompt_tokens += row->request.prompt_token_ids.size();
            scheduler_.add(row);
        }
    }

    // The step for the runner. Rows whose constraint has no mask for them end, and leave the step.
    std::vector<RunRow> take_masks(StepPlan& step) {
        if (step.empty()) throw std::logic_error("there are rows and none is scheduled");
        std::vector<RunRow> rows;
        StepPlan kept;
        for (const ScheduledRow& scheduled : step) {
            Row& row = *scheduled.row;
            const std::uint32_t* mask = nullptr;
            std::span<const LogitEdit> edits;
            try {
                if (scheduled.samples && row.edits) edits = row.edits->step(row.answer());
                if (scheduled.samples) mask = masks_.fill(kept.size(), row, edits);
            } catch (...) {
                end(scheduled.row, std::current_exception());
                continue;
            }
            const auto first = static_cast<std::size_t>(row.num_computed_tokens), count = static_cast<std::size_t>(scheduled.num_tokens);
            rows.push_back({std::span(row.token_ids).subspan(first, count), row.num_computed_tokens, row.block_table, row.slot, scheduled.samples, &row.request,
                            row.num_generated(), mask, edits, ranked(row, scheduled.num_tokens)});
            kept.push_back(scheduled);
        }
        step = std::move(kept);
        return rows;
    }

    static RankedTokens ranked(Row& row, int num_tokens) {
        const auto [begin, end] = row.ranked(num_tokens);
        if (begin == end) return {};
        const std::span ids = std::span(std::as_const(row.token_ids)).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
        return {begin - 1 - row.num_computed_tokens, ids, *row.request.prompt_logprobs, &row.prompt_logprobs};
    }

    // Without those that say that a row starts at its first token, which is nothing to carry out.
    std::vector<StateCopy> take_copies() {
        std::vector<StateCopy> copies = scheduler_.take_copies();
        std::erase_if(copies, [](const StateCopy& copy) { return copy.from < 0; });
        return copies;
    }

    // Hand what a step gave to constraints, scheduler and listeners. A row that failed ends before the others are resolved.
    void land(const StepPlan& step, std::span<Draw> draws) {
        const auto num_samples = std::ranges::count_if(step, [](const ScheduledRow& scheduled) { return scheduled.samples; });
        if (static_cast<std::ptrdiff_t>(draws.size()) != num_samples) throw std::logic_error("the runner drew for other rows than sample");
        std::vector<std::int32_t> drawn(step.size(), -1);              // by place
        std::vector<Draw*> draw_of(step.size());
        auto next = draws.begin();
        for (std::size_t place = 0; place < step.size(); ++place) {
            if (!step[place].samples) continue;
            draw_of[place] = &*next++;
            drawn[place] = accept(step[place].row, *draw_of[place]);
        }
        for (RowUpdate& update : scheduler_.resolve(step, drawn)) publish(update, draw_of[update.place]->logprobs);
    }

    // The id that the row drew, of which its constraint was told; -1 where that failed, and the row ended.
    std::int32_t accept(const std::shared_ptr<Row>& row, const Draw& draw) {
        if (!draw.is_finite) {
            scheduler_.discard(row);
            emit_end(*row, std::make_exception_ptr(Error(
                ErrorKind::device, "The model's logits are not finite, so no token can be drawn from them: check the checkpoint, or take a wider dtype.")));
            return -1;
        }
        if (draw.token_id < 0 || draw.token_id >= vocab_size_) throw std::logic_error(text("the runner drew ", draw.token_id, ", which is no token id"));
        try {
            Masks::accept(*row, draw.token_id);
            return draw.token_id;
        } catch (...) {
            end(row, std::current_exception());
            return -1;
        }
    }

    void publish(const RowUpdate& update, TokenLogprobs& logprobs) {
        Row& row = *update.row;
        totals_.generated_tokens += update.num_generated > 0;
        if (update.num_generated <= 1) totals_.cached_tokens += static_cast<std::uint64_t>(*row.cached_tokens);
        StepOutput output{row.id, {}, update.num_generated, update.finish_reason, *row.cached_tokens, nullptr, {}, std::exchange(row.prompt_logprobs, {})};
        if (update.token_id) {
            output.token_ids.push_back(*update.token_id);
            if (row.request.logprobs) output.logprobs.push_back(std::move(logprobs));
        }
        emit(output);
    }

    // Take a row out between two steps: it failed with `error`, or, where that is null, was cancelled.
    void end(const std::shared_ptr<Row>& row, std::exception_ptr error) {
        scheduler_.remove(row);
        emit_end(*row, std::move(error));
    }

    void emit_end(const Row& row, std::exception_ptr error) {
        const FinishReason reason = error == nullptr ? FinishReason::cancelled : FinishReason::error;
        emit({row.id, {}, row.num_generated(), reason, row.cached_tokens.value_or(0), std::move(error), {}, {}});
    }

    // Call the row's listener, which may call the engine, so without the lock. Only this thread erases from active_, and its nodes stay where they are.
    void emit(const StepOutput& output) {
        record();
        decltype(active_)::node_type finished;                         // freed after the call, outside of the lock, since it holds what is not ours
        Active* active = nullptr;
        {
            const std::lock_guard lock(mutex_);
            const auto entry = active_.find(output.request_id);
            active = &entry->second;
            if (output.finish_reason) finished = active_.extract(entry);
        }
        try {
            if (active->on_step) active->on_step(output);
        } catch (...) {
            std::cerr << text("pocketllm: the callback of request ", output.request_id, " failed: ", what(std::current_exception()), "\n") << std::flush;
        }
    }

    // The figures that other threads see.
    void record() {
        totals_.running = static_cast<int>(scheduler_.running().size());
        totals_.kv_blocks_used = scheduler_.pool().num_used();
        totals_.preemptions = scheduler_.num_preemptions();
        const std::lock_guard lock(mutex_);
        stats_ = totals_;
    }

    // End every row and refuse new ones: the engine was stopped, or `error` ended it.
    void finish(std::exception_ptr error) {
        std::exception_ptr reported;
        std::vector<std::shared_ptr<Row>> rows;
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            if (error != nullptr) {
                death_ = text("a step failed: ", what(error));
                reported = std::make_exception_ptr(Error(ErrorKind::unavailable, text("The engine is dead: ", death_, ". Load the model again.")));
            }
            for (const auto& [id, active] : active_) rows.push_back(active.row);
        }
        std::ranges::sort(rows, {}, [](const auto& row) { return row->id; });
        for (const auto& row : rows) scheduler_.remove(row);           // all of them before the first listener hears of it
        record();
        for (const auto& row : rows) emit_end(*row, reported);
    }

    Runner& runner_;                                                   // not touched once stopping_ was seen
    const CacheShape cache_;
    const int vocab_size_;
    const bool checks_integrity_;
    Scheduler scheduler_;                                              // this and what follows up to totals_: of the loop's thread alone
    Masks masks_;
    EngineStats totals_;

    mutable std::mutex mutex_;                                         // guards what follows up to stats_
    std::condition_variable wake_;
    std::unordered_map<RequestId, Active> active_;
    std::vector<Message> inbox_;
    std::string death_;
    EngineStats stats_;

    std::atomic<bool> stopping_ = false;                               // set under mutex_, so that the loop does not miss it
    std::atomic<int> prefill_token_budget_;
    std::atomic<RequestId> last_id_ = 0;
    std::atomic<std::thread::id> own_thread_{};
    std::mutex join_mutex_;                                            // of thread_, once it was started
    std::thread thread_;
};

Engine::Engine(Runner& runner, const EngineOptions& options) : loop_(std::make_shared<Loop>(runner, options)) { Loop::begin(loop_); }

Engine::~Engine() {
    stop();
    loop_->leave();
}

RequestId Engine::submit(Request request, StepCallback on_step) { return loop_->submit(std::move(request), std::move(on_step)); }

bool Engine::cancel(RequestId id) { return loop_->cancel(id); }

void Engine::set_prefill_token_budget(int tokens) { loop_->set_prefill_token_budget(tokens); }

EngineStats Engine::stats() const { return loop_->stats(); }

bool Engine::is_own_thread() const noexcept { return loop_->is_own_thread(); }

bool Engine::is_dead() const { return !loop_->death().empty(); }

std::string Engine::death() const { return loop_->death(); }

void Engine::stop() { loop_->stop(); }

}  // namespace pocket
