// What the ranks that share one model say to each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pocket {

// This rank among `size` of them. One thread at a time calls it, the one that computes; `abort` is for any. Every rank makes the same calls in the same order.
// A call returns when every rank has made it, or, on a device that works behind the host, when the work is enqueued.
// Once a rank has ended or called `abort`, a call throws Error(unavailable) that names it, also one that waits already. A call never returns what is not whole.
class Communicator {
public:
    virtual ~Communicator() = default;
    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }

    // --- device memory, in the order of the device's calls ---
    virtual void sum(float* values, std::size_t count) = 0;                                // over all ranks, in place; the same bits on each
    virtual void gather(const void* part, std::size_t num_bytes, void* parts) = 0;         // parts [size, num_bytes]: every rank's part, by rank

    // --- host memory ---
    virtual void exchange(const void* part, std::size_t num_bytes, void* parts) = 0;       // as gather
    virtual void broadcast(std::vector<std::byte>& bytes) = 0;                             // those of rank 0, of any number; the others wait for them without end
    virtual void barrier() = 0;                                                            // every rank has come here, which may take as long as it takes
    std::int64_t least(std::int64_t number);                                               // of the ranks' numbers

    // From any thread, without waiting: throws as a call would, once a rank is lost. A device that works behind the host may have computed nonsense since.
    virtual void check() const = 0;

    // From any thread: this rank can't go on, as `reason` says in one line. Its own calls and those of the others throw from now on.
    virtual void abort(const std::string& reason) noexcept = 0;

protected:
    Communicator(int rank, int size) noexcept : rank_(rank), size_(size) {}

private:
    int rank_, size_;
};

}  // namespace pocket
