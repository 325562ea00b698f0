#include "core/thread_pool.h"

#include <chrono>
#include <ctime>
#include <numeric>
#include <stdexcept>

#include "core/cores.h"
#include "tests/check.h"

using pocket::ThreadPool;

TEST(every_index_runs_once) {
    for (const int size : {1, 2, 5}) {
        ThreadPool pool(size);
        CHECK_EQ(pool.size(), size);
        for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
            for (const std::int64_t piece : {1, 3, 2000}) {
                std::vector<int> runs(static_cast<std::size_t>(count));
                std::atomic<bool> known = true;
                pool.parallel_for(count, piece, [&](std::int64_t begin, std::int64_t end, int thread) {
                    if (thread < 0 || thread >= size || begin >= end) known = false;
                    for (std::int64_t i = begin; i < end; ++i) ++runs[static_cast<std::size_t>(i)];
                });
                CHECK(known);
                CHECK_EQ(runs, std::vector<int>(static_cast<std::size_t>(count), 1));
            }
        }
    }
}

TEST(many_short_loops_see_what_those_before_wrote) {
    ThreadPool pool(4);
    std::vector<std::int64_t> values(64, 0);
    for (int round = 0; round < 20000; ++round) {
        pool.parallel_for(64, 4, [&](std::int64_t begin, std::int64_t end, int) {
            for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i)] += i;
        });
        if (round % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for the threads to sleep
    }
    for (std::size_t i = 0; i < 64; ++i) CHECK_EQ(values[i], static_cast<std::int64_t>(i) * 20000);
}

TEST(a_thread_number_is_nobody_elses) {
    ThreadPool pool(4);
    std::vector<std::atomic<int>> inside(4);
    std::atomic<int> clashes = 0;
    for (int round = 0; round < 500; ++round) {
        pool.parallel_for(40, 1, [&](std::int64_t, std::int64_t, int thread) {
            if (inside[static_cast<std::size_t>(thread)].fetch_add(1) != 0) ++clashes;
            inside[static_cast<std::size_t>(thread)].fetch_sub(1);
        });
    }
    CHECK_EQ(clashes.load(), 0);
}

TEST(an_exception_reaches_the_caller_and_the_pool_lives_on) {
    ThreadPool pool(3);
    for (int round = 0; round < 200; ++round) {
        std::atomic<int> done = 0;
        CHECK_THROWS(pool.parallel_for(100, 1,
                                       [&](std::int64_t begin, std::int64_t end, int) {
                                           for (std::int64_t i = begin; i < end; ++i, ++done)
                                               if (i == round % 100) throw std::runtime_error("index " + std::to_string(i));
                                       }),
                     "index " + std::to_string(round % 100));
        CHECK(done < 100);
    }
    std::atomic<int> sum = 0;
    pool.parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end, int) { sum += static_cast<int>(end - begin); });
    CHECK_EQ(sum.load(), 10);
}

TEST(a_loop_within_a_loop_runs_inline) {
    ThreadPool pool(3);
    std::atomic<int> sum = 0;
    pool.parallel_for(8, 1, [&](std::int64_t, std::int64_t, int) {
        const std::thread::id own = std::this_thread::get_id();
        pool.parallel_for(5, 1, [&](std::int64_t begin, std::int64_t end, int) {
            if (std::this_thread::get_id() == own) sum += static_cast<int>(end - begin);
        });
    });
    CHECK_EQ(sum.load(), 40);
}

TEST(two_callers_at_once_both_finish) {
    ThreadPool pool(3);
    std::atomic<int> sum = 0;
    const auto call = [&] {
        for (int round = 0; round < 2000; ++round)
            pool.parallel_for(16, 1, [&](std::int64_t begin, std::int64_t end, int) { sum += static_cast<int>(end - begin); });
    };
    std::thread other(call);
    call();
    other.join();
    CHECK_EQ(sum.load(), 2 * 2000 * 16);
}

TEST(an_idle_pool_sleeps) {
    ThreadPool pool(4);
    pool.parallel_for(100, 1, [](std::int64_t, std::int64_t, int) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    CHECK(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC < 0.02);
}

TEST(cores_are_at_least_one) { CHECK(pocket::available_cores() >= 1); }
