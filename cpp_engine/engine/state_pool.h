// Slots for the recurrent states of hybrid models, as plain ints: which prefix each snapshot stands for, and what is copied where. No tensors.
//
// The state of a layer that is not attention says nothing of earlier positions, so a cached prefix can be taken up again only where a copy of the state was
// kept: a snapshot. Slots [0, num_row_slots) are those of the running rows, which the scheduler hands out; the slots after them hold snapshots, so a row never
// waits for one, and what snapshots take in memory is fixed.
//
// Nothing is copied here. The pool writes down copies, and whoever owns the tensors carries them out in this order before the next step. So each decision
// sees the slots as if all earlier ones had been carried out at once: a snapshot may be evicted, and its slot given away, right after a row was started
// from it.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/prefix.h"
#include "engine/runner.h"

namespace pocket {

// Why a snapshot is there, the least reason first. Passing ones go when their rows have gone on. Interval ones stay, and are the first to make room, so that
// one long prompt does not drive out what others come back to. Lasting ones, at the end of a prompt or a row, or started from before, go when they are
// the least recently used.
enum class Worth : std::uint8_t { passing, interval, lasting };

// A copy of a row's state after a whole number of blocks.
struct Snapshot {
    Prefix prefix;
    int slot = -1;                                                     // where it is; -1 once it was given up
    int rows = 0;                                                      // running rows whose newest snapshot this is
    Worth worth = Worth::passing;                                      // the best of the reasons so far
};

// Starts rows in their slots, and keeps snapshots as their worth says. One thread uses it; the prefixes' table outlives it.
class StatePool {
public:
    // No more than `num_snapshots` at once; 0 is without prefix reuse.
    StatePool(int num_row_slots, int num_snapshots);

    int num_snapshots() const noexcept { return static_cast<int>(snapshots_.size()); }  // that exist now

    // The copies written down since the last call, to be carried out in order. One from -1 is a row's start from the state before its first token.
    std::vector<StateCopy> take_copies();

    // Whether a row can start after `prefix`.
    bool has(const Prefix& prefix) const { return place_of_.contains(prefix); }

    // Start a row in its `slot`: from the snapshot of `prefix`, which there is, or at its beginning where that is empty.
    void start(int slot, const Prefix& prefix);

    // A row stops running; its newest snapshot, if it has one, stays.
    void end(const std::shared_ptr<Snapshot>& newest);

    // Snapshot the row in `slot`, which is now at `prefix`. `newest`, the row's snapshot before this one or null, goes if it was a passing one. A snapshot
    // that is there already keeps its own worth if that is better. Returns the row's newest snapshot now; null without room for any.
    std::shared_ptr<Snapshot> save(int slot, const Prefix& prefix, const std::shared_ptr<Snapshot>& newest, Worth worth);

    // Give up the snapshot of `prefix`, if there is one: its blocks are gone, or its slot is needed.
    void drop(const Prefix& prefix);

    // std::logic_error unless slots and counts are just those of `newest`: the newest snapshot of each running row, null where it has none.
    void check_integrity(std::span<const std::shared_ptr<Snapshot>> newest) const;

private:
    using Snapshots = std::list<std::shared_ptr<Snapshot>>;
    Prefix least_needed() const;

    int num_row_slots_;
    int num_slots_;
    std::deque<int> free_slots_;
    Snapshots snapshots_;                                              // least recently used first
    std::unordered_map<Prefix, Snapshots::iterator> place_of_;
    std::vector<StateCopy> copies_;
};

}  // namespace pocket
