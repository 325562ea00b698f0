#include "comm/word.h"

#include <climits>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pocket {

#if defined(__linux__)
// The C++ library's own wait knows the threads of one process only.
void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::milliseconds limit) noexcept {
    timespec time{};
    time.tv_sec = limit.count() / 1000;
    time.tv_nsec = limit.count() % 1000 * 1'000'000;
    ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) noexcept { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
void sleep_on(const std::atomic<std::uint32_t>&, std::uint32_t, std::chrono::milliseconds) noexcept {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void wake_all(std::atomic<std::uint32_t>&) noexcept {}
#endif

void rest() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

}  // namespace pocket
