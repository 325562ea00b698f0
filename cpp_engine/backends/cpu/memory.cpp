#include "backends/cpu/memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "pocket/error.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pocket {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::string mebibytes(std::size_t num_bytes) { return std::to_string((num_bytes + (1u << 20) - 1) >> 20) + " MiB"; }

[[noreturn]] void refuse(std::size_t num_bytes) {
    const std::size_t free = free_memory();
    throw Error(ErrorKind::device, "cpu: no room for " + mebibytes(num_bytes) + (free ? " beside what is in use (" + mebibytes(free) + " are free)" : "") +
                                       "; lower max_model_len, max_batch_size or kv_cache_memory, or use a smaller model");
}

class HeapBuffer final : public Buffer {
public:
    explicit HeapBuffer(std::size_t num_bytes) {
        data_ = ::operator new(std::max<std::size_t>(num_bytes, 1), std::align_val_t{64}, std::nothrow);
        if (!data_) refuse(num_bytes);
        num_bytes_ = num_bytes;
        std::memset(data_, 0, num_bytes);
    }
    ~HeapBuffer() override { ::operator delete(data_, std::align_val_t{64}); }
};

#if defined(__linux__)
class MappedBuffer final : public Buffer {
public:
    explicit MappedBuffer(std::size_t num_bytes) : mapped_(num_bytes + kHugePage) {
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) refuse(num_bytes);
        const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(base_);
        data_ = reinterpret_cast<void*>((address + kHugePage - 1) / kHugePage * kHugePage);
        num_bytes_ = num_bytes;
        madvise(data_, num_bytes, MADV_HUGEPAGE);  // advice: without it the memory is the same, a little slower
    }
    ~MappedBuffer() override { munmap(base_, mapped_); }

private:
    void* base_ = nullptr;
    std::size_t mapped_;
};
#endif

// The number in a file that holds one; 0 where there is none, such as "max".
std::size_t number_in(const std::string& path) {
    std::ifstream file(path);
    std::size_t number = 0;
    return file >> number ? number : 0;
}

// The number behind `key` in a file of lines "key number".
std::size_t number_of(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    for (std::string word; file >> word;) {
        std::size_t number = 0;
        if (word == key && file >> number) return number;
    }
    return 0;
}

std::size_t meminfo(const std::string& key) { return number_of("/proc/meminfo", key) << 10; }

// What the control group (version 2 or 1) holds and can't give up: files that the system keeps in memory go when somebody needs the room.
std::size_t cgroup_used() {
    const bool is_unified = number_in("/sys/fs/cgroup/memory.current") > 0;
    const std::string folder = is_unified ? "/sys/fs/cgroup/" : "/sys/fs/cgroup/memory/", prefix = is_unified ? "" : "total_";
    const std::size_t all = number_in(folder + (is_unified ? "memory.current" : "memory.usage_in_bytes"));
    const std::size_t files = number_of(folder + "memory.stat", prefix + "inactive_file") + number_of(folder + "memory.stat", prefix + "active_file");
    return all > files ? all - files : 0;
}

std::size_t cgroup_limit() {
    const std::size_t limit = std::max(number_in("/sys/fs/cgroup/memory.max"), number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    return limit ? limit : std::numeric_limits<std::size_t>::max();
}

}  // namespace

std::unique_ptr<Buffer> allocate_memory(std::size_t num_bytes) {
#if defined(__linux__)
    if (num_bytes >= kHugePage) {
        const std::size_t free = free_memory();  // the system itself would promise more than it has
        if (free && num_bytes > free) refuse(num_bytes);
        return std::make_unique<MappedBuffer>(num_bytes);
    }
#endif
    return std::make_unique<HeapBuffer>(num_bytes);
}

std::size_t total_memory() { return std::min(meminfo("MemTotal:"), cgroup_limit()); }

std::size_t free_memory() {
    const std::size_t free = meminfo("MemAvailable:"), limit = cgroup_limit();
    if (limit == std::numeric_limits<std::size_t>::max()) return free;
    const std::size_t used = cgroup_used();
    return std::min<std::size_t>(free, limit > used ? limit - used : 1);  // 0 would say that nobody knows
}

}  // namespace pocket
