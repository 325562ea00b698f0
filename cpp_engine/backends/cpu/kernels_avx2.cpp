#include "backends/cpu/kernels.h"
#include "backends/cpu/target.h"

#if defined(__x86_64__)
#include <immintrin.h>

POCKET_TARGET_BEGIN("avx2,fma,f16c")
#include "backends/cpu/lanes_avx2.h"

#include "backends/cpu/kernel_rows.h"

#include "backends/cpu/kernel_attention.h"
#include "backends/cpu/kernel_delta_net.h"
#include "backends/cpu/kernel_product.h"
#include "backends/cpu/kernel_table.h"

namespace pocket {
namespace {
Kernels avx2_table() { return make_kernels<Avx2>(); }
}  // namespace
}  // namespace pocket
POCKET_TARGET_END

namespace pocket {

const Kernels& avx2_kernels() {
    static const Kernels table = avx2_table();
    return table;
}

}  // namespace pocket
#endif
