// What must have ended before the interpreter does: a thread that asks for the GIL after that never gets it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/qwen_batch_scheduler.h"

namespace pocket::python {

// One for the process. Python's atexit calls `end`, which stops the schedulers and waits for the calls that compute; later ones are refused.
class Lifetime {
public:
    static Lifetime& get();

    // While it lives, the interpreter's end waits. Error(unavailable) once `end` was called.
    class Call {
    public:
        Call();
        ~Call();
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;
    };

    void add(const std::shared_ptr<QwenBatchScheduler>& scheduler);
    void end();                                             // without the GIL
    void check() const;                                     // Error(unavailable) once `end` was called; for long calls, so that the end need not wait for them

private:
    Lifetime();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::weak_ptr<QwenBatchScheduler>> schedulers_;
    int num_calls_ = 0;
    std::atomic<bool> has_ended_ = false;                   // set under mutex_
    int process_ = 0;                                       // in a fork nothing is waited for: the threads did not come along
};

}  // namespace pocket::python
