// Continuous batching over plain ints: which rows run, how many tokens each computes this step, in which blocks.
//
// There are no phases. A row catches up num_computed_tokens to its length within a budget of prompt tokens a step; the step in which it catches up gives its
// next token. Preemption frees a row's blocks and recomputes them later.
//
// A step is chosen by `schedule`, counted as computed by `advance`, and its ids come in by `resolve`. Between the two a row's last id is unknown_token, and the
// next step may be chosen and launched; it is counted once the one before is resolved. So when a row turns out to have ended, at most one step was computed
// for nothing. What that step writes lies behind what the row has counted, in blocks and a slot that are free by then: whoever gets them writes them in a
// later step, which the device runs after it.
//
// Each running row owns a slot, a number below max_batch_size; in a hybrid model its state is in that slot. Such a row's prompt is cut where a snapshot of the
// state is to be taken, and it starts from cached blocks only as far as there is a snapshot.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/block_pool.h"
#include "engine/row.h"
#include "engine/runner.h"
#include "engine/state_pool.h"

namespace pocket {

struct SchedulerOptions {
    int max_batch_size = 1;                                            // most running rows, at most CacheShape::num_row_slots
    int prefill_token_budget = 0;                                      // most prompt tokens a step over all rows; 0 computes each prompt in one step
    int prefill_budget_beside_answers = 0;                             // most of them in a step in which some row decodes; 0 is as many as in any other
    bool enable_prefix_caching = true;
};

using StepPlan = std::vector<ScheduledRow>;

// Holds the waiting and the running rows. One thread uses it.
class Scheduler {
public:
    Scheduler(const CacheShape& cache, const SchedulerOptions& options);

    const BlockPool& pool() const noexcept { return pool_; }
    const std::deque<std::shared_ptr<Row>>& waiting() const noexcept { return waiting_; }
    const std::vector<std::shared_ptr<Row>>& running() const noexcept { return running_; }
    std::uint64_t num_preemptions() const noexcept { return num_preemptions_; }
    int num_snapshots() const noexcept { return states_ ? states_->num_snapshots() : 0; }
    bool is_idle() const noexcept { return waiting_.empty() && running_.empty(); }

    // Takes effect with the next `schedule`.
    void set_prefill_token_budget(int tokens) noexcept { options_.prefill_token_budget = tokens; }

    // Queue a new row behind those that wait with its priority or a lower number. Its tokens all fit into the pool.
    void add(std::shared_ptr<Row> row);

    // Take a row out, wherever it is, and free its blocks. An id that is unknown is taken back.
    void remove(std::shared_ptr<Row> row);

    // `remove` a running row, and let no other row take up what it has in the cache, since that may be broken.
    void discard(std::shared_ptr<Row> row);

    // Whether the next step can be chosen while ids are unknown: no row needs its id for its next mask, and none has to be preempted.
    bool can_run_ahead() const;

    // Choose this step's rows and give them blocks. Empty when there is nothing to do. Running rows come first, oldest first, so that an answer under way is
    // not stalled by a new prompt; then waiting rows, in order of arrival, while there is a slot, budget, and room. While ids are unknown, ask
    // `can_run_ahead` before.
    StepPlan schedule();

    // Copies between state slots that must be carried out, in order, before the step that was just scheduled is computed. One from -1 only says that the row in
    // that slot starts at its first token.
    std::vector<StateCopy> take_copies() { return states_ ? states_->take_copies() : std::vector<StateCopy>(); }

    // Count the tokens of `step`, which was launched, as computed; the next id of each of its sampling rows is unknown from now on.
    // All steps before it are resolved, and the next one is not yet scheduled. Rows that have left since it was scheduled are skipped.
    void advance(const StepPlan& step);

    // Record that `step`, the last that was advanced, was computed well, and fill in its ids: `drawn` has, by place in `step`, the id of each row that samples
    // and has not left. Finished rows leave. Rows that have left since it was scheduled are skipped; take those that failed out before.
    // One update for each row that sampled, in the order of their places.
    std::vector<RowUpdate> resolve(const StepPlan& step, std::span<const std::int32_t> drawn);

    // Free a running row's blocks and slot and put it first among those of its priority in the queue; what it computed is recomputed later. Its last id is known.
    void preempt(std::shared_ptr<Row> row);

    // std::logic_error unless rows, tables and pools agree.
    void check_integrity() const;

private:
    int blocks_for(int num_tokens) const noexcept { return (num_tokens + pool_.block_size() - 1) / pool_.block_size(); }
    bool keeps_snapshots() const noexcept { return states_ && pool_.enable_prefix_caching(); }
    int prompt_budget() const;
    bool start(Row& row);
    bool make_room(const std::shared_ptr<Row>& row);
    void release(Row& row);
    int cut(const Row& row, int count) const;
    void take_snapshot(Row& row);
    void extend_prefixes(Row& row);
    void register_blocks(Row& row);

    SchedulerOptions options_;
    int snapshot_interval_;
    BlockPool pool_;                                                   // before whatever holds prefixes of its table
    std::optional<StatePool> states_;                                  // of a hybrid model
    std::deque<int> free_slots_;
    std::deque<std::shared_ptr<Row>> waiting_;
    std::vector<std::shared_ptr<Row>> running_;                        // oldest first
    std::uint64_t num_preemptions_ = 0;
};

}  // namespace pocket
