// Products of bfloat16 tiles on AMX. Only where available_isas() has Isa::amx_bf16.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pocket {

constexpr int kTileRows = 16;                             // rows of x, and of a panel, in a tile
constexpr std::int64_t kTileValues = kTileRows * 32;      // of 32 columns

// The calling thread's tile registers, for row tiles of which the first has `first` rows in use and the second `second`. They stay until amx_release.
void amx_configure(int first, int second);
void amx_release();

// What amx_product multiplies.
struct TileProduct {
    const std::uint16_t* x = nullptr;        // row tiles [steps][16 rows][32 columns], `x_stride` values from a row tile to the next
    std::int64_t x_stride = 0;
    const std::byte* panels[2] = {};         // bfloat16 panels from the same column on; the second may be null
    float* sums[2] = {};                     // for each panel: row tiles [16 rows][16]
    int row_tiles = 1;                       // 1 or 2
    int steps = 0;                           // of 32 columns
    bool adds = false;                       // to what `sums` hold
};

void amx_product(const TileProduct& product);

// float8 panels are multiplied by way of bfloat16, which holds 256th parts of their numbers exactly; their scales are applied to sums in float32.
// `columns` columns of a float8 panel from the start of a block on -> a bfloat16 panel.
void amx_unpack(const std::byte* panel, std::int64_t columns, std::uint16_t* out);
// sums [rows][16] = products [rows][16] * 256 * scales [16], added to what they hold where `adds`
void amx_add_scaled(const float* products, const float* scales, int rows, bool adds, float* sums);

}  // namespace pocket
