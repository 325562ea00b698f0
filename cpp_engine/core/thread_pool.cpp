#include "core/thread_pool.h"

#include <algorithm>
#include <system_error>

namespace pocket {
namespace {

constexpr int kSpins = 800;  // some 40 microseconds: longer than what lies between two loops of a step

void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

thread_local bool is_in_loop = false;

}  // namespace

ThreadPool::ThreadPool(int size) {
    threads_.reserve(static_cast<std::size_t>(std::max(0, size - 1)));
    try {
        for (int thread = 1; thread < size; ++thread) threads_.emplace_back([this, thread] { help(thread); });
    } catch (const std::system_error&) {
        // The system gives no more threads; those that run are the pool.
    }
}

ThreadPool::~ThreadPool() {
    stop_.store(true);
    state_.fetch_add(2);
    state_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(std::int64_t count, std::int64_t piece, Call call, void* context) {
    if (count <= 0) return;
    piece = std::max<std::int64_t>(1, piece);
    std::unique_lock caller(caller_, std::defer_lock);
    if (threads_.empty() || count <= piece || is_in_loop || !caller.try_lock()) return call(context, 0, count, 0);

    call_ = call;
    context_ = context;
    count_ = count;
    piece_ = piece;
    shares_ = 4LL * size();
    failure_ = nullptr;
    next_.store(0, std::memory_order_relaxed);
    state_.fetch_add(1);  // open
    state_.notify_all();
    is_in_loop = true;
    work(0);
    is_in_loop = false;
    state_.fetch_add(1);  // closed: who is not inside yet stays out
    for (int spins = 0; inside_.load() != 0; ++spins) {
        if (spins < kSpins) pause();
        else std::this_thread::yield();
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

std::int64_t ThreadPool::take(std::int64_t& begin) {
    begin = next_.load(std::memory_order_relaxed);
    for (;;) {
        const std::int64_t left = count_ - begin;
        if (left <= 0) return 0;
        const std::int64_t length = std::min(left, std::max(piece_, left / shares_));
        if (next_.compare_exchange_weak(begin, begin + length, std::memory_order_relaxed)) return length;
    }
}

void ThreadPool::work(int thread) {
    try {
        std::int64_t begin = 0;
        while (const std::int64_t length = take(begin)) call_(context_, begin, begin + length, thread);
    } catch (...) {
        next_.store(count_, std::memory_order_relaxed);
        const std::lock_guard lock(failure_mutex_);
        if (!failure_) failure_ = std::current_exception();
    }
}

void ThreadPool::help(int thread) {
    is_in_loop = true;
    std::uint32_t seen = 0;
    while (!stop_.load()) {
        std::uint32_t state = state_.load();
        for (int spins = 0; spins < kSpins && state == seen; ++spins) {
            pause();
            state = state_.load();
        }
        if (state == seen) {
            state_.wait(seen);
            continue;
        }
        seen = state;
        if (state % 2 == 0) continue;
        // All of this is sequentially consistent: either the state is still open here, and the caller sees this thread inside once it has
        // closed, or it is not, and the thread leaves the loop alone.
        inside_.fetch_add(1);
        if (state_.load() == state) work(thread);
        inside_.fetch_sub(1);
    }
}

}  // namespace pocket
