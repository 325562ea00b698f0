#include "engine/scheduler.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace pocket {

Scheduler::Scheduler(const CacheShape& cache, const SchedulerOptions& options)
    : options_(options), snapshot_interval_(cache.snapshot_interval), pool_(cache.num_blocks, cache.block_size, options.enable_prefix_caching) {
    if (cache.snapshot_interval > 0) {
        states_.emplace(cache.num_row_slots, cache.num_snapshot_slots);
        pool_.on_evict = [this](const Prefix& prefix) { states_->drop(prefix); };
    }
    for (int slot = 0; slot < options.max_batch_size; ++slot) free_slots_.push_back(slot);
}

namespace {

// Where a row goes in rows that are ordered by priority, lower numbers first: behind its equals, or before them.
auto behind_equals(auto& rows, const Row& row) {
    return std::ranges::upper_bound(rows, row.request.priority, {}, [](const auto& other) { return other->request.priority; });
}
auto before_equals(auto& rows, const Row& row) {
    return std::ranges::lower_bound(rows, row.request.priority, {}, [](const auto& other) { return other->request.priority; });
}

}  // namespace

void Scheduler::add(std::shared_ptr<Row> row) {
    const auto place = behind_equals(waiting_, *row);
    waiting_.insert(place, std::move(row));
}

void Scheduler::remove(std::shared_ptr<Row> row) {
    if (row->is_running()) {
        std::erase(running_, row);
        release(*row);
        if (row->token_ids.back() == unknown_token) row->token_ids.pop_back();
    } else {
        std::erase(waiting_, row);
    }
}

void Scheduler::discard(std::shared_ptr<Row> row) {
    const std::vector<Prefix> prefixes = row->prefixes;
    remove(row);
    for (const Prefix& prefix : prefixes) pool_.forget(prefix);
}

bool Scheduler::can_run_ahead() const {
    int needed = 0;
    for (const auto& row : running_) {
        if (row->request.constraint != nullptr) return false;
        if (!row->awaits_end()) needed += std::max(0, blocks_for(row->num_tokens()) - static_cast<int>(row->block_table.size()));
    }
    const std::size_t startable = std::min(waiting_.size(), static_cast<std::size_t>(options_.max_batch_size) - running_.size());
    for (std::size_t place = 0; place < startable; ++place) {
        if (waiting_[place]->request.constraint != nullptr) return false;
    }
    return needed <= pool_.num_available();
}

StepPlan Scheduler::schedule() {
    int budget = prompt_budget();
    StepPlan step;
    const std::uint64_t preemptions = num_preemptions_;
    for (const auto& row : std::vector(running_)) {
        if (!row->is_running() || row->awaits_end()) continue;         // preempted to make room for an older row, or as good as done
        const int wanted = row->num_pending_tokens();
        const int count = wanted == 1 ? 1 : cut(*row, std::min(wanted, budget));
        if (count == 0 || !make_room(row)) continue;
        if (wanted > 1) budget -= count;
        step.push_back({row, count, count == wanted});
    }
    if (num_preemptions_ > preemptions) return step;                   // a row that comes back now would take the blocks it just gave up
    while (!waiting_.empty() && static_cast<int>(running_.size()) < options_.max_batch_size && budget > 0 && start(*waiting_.front())) {
        const auto row = std::move(waiting_.front());
        waiting_.pop_front();
        running_.insert(behind_equals(running_, *row), row);
        const int count = cut(*row, std::min(row->num_pending_tokens(), budget));
        budget -= count;
        step.push_back({row, count, count == row->num_pending_tokens()});
    }
    return step;
}

void Scheduler::advance(const StepPlan& step) {
    for (const auto& [row, num_tokens, samples] : step) {
        if (!row->is_running()) continue;
        if (row->request.prompt_logprobs) row->num_ranked = std::max(row->num_ranked, row->ranked(num_tokens).second - 1);
        row->num_computed_tokens += num_tokens;
        extend_prefixes(*row);
        if (keeps_snapshots()) take_snapshot(*row);
        if (samples) row->token_ids.push_back(unknown_token);
    }
}

std::vector<RowUpdate> Scheduler::resolve(const StepPlan& step, std::span<const std::int32_t> drawn) {
    std::vector<RowUpdate> updates;
    for (std::size_t place = 0; place < step.size(); ++place) {
        const auto& row = step[place].row;
        if (!row->is_running()) continue;
        register_blocks(*row);
        if (!step[place].samples) continue;
        const std::int32_t token_id = row->token_ids.back() = drawn[place];
        const bool is_stop = row->is_stop(token_id);
        RowUpdate update{row, place, is_stop ? std::nullopt : std::optional(token_id), row->num_generated(), std::nullopt};
        if (is_stop || row->is_complete) {
            update.finish_reason = FinishReason::stop;
        } else if (row->awaits_end()) {
            update.finish_reason = FinishReason::length;
        }
        if (row->request.max_tokens == 0) update = {row, place, std::nullopt, 0, FinishReason::length};  // what was drawn is not asked for
        if (update.finish_reason) remove(row);
        updates.push_back(std::move(update));
    }
    return updates;
}

void Scheduler::preempt(std::shared_ptr<Row> row) {
    if (row->token_ids.back() == unknown_token) throw std::logic_error("a row is preempted while its id is under way");
    std::erase(running_, row);
    release(*row);
    row->num_computed_tokens = 0;
    const auto place = before_equals(waiting_, *row);
    waiting_.insert(place, std::move(row));
    ++num_preemptions_;
}

// Most prompt tokens of the next step.
int Scheduler::prompt_budget() const {
    constexpr int unlimited = std::numeric_limits<int>::max();
    const int most = options_.prefill_token_budget > 0 ? options_.prefill_token_budget : unlimited;
    const int beside = options_.prefill_budget_beside_answers > 0 ? options_.prefill_budget_beside_answers : unlimited;
    const auto decodes = [](const auto& row) { return row->num_pending_tokens() == 1 && !row->awaits_end(); };
    return beside < most && std::ranges::any_of(running_, decodes) ? beside : most;
}

// A slot and blocks for all tokens that a waiting row has, cached ones first. False, and nothing taken, if they are not there.
bool Scheduler::start(Row& row) {
    std::vector<std::int32_t> blocks = pool_.match_prefix(row.token_ids);
    if (row.request.prompt_logprobs && row.num_ranked + 1 < static_cast<int>(row.request.prompt_token_ids.size())) {  // what is not computed can't be ranked
        blocks.resize(std::min(blocks.size(), static_cast<std::size_t>(row.num_ranked / pool_.block_size())));
    }
    if (states_) {
        while (!blocks.empty() && !states_->has(pool_.prefix_of(blocks.back()))) blocks.pop_back();
    }
    const int num_cached = static_cast<int>(blocks.size());
    pool_.share(blocks);
    const auto fresh = pool_.allocate(blocks_for(row.num_tokens()) - num_cached);
    if (!fresh) {
        pool_.free(blocks);
        return false;
    }
    blocks.insert(blocks.end(), fresh->begin(), fresh->end());
    row.block_table = std::move(blocks);
    row.num_computed_tokens = num_cached * pool_.block_size();
    extend_prefixes(row);
    row.num_registered_blocks = num_cached;
    row.slot = free_slots_.front();
    free_slots_.pop_front();
    if (states_) {
        states_->start(row.slot, num_cached > 0 ? row.prefixes.back() : Prefix());
        row.snapshot_end = (row.num_tokens() - 1) / pool_.block_size() * pool_.block_size();
    }
    if (!row.cached_tokens) row.cached_tokens = row.num_computed_tokens;
    return true;
}

// Blocks for all tokens of a running row, preempting the youngest rows. False if `row` itself had to go.
bool Scheduler::make_room(const std::shared_ptr<Row>& row) {
    const int needed = blocks_for(row->num_tokens()) - static_cast<int>(row->block_table.size());
    if (needed <= 0) return true;
    auto fresh = pool_.allocate(needed);
    while (!fresh) {
        preempt(running_.back());
        if (!row->is_running()) return false;
        fresh = pool_.allocate(needed);
    }
    row->block_table.insert(row->block_table.end(), fresh->begin(), fresh->end());
    return true;
}

void Scheduler::release(Row& row) {
    if (states_) {
        states_->end(row.snapshot);
        const bool is_unsure = row.num_registered_blocks < static_cast<int>(row.prefixes.size());  // of a step that failed, or whose result nobody will look at
        if (row.snapshot != nullptr && is_unsure && row.snapshot->prefix == row.prefixes.back()) states_->drop(row.prefixes.back());
        row.snapshot.reset();
    }
    pool_.free(row.block_table);
    row.block_table.clear();
    row.prefixes.clear();
    row.num_registered_blocks = 0;
    free_slots_.push_back(std::exchange(row.slot, -1));
}

// `count`, or fewer so that the row's next tokens end where a snapshot is to be kept.
int Scheduler::cut(const Row& row, int count) const {
    if (!keeps_snapshots()) return count;
    const int start = row.num_computed_tokens;
    const int mark = (start / snapshot_interval_ + 1) * snapshot_interval_;
    count = std::min(count, mark - start);
    return row.snapshot_end > start ? std::min(count, row.snapshot_end - start) : count;
}

// Snapshot a row that is at the end of a block. One that decodes gives up the one before, so that it leaves a late one when it ends.
void Scheduler::take_snapshot(Row& row) {
    const int position = row.num_computed_tokens;
    if (position % pool_.block_size() != 0) return;
    const bool is_mark = position % snapshot_interval_ == 0;
    const Worth worth = position == row.snapshot_end ? Worth::lasting : is_mark ? Worth::interval : Worth::passing;
    row.snapshot = states_->save(row.slot, row.prefixes.back(), row.snapshot, worth);
}

void Scheduler::extend_prefixes(Row& row) {
    const auto size = static_cast<std::size_t>(pool_.block_size());
    if (!pool_.enable_prefix_caching()) return;
    const std::span<const std::int32_t> computed(row.token_ids.data(), static_cast<std::size_t>(row.num_computed_tokens));
    while ((row.prefixes.size() + 1) * size <= computed.size()) {
        const Prefix parent = row.prefixes.empty() ? Prefix() : row.prefixes.back();
        row.prefixes.push_back(pool_.prefixes().extend(parent, computed.subspan(row.prefixes.size() * size, size)));
    }
}

void Scheduler::register_blocks(Row& row) {
    const int full = static_cast<int>(row.prefixes.size());
    for (int index = row.num_registered_blocks; index < full; ++index) {
        pool_.register_block(row.block_table[static_cast<std::size_t>(index)], row.prefixes[static_cast<std::size_t>(index)]);
    }
    row.num_registered_blocks = full;
}

void Scheduler::check_integrity() const {
    const auto check = [](bool holds, const char* message) {
        if (!holds) throw std::logic_error(message);
    };
    const auto knows = [](const Row& row, int count) {
        return std::ranges::count(std::span(row.token_ids).first(static_cast<std::size_t>(count)), unknown_token) == 0;
    };
    std::vector<std::span<const std::int32_t>> tables;
    std::vector<std::shared_ptr<Snapshot>> newest;
    std::vector<int> slots(free_slots_.begin(), free_slots_.end());
    for (const auto& row : running_) {
        tables.emplace_back(row->block_table);
        newest.push_back(row->snapshot);
        slots.push_back(row->slot);
        const int full = pool_.enable_prefix_caching() ? row->num_computed_tokens / pool_.block_size() : 0;
        check(row->num_computed_tokens < row->num_tokens(), "a running row has nothing to compute");
        check(blocks_for(row->num_computed_tokens) <= static_cast<int>(row->block_table.size()), "computed tokens have no block");
        check(knows(*row, row->num_computed_tokens), "a token was counted before its id was known");
        check(static_cast<int>(row->prefixes.size()) == full && row->num_registered_blocks <= full, "a row has other prefixes than full blocks");
    }
    pool_.check_integrity(tables);
    check(static_cast<int>(running_.size()) <= options_.max_batch_size, "more rows run than there are slots");
    const auto priority = [](const auto& row) { return row->request.priority; };
    check(std::ranges::is_sorted(running_, {}, priority) && std::ranges::is_sorted(waiting_, {}, priority),
          "a row is before one with a lower number as its priority");
    std::ranges::sort(slots);
    bool is_whole = static_cast<int>(slots.size()) == options_.max_batch_size;
    for (std::size_t place = 0; is_whole && place < slots.size(); ++place) is_whole = slots[place] == static_cast<int>(place);
    check(is_whole, "a slot is lost or held twice");
    if (states_) states_->check_integrity(newest);
    for (const auto& row : waiting_) {
        check(!row->is_running() && row->snapshot == nullptr, "a waiting row holds a slot");
        check(row->block_table.empty() && row->num_computed_tokens == 0, "a waiting row holds keys and values");
        check(knows(*row, row->num_tokens()), "a waiting row awaits an id");
    }
}

}  // namespace pocket
