// Threads that share loops with their caller.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace pocket {

// Between loops the threads spin for a few microseconds, since a step is a row of short loops, and then sleep.
// Nobody waits for a thread that has not begun: on a busy machine the caller does the work alone rather than wait for a core.
class ThreadPool {
public:
    // `size` threads, the caller included; where the system gives fewer, the pool is smaller.
    explicit ThreadPool(int size);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const noexcept { return static_cast<int>(threads_.size()) + 1; }

    // Calls body(begin, end, thread) for pieces that together are [0, count), each index once, and returns when all are done. `thread` is in
    // [0, size()) and differs between calls that run at the same time. Pieces are large at first, a quarter of a thread's share of what is left, and
    // shrink to `piece` indices, so that all threads end together.
    // Called from within a body, or while another thread's loop runs, it runs in the caller alone, as thread 0 of what may only be its own
    // loop: so bodies that use memory by `thread` must not call it. What a body throws reaches the caller once all threads have left the
    // loop; pieces that nobody has begun are then left out.
    template <typename Body>
    void parallel_for(std::int64_t count, std::int64_t piece, Body&& body) {
        using Function = std::remove_reference_t<Body>;
        run(
            count, piece, [](void* context, std::int64_t begin, std::int64_t end, int thread) { (*static_cast<Function*>(context))(begin, end, thread); },
            const_cast<void*>(static_cast<const void*>(&body)));
    }

    template <typename Body>
    void parallel_for(std::int64_t count, Body&& body) {
        parallel_for(count, 1, std::forward<Body>(body));
    }

private:
    using Call = void (*)(void* context, std::int64_t begin, std::int64_t end, int thread);

    void run(std::int64_t count, std::int64_t piece, Call call, void* context);
    std::int64_t take(std::int64_t& begin);  // a piece's length, 0 when none is left
    void work(int thread);  // takes pieces until none is left; throws nothing
    void help(int thread);  // a thread's life

    std::vector<std::thread> threads_;
    std::mutex caller_;     // held while a loop runs

    // The loop that is open. Written by the caller while nobody is inside.
    Call call_ = nullptr;
    void* context_ = nullptr;
    std::int64_t count_ = 0, piece_ = 1, shares_ = 1;
    std::exception_ptr failure_;
    std::mutex failure_mutex_;

    // Number of the loop, doubled, and 1 where it is open. Sleeping threads wait for it to change.
    alignas(64) std::atomic<std::uint32_t> state_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> inside_{0};            // threads that may touch the loop
    alignas(64) std::atomic<std::int64_t> next_{0};     // first index that nobody has taken; count_ ends the loop
};

}  // namespace pocket
