// Gated DeltaNet over a step's rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/cpu_device.h"
#include "pocket/error.h"

namespace pocket {
namespace {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

// A task is a row and one key head with its value heads: nobody else touches their states and their channels of the convolution's tail.
void CpuDevice::delta_net(const Step& step, const DeltaNetShape& shape, const DeltaNetWeights& weights, const Tensor& projections, const StateCache& states,
                          const Tensor& out) {
    const int key_dim = shape.key_dim, value_dim = shape.value_dim, group = shape.num_value_heads / std::max(1, shape.num_key_heads);
    if (key_dim % 16 != 0 || value_dim % 16 != 0 || group * shape.num_key_heads != shape.num_value_heads || shape.conv_kernel < 2) {
        throw Error(ErrorKind::unsupported, "cpu: DeltaNet heads of " + std::to_string(key_dim) + " and " + std::to_string(value_dim) +
                                                " values (multiples of 16 are computed), " + std::to_string(shape.num_key_heads) + " key and " +
                                                std::to_string(shape.num_value_heads) + " value heads, a convolution over " +
                                                std::to_string(shape.conv_kernel) + " tokens: use backend \"torch\" for this model", "model");
    }
    const std::int64_t conv_dim = shape.conv_dim(), matrix_size = static_cast<std::int64_t>(key_dim) * value_dim;
    constexpr int kTokens = kDeltaTokens;
    own_.reserve<float>(pool_.size(), static_cast<std::size_t>(kTokens * (2 * key_dim + 2 * value_dim + 2) + delta_workspace_size(key_dim)));

    pool_.parallel_for(static_cast<std::int64_t>(step.num_rows) * shape.num_key_heads, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        float* queries = own_.of<float>(thread);         // [kTokens, key_dim]
        float* keys = queries + kTokens * key_dim;       // [kTokens, key_dim]
        float* values = keys + kTokens * key_dim;        // [kTokens, value_dim]
        float* outputs = values + kTokens * value_dim;   // [kTokens, value_dim]
        float* decays = outputs + kTokens * value_dim;   // [kTokens]
        float* betas = decays + kTokens;                 // [kTokens]
        float* workspace = betas + kTokens;
        for (std::int64_t task = begin; task < end; ++task) {
            const int row = static_cast<int>(task / shape.num_key_heads), key_head = static_cast<int>(task % shape.num_key_heads);
            const int first = step.row_starts[row], last = step.row_starts[row + 1];
            float* state = states.states + step.state_slots[row] * states.slot_stride;
            float* tail = state + shape.num_value_heads * matrix_size;  // [conv_kernel - 1, conv_dim]
            const int query_at = key_head * key_dim, key_at = (shape.num_key_heads + key_head) * key_dim;
            const int value_at = 2 * shape.num_key_heads * key_dim + key_head * group * value_dim;
            if (first < last && step.positions[first] == 0) {
                std::fill_n(state + key_head * group * matrix_size, group * matrix_size, 0.0f);
                for (int j = 0; j < shape.conv_kernel - 1; ++j) {
                    std::fill_n(tail + j * conv_dim + query_at, key_dim, 0.0f);
                    std::fill_n(tail + j * conv_dim + key_at, key_dim, 0.0f);
                    std::fill_n(tail + j * conv_dim + value_at, group * value_dim, 0.0f);
                }
            }
            for (int start = first; start < last; start += kTokens) {
                const int count = std::min(kTokens, last - start);
                const float* from = static_cast<const float*>(projections.data) + start * projections.stride;
                const auto convolve = [&](int channel, int channels, float* to) {
                    kernels_.convolve(from + channel, projections.stride, count, channels, weights.conv + channel, conv_dim, shape.conv_kernel, tail + channel,
                                      conv_dim, to, channels);
                };
                convolve(query_at, key_dim, queries);
                convolve(key_at, key_dim, keys);
                kernels_.unit_rows(queries, key_dim, count, key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)));
                kernels_.unit_rows(keys, key_dim, count, key_dim, 1.0f);
                for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
                    convolve(2 * shape.num_key_heads * key_dim + head * value_dim, value_dim, values);
                    for (int token = 0; token < count; ++token) {
                        const float* gates = from + token * projections.stride + conv_dim + shape.value_size();  // b, then a
                        betas[token] = 1.0f / (1.0f + std::exp(-gates[head]));
                        decays[token] = weights.rate[head] * softplus(gates[shape.num_value_heads + head] + weights.dt_bias[head]);
                    }
                    kernels_.delta_rule({queries, keys, values, decays, betas, outputs, key_dim, value_dim, value_dim, count, key_dim, value_dim},
                                        state + head * matrix_size, workspace);
                    for (int token = 0; token < count; ++token) {
                        kernels_.gate_norm(outputs + token * value_dim, weights.norm, from + token * projections.stride + conv_dim + head * value_dim,
                                           value_dim, static_cast<float*>(out.data) + (start + token) * out.stride + head * value_dim);
                    }
                }
            }
        }
    });
}

}  // namespace pocket
