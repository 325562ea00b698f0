// Random submits, cancels, budget changes and questions from many threads, for as many seconds as the first argument says: no request is lost, each row's
// ids are those that it has alone, and nothing is left behind. Engines are stopped and started again while it runs.
//
//   test_soak [SECONDS [SEED]]        3 s in ctest; 600 by hand
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pocket/error.h"
#include "tests/answer.h"

namespace {

using namespace pocket;
using Clock = std::chrono::steady_clock;

constexpr int num_threads = 8;

#ifdef __SANITIZE_ADDRESS__
constexpr bool sees_memory = false;                                    // what is freed is held back, and leaks are found at the end
#else
constexpr bool sees_memory = true;
#endif

struct Totals {
    std::atomic<std::int64_t> asked = 0, stopped = 0, ran_out = 0, cancelled = 0, failed = 0, refused = 0, engines = 0, preempted = 0, cached = 0;
};

void require(bool holds, const char* message) {
    if (!holds) throw std::runtime_error(message);
}

// Says the ids that `mask` has, and gives up after some.
class Picky : public TokenConstraint {
public:
    Picky(std::uint32_t mask, int fails_after) : mask_(mask), fails_after_(fails_after) { ++num_alive; }
    ~Picky() override { --num_alive; }
    void fill(std::span<std::uint32_t> mask) override { std::ranges::fill(mask, mask_); }
    void accept(std::int32_t) override {
        if (--fails_after_ < 0) throw std::runtime_error("the constraint gives up");
    }
    bool is_complete() override { return false; }

    inline static std::atomic<int> num_alive = 0;

private:
    std::uint32_t mask_;
    int fails_after_;
};

struct Sent {
    Request request;
    Asked asked;
    bool may_fail = false;
    std::uint32_t mask = ~0U;
};

class Client {
public:
    Client(Engine& engine, const CacheShape& cache, std::uint32_t seed, Totals& totals) : engine_(engine), cache_(cache), random_(seed), totals_(totals) {}

    void run(Clock::time_point end) {
        while (Clock::now() < end && !is_stopped_) {
            switch (up_to(9)) {
                case 0: engine_.set_prefill_token_budget(up_to(20)); break;
                case 1: require(engine_.stats().kv_blocks_used <= cache_.num_blocks, "more blocks are used than there are"); break;
                case 2: require(!engine_.cancel(~RequestId{0} - random_()), "a request that was never sent is cancelled"); break;
                default: send();
            }
            if (sent_.size() > 12 || up_to(3) == 0) settle(sent_.size() / 2);
        }
        settle(0);
    }

private:
    int up_to(int most) { return static_cast<int>(random_() % static_cast<unsigned>(most + 1)); }

    void send() {
        Sent sent;
        sent.request = ask_for(10 * up_to(3), up_to(24), 1 + up_to(24));
        for (int more = up_to(4); more >= 0; --more) sent.request.prompt_token_ids.push_back(up_to(3));
        for (int stops = up_to(2); stops > 0; --stops) sent.request.stop_token_ids.push_back(up_to(toy_vocab_size - 1));
        if (up_to(2) == 0) sent.request.temperature = 1, sent.request.seed = random_();
        if (up_to(3) == 0) sent.request.logprobs = up_to(20);
        if (up_to(4) == 0) {
            sent.mask = random_() | 1;
            sent.may_fail = up_to(1);
            sent.request.constraint = std::make_shared<Picky>(sent.mask, sent.may_fail ? up_to(6) : 1000);
        }
        try {
            sent.asked = ask(engine_, sent.request);
        } catch (const Error& error) {
            require(error.kind() == ErrorKind::unavailable && engine_.death().empty(), error.what());
            ++totals_.refused;
            is_stopped_ = true;
            return;
        }
        ++totals_.asked;
        sent_.push_back(std::move(sent));
        if (up_to(3) == 0) engine_.cancel(sent_[static_cast<std::size_t>(up_to(static_cast<int>(sent_.size()) - 1))].asked.id);
    }

    void settle(std::size_t left) {
        while (sent_.size() > left) {
            const auto place = sent_.begin() + up_to(static_cast<int>(sent_.size()) - 1);
            if (up_to(5) == 0) engine_.cancel(place->asked.id);
            check(*place);
            sent_.erase(place);
        }
    }

    void check(const Sent& sent) {
        const std::vector<std::uint32_t> mask((toy_vocab_size + 31) / 32, sent.mask);
        auto wanted = alone(sent.request, cache_, mask.data());
        const auto found = sent.asked->token_ids();
        const FinishReason reason = sent.asked->reason();
        if (reason == FinishReason::cancelled || reason == FinishReason::error) {
            ++(reason == FinishReason::error ? totals_.failed : totals_.cancelled);
            require(reason == FinishReason::cancelled || sent.may_fail, "a row failed that had no reason to");
            require(found.size() <= wanted.size(), "a row was given more than there is");
            wanted.resize(found.size());
        } else {
            const bool is_stopped = static_cast<int>(wanted.size()) < sent.request.max_tokens;
            ++(is_stopped ? totals_.stopped : totals_.ran_out);
            require(reason == (is_stopped ? FinishReason::stop : FinishReason::length), "a row ended for another reason");
        }
        require(found == wanted, "a row was given other ids than it has alone");
        require(sent.asked->logprobs().size() == (sent.request.logprobs ? found.size() : 0), "log probabilities are missing");
    }

    Engine& engine_;
    const CacheShape& cache_;
    std::mt19937 random_;
    Totals& totals_;
    std::vector<Sent> sent_;
    bool is_stopped_ = false;
};

// One engine's life of `seconds`; in some of them it is stopped under its clients.
void live(std::uint32_t seed, double seconds, Totals& totals) {
    std::mt19937 random(seed);
    const int num_blocks = 14 + static_cast<int>(random() % 40);
    const CacheShape cache = random() % 3 ? hybrid_cache(num_blocks, 5, static_cast<int>(random() % 8)) : attention_cache(num_blocks, 5);
    ToyRunner runner(cache);
    Engine engine(runner, {5, static_cast<int>(random() % 20), 0, random() % 5 > 0, true});
    ++totals.engines;
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::mutex mutex;
    std::exception_ptr failure;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < num_threads; ++thread) {
        threads.emplace_back([&, client_seed = random()] {
            try {
                Client(engine, cache, static_cast<std::uint32_t>(client_seed), totals).run(end);
            } catch (...) {
                const std::lock_guard lock(mutex);
                failure = std::current_exception();
            }
        });
    }
    if (random() % 2) {
        std::this_thread::sleep_until(end - (end - Clock::now()) / 4);
        engine.stop();
    }
    for (std::thread& thread : threads) thread.join();
    if (failure) std::rethrow_exception(failure);
    require(engine.death().empty(), engine.death().c_str());
    const EngineStats stats = engine.stats();
    require(stats.running == 0 && stats.waiting == 0, "a row is left");
    require(stats.kv_blocks_used == 0, "a block is left");
    totals.preempted += static_cast<std::int64_t>(stats.preemptions);
    totals.cached += static_cast<std::int64_t>(stats.cached_tokens);
}

// Bytes of the process in memory; 0 where the system does not say.
std::int64_t resident_bytes() {
    std::ifstream file("/proc/self/statm");
    std::int64_t pages = 0, resident = 0;
    return file >> pages >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

}  // namespace

int main(int count, char** arguments) {
    const double seconds = count > 1 ? std::atof(arguments[1]) : 3;
    const auto seed = static_cast<std::uint32_t>(count > 2 ? std::atoi(arguments[2]) : 1);
    const double life = std::clamp(seconds / 10, 0.2, 5.0);
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    Totals totals;
    std::int64_t settled = 0;
    try {
        std::cout << "seed " << seed << std::endl;
        while (Clock::now() < end) {
            live(seed + static_cast<std::uint32_t>(totals.engines), life, totals);
            require(Picky::num_alive == 0, "a constraint is left");
            if (totals.engines == 3) settled = resident_bytes();
        }
        const std::int64_t grown = resident_bytes() - settled;
        std::cout << totals.engines << " engines, " << totals.asked << " requests: " << totals.stopped << " stopped, " << totals.ran_out << " ran out, "
                  << totals.cancelled << " cancelled, " << totals.failed << " failed as they should; " << totals.refused << " refused, " << totals.preempted
                  << " preemptions, " << totals.cached << " tokens cached, " << grown / 1024 << " KiB grown" << std::endl;
        require(totals.asked == totals.stopped + totals.ran_out + totals.cancelled + totals.failed, "a request is lost");
        for (const auto* happened : {&totals.stopped, &totals.ran_out, &totals.cancelled, &totals.failed, &totals.preempted, &totals.cached}) {
            require(*happened > 0, "something never happened that a soak is for");
        }
        // Allocators keep some of what was freed; what leaks with each request is far above that.
        require(!sees_memory || settled == 0 || grown < (std::int64_t{16} << 20) + totals.asked * 16, "memory grows");
    } catch (const std::exception& error) {
        std::cerr << "test_soak: " << error.what() << std::endl;
        return 1;
    }
    return 0;
}
