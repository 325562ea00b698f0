// Gated DeltaNet on every device.
#include "ops_devices.h"
#include "reference_ops.h"
#include "tests/check.h"

using namespace pocket;
using namespace pocket::ops;

namespace {

// Rows that run through several steps: `counts[step][row]` tokens, those with one token first; 0 leaves a row out.
void check_rows(Device& device, const std::string& where, const DeltaNetShape& shape, const std::vector<std::vector<int>>& counts, int num_decode,
                std::uint64_t seed) {
    Random random(seed);
    const double near = tolerance(device);
    const std::size_t num_rows = counts[0].size(), heads = static_cast<std::size_t>(shape.num_value_heads),
                      state_size = static_cast<std::size_t>(shape.state_size());
    reference::DeltaNet model;
    model.shape = shape;
    model.conv = random.values(static_cast<std::size_t>(shape.conv_kernel * shape.conv_dim()));
    for (std::size_t head = 0; head < heads; ++head) model.rate.push_back(static_cast<float>(-std::exp(2.0 * random.next())));
    model.dt_bias = random.values(heads, 2.0);
    model.norm_weight = random.values(static_cast<std::size_t>(shape.value_dim));
    model.eps = 1e-6;
    model.state.assign(state_size, 0.0);
    std::vector<reference::DeltaNet> rows(num_rows, model);

    const Array conv(device, model.conv), rate(device, model.rate), dt_bias(device, model.dt_bias), norm_weight(device, model.norm_weight);
    const DeltaNetWeights weights{conv.floats(), rate.floats(), dt_bias.floats(), {norm_weight.floats(), 1e-6f}};
    const std::size_t slot_stride = 2 * state_size + (num_rows % 2 ? 7 : 8), num_slots = num_rows + 2;  // slots hold more than this layer
    const Array states(device, random.values(slot_stride * num_slots, 3.0));        // what was there before must not matter
    const std::vector<float> before = states.values();
    const StateCache cache{static_cast<float*>(states.data()), static_cast<std::int64_t>(slot_stride), static_cast<int>(num_slots)};
    const auto slot_of = [&](std::size_t row) { return static_cast<int>(num_slots - 1 - row); };

    std::vector<int> done(num_rows, 0);
    for (const std::vector<int>& step_counts : counts) {
        std::vector<Rows::Row> step_rows;
        std::vector<std::size_t> which;
        std::size_t num_tokens = 0;
        for (std::size_t row = 0; row < num_rows; ++row) {
            if (step_counts[row] == 0) continue;
            step_rows.push_back({done[row], step_counts[row], {}, slot_of(row)});
            which.push_back(row);
            num_tokens += static_cast<std::size_t>(step_counts[row]);
        }
        int decoding = 0;
        while (decoding < num_decode && decoding < static_cast<int>(step_rows.size()) && step_rows[static_cast<std::size_t>(decoding)].count == 1) ++decoding;
        const Rows rows_on_device(device, step_rows, decoding, 16);
        const std::size_t width = static_cast<std::size_t>(shape.projection_size()), size = static_cast<std::size_t>(shape.value_size());
        const DType dtype = device.info().activation_dtype;
        const std::vector<float> projections = rounded(random.values(num_tokens * width, 2.0), dtype);
        const Array input(device, projections, dtype), output(device, std::vector<float>(num_tokens * size), dtype);
        device.delta_net(rows_on_device.step, shape, weights, matrix(input, static_cast<std::int64_t>(num_tokens), static_cast<std::int64_t>(width), dtype),
                         cache, matrix(output, static_cast<std::int64_t>(num_tokens), static_cast<std::int64_t>(size), dtype));
        device.synchronize();
        const std::vector<float> found = output.values(dtype);
        std::size_t token = 0;
        for (std::size_t i = 0; i < which.size(); ++i) {
            for (int count = 0; count < step_rows[i].count; ++count, ++token) {
                const reference::Vector wanted = rows[which[i]].token(reference::slice(projections, token * width, width));
                for (std::size_t k = 0; k < size; ++k) {
                    if (std::abs(found[token * size + k] - wanted[k]) <= 4 * near * (1 + std::abs(wanted[k]))) continue;
                    check::fail(__FILE__, __LINE__,
                                where + ": row " + std::to_string(which[i]) + ", token " + std::to_string(done[which[i]] + count) + ", value " +
                                    std::to_string(k) + ": " + std::to_string(found[token * size + k]) + " is not " + std::to_string(wanted[k]));
                    return;
                }
            }
            done[which[i]] += step_rows[i].count;
        }
    }
    const std::vector<float> after = states.values();
    for (std::size_t row = 0; row < num_rows; ++row) {
        const std::size_t at = static_cast<std::size_t>(slot_of(row)) * slot_stride;
        for (std::size_t i = 0; i < state_size; ++i) {
            if (std::abs(after[at + i] - rows[row].state[i]) <= 2 * near * (1 + std::abs(rows[row].state[i]))) continue;
            check::fail(__FILE__, __LINE__,
                        where + ": state of row " + std::to_string(row) + " at " + std::to_string(i) + ": " + std::to_string(after[at + i]) + " is not " +
                            std::to_string(rows[row].state[i]));
            return;
        }
        for (std::size_t i = state_size; i < slot_stride; ++i) CHECK_EQ(after[at + i], before[at + i]);
    }
}

}  // namespace

TEST(whole_rows_and_pieces_of_every_length) {
    on_every_device([](Device& device, const std::string& where) {
        const DeltaNetShape shape{2, 4, 32, 48, 4};
        for (const int count : {1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 130}) check_rows(device, where, shape, {{count}}, 1, static_cast<std::uint64_t>(count));
        check_rows(device, where, shape, {{1, 1, 65, 3}, {1, 1, 1, 70}, {1, 0, 64, 2}, {1, 1, 1, 1}}, 4, 100);
    });
}

TEST(states_are_carried_between_steps) {
    on_every_device([](Device& device, const std::string& where) {
        check_rows(device, where, {4, 4, 128, 128, 4}, {{10, 67}, {1, 1}, {1, 1}, {33, 1}}, 1, 101);
        check_rows(device, where, {1, 2, 128, 128, 4}, {{1, 130, 20}, {1, 16, 64}, {1, 1, 2}}, 1, 104);
        check_rows(device, where, {1, 3, 16, 16, 2}, {{5, 1}, {1, 1}, {9, 40}}, 2, 102);
        check_rows(device, where, {2, 2, 64, 32, 6}, {{2, 3}, {1, 1}, {1, 1}, {1, 4}, {20, 1}}, 2, 103);
    });
}
