#include "engine/warm_up.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "engine/model_runner.h"

namespace pocket {

namespace {

constexpr int block_size = 16, shortest = 16;
constexpr int longest_whole = 8192;  // where prompts are computed in one step, of any length

}  // namespace

void try_prompts(Device& device, Model& model, const CacheOptions& options, Communicator* ranks) {
    const int context = options.max_model_len > 0 ? std::min(options.max_model_len, model.max_positions()) : model.max_positions();
    const int longest = std::min(context, options.prefill_token_budget > 0 ? options.prefill_token_budget : longest_whole);
    CacheShape shape;
    shape.block_size = block_size;
    shape.num_blocks = (longest + block_size - 1) / block_size;
    shape.num_row_slots = 1;
    shape.max_model_len = context;
    ModelRunner runner(device, model, shape, options.kv_cache_dtype, longest, ranks);
    const std::vector<std::int32_t> token_ids(static_cast<std::size_t>(longest), 0);
    std::vector<std::int32_t> block_table(static_cast<std::size_t>(shape.num_blocks));
    std::iota(block_table.begin(), block_table.end(), 0);
    const Request greedy;
    RunRow row;
    row.block_table = block_table;
    row.slot = 0;
    row.samples = true;
    row.request = &greedy;
    for (int length = longest; length >= std::min(shortest, longest); length /= 2) {
        row.token_ids = std::span(token_ids).first(static_cast<std::size_t>(length));
        runner.run({&row, 1}, {});
        if (length == 1) return;
    }
}

}  // namespace pocket
