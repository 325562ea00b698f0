// Gated DeltaNet of one row that computes one token, as a block or a part of one computes up to 64 value channels of one head: all but the factor of the norm, which
// takes whole heads.
//
// Value channels do not touch each other. Parts of heads of one key head all read that key head's past inputs of the convolution, which are moved on when all parts
// are done.
#pragma once

#include "backends/cuda/decode_step.h"
#include "backends/cuda/stream_code.cuh"

namespace pocket::cuda {

constexpr int kDeltaWidth = 64;                             // most value channels of a part
constexpr int kDeltaKeys = 128;                             // most key channels
constexpr int kDeltaTaps = 4;

struct DeltaNotes {                                         // in shared memory
    alignas(16) float query[kDeltaKeys], key[kDeltaKeys], value[kDeltaWidth], correction[kDeltaWidth];
    alignas(16) float held[8][kDeltaWidth], asked[8][kDeltaWidth];  // [warp][channel]
    float sums[3];
};

// Value channels [first, first + width) of `head`; width a power of two from 4 to kDeltaWidth, or to 32 for less than 256 threads.
template <int kThreads>
__device__ __forceinline__ void step_delta(const DeltaNetCall& call, int row, int head, int first, int width, const DeltaResults& results, DeltaNotes& notes) {
    constexpr int kWidth = kThreads == 256 ? kDeltaWidth : 32, kWarps = kThreads / 32, kTurns = (2 * kDeltaKeys + kWidth + kThreads - 1) / kThreads, kTaps = kDeltaTaps, kFours = kDeltaKeys * kWidth / 4 / kThreads;
    constexpr float kUnitEps = 1e-6f;
    const DeltaNetShape& shape = call.shape;
    const int part = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, warp = thread >> 5, share = shape.num_value_heads / shape.num_key_heads, key_head = head / share;
    const int key_dim = shape.key_dim, value_dim = shape.value_dim, taps = shape.conv_kernel;
    const int lanes = width / 4, fours = key_dim * lanes;   // float4 of a key channel, and of this part of the matrix
    const int slot = call.step.state_slots[row], place = max(slot, 0);
    float* matrix = call.states.states + place * call.states.slot_stride + static_cast<std::int64_t>(head) * key_dim * value_dim + first;
    const float* tail = call.states.states + place * call.states.slot_stride + static_cast<std::int64_t>(shape.num_value_heads) * key_dim * value_dim;
    const std::int64_t channel_of_result = static_cast<std::int64_t>(head) * value_dim + first + thread;
    std::uint16_t* result = results.values + row * shape.value_size() + channel_of_result;
    float* squares = results.squares + (static_cast<std::int64_t>(row) * shape.num_value_heads + head) * delta_squares(value_dim) + first / 32;
    if (slot < 0) {
        if (thread < width) *result = 0;
        if (thread % 32 == 0 && thread < width) squares[thread / 32] = 0.0f;
        return;
    }
    const bool has_state = call.step.positions[row] != 0;
    const std::int64_t conv_dim = shape.conv_dim(), keys = static_cast<std::int64_t>(shape.num_key_heads) * key_dim;
    const int channels = 2 * key_dim + width;
    const auto channel_of = [&](int index) {                // of the row's projections: the head's queries, keys, values
        return index < key_dim ? static_cast<std::int64_t>(key_head) * key_dim + index
               : index < 2 * key_dim ? keys + static_cast<std::int64_t>(key_head) * key_dim + (index - key_dim)
                                     : 2 * keys + static_cast<std::int64_t>(head) * value_dim + first + (index - 2 * key_dim);
    };

    float4 state[kFours];
#pragma unroll
    for (int index = 0; index < kFours; ++index) {
        const int four = thread + index * kThreads;
        state[index] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (four < fours && has_state) state[index] = *reinterpret_cast<const float4*>(matrix + static_cast<std::int64_t>(four / lanes) * value_dim + four % lanes * 4);
    }
    float past[kTurns][kTaps - 1], filter[kTurns][kTaps], inputs[kTurns];
    const std::int64_t projections = row * call.projections.stride, gates = projections + conv_dim + shape.value_size();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int index = thread + turn * kThreads;
        const std::int64_t channel = index < channels ? channel_of(index) : 0;
        inputs[turn] = index < channels ? load_value(call.projections.data, call.projections.dtype, projections + channel) : 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            if (tap < kTaps - 1) past[turn][tap] = index < channels && tap < taps - 1 && has_state ? tail[tap * conv_dim + channel] : 0.0f;
            filter[turn][tap] = index < channels && tap < taps ? call.weights.conv[tap * conv_dim + channel] : 0.0f;
        }
    }
    const float b = load_value(call.projections.data, call.projections.dtype, gates + head);
    const float a = load_value(call.projections.data, call.projections.dtype, gates + shape.num_value_heads + head);
    const float rate = call.weights.rate[head], dt_bias = call.weights.dt_bias[head];
    const float weight = thread < width ? call.weights.norm.weight[first + thread] : 0.0f;
    const float z = thread < width ? load_value(call.projections.data, call.projections.dtype, projections + conv_dim + channel_of_result) : 0.0f;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int index = thread + turn * kThreads;
        if (index >= channels) continue;
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            if (tap >= taps) break;
            const float moved = tap == taps - 1 ? inputs[turn] : past[turn][tap < kTaps - 1 ? tap : 0];
            sum = fmaf(moved, filter[turn][tap], sum);
        }
        (index < key_dim ? notes.query[index] : index < 2 * key_dim ? notes.key[index - key_dim] : notes.value[index - 2 * key_dim]) = silu(sum);
    }
    meet_part<kThreads>(part);
    for (int which = warp; which < 3; which += kWarps) {    // lengths of query and key, and their product
        float sum = 0.0f;
        for (int dim = thread & 31; dim < key_dim; dim += 32) {
            const float q = notes.query[dim], k = notes.key[dim];
            sum += which == 0 ? q * q : which == 1 ? k * k : q * k;
        }
        sum = warp_sum(sum);
        if ((thread & 31) == 0) notes.sums[which] = sum;
    }
    const float beta = sigmoid(b), decay = expf(rate * softplus(a + dt_bias));

    // With S the matrix as loaded, S' = decay S + k c^T: what q reads of S' is decay S^T q + (q k) c, so S is gone through once.
    float4 held = make_float4(0.0f, 0.0f, 0.0f, 0.0f), asked = held;
#pragma unroll
    for (int index = 0; index < kFours; ++index) {
        const int four = thread + index * kThreads;
        if (four >= fours) break;
        const float k = notes.key[four / lanes], q = notes.query[four / lanes];
        held.x = fmaf(k, state[index].x, held.x), held.y = fmaf(k, state[index].y, held.y), held.z = fmaf(k, state[index].z, held.z), held.w = fmaf(k, state[index].w, held.w);
        asked.x = fmaf(q, state[index].x, asked.x), asked.y = fmaf(q, state[index].y, asked.y), asked.z = fmaf(q, state[index].z, asked.z), asked.w = fmaf(q, state[index].w, asked.w);
    }
    for (int step = 16; step >= lanes; step >>= 1) {        // lanes of the same channels
        const auto add = [&](float& value) { value += __shfl_xor_sync(0xffffffffu, value, step); };
        add(held.x), add(held.y), add(held.z), add(held.w), add(asked.x), add(asked.y), add(asked.z), add(asked.w);
    }
    if ((thread & 31) < lanes) {
        *reinterpret_cast<float4*>(&notes.held[warp][(thread & 31) * 4]) = held;
        *reinterpret_cast<float4*>(&notes.asked[warp][(thread & 31) * 4]) = asked;
    }
    meet_part<kThreads>(part);
    const float query_factor = rsqrtf(notes.sums[0] + kUnitEps) * rsqrtf(static_cast<float>(key_dim)), key_factor = rsqrtf(notes.sums[1] + kUnitEps);
    if (warp < kWidth / 32) {
        float read = 0.0f;
        if (thread < width) {
            float held_sum = 0.0f, asked_sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kWarps; ++other) held_sum += notes.held[other][thread], asked_sum += notes.asked[other][thread];
            const float change = (notes.value[thread] - decay * held_sum * key_factor) * beta;
            notes.correction[thread] = change * key_factor;
            read = decay * asked_sum * query_factor + notes.sums[2] * query_factor * key_factor * change;
            const __nv_bfloat16 gated = __float2bfloat16_rn(read * weight * silu(z));
            *result = *reinterpret_cast<const std::uint16_t*>(&gated);
        }
        read = warp_sum(read * read);
        if (thread % 32 == 0 && thread < width) squares[thread / 32] = read;
    }
    meet_part<kThreads>(part);
#pragma unroll
    for (int index = 0; index < kFours; ++index) {
        const int four = thread + index * kThreads;
        if (four >= fours) break;
        const float k = notes.key[four / lanes];
        const float4 change = *reinterpret_cast<const float4*>(&notes.correction[four % lanes * 4]);
        *reinterpret_cast<float4*>(matrix + static_cast<std::int64_t>(four / lanes) * value_dim + four % lanes * 4) =
            make_float4(fmaf(k, change.x, decay * state[index].x), fmaf(k, change.y, decay * state[index].y), fmaf(k, change.z, decay * state[index].z),
                        fmaf(k, change.w, decay * state[index].w));
    }
}

// The past inputs of the convolution as the next step finds them; all blocks share the channels of all rows.
__device__ __forceinline__ void move_tails(const DeltaNetCall& call, int num_rows) {
    constexpr int kThreads = 256;
    const DeltaNetShape& shape = call.shape;
    const int conv_dim = static_cast<int>(shape.conv_dim()), taps = shape.conv_kernel;
    for (int index = blockIdx.x * kThreads + threadIdx.x; index < num_rows * conv_dim; index += gridDim.x * kThreads) {
        const int row = index / conv_dim, channel = index % conv_dim, slot = call.step.state_slots[row];
        const bool has_state = call.step.positions[row] != 0;
        if (slot < 0) continue;
        float* tail = call.states.states + slot * call.states.slot_stride + static_cast<std::int64_t>(shape.num_value_heads) * shape.key_dim * shape.value_dim + channel;
        float moved[kDeltaTaps - 1];
#pragma unroll
        for (int tap = 1; tap < kDeltaTaps; ++tap)
            if (tap < taps) moved[tap - 1] = tap < taps - 1 ? (has_state ? tail[static_cast<std::int64_t>(tap) * conv_dim] : 0.0f) : load_value(call.projections.data, call.projections.dtype, row * call.projections.stride + channel);
#pragma unroll
        for (int tap = 1; tap < kDeltaTaps; ++tap)
            if (tap < taps) tail[static_cast<std::int64_t>(tap - 1) * conv_dim] = moved[tap - 1];
    }
}

// Brings the state that step_delta reads closer, as far as the L2 cache: `thread`, of at least kDeltaKeys, a line.
__device__ __forceinline__ void prefetch_delta(const DeltaNetCall& call, int row, int head, int first, int thread) {
    const DeltaNetShape& shape = call.shape;
    const int slot = call.step.state_slots[row], key = thread;
    if (slot < 0 || key >= shape.key_dim) return;
    prefetch(call.states.states + slot * call.states.slot_stride + (static_cast<std::int64_t>(head) * shape.key_dim + key) * shape.value_dim + first);
}

}  // namespace pocket::cuda
