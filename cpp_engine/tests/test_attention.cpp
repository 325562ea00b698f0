// Gated attention over paged keys and values, on every device.
#include "ops_devices.h"
#include "reference_ops.h"
#include "tests/check.h"

using namespace pocket;
using namespace pocket::ops;

namespace {

double keep(double value) { return value; }
double as_half(double value) { return from_float16(to_float16(static_cast<float>(value))); }
double as_bfloat16(double value) { return from_bfloat16(to_bfloat16(static_cast<float>(value))); }

// As check_rows of test_delta_net.cpp; the blocks of the rows are scattered over the cache.
void check_rows(Device& device, const std::string& where, const AttentionShape& shape, DType cache_dtype, int block_size,
                const std::vector<std::vector<int>>& counts, int num_decode, std::uint64_t seed) {
    Random random(seed);
    const double near = tolerance(device);
    const std::size_t num_rows = counts[0].size(), dim = static_cast<std::size_t>(shape.head_dim);
    reference::Attention model;
    model.shape = shape;
    model.query_weight = random.values(dim, 2.0);
    model.key_weight = random.values(dim, 2.0);
    model.eps = 1e-6;
    model.theta = 10000.0;
    model.round = cache_dtype == DType::float32 ? keep : cache_dtype == DType::float16 ? as_half : as_bfloat16;
    std::vector<reference::Attention> rows(num_rows, model);

    int longest = 0, num_blocks = 3;
    std::vector<std::vector<std::int32_t>> tables(num_rows);
    for (std::size_t row = 0; row < num_rows; ++row) {
        int total = 0;
        for (const std::vector<int>& step : counts) total += step[row];
        longest = std::max(longest, total);
        tables[row].resize(static_cast<std::size_t>((total + block_size - 1) / block_size));
        num_blocks += static_cast<int>(tables[row].size());
    }
    std::vector<std::int32_t> free;
    for (int block = 0; block < num_blocks; ++block) free.push_back(block);
    for (std::size_t row = 0; row < num_rows; ++row) {
        for (std::int32_t& block : tables[row]) {
            const std::size_t pick = static_cast<std::size_t>(random.below(static_cast<int>(free.size())));
            block = free[pick];
            free.erase(free.begin() + static_cast<std::ptrdiff_t>(pick));
        }
    }
    const std::size_t half = static_cast<std::size_t>(shape.rotary_dim / 2);
    std::vector<float> cosines, sines;
    for (int position = 0; position < longest; ++position) {
        for (std::size_t i = 0; i < half; ++i) {
            const double angle = position * std::pow(model.theta, -2.0 * static_cast<double>(i) / shape.rotary_dim);
            cosines.push_back(static_cast<float>(std::cos(angle)));
            sines.push_back(static_cast<float>(std::sin(angle)));
        }
    }
    const Array query_weight(device, model.query_weight), key_weight(device, model.key_weight), cosine_array(device, cosines), sine_array(device, sines);
    const AttentionWeights weights{{query_weight.floats(), 1e-6f}, {key_weight.floats(), 1e-6f}, cosine_array.floats(), sine_array.floats()};
    const std::size_t cache_size = static_cast<std::size_t>(num_blocks * shape.num_kv_heads * block_size) * dim;
    const Array keys(device, random.values(cache_size, 9.0), cache_dtype), values(device, random.values(cache_size, 9.0), cache_dtype);
    const KvCache cache{keys.data(), values.data(), cache_dtype, num_blocks, block_size};

    std::vector<int> done(num_rows, 0);
    for (const std::vector<int>& step_counts : counts) {
        std::vector<Rows::Row> step_rows;
        std::vector<std::size_t> which;
        std::size_t num_tokens = 0;
        for (std::size_t row = 0; row < num_rows; ++row) {
            if (step_counts[row] == 0) continue;
            step_rows.push_back({done[row], step_counts[row], tables[row], 0});
            which.push_back(row);
            num_tokens += static_cast<std::size_t>(step_counts[row]);
        }
        int decoding = 0;
        while (decoding < num_decode && decoding < static_cast<int>(step_rows.size()) && step_rows[static_cast<std::size_t>(decoding)].count == 1) ++decoding;
        const Rows rows_on_device(device, step_rows, decoding, block_size);
        const std::size_t width = static_cast<std::size_t>(2 * shape.num_heads + 2 * shape.num_kv_heads) * dim,
                          size = static_cast<std::size_t>(shape.num_heads) * dim;
        const DType dtype = device.info().activation_dtype;
        const std::vector<float> projections = rounded(random.values(num_tokens * width, 2.0), dtype);
        const Array input(device, projections, dtype), output(device, std::vector<float>(num_tokens * size), dtype);
        device.attention(rows_on_device.step, shape, weights, matrix(input, static_cast<std::int64_t>(num_tokens), static_cast<std::int64_t>(width), dtype),
                         cache, matrix(output, static_cast<std::int64_t>(num_tokens), static_cast<std::int64_t>(size), dtype));
        device.synchronize();
        const std::vector<float> found = output.values(dtype);
        std::size_t token = 0;
        for (std::size_t i = 0; i < which.size(); ++i) {
            for (int count = 0; count < step_rows[i].count; ++count, ++token) {
                const reference::Vector wanted = rows[which[i]].token(reference::slice(projections, token * width, width));
                // A key that rounds to the other neighbour moves a score by that much.
                const double slack = std::max(4 * near, cache_dtype == DType::float32 ? 0 : cache_dtype == DType::float16 ? 2e-3 : 1.6e-2);
                for (std::size_t k = 0; k < size; ++k) {
                    if (std::abs(found[token * size + k] - wanted[k]) <= slack) continue;
                    check::fail(__FILE__, __LINE__,
                                where + ": heads of " + std::to_string(dim) + ", " + name(cache_dtype) + ", row " + std::to_string(which[i]) + ", token " +
                                    std::to_string(done[which[i]] + count) + ", value " + std::to_string(k) + ": " + std::to_string(found[token * size + k]) +
                                    " is not " + std::to_string(wanted[k]));
                    return;
                }
            }
            done[which[i]] += step_rows[i].count;
        }
    }
}

}  // namespace

TEST(rows_of_different_lengths_in_one_step) {
    on_every_device([](Device& device, const std::string& where) {
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
            check_rows(device, where, {4, 2, 64, 16}, dtype, 16, {{1, 1, 5, 70}, {1, 1, 1, 1}, {1, 1, 33, 2}, {1, 1, 1, 90}}, 2, 1);
            check_rows(device, where, {3, 1, 32, 8}, dtype, 8, {{17, 1}, {1, 1}, {1, 64}, {1, 1}}, 2, 2);
        }
    });
}

TEST(head_sizes_and_groups) {
    on_every_device([](Device& device, const std::string& where) {
        check_rows(device, where, {8, 2, 256, 64}, DType::float32, 16, {{37, 1}, {1, 80}, {1, 1}}, 2, 3);
        check_rows(device, where, {5, 1, 128, 128}, DType::float32, 32, {{66, 3}, {1, 1}}, 2, 4);
        check_rows(device, where, {3, 3, 48, 12}, DType::float32, 4, {{9, 30}, {1, 1}}, 2, 5);
        check_rows(device, where, {24, 4, 32, 32}, DType::float32, 16, {{20, 2}, {1, 1}}, 2, 6);
    });
}

TEST(prompts_of_large_heads) {
    on_every_device([](Device& device, const std::string& where) {
        check_rows(device, where, {4, 2, 256, 64}, DType::bfloat16, 16, {{1, 200, 31}, {1, 70, 140}}, 1, 9);
        check_rows(device, where, {3, 1, 256, 256}, DType::bfloat16, 32, {{128}, {1}, {130}}, 0, 10);
    });
}

TEST(contexts_that_are_split_over_threads) {
    on_every_device([](Device& device, const std::string& where) {
        check_rows(device, where, {2, 1, 16, 8}, DType::float32, 16, {{510, 1030, 3}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 70, 1}}, 3, 7);
    });
}

TEST(a_prompt_in_one_step_and_in_pieces) {
    on_every_device([](Device& device, const std::string& where) {
        for (const std::vector<std::vector<int>>& counts : {std::vector<std::vector<int>>{{200}}, {{64}, {64}, {72}}, {{1}, {199}}, {{63}, {65}, {16}, {56}}})
            check_rows(device, where, {4, 2, 64, 32}, DType::float32, 16, counts, 0, 8);
    });
}
