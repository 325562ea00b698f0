#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes_plain.h"

#include "backends/cpu/kernel_rows.h"

#include "backends/cpu/kernel_attention.h"
#include "backends/cpu/kernel_delta_net.h"
#include "backends/cpu/kernel_product.h"
#include "backends/cpu/kernel_table.h"

namespace pocket {

const Kernels& plain_kernels() {
    static const Kernels table = make_kernels<Plain>();
    return table;
}

const Kernels& kernels(Isa isa) {
    switch (isa) {
        case Isa::plain: break;
#if defined(__x86_64__)
        case Isa::avx2: return avx2_kernels();
        case Isa::avx512: return avx512_kernels();
        case Isa::avx512_bf16:
        case Isa::amx_bf16: return avx512_bf16_kernels();
#else
        default: break;
#endif
    }
    return plain_kernels();
}

}  // namespace pocket
