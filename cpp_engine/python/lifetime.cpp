#include "lifetime.h"

#include <unistd.h>

#include "pocket/error.h"

namespace pocket::python {

Lifetime& Lifetime::get() {
    static Lifetime* const only = new Lifetime;  // never destroyed: threads may outlive main's statics
    return *only;
}

Lifetime::Lifetime() : process_(getpid()) {}

void Lifetime::check() const {
    if (has_ended_) throw Error(ErrorKind::unavailable, "Python is shutting down: the native engine takes no more calls.");
}

Lifetime::Call::Call() {
    Lifetime& lifetime = get();
    const std::lock_guard lock(lifetime.mutex_);
    lifetime.check();
    ++lifetime.num_calls_;
}

Lifetime::Call::~Call() {
    Lifetime& lifetime = get();
    const std::lock_guard lock(lifetime.mutex_);
    --lifetime.num_calls_;
    lifetime.changed_.notify_all();
}

void Lifetime::add(const std::shared_ptr<QwenBatchScheduler>& scheduler) {
    const std::lock_guard lock(mutex_);
    std::erase_if(schedulers_, [](const auto& one) { return one.expired(); });
    schedulers_.push_back(scheduler);
}

void Lifetime::end() {
    if (getpid() != process_) return;
    std::vector<std::shared_ptr<QwenBatchScheduler>> running;
    {
        const std::lock_guard lock(mutex_);
        has_ended_ = true;
        for (const auto& one : schedulers_) {
            if (auto scheduler = one.lock()) running.push_back(std::move(scheduler));
        }
        schedulers_.clear();
    }
    for (const auto& scheduler : running) scheduler->stop();
    running.clear();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return num_calls_ == 0; });
}

}  // namespace pocket::python
