// Ranks that have a GPU each: sums and gathered parts by NCCL, on the device's stream, all else by the communicator of the host's memory.
#ifdef POCKET_NCCL
#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/cuda/call.h"
#include "backends/cuda/cuda_device.h"
#include "pocket/communicator.h"

namespace pocket::cuda {

namespace {

constexpr std::chrono::milliseconds kBeat{200};             // between two looks whether a rank is lost

[[noreturn]] void fail(ncclResult_t status, const char* what) {
    throw Error(ErrorKind::device, std::string("NCCL failed at ") + what + ": " + ncclGetErrorString(status) +
                                       ". Run with NCCL_DEBUG=WARN to see more, or send backend \"torch\".");
}

class NcclCommunicator final : public Communicator {
public:
    NcclCommunicator(std::unique_ptr<Communicator> host, int ordinal, cudaStream_t stream)
        : Communicator(host->rank(), host->size()), host_(std::move(host)), ordinal_(ordinal), stream_(stream) {
        ncclUniqueId id = {};
        if (rank() == 0) {
            if (const ncclResult_t status = ncclGetUniqueId(&id); status != ncclSuccess) fail(status, "the id of the ranks");
        }
        std::vector<std::byte> bytes(sizeof id);
        std::memcpy(bytes.data(), &id, sizeof id);
        host_->broadcast(bytes);
        std::memcpy(&id, bytes.data(), sizeof id);
        call(cudaSetDevice(ordinal_), "the choice of the device");
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;  // a call that waits for a rank that is lost could not be ended
        settle(ncclCommInitRankConfig(&ranks_, size(), id, rank(), &config), "the meeting of the ranks");
        watcher_ = std::thread([this] { watch(); });
    }

    ~NcclCommunicator() override {
        {
            const std::lock_guard lock(mutex_);
            is_ending_ = true;
        }
        changed_.notify_all();
        if (watcher_.joinable()) watcher_.join();
        // Not destroyed in turn with the others, which may have ended: what is under way is of no use to anybody.
        if (!is_aborted_) ncclCommAbort(ranks_);
    }

    void sum(float* values, std::size_t count) override {
        const std::lock_guard lock(mutex_);
        if (is_aborted_) host_->check();
        settle(ncclAllReduce(values, values, count, ncclFloat32, ncclSum, ranks_, stream_), "a sum over the ranks");
    }
    void gather(const void* part, std::size_t num_bytes, void* parts) override {
        const std::lock_guard lock(mutex_);
        if (is_aborted_) host_->check();
        settle(ncclAllGather(part, parts, num_bytes, ncclInt8, ranks_, stream_), "the ranks' parts");
    }
    void exchange(const void* part, std::size_t num_bytes, void* parts) override { host_->exchange(part, num_bytes, parts); }
    void broadcast(std::vector<std::byte>& bytes) override { host_->broadcast(bytes); }
    void barrier() override { host_->barrier(); }
    void check() const override { host_->check(); }
    void abort(const std::string& reason) noexcept override { host_->abort(reason); }  // the watcher sees it

private:
    // Until a call that does not block was made; on the host, not on the device.
    void settle(ncclResult_t status, const char* what) {
        while (status == ncclInProgress) {
            host_->check();
            std::this_thread::yield();
            if (ncclCommGetAsyncError(ranks_, &status) != ncclSuccess) break;
        }
        if (status == ncclSuccess) return;
        host_->check();  // the loss of a rank is the better reason
        fail(status, what);
    }

    // Ends kernels that wait for a rank that is lost, so that whoever waits for the stream goes on and finds `check` throw.
    void watch() noexcept {
        std::unique_lock lock(mutex_);
        while (!is_ending_) {
            changed_.wait_for(lock, kBeat);
            if (is_ending_) return;
            try {
                host_->check();
            } catch (const std::exception&) {  // told by every call of the rank's own thread
                ncclCommAbort(ranks_);
                is_aborted_ = true;
                return;
            }
        }
    }

    std::unique_ptr<Communicator> host_;
    int ordinal_;
    cudaStream_t stream_;                                   // the device's, which outlives this
    ncclComm_t ranks_ = nullptr;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_ending_ = false;                                // guarded by mutex_, as is what follows, and the use of ranks_, which an abort frees
    bool is_aborted_ = false;
    std::thread watcher_;
};

}  // namespace

std::unique_ptr<Communicator> CudaDevice::join(std::unique_ptr<Communicator> host) {
    return std::make_unique<NcclCommunicator>(std::move(host), ordinal_, context_.stream);
}

}  // namespace pocket::cuda
#endif
