#include "core/cores.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace pocket {
namespace {

// Cores that `quota` microseconds in each `period` are worth; 0 where nothing limits.
int quota_cores(double quota, double period) { return quota > 0 && period > 0 ? static_cast<int>(std::ceil(quota / period)) : 0; }

int cgroup_cores() {
    std::ifstream unified("/sys/fs/cgroup/cpu.max");  // "max 100000" or "150000 100000"
    std::string quota;
    double period = 0;
    if (unified >> quota >> period) return quota == "max" ? 0 : quota_cores(std::strtod(quota.c_str(), nullptr), period);
    std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    double limit = 0;
    if (quota_file >> limit && period_file >> period) return quota_cores(limit, period);
    return 0;
}

int affinity_cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

int available_cores() {
    const int cores = std::max(1, affinity_cores()), limit = cgroup_cores();
    return limit > 0 ? std::min(cores, limit) : cores;
}

}  // namespace pocket
