// A 32-bit word in memory that processes share: threads of any of them sleep until it changes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pocket {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "processes share these words, and no lock");

// Sleep while `word` is `value`, for `limit` at most. May return early.
void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::milliseconds limit) noexcept;

// Wake every thread that sleeps on `word`.
void wake_all(std::atomic<std::uint32_t>& word) noexcept;

// Tell the processor that the thread spins.
void rest() noexcept;

}  // namespace pocket
