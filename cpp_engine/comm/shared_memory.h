// Ranks on one machine that meet in a folder: each has a file there that all of them map.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pocket/communicator.h"

namespace pocket {

struct Meeting {
    int rank = 0;                                           // in [0, size)
    int size = 1;
    std::filesystem::path folder;                           // of this run alone, there and writable for each rank
    std::function<void()> check;                            // called now and then while the ranks meet; what it throws ends the wait
    std::chrono::milliseconds patience{0};                  // until every rank has come; 0 is as long as it takes
    std::chrono::milliseconds limit{600'000};               // for a rank that is late in a call that does not wait without end
};

// Its device memory is the host's. A rank's file is locked for as long as its process runs, whatever ends that, so that the others notice an end within a
// fraction of a second. The files are gone from the folder once all have met.
class SharedMemoryCommunicator final : public Communicator {
public:
    // Returns when every rank is there. Error(configuration) naming the folder: it can't hold the file, or a rank was started for another number of ranks;
    // Error(unavailable) where one does not come within `patience`.
    explicit SharedMemoryCommunicator(const Meeting& meeting);
    ~SharedMemoryCommunicator() override;

    void sum(float* values, std::size_t count) override;
    void gather(const void* part, std::size_t num_bytes, void* parts) override { exchange(part, num_bytes, parts); }
    void exchange(const void* part, std::size_t num_bytes, void* parts) override;
    void broadcast(std::vector<std::byte>& bytes) override;
    void barrier() override;
    void check() const override;
    void abort(const std::string& reason) noexcept override;

private:
    struct Header;
    class Segment;

    void open_own();
    void await_others();
    std::byte* begin();
    void post();
    void await_all(bool is_patient);
    void await(int rank, bool is_patient);
    std::string loss_of(int rank) const;
    const std::byte* half(int rank) const;
    std::filesystem::path path_of(int rank) const;

    Meeting meeting_;
    std::vector<std::unique_ptr<Segment>> segments_;        // by rank
    std::uint32_t number_ = 0;                              // of the exchange under way; its bytes lie in half number_ % 2 of each segment
    int spins_ = 0;                                         // looks for a peer's word before the thread sleeps
    std::mutex abort_mutex_;
};

}  // namespace pocket
