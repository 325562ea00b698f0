#include "read_bandwidth.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#ifdef POCKET_CUDA
#include "backends/cuda/read_rate.h"
#endif

namespace pocket::launcher {

namespace {

// Four sums, so that no addition waits for the one before; compilers make vectors of them.
std::uint64_t sum(const std::uint64_t* words, std::size_t count) {
    std::uint64_t sums[32] = {};
    for (std::size_t place = 0; place + 32 <= count; place += 32) {
        for (std::size_t lane = 0; lane < 32; ++lane) sums[lane] += words[place + lane];
    }
    std::uint64_t total = 0;
    for (const std::uint64_t one : sums) total += one;
    return total;
}

}  // namespace

double read_bandwidth(std::size_t num_bytes, int num_threads, int repeats) {
    const auto threads = static_cast<std::size_t>(std::max(1, num_threads));
    const std::size_t share = num_bytes / sizeof(std::uint64_t) / threads / 32 * 32;
    const std::vector<std::uint64_t> words(share * threads, 1);
    std::vector<std::uint64_t> sums(threads);
    std::vector<double> seconds;
    std::chrono::steady_clock::time_point last;
    std::barrier together(static_cast<std::ptrdiff_t>(threads), [&]() noexcept {
        const auto now = std::chrono::steady_clock::now();
        if (last != std::chrono::steady_clock::time_point()) seconds.push_back(std::chrono::duration<double>(now - last).count());
        last = now;
    });
    std::vector<std::thread> running;
    seconds.reserve(static_cast<std::size_t>(repeats) + 1);
    for (std::size_t thread = 0; thread < threads; ++thread) {
        running.emplace_back([&, thread] {
            together.arrive_and_wait();
            for (int pass = 0; pass <= repeats; ++pass) {
                sums[thread] += sum(words.data() + thread * share, share);
                together.arrive_and_wait();
            }
        });
    }
    for (std::thread& one : running) one.join();
    std::uint64_t total = 0;
    for (const std::uint64_t one : sums) total += one;
    if (total != share * threads * (static_cast<std::uint64_t>(repeats) + 1)) return 0;  // also keeps the sums from being optimized away
    seconds.erase(seconds.begin());
    std::sort(seconds.begin(), seconds.end());
    return static_cast<double>(share * threads * sizeof(std::uint64_t)) / seconds[seconds.size() / 2];
}

double device_bandwidth([[maybe_unused]] const std::string& device, int num_threads, int repeats) {
#ifdef POCKET_CUDA
    if (device.starts_with("cuda:")) return cuda::read_rate(std::stoi(device.substr(5)), std::size_t{4} << 30);
#endif
    return read_bandwidth(std::size_t{1} << 30, num_threads, repeats);
}

}  // namespace pocket::launcher
