#include "backends/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pocket {
namespace {

#if defined(__x86_64__)

bool has_avx512_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 5) != 0;
}

// Linux lets a process use the tile registers on request only.
bool request_amx_bf16() {
#if defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#endif

std::vector<Isa> find_isas() {
    std::vector<Isa> isas = {Isa::plain};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return isas;
    isas.push_back(Isa::avx2);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return isas;
    isas.push_back(Isa::avx512);
    if (!has_avx512_bf16()) return isas;
    isas.push_back(Isa::avx512_bf16);
    if (request_amx_bf16()) isas.push_back(Isa::amx_bf16);
#endif
    return isas;
}

}  // namespace

const char* name(Isa isa) noexcept {
    switch (isa) {
        case Isa::plain: return "plain C++";
        case Isa::avx2: return "AVX2";
        case Isa::avx512: return "AVX-512";
        case Isa::avx512_bf16: return "AVX-512 BF16";
        case Isa::amx_bf16: return "AMX BF16";
    }
    return "";
}

const std::vector<Isa>& available_isas() {
    static const std::vector<Isa> isas = find_isas();
    return isas;
}

}  // namespace pocket
