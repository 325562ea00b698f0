// Instruction sets that the CPU device has kernels for.
#pragma once

#include <cstdint>
#include <vector>

namespace pocket {

// Each one includes those before it.
enum class Isa : std::uint8_t {
    plain,        // C++ alone
    avx2,         // with FMA and F16C
    avx512,       // F, BW, DQ, VL
    avx512_bf16,  // products of bfloat16 pairs
    amx_bf16,     // products of bfloat16 tiles
};

const char* name(Isa isa) noexcept;

// Those that this processor has and the system lets this process use, from plain up.
const std::vector<Isa>& available_isas();

}  // namespace pocket
