#include "backends/cpu/kernels.h"
#include "backends/cpu/target.h"

#if defined(__x86_64__)
#include <immintrin.h>

POCKET_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#include "backends/cpu/lanes_avx512.h"

#include "backends/cpu/kernel_rows.h"

#include "backends/cpu/kernel_attention.h"
#include "backends/cpu/kernel_delta_net.h"
#include "backends/cpu/kernel_product.h"
#include "backends/cpu/kernel_table.h"

namespace pocket {
namespace {
Kernels avx512_table() { return make_kernels<Avx512>(); }
}  // namespace
}  // namespace pocket
POCKET_TARGET_END

POCKET_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
namespace pocket {
namespace {

struct ByPackedPairs {  // bfloat16, x too
    template <int N>
    static void run(const std::byte* panel, const void* x, std::int64_t columns, float* out) {
        constexpr int S = sums_of(N);
        __m512 sums[N][S];
        clear<Avx512>(sums);
        const std::uint16_t* at = static_cast<const std::uint16_t*>(x);
        for (std::int64_t k = 0; k < columns; k += 8) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j, panel += 64) {
                Avx512::prefetch(panel + kPrefetchAhead);
                const __m512bh weight = (__m512bh)_mm512_loadu_si512(panel);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) {
                    int pair;
                    __builtin_memcpy(&pair, at + n * columns + k + 2 * j, sizeof(pair));
                    sums[n][j % S] = _mm512_dpbf16_ps(sums[n][j % S], weight, (__m512bh)_mm512_set1_epi32(pair));
                }
            }
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) _mm512_storeu_ps(out + n * 16, total<Avx512>(sums[n]));
    }
    static constexpr int kItemBytes = 2;
};

Kernels avx512_bf16_table() {
    Kernels table = avx512_table();
    table.packs_bfloat16 = true;
    table.product_bfloat16 = product<Avx512, ByPackedPairs>;
    return table;
}

}  // namespace
}  // namespace pocket
POCKET_TARGET_END

namespace pocket {

const Kernels& avx512_kernels() {
    static const Kernels table = avx512_table();
    return table;
}

const Kernels& avx512_bf16_kernels() {
    static const Kernels table = avx512_bf16_table();
    return table;
}

}  // namespace pocket
#endif
