// Continuous batching over one Runner: a thread whose whole loop is schedule, run, resolve, publish.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/request.h"
#include "engine/runner.h"

namespace pocket {

struct EngineOptions {
    int max_batch_size = 8;                                 // most running rows; at most Runner::cache().num_row_slots
    int prefill_token_budget = 512;                         // most prompt tokens a step over all rows; 0 computes each prompt in one step
    int prefill_budget_beside_answers = 0;                  // most of them in a step in which some row decodes; 0 is as many as in any other
    bool enable_prefix_caching = true;
    bool check_integrity = false;                           // verify the scheduler's books after every step (tests)
};

// Gauges and running totals since the start.
struct EngineStats {
    int running = 0;
    int waiting = 0;
    int kv_blocks_total = 0;
    int kv_blocks_used = 0;
    std::uint64_t prompt_tokens = 0;
    std::uint64_t generated_tokens = 0;
    std::uint64_t cached_tokens = 0;
    std::uint64_t preemptions = 0;
};

// Every method may be called from any thread, and from callbacks. The Runner must outlive the engine, which holds no ownership of it.
class Engine {
public:
    // Starts the thread. Error(configuration) naming the option that is out of its range.
    Engine(Runner& runner, const EngineOptions& options);
    ~Engine();                                              // stop()
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Queue a row; never blocks on the device and never drops. Its first output may come before this returns. Error(configuration) naming the field that
    // breaks Request's terms, Error(unavailable) once the engine is dead or stopped.
    RequestId submit(Request request, StepCallback on_step);

    // End an active row at the next step boundary with FinishReason::cancelled. False if it is not active.
    bool cancel(RequestId id);

    // Takes effect with the next schedule. Error(configuration) below 0.
    void set_prefill_token_budget(int tokens);

    EngineStats stats() const;
    bool is_own_thread() const noexcept;                    // whether the caller is the engine's thread, as callbacks and what they free are
    bool is_dead() const;
    std::string death() const;                              // why it is dead, empty while it is not

    // End every active row with FinishReason::cancelled and join the thread. May be called more than once. From a callback, which is on that thread, it
    // cannot wait: the runner is not called again, and the rows end once the callback has returned. So a callback may even destroy the engine.
    void stop();

private:
    class Loop;
    std::shared_ptr<Loop> loop_;                            // shared with the thread, which outlives an engine that a callback destroys
};

}  // namespace pocket
