#include "engine/state_pool.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace pocket {

StatePool::StatePool(int num_row_slots, int num_snapshots) : num_row_slots_(num_row_slots), num_slots_(num_row_slots + num_snapshots) {
    for (int slot = num_row_slots_; slot < num_slots_; ++slot) free_slots_.push_back(slot);
}

std::vector<StateCopy> StatePool::take_copies() { return std::exchange(copies_, {}); }

void StatePool::start(int slot, const Prefix& prefix) {
    int from = -1;
    if (!prefix.is_empty()) {
        const auto place = place_of_.at(prefix);
        (*place)->worth = Worth::lasting;
        snapshots_.splice(snapshots_.end(), snapshots_, place);
        from = (*place)->slot;
    }
    copies_.push_back({from, slot});
}

void StatePool::end(const std::shared_ptr<Snapshot>& newest) {
    if (newest == nullptr) return;
    --newest->rows;
    newest->worth = Worth::lasting;
}

std::shared_ptr<Snapshot> StatePool::save(int slot, const Prefix& prefix, const std::shared_ptr<Snapshot>& newest, Worth worth) {
    if (newest != nullptr && --newest->rows == 0 && newest->worth == Worth::passing && newest->slot >= 0) drop(newest->prefix);
    auto known = place_of_.find(prefix);
    if (known == place_of_.end()) {
        if (num_slots_ == num_row_slots_) return nullptr;
        if (free_slots_.empty()) drop(least_needed());
        const auto place = snapshots_.insert(snapshots_.end(), std::make_shared<Snapshot>(Snapshot{prefix, free_slots_.front()}));
        known = place_of_.emplace(prefix, place).first;
        free_slots_.pop_front();
        copies_.push_back({slot, (*place)->slot});
    }
    snapshots_.splice(snapshots_.end(), snapshots_, known->second);
    Snapshot& snapshot = **known->second;
    ++snapshot.rows;
    snapshot.worth = std::max(snapshot.worth, worth);
    return *known->second;
}

void StatePool::drop(const Prefix& prefix) {
    const auto known = place_of_.find(prefix);
    if (known == place_of_.end()) return;
    const auto place = known->second;
    free_slots_.push_back(std::exchange((*place)->slot, -1));
    place_of_.erase(known);
    snapshots_.erase(place);
}

// The one that makes room: the least recently used one that only marks an interval, else the least recently used one.
Prefix StatePool::least_needed() const {
    const auto mark = std::ranges::find_if(snapshots_, [](const auto& one) { return one->worth == Worth::interval && one->rows == 0; });
    return (mark == snapshots_.end() ? snapshots_.front() : *mark)->prefix;
}

void StatePool::check_integrity(std::span<const std::shared_ptr<Snapshot>> newest) const {
    const auto check = [](bool holds, const char* message) {
        if (!holds) throw std::logic_error(message);
    };
    std::vector<int> slots(free_slots_.begin(), free_slots_.end());
    for (const auto& snapshot : snapshots_) {
        slots.push_back(snapshot->slot);
        const auto known = place_of_.find(snapshot->prefix);
        check(known != place_of_.end() && *known->second == snapshot, "a snapshot is filed under another prefix");
        check(snapshot->rows == std::ranges::count(newest, snapshot), "a snapshot counts other rows than hold it");
        check(snapshot->rows > 0 || snapshot->worth != Worth::passing, "a snapshot that nobody needs takes a slot");
    }
    check(place_of_.size() == snapshots_.size(), "a prefix has a snapshot that is not in the list");
    std::ranges::sort(slots);
    bool is_whole = static_cast<int>(slots.size()) == num_slots_ - num_row_slots_;
    for (std::size_t place = 0; is_whole && place < slots.size(); ++place) is_whole = slots[place] == num_row_slots_ + static_cast<int>(place);
    check(is_whole, "a snapshot's slot is lost or held twice");
    for (const auto& one : newest) {
        if (one == nullptr || one->slot < 0) continue;
        const auto known = place_of_.find(one->prefix);
        check(known != place_of_.end() && *known->second == one, "a row's snapshot is unknown to the pool");
    }
}

}  // namespace pocket
