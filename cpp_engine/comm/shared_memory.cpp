#include "comm/shared_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/word.h"
#include "core/cores.h"
#include "pocket/error.h"

namespace pocket {

namespace {

constexpr std::uint64_t layout = 0x706f636b65740001;        // of the files, with its version
constexpr std::size_t half_bytes = std::size_t{1} << 20;
constexpr std::size_t reason_bytes = 512;
constexpr int spins = 4000;                                 // up to some hundred microseconds, a few times what a sleep and a wake cost
constexpr std::chrono::milliseconds beat{100};              // between two looks whether a rank that is waited for has ended

std::string text_of(int code) { return std::generic_category().message(code); }

}  // namespace

// Written by its rank, but for `sleepers`.
struct SharedMemoryCommunicator::Header {
    std::uint64_t layout = 0;
    std::int32_t size = 0;
    std::atomic<std::uint32_t> posted{0};                   // number of the newest exchange whose bytes are there
    std::atomic<std::uint32_t> sleepers{0};                 // threads that sleep on `posted`
    std::atomic<std::uint32_t> is_aborted{0};               // `reason` is whole
    char reason[reason_bytes] = {};
};

// A rank's file in memory: the header, then two halves. While one exchange is read, the bytes of the next go into the other half; they are posted by ranks
// alone that have read the one before, so two are enough.
class SharedMemoryCommunicator::Segment {
public:
    static constexpr std::size_t first_half = (sizeof(Header) + 63) / 64 * 64;
    static constexpr std::size_t num_bytes = first_half + 2 * half_bytes;

    // Takes over the descriptor, whose file has num_bytes.
    explicit Segment(int file) : file_(file) {
        memory_ = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory_ != MAP_FAILED) return;
        const int code = errno;
        ::close(file);
        throw Error(ErrorKind::unavailable, "the shared memory of the ranks can't be mapped (" + text_of(code) + "): free some memory");
    }
    ~Segment() {
        ::munmap(memory_, num_bytes);
        ::close(file_);
    }
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    Header& header() const noexcept { return *static_cast<Header*>(memory_); }
    std::byte* half(std::uint32_t number) const noexcept { return static_cast<std::byte*>(memory_) + first_half + number % 2 * half_bytes; }

    // Whether nobody holds the lock of the file, which its rank's process does until it ends. Not for the own segment.
    bool is_orphan() const noexcept {
        if (::flock(file_, LOCK_SH | LOCK_NB) != 0) return false;
        ::flock(file_, LOCK_UN);
        return true;
    }

private:
    int file_;
    void* memory_ = nullptr;
};

SharedMemoryCommunicator::SharedMemoryCommunicator(const Meeting& meeting)
    : Communicator(meeting.rank, meeting.size),
      meeting_(meeting),
      segments_(static_cast<std::size_t>(meeting.size)),
      spins_(available_cores() >= meeting.size ? spins : 0) {
    open_own();
    try {
        await_others();
        barrier();
    } catch (...) {
        ::unlink(path_of(rank()).c_str());
        throw;
    }
    ::unlink(path_of(rank()).c_str());  // all have mapped it
    meeting_.check = nullptr;
}

SharedMemoryCommunicator::~SharedMemoryCommunicator() = default;

std::filesystem::path SharedMemoryCommunicator::path_of(int rank) const { return meeting_.folder / ("native-rank-" + std::to_string(rank)); }

// Under another name until it is whole and locked: a file of an earlier run that the others may find in its place is not locked.
void SharedMemoryCommunicator::open_own() {
    const auto fail = [this](int code) {
        throw Error(ErrorKind::configuration,
                    meeting_.folder.string() + " can't hold the shared memory of the ranks (" + text_of(code) + "): name a folder that exists and may be written.",
                    "rendezvous_dir");
    };
    const std::string made = path_of(rank()).string() + ".new";
    ::unlink(made.c_str());
    const int file = ::open(made.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) fail(errno);
    int code = ::posix_fallocate(file, 0, static_cast<off_t>(Segment::num_bytes));  // a full disk is noticed now, not by a signal later
    if (code == 0 && ::flock(file, LOCK_EX | LOCK_NB) != 0) code = errno;
    if (code != 0) {
        ::close(file);
        ::unlink(made.c_str());
        fail(code);
    }
    auto segment = std::make_unique<Segment>(file);
    Header* header = new (&segment->header()) Header;
    header->layout = layout;
    header->size = size();
    segments_[static_cast<std::size_t>(rank())] = std::move(segment);
    if (::rename(made.c_str(), path_of(rank()).c_str()) != 0) {
        code = errno;
        ::unlink(made.c_str());
        fail(code);
    }
}

void SharedMemoryCommunicator::await_others() {
    const auto began = std::chrono::steady_clock::now();
    for (int other = 0; other < size(); ++other) {
        auto& segment = segments_[static_cast<std::size_t>(other)];
        while (!segment) {
            const int file = ::open(path_of(other).c_str(), O_RDWR | O_CLOEXEC);
            struct stat about {};
            if (file >= 0 && ::fstat(file, &about) == 0 && about.st_size == static_cast<off_t>(Segment::num_bytes)) {
                auto found = std::make_unique<Segment>(file);
                if (!found->is_orphan()) segment = std::move(found);
            } else if (file >= 0) {
                ::close(file);
            }
            if (segment) break;
            if (meeting_.check) meeting_.check();
            if (meeting_.patience.count() > 0 && std::chrono::steady_clock::now() - began >= meeting_.patience) {
                throw Error(ErrorKind::unavailable, "rank " + std::to_string(other) + " of " + std::to_string(size()) + " did not come to " +
                                                        meeting_.folder.string() + " in time: start every rank.");
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        const Header& header = segment->header();
        if (header.layout != layout || header.size != size()) {
            throw Error(ErrorKind::configuration, "rank " + std::to_string(other) + " in " + meeting_.folder.string() + " was started for " +
                                                      std::to_string(header.size) + " ranks, and this one for " + std::to_string(size()) + ": make them equal.",
                        "tensor_parallel_size");
        }
    }
}

// The own half for the next exchange.
std::byte* SharedMemoryCommunicator::begin() {
    if (const std::string loss = loss_of(rank()); !loss.empty()) throw Error(ErrorKind::unavailable, loss);
    return segments_[static_cast<std::size_t>(rank())]->half(++number_);
}

void SharedMemoryCommunicator::post() {
    Header& header = segments_[static_cast<std::size_t>(rank())]->header();
    header.posted.store(number_);
    if (header.sleepers.load() > 0) wake_all(header.posted);
}

const std::byte* SharedMemoryCommunicator::half(int rank) const { return segments_[static_cast<std::size_t>(rank)]->half(number_); }

void SharedMemoryCommunicator::await_all(bool is_patient) {
    for (int other = 0; other < size(); ++other) {
        if (other != rank()) await(other, is_patient);
    }
}

void SharedMemoryCommunicator::await(int other, bool is_patient) {
    Header& header = segments_[static_cast<std::size_t>(other)]->header();
    const auto is_there = [&](std::uint32_t posted) { return static_cast<std::int32_t>(posted - number_) >= 0; };  // numbers wrap around
    for (int spin = 0; spin < spins_; ++spin) {
        if (is_there(header.posted.load(std::memory_order_acquire))) return;
        rest();
    }
    const auto began = std::chrono::steady_clock::now();
    for (;;) {
        ++header.sleepers;
        const std::uint32_t posted = header.posted.load();
        if (!is_there(posted)) sleep_on(header.posted, posted, beat);
        --header.sleepers;
        if (is_there(header.posted.load())) return;
        for (int any = 0; any < size(); ++any) {
            const std::string loss = loss_of(any);
            if (is_there(header.posted.load())) return;  // a rank that ended had posted all that this call needs
            if (!loss.empty()) throw Error(ErrorKind::unavailable, loss);
        }
        if (meeting_.check) meeting_.check();
        if (!is_patient && std::chrono::steady_clock::now() - began >= meeting_.limit) {
            throw Error(ErrorKind::unavailable, "rank " + std::to_string(other) + " of " + std::to_string(size()) + " is lost: nothing came from it for " +
                                                    std::to_string(meeting_.limit.count() / 1000) + " seconds.");
        }
    }
}

// Why nothing more comes of `rank`; empty while all is well.
std::string SharedMemoryCommunicator::loss_of(int rank) const {
    const Segment& segment = *segments_[static_cast<std::size_t>(rank)];
    const bool is_own = rank == this->rank(), is_orphan = !is_own && segment.is_orphan();
    const bool is_aborted = segment.header().is_aborted.load();  // read after the lock: what it said before it ended counts
    if (!is_aborted && !is_orphan) return {};
    if (is_own) return segment.header().reason;
    const std::string who = "rank " + std::to_string(rank) + " of " + std::to_string(size());
    return is_aborted ? who + " has failed: " + segment.header().reason : who + " is lost: its process has ended.";
}

void SharedMemoryCommunicator::sum(float* values, std::size_t count) {
    constexpr std::size_t most = half_bytes / sizeof(float);
    for (std::size_t start = 0; start < count; start += most) {
        const std::size_t part = std::min(most, count - start);
        std::memcpy(begin(), values + start, part * sizeof(float));
        post();
        await_all(false);
        std::memcpy(values + start, half(0), part * sizeof(float));
        for (int other = 1; other < size(); ++other) {  // in the order of the ranks, so that all get the same bits
            const auto* more = reinterpret_cast<const float*>(half(other));
            for (std::size_t index = 0; index < part; ++index) values[start + index] += more[index];
        }
    }
}

void SharedMemoryCommunicator::exchange(const void* part, std::size_t num_bytes, void* parts) {
    for (std::size_t start = 0; start < num_bytes; start += half_bytes) {
        const std::size_t count = std::min(half_bytes, num_bytes - start);
        std::memcpy(begin(), static_cast<const std::byte*>(part) + start, count);
        post();
        await_all(false);
        for (int other = 0; other < size(); ++other) {
            std::memcpy(static_cast<std::byte*>(parts) + static_cast<std::size_t>(other) * num_bytes + start, half(other), count);
        }
    }
}

// The number of bytes comes before the first of them.
void SharedMemoryCommunicator::broadcast(std::vector<std::byte>& bytes) {
    std::uint64_t total = bytes.size();
    std::size_t done = 0;
    for (bool is_first = true; is_first || done < total; is_first = false) {
        const std::size_t before = is_first ? sizeof total : 0;
        std::byte* own = begin();
        if (rank() == 0) {
            if (is_first) std::memcpy(own, &total, sizeof total);
            const std::size_t count = std::min<std::size_t>(half_bytes - before, total - done);
            if (count > 0) std::memcpy(own + before, bytes.data() + done, count);
            done += count;
        }
        post();
        await_all(is_first);
        if (rank() == 0) continue;
        if (is_first) {
            std::memcpy(&total, half(0), sizeof total);
            bytes.resize(total);
        }
        const std::size_t count = std::min<std::size_t>(half_bytes - before, total - done);
        if (count > 0) std::memcpy(bytes.data() + done, half(0) + before, count);
        done += count;
    }
}

void SharedMemoryCommunicator::barrier() {
    begin();
    post();
    await_all(true);
}

void SharedMemoryCommunicator::check() const {
    for (int any = 0; any < size(); ++any) {
        if (const std::string loss = loss_of(any); !loss.empty()) throw Error(ErrorKind::unavailable, loss);
    }
}

void SharedMemoryCommunicator::abort(const std::string& reason) noexcept {
    const std::lock_guard lock(abort_mutex_);
    Header& own = segments_[static_cast<std::size_t>(rank())]->header();
    if (own.is_aborted.load()) return;
    const std::size_t count = std::min(reason.size(), reason_bytes - 1);
    std::replace_copy(reason.begin(), reason.begin() + static_cast<std::ptrdiff_t>(count), own.reason, '\n', ' ');
    own.reason[count] = '\0';
    own.is_aborted.store(1);
    for (const auto& segment : segments_) wake_all(segment->header().posted);  // whoever sleeps looks again
}

}  // namespace pocket
