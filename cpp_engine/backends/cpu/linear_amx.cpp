// Products of several rows with bfloat16 weights on AMX.
#include <algorithm>

#include "backends/cpu/amx.h"
#include "backends/cpu/cpu_device.h"

namespace pocket {
namespace {

constexpr std::int64_t kCachedRows = 512;         // rows that pass by the weights together
constexpr std::int64_t kCachedValues = 512 << 10; // of x, 1 MiB: they stay in a core's second-level cache beside weights and sums
constexpr std::int64_t kGroupPairs = 4;           // pairs of panels that share x while it is in the cache

std::int64_t tiles(std::int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

}  // namespace

// Columns by the block, so that a block of x stays in the cache while the panels of a group pass by; a group's sums wait in memory for the next block.
void CpuDevice::multiply_tiles(const Tensor& x, const Norm* norm, const CpuMatrix& weight, const CpuMatrix::Segment& segment, Epilogue epilogue, const Tensor& out) {
    const std::int64_t padded = weight.padded_columns(), steps = padded / 32;
    const std::int64_t row_tiles = tiles(x.rows), tile_stride = padded * kTileRows;
    shared_.reserve<std::uint16_t>(1, static_cast<std::size_t>(row_tiles * tile_stride));
    std::uint16_t* prepared = shared_.of<std::uint16_t>(0);  // [row_tiles][steps][16][32]
    const auto prepare = [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t tile = begin; tile < end; ++tile) {
            const std::int64_t first = tile * kTileRows;
            kernels_.prepare(static_cast<const float*>(x.data) + first * x.stride, x.stride, static_cast<int>(std::min<std::int64_t>(kTileRows, x.rows - first)), x.columns, padded, norm, RowForm::tiles,
                             prepared + tile * tile_stride);
        }
    };
    pool_.parallel_for(row_tiles, 1, prepare);

    const bool is_gated = epilogue == Epilogue::swiglu;
    const std::int64_t pairs = is_gated ? segment.num_panels / 2 : (segment.num_panels + 1) / 2;
    for (std::int64_t top = 0; top < x.rows; top += kCachedRows) {
        const std::int64_t rows = std::min(kCachedRows, x.rows - top), own_tiles = tiles(rows);
        const std::int64_t most_steps = std::max<std::int64_t>(4, kCachedValues / (own_tiles * kTileRows * 32)), blocks = (steps + most_steps - 1) / most_steps;
        const std::int64_t group = blocks > 1 ? kGroupPairs : 1, panel_sums = (own_tiles + 1) * kTileRows * kPanelRows;
        own_.reserve<float>(pool_.size(), static_cast<std::size_t>(2 * group * panel_sums));
        const std::int64_t num_groups = (pairs + group - 1) / group;
        pool_.parallel_for(num_groups, [&](std::int64_t begin, std::int64_t end, int thread) {
            float* sums = own_.of<float>(thread);
            amx_configure(static_cast<int>(std::min<std::int64_t>(rows, kTileRows)), static_cast<int>(rows <= kTileRows ? kTileRows : rows <= 2 * kTileRows ? rows - kTileRows : kTileRows));
            for (std::int64_t index = begin * blocks; index < end * blocks; ++index) {
                const std::int64_t block = index % blocks, first_step = steps * block / blocks, last_step = steps * (block + 1) / blocks;
                for (std::int64_t pair = index / blocks * group; pair < std::min(pairs, (index / blocks + 1) * group); ++pair) {
                    const std::int64_t left = is_gated ? pair : 2 * pair, right = is_gated ? pairs + pair : 2 * pair + 1;
                    float* left_sums = sums + pair % group * 2 * panel_sums;
                    for (std::int64_t tile = 0; tile < own_tiles; tile += 2) {
                        TileProduct product;
                        product.x = prepared + (top / kTileRows + tile) * tile_stride + first_step * kTileValues;
                        product.x_stride = tile_stride;
                        product.panels[0] = segment.panel(left) + first_step * kTileValues * 2;
                        product.panels[1] = right < segment.num_panels ? segment.panel(right) + first_step * kTileValues * 2 : nullptr;
                        product.sums[0] = left_sums + tile * kTileRows * kPanelRows;
                        product.sums[1] = product.sums[0] + panel_sums;
                        product.row_tiles = tile + 1 < own_tiles ? 2 : 1;
                        product.steps = static_cast<int>(last_step - first_step);
                        product.adds = block > 0;
                        amx_product(product);
                        if (block + 1 < blocks) continue;
                        const int count = static_cast<int>(std::min<std::int64_t>(2 * kTileRows, rows - tile * kTileRows));
                        float* to = static_cast<float*>(out.data) + (top + tile * kTileRows) * out.stride + segment.first_row;
                        const auto finish = [&](std::int64_t panel, const float* from, const float* ups) {
                            const int valid = static_cast<int>(std::min<std::int64_t>(kPanelRows, segment.rows - panel * kPanelRows));
                            kernels_.finish(epilogue, from, ups, count, valid, to + panel * kPanelRows, out.stride);
                        };
                        finish(left, product.sums[0], product.sums[1]);
                        if (!is_gated && product.panels[1]) finish(right, product.sums[1], nullptr);
                    }
                }
            }
            amx_release();
        });
    }
}

}  // namespace pocket
