// Ranks in shared memory, as threads and as processes: what they exchange, and how they learn that one of them is lost.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/shared_memory.h"
#include "pocket/error.h"
#include "tiny_checkpoint.h"

using namespace pocket;
using std::chrono::milliseconds;

namespace {

Meeting meeting_of(const TemporaryFolder& folder, int rank, int size) {
    Meeting meeting;
    meeting.rank = rank;
    meeting.size = size;
    meeting.folder = folder.path();
    meeting.patience = milliseconds(60'000);
    meeting.limit = milliseconds(60'000);
    return meeting;
}

// `work` on a thread of each of `size` ranks.
void run_ranks(int size, const std::function<void(SharedMemoryCommunicator&)>& work) {
    const TemporaryFolder folder;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                SharedMemoryCommunicator communicator(meeting_of(folder, rank, size));
                work(communicator);
            } catch (const std::exception& error) {
                check::fail("rank", rank, error.what());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(std::filesystem::is_empty(folder.path()));
}

float value_of(int rank, std::size_t index) { return static_cast<float>(rank + 1) * 0.1f + static_cast<float>(index % 977); }

// Rank 1 as a process of its own, which `work` ends; rank 0 is the test.
class OtherProcess {
public:
    template <typename Work>
    OtherProcess(const TemporaryFolder& folder, Work work) {
        process_ = ::fork();
        if (process_ != 0) return;
        try {
            SharedMemoryCommunicator communicator(meeting_of(folder, 1, 2));
            work(communicator);
        } catch (const std::exception& error) {
            ::_exit(3);
        }
        ::_exit(0);
    }
    ~OtherProcess() { kill(); }
    void kill() {
        if (process_ <= 0) return;
        ::kill(process_, SIGKILL);
        ::waitpid(process_, nullptr, 0);
        process_ = 0;
    }
    int end() {
        int status = 0;
        ::waitpid(process_, &status, 0);
        process_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }

private:
    pid_t process_ = 0;
};

}  // namespace

TEST(sums_are_those_of_all_ranks_in_their_order) {
    for (const int size : {1, 2, 3}) {
        for (const std::size_t count : {std::size_t{1}, std::size_t{5}, std::size_t{1000}, std::size_t{600'001}}) {  // the last needs several pieces
            run_ranks(size, [&](SharedMemoryCommunicator& ranks) {
                std::vector<float> values(count);
                for (std::size_t index = 0; index < count; ++index) values[index] = value_of(ranks.rank(), index);
                ranks.sum(values.data(), count);
                bool is_right = true;
                for (std::size_t index = 0; index < count; ++index) {
                    float wanted = value_of(0, index);
                    for (int rank = 1; rank < size; ++rank) wanted += value_of(rank, index);
                    is_right = is_right && values[index] == wanted;
                }
                CHECK(is_right);
            });
        }
    }
}

TEST(calls_of_every_kind_follow_each_other) {
    run_ranks(3, [](SharedMemoryCommunicator& ranks) {
        for (int round = 0; round < 300; ++round) {
            const auto length = static_cast<std::size_t>(round % 7 == 6 ? 2'500'000 : round);  // none, few, more than fit at once
            std::vector<std::byte> bytes(ranks.rank() == 0 ? length : 3);
            if (ranks.rank() == 0) std::fill(bytes.begin(), bytes.end(), static_cast<std::byte>(round));
            if (round > 40 && length > 1000) continue;
            ranks.broadcast(bytes);
            CHECK_EQ(bytes.size(), length);
            CHECK(bytes.empty() || (bytes.front() == static_cast<std::byte>(round) && bytes.back() == static_cast<std::byte>(round)));
            const std::vector<std::int32_t> part(static_cast<std::size_t>(round % 5), 100 * ranks.rank() + round);
            std::vector<std::int32_t> parts(3 * part.size(), -1);
            ranks.gather(part.data(), part.size() * sizeof(std::int32_t), parts.data());
            for (std::size_t place = 0; place < parts.size(); ++place) {
                CHECK_EQ(parts[place], 100 * static_cast<std::int32_t>(place / part.size()) + round);
            }
            CHECK_EQ(ranks.least(round - ranks.rank()), round - 2);
            float one = 1;
            ranks.sum(&one, 1);
            CHECK_EQ(one, 3.0f);
            if (round % 50 == 0) ranks.barrier();
        }
    });
}

TEST(processes_exchange_as_threads_do) {
    const TemporaryFolder folder;
    OtherProcess other(folder, [](SharedMemoryCommunicator& ranks) {
        float values[2] = {1, 2};
        ranks.sum(values, 2);
        std::vector<std::byte> bytes;
        ranks.broadcast(bytes);
        if (values[0] != 11 || values[1] != 22 || bytes.size() != 3) ::_exit(4);
    });
    SharedMemoryCommunicator ranks(meeting_of(folder, 0, 2));
    float values[2] = {10, 20};
    ranks.sum(values, 2);
    CHECK_EQ(values[1], 22.0f);
    std::this_thread::sleep_for(milliseconds(50));  // so that the other sleeps when it comes
    std::vector<std::byte> bytes(3);
    ranks.broadcast(bytes);
    CHECK_EQ(other.end(), 0);
}

TEST(a_killed_process_is_noticed) {
    const TemporaryFolder folder;
    OtherProcess other(folder, [](SharedMemoryCommunicator&) { ::pause(); });
    SharedMemoryCommunicator ranks(meeting_of(folder, 0, 2));
    std::thread killer([&] {
        std::this_thread::sleep_for(milliseconds(100));
        other.kill();
    });
    std::vector<std::byte> order(10);
    CHECK_THROWS(ranks.broadcast(order), "rank 1 of 2 is lost: its process has ended");  // which would wait without end
    killer.join();
    float one = 1;
    CHECK_THROWS(ranks.sum(&one, 1), "rank 1 of 2 is lost");
    CHECK_THROWS(ranks.check(), "rank 1 of 2 is lost");
}

TEST(what_a_rank_said_before_its_end_arrives) {
    const TemporaryFolder folder;
    OtherProcess other(folder, [](SharedMemoryCommunicator& ranks) { ranks.least(7); });
    SharedMemoryCommunicator ranks(meeting_of(folder, 0, 2));
    ranks.check();
    CHECK_EQ(ranks.least(9), 7);
    CHECK_EQ(other.end(), 0);
    CHECK_THROWS(ranks.least(9), "rank 1 of 2 is lost");
}

TEST(a_rank_that_gives_up_says_why) {
    run_ranks(3, [](SharedMemoryCommunicator& ranks) {
        if (ranks.rank() == 1) {
            ranks.abort("there is no\nmemory left");
            CHECK_THROWS(ranks.barrier(), "there is no memory left");
            return;
        }
        CHECK_THROWS(ranks.barrier(), " of 3 has failed: ");
        ranks.abort("another one is lost");        // the third may wait for this one
    });
}

TEST(a_call_under_way_ends_when_its_own_rank_gives_up) {
    const TemporaryFolder folder;
    OtherProcess other(folder, [](SharedMemoryCommunicator&) { ::pause(); });
    SharedMemoryCommunicator ranks(meeting_of(folder, 0, 2));
    std::thread stops([&] {
        std::this_thread::sleep_for(milliseconds(50));
        ranks.abort("the supervisor has died");
    });
    CHECK_THROWS(ranks.barrier(), "the supervisor has died");
    stops.join();
    CHECK_THROWS(ranks.barrier(), "the supervisor has died");
}

TEST(a_rank_that_is_late_is_lost) {
    const TemporaryFolder folder;
    OtherProcess other(folder, [](SharedMemoryCommunicator&) { ::pause(); });
    Meeting meeting = meeting_of(folder, 0, 2);
    meeting.limit = milliseconds(200);
    SharedMemoryCommunicator ranks(meeting);
    CHECK_THROWS(ranks.least(1), "rank 1 of 2 is lost: nothing came from it for 0 seconds");
}

TEST(ranks_that_do_not_meet_say_so) {
    const TemporaryFolder folder;
    Meeting meeting = meeting_of(folder, 0, 2);
    meeting.patience = milliseconds(100);
    CHECK_THROWS(SharedMemoryCommunicator(meeting), "rank 1 of 2 did not come to " + folder.path().string());
    CHECK(std::filesystem::is_empty(folder.path()));
    meeting.patience = milliseconds(0);
    meeting.check = [] { throw std::runtime_error("enough"); };
    CHECK_THROWS(SharedMemoryCommunicator(meeting), "enough");
    meeting.folder /= "none";
    CHECK_THROWS(SharedMemoryCommunicator(meeting), "none can't hold the shared memory of the ranks");
}

TEST(files_of_an_earlier_run_are_passed_over) {
    const TemporaryFolder folder;
    write_file(folder.path() / "native-rank-0", "of another size");
    {
        OtherProcess killed(folder, [](SharedMemoryCommunicator&) {});  // while it waited for rank 0
        while (!std::filesystem::exists(folder.path() / "native-rank-1")) std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK(std::filesystem::exists(folder.path() / "native-rank-1"));
    OtherProcess other(folder, [](SharedMemoryCommunicator& ranks) { ranks.barrier(); });
    SharedMemoryCommunicator ranks(meeting_of(folder, 0, 2));
    ranks.barrier();
    CHECK_EQ(other.end(), 0);
    CHECK(std::filesystem::is_empty(folder.path()));
}

TEST(another_number_of_ranks_is_refused) {
    const TemporaryFolder folder;
    std::string said[2];  // the first that sees the other ends, and that one then waits in vain
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            Meeting meeting = meeting_of(folder, rank, 2 + rank);
            meeting.patience = milliseconds(500);
            try {
                SharedMemoryCommunicator ranks(meeting);
            } catch (const Error& error) {
                said[rank] = error.what();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    const auto names = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
    CHECK(names(said[0], "rank 1 in ") || names(said[1], "rank 0 in "));
    CHECK(names(said[0], "was started for 3 ranks, and this one for 2: make them equal") || names(said[1], "was started for 2 ranks, and this one for 3"));
}
