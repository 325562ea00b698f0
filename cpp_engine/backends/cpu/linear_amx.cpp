// Products of several rows with bfloat16 and float8 weights on AMX.
#include <algorithm>

#include "backends/cpu/amx.h"
#include "backends/cpu/cpu_device.h"

namespace pocket {
namespace {

constexpr std::int64_t kCachedRows = 512;          // rows that pass by the weights together
constexpr std::int64_t kCachedValues = 128 << 10;  // of x, 256 KiB: they stay in the second-level cache, and a pair of panels as wide in the first
constexpr std::int64_t kGroupPairs = 4;            // pairs of panels that share x while it is in the cache
constexpr int kScaleSteps = kScaleBlock / 32;
constexpr std::size_t kFloat8Block = (kScaleBlock + sizeof(float)) * kPanelRows;  // bytes

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// A pair of panels (the second may be missing) from some column on: bfloat16 ones, and where they stand for float8 ones, those too.
struct PanelPair {
    const std::byte* panels[2] = {};
    const std::byte* scaled[2] = {};
};

PanelPair pair_at(const CpuMatrix::Segment& segment, std::int64_t left, std::int64_t right, std::int64_t first_step, std::int64_t steps,
                  std::uint16_t* unpacked) {
    PanelPair pair;
    for (int i = 0; i < 2; ++i) {
        const std::int64_t index = i == 0 ? left : right;
        if (index >= segment.num_panels) continue;
        if (segment.dtype == DType::bfloat16) {
            pair.panels[i] = segment.panel(index) + first_step * kTileValues * 2;
        } else {
            pair.scaled[i] = segment.panel(index) + static_cast<std::size_t>(first_step / kScaleSteps) * kFloat8Block;
            amx_unpack(pair.scaled[i], steps * 32, unpacked + i * steps * kTileValues);
            pair.panels[i] = reinterpret_cast<const std::byte*>(unpacked + i * steps * kTileValues);
        }
    }
    return pair;
}

// The first `rows` rows of one or two row tiles times a pair of float8, the columns that share scales at a time.
void multiply_scaled(const PanelPair& pair, const TileProduct& product, int rows) {
    alignas(64) float products[2][2 * kTileRows * kPanelRows];
    TileProduct part = product;
    part.sums[0] = products[0];
    part.sums[1] = products[1];
    part.adds = false;
    for (int step = 0; step < product.steps; step += kScaleSteps) {
        part.steps = std::min(kScaleSteps, product.steps - step);
        amx_product(part);
        for (int i = 0; i < 2 && part.panels[i]; ++i) {
            const std::byte* scales = pair.scaled[i] + static_cast<std::size_t>(step / kScaleSteps) * kFloat8Block;
            amx_add_scaled(products[i], reinterpret_cast<const float*>(scales), rows, product.adds || step > 0, product.sums[i]);
            part.panels[i] += part.steps * kTileValues * 2;
        }
        part.x += part.steps * kTileValues;
    }
}

}  // namespace

// Columns by the block, so that a block of x stays in the cache while the panels of a group pass by; a group's sums wait in memory for the next block.
void CpuDevice::multiply_tiles(const Tensor& x, const Norm* norm, const CpuMatrix& weight, const CpuMatrix::Segment& segment, Epilogue epilogue,
                               const Tensor& out) {
    const std::int64_t padded = weight.padded_columns(), steps = padded / 32, units = divide_up(steps, kScaleSteps);
    const std::int64_t row_tiles = divide_up(x.rows, kTileRows), tile_stride = padded * kTileRows;
    shared_.reserve<std::uint16_t>(1, static_cast<std::size_t>(row_tiles * tile_stride));
    std::uint16_t* prepared = shared_.of<std::uint16_t>(0);  // [row_tiles][steps][16][32]
    pool_.parallel_for(row_tiles, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t tile = begin; tile < end; ++tile) {
            const std::int64_t first = tile * kTileRows;
            kernels_.prepare(static_cast<const float*>(x.data) + first * x.stride, x.stride,
                             static_cast<int>(std::min<std::int64_t>(kTileRows, x.rows - first)), x.columns, padded, norm, RowForm::tiles,
                             prepared + tile * tile_stride);
        }
    });

    const bool is_gated = epilogue == Epilogue::swiglu, is_float8 = segment.dtype == DType::float8_e4m3;
    const std::int64_t pairs = is_gated ? segment.num_panels / 2 : divide_up(segment.num_panels, 2);
    for (std::int64_t top = 0; top < x.rows; top += kCachedRows) {
        const std::int64_t rows = std::min(kCachedRows, x.rows - top), own_tiles = divide_up(rows, kTileRows);
        const std::int64_t most_units = std::max<std::int64_t>(1, kCachedValues / (own_tiles * kTileRows * kScaleBlock)), blocks = divide_up(units, most_units);
        const std::int64_t group = blocks > 1 ? kGroupPairs : 1, panel_sums = (own_tiles + 1) * kTileRows * kPanelRows;
        const std::int64_t sums_size = 2 * group * panel_sums,
                           unpacked_size = is_float8 ? (divide_up(units, blocks) * kScaleSteps) * kTileValues : 0;  // of two panels, in float32
        own_.reserve<float>(pool_.size(), static_cast<std::size_t>(sums_size + unpacked_size));
        pool_.parallel_for(divide_up(pairs, group), [&](std::int64_t begin, std::int64_t end, int thread) {
            float* sums = own_.of<float>(thread);
            std::uint16_t* unpacked = reinterpret_cast<std::uint16_t*>(sums + sums_size);
            amx_configure(static_cast<int>(std::min<std::int64_t>(rows, kTileRows)),
                          static_cast<int>(std::clamp<std::int64_t>(rows - kTileRows, 1, kTileRows)));
            for (std::int64_t index = begin * blocks; index < end * blocks; ++index) {
                const std::int64_t first_group = index / blocks * group, block = index % blocks;
                const std::int64_t first_step = units * block / blocks * kScaleSteps, last_step = std::min(steps, units * (block + 1) / blocks * kScaleSteps);
                for (std::int64_t at = first_group; at < std::min(pairs, first_group + group); ++at) {
                    const std::int64_t left = is_gated ? at : 2 * at, right = is_gated ? pairs + at : 2 * at + 1;
                    const PanelPair pair = pair_at(segment, left, right, first_step, last_step - first_step, unpacked);
                    for (std::int64_t tile = 0; tile < own_tiles; tile += 2) {
                        TileProduct product;
                        product.x = prepared + (top / kTileRows + tile) * tile_stride + first_step * kTileValues;
                        product.x_stride = tile_stride;
                        product.sums[0] = sums + (at - first_group) * 2 * panel_sums + tile * kTileRows * kPanelRows;
                        product.sums[1] = product.sums[0] + panel_sums;
                        product.row_tiles = tile + 1 < own_tiles ? 2 : 1;
                        product.steps = static_cast<int>(last_step - first_step);
                        product.adds = block > 0;
                        product.panels[0] = pair.panels[0];
                        product.panels[1] = pair.panels[1];
                        const int count = static_cast<int>(std::min<std::int64_t>(2 * kTileRows, rows - tile * kTileRows));
                        float* to = static_cast<float*>(out.data) + (top + tile * kTileRows) * out.stride + segment.first_row;
                        if (block + 1 == blocks) {  // by the time that the sums are there, so is the memory for them
                            for (int row = 0; row < count; ++row) {
                                __builtin_prefetch(to + row * out.stride + left * kPanelRows, 1);
                                if (!is_gated) __builtin_prefetch(to + row * out.stride + right * kPanelRows, 1);
                            }
                        }
                        if (is_float8) multiply_scaled(pair, product, count);
                        else amx_product(product);
                        if (block + 1 < blocks) continue;
                        const auto finish = [&](std::int64_t panel, const float* from, const float* ups) {
                            const int valid = static_cast<int>(std::min<std::int64_t>(kPanelRows, segment.rows - panel * kPanelRows));
                            kernels_.finish(epilogue, from, ups, count, valid, to + panel * kPanelRows, out.stride);
                        };
                        finish(left, product.sums[0], product.sums[1]);
                        if (!is_gated && pair.panels[1]) finish(right, product.sums[1], nullptr);
                    }
                }
            }
            amx_release();
        });
    }
}

}  // namespace pocket
