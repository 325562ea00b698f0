#include "backends/cpu/amx.h"

#include <algorithm>

#include "backends/cpu/kernels.h"
#include "backends/cpu/target.h"

#if defined(__x86_64__)
#include <immintrin.h>

POCKET_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")
#include "backends/cpu/lanes_avx512.h"
namespace pocket {
namespace {

// Registers 0 to 3 hold sums (row tile * 2 + panel), 4 and 5 rows of x, 6 and 7 panels.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr std::int64_t kAhead = 4;  // steps whose weights are asked of memory before their use

inline void prefetch_tile(const std::byte* tile) {
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) _mm_prefetch(reinterpret_cast<const char*>(tile) + line * 64, _MM_HINT_T0);
}

template <int RowTiles, int Panels>
void multiply(const TileProduct& p) {
    constexpr int kStride = 64;  // bytes from a row of any tile to the next
    if (p.adds) {
        _tile_loadd(0, p.sums[0], kStride);
        if constexpr (Panels == 2) _tile_loadd(1, p.sums[1], kStride);
        if constexpr (RowTiles == 2) _tile_loadd(2, p.sums[0] + 256, kStride);
        if constexpr (RowTiles == 2 && Panels == 2) _tile_loadd(3, p.sums[1] + 256, kStride);
    } else {
        _tile_zero(0);
        if constexpr (Panels == 2) _tile_zero(1);
        if constexpr (RowTiles == 2) _tile_zero(2);
        if constexpr (RowTiles == 2 && Panels == 2) _tile_zero(3);
    }
    const std::uint16_t *first = p.x, *second = p.x + p.x_stride;
    const std::byte *left = p.panels[0], *right = p.panels[1];
    for (int step = 0; step < p.steps; ++step) {
        _tile_loadd(6, left, kStride);
        _tile_loadd(4, first, kStride);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_tile(left + kAhead * kTileValues * 2);
        left += kTileValues * 2;
        if constexpr (RowTiles == 2) {
            _tile_loadd(5, second, kStride);
            _tile_dpbf16ps(2, 5, 6);
            second += kTileValues;
        }
        if constexpr (Panels == 2) {
            _tile_loadd(7, right, kStride);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (RowTiles == 2) _tile_dpbf16ps(3, 5, 7);
            prefetch_tile(right + kAhead * kTileValues * 2);
            right += kTileValues * 2;
        }
        first += kTileValues;
    }
    _tile_stored(0, p.sums[0], kStride);
    if constexpr (Panels == 2) _tile_stored(1, p.sums[1], kStride);
    if constexpr (RowTiles == 2) _tile_stored(2, p.sums[0] + 256, kStride);
    if constexpr (RowTiles == 2 && Panels == 2) _tile_stored(3, p.sums[1] + 256, kStride);
}

}  // namespace

void amx_configure(int first, int second) {
    TileConfig config;
    const std::uint8_t rows[2] = {static_cast<std::uint8_t>(first), static_cast<std::uint8_t>(second)};
    config.rows[0] = config.rows[1] = config.rows[4] = rows[0];
    config.rows[2] = config.rows[3] = config.rows[5] = rows[1];
    asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic tells the compiler of the first 8 bytes only
    _tile_loadconfig(&config);
}

void amx_release() { _tile_release(); }

void amx_product(const TileProduct& product) {
    if (product.row_tiles == 2) product.panels[1] ? multiply<2, 2>(product) : multiply<2, 1>(product);
    else product.panels[1] ? multiply<1, 2>(product) : multiply<1, 1>(product);
}

void amx_unpack(const std::byte* panel, std::int64_t columns, std::uint16_t* out) {
    for (std::int64_t first = 0; first < columns; first += kScaleBlock) {
        panel += kPanelRows * sizeof(float);
        for (std::int64_t k = first; k < std::min<std::int64_t>(columns, first + kScaleBlock); k += 2, panel += 2 * kPanelRows, out += 2 * kPanelRows) {
            const auto* bytes = reinterpret_cast<const std::uint8_t*>(panel);
            const __m512i even = _mm512_castps_si512(Avx512::load_float8(bytes)), odd = _mm512_castps_si512(Avx512::load_float8(bytes + kPanelRows));
            _mm512_storeu_si512(out, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));  // the lower halves are zero
        }
    }
}

void amx_add_scaled(const float* products, const float* scales, int rows, bool adds, float* sums) {
    const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_set1_ps(256.0f));
    for (int i = 0; i < rows * kPanelRows; i += kPanelRows) {
        const __m512 before = adds ? _mm512_loadu_ps(sums + i) : _mm512_setzero_ps();
        _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(_mm512_loadu_ps(products + i), scale, before));
    }
}

}  // namespace pocket
POCKET_TARGET_END

#else

namespace pocket {

// Never reached: available_isas() has no AMX elsewhere.
void amx_configure(int, int) {}
void amx_release() {}
void amx_product(const TileProduct&) {}
void amx_unpack(const std::byte*, std::int64_t, std::uint16_t*) {}
void amx_add_scaled(const float*, const float*, int, bool, float*) {}

}  // namespace pocket

#endif
