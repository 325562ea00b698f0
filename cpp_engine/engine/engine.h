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

// Every method may be called from any thread. The Runner must outlive the engine, which holds no ownership of it.
class Engine {
public:
    Engine(Runner& runner, const EngineOptions& options);   // starts the thread
    ~Engine();                                              // stop()
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Queue a row; never blocks on the device and never drops. Error(configuration) naming the field that breaks Request's terms,
    // Error(unavailable) once the engine is dead or stopped.
    RequestId submit(Request request, StepCallback on_step);

    // End an active row at the next step boundary with FinishReason::cancelled. False if it is not active.
    bool cancel(RequestId id);

    // Takes effect with the next schedule.
    void set_prefill_token_budget(int tokens);

    EngineStats stats() const;
    bool is_dead() const;
    std::string death() const;                              // why it is dead, empty while it is not

    // End every active row with FinishReason::cancelled and join the thread. May be called more than once, not from a callback.
    void stop();

private:
    class Loop;
    std::unique_ptr<Loop> loop_;
};

}  // namespace pocket
