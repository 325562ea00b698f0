// Gated DeltaNet, one token a row: convolution, delta rule and gated norm in one launch; each value head's matrix is read once and written once.
//
// A block has one row and one value head. Its threads hold the head's matrix [key_dim, value_dim], four neighbouring value channels of up to kMostFours key
// channels each. Value heads of one key head all read that key head's past inputs of the convolution: the last of their blocks to have read them moves them on.
#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostFours = 8;                               // of a thread: matrices of up to 128 x 128
constexpr int kMostDim = 256;
constexpr int kMostTaps = 8;
constexpr float kUnitEps = 1e-6f;

// kTurns: channels of the convolution that a thread has; kTaps: most tokens that it goes over.
template <int kTurns, int kTaps>
__global__ __launch_bounds__(kThreads, 2) void decode_kernel(const DeltaNetCall call, int* tickets) {
    __shared__ __align__(16) float query[kMostDim], key[kMostDim], value[kMostDim], correction[kMostDim], result[kMostDim];
    __shared__ __align__(16) float remembered[kWarps * 128], seen[kWarps * 128];  // [threads of one key channel's stretch][value_dim]
    __shared__ float sums[3], norms[32];
    __shared__ bool is_last;
    const DeltaNetShape& shape = call.shape;
    const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x;
    const int share = shape.num_value_heads / shape.num_key_heads, key_head = head / share;
    const int key_dim = shape.key_dim, value_dim = shape.value_dim, taps = shape.conv_kernel;
    const int lanes = value_dim / 4, fours = key_dim * lanes;  // float4 of a key channel, and of the matrix
    const int slot = call.step.state_slots[row], place = max(slot, 0);
    float* matrix = call.states.states + place * call.states.slot_stride + static_cast<std::int64_t>(head) * key_dim * value_dim;
    float* tail = call.states.states + place * call.states.slot_stride + static_cast<std::int64_t>(shape.num_value_heads) * key_dim * value_dim;
    const bool is_first = call.step.positions[row] == 0, has_state = slot >= 0 && !is_first;
    const std::int64_t conv_dim = shape.conv_dim(), keys = static_cast<std::int64_t>(shape.num_key_heads) * key_dim;
    const int channels = 2 * key_dim + value_dim;
    const auto channel_of = [&](int index) {                // of the row's projections: the head's queries, keys, values
        return index < key_dim ? static_cast<std::int64_t>(key_head) * key_dim + index
               : index < 2 * key_dim ? keys + static_cast<std::int64_t>(key_head) * key_dim + (index - key_dim)
                                     : 2 * keys + static_cast<std::int64_t>(head) * value_dim + (index - 2 * key_dim);
    };

    float4 state[kMostFours];
#pragma unroll
    for (int index = 0; index < kMostFours; ++index) {
        const int four = thread + index * kThreads;
        state[index] = four < fours && has_state ? reinterpret_cast<const float4*>(matrix)[four] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float past[kTurns][kTaps - 1];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int index = thread + turn * kThreads;
#pragma unroll
        for (int tap = 0; tap < kTaps - 1; ++tap) past[turn][tap] = index < channels && tap < taps - 1 && has_state ? tail[tap * conv_dim + channel_of(index)] : 0.0f;
    }
    const float rate = call.weights.rate[head], dt_bias = call.weights.dt_bias[head], norm = thread < value_dim ? call.weights.norm.weight[thread] : 0.0f;

    const std::int64_t projections = row * call.projections.stride, out = row * call.out.stride + static_cast<std::int64_t>(head) * value_dim;
    if (slot < 0) {
        for (int dim = thread; dim < value_dim; dim += kThreads) store_value(call.out.data, call.out.dtype, out + dim, 0.0f);
        return;
    }
    const std::int64_t gates = projections + conv_dim + shape.value_size();
    const auto load = [&](std::int64_t at) { return load_value(call.projections.data, call.projections.dtype, at); };
    const float b = load(gates + head), a = load(gates + shape.num_value_heads + head);
    const float z = thread < value_dim ? load(projections + conv_dim + static_cast<std::int64_t>(head) * value_dim + thread) : 0.0f;
    float inputs[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int index = thread + turn * kThreads;
        if (index >= channels) continue;
        const std::int64_t channel = channel_of(index);
        inputs[turn] = load(projections + channel);
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            if (tap >= taps) break;
            const float moved = tap == taps - 1 ? inputs[turn] : past[turn][tap < kTaps - 1 ? tap : 0];
            sum = fmaf(moved, call.weights.conv[tap * conv_dim + channel], sum);
            if (tap > 0 && index >= 2 * key_dim) tail[(tap - 1) * conv_dim + channel] = moved;
        }
        (index < key_dim ? query[index] : index < 2 * key_dim ? key[index - key_dim] : value[index - 2 * key_dim]) = silu(sum);
    }
    __syncthreads();
    if (thread == 0) {
        __threadfence();
        const int ticket = row * shape.num_key_heads + key_head;
        is_last = atomicAdd(&tickets[ticket], 1) == share - 1;
        if (is_last) tickets[ticket] = 0;
    }
    if (thread >= 32 && thread < 128) {                     // warps 1 to 3: lengths of query and key, and their product
        const int which = (thread >> 5) - 1;
        float sum = 0.0f;
        for (int dim = thread & 31; dim < key_dim; dim += 32) sum += which == 0 ? query[dim] * query[dim] : which == 1 ? key[dim] * key[dim] : query[dim] * key[dim];
        sum = warp_sum(sum);
        if ((thread & 31) == 0) sums[which] = sum;
    }
    const float beta = sigmoid(b), decay = expf(rate * softplus(a + dt_bias));

    // With S the matrix as loaded, S' = decay S + k c^T: what q reads of S' is decay S^T q + (q k) c, so S is gone through once.
    const int lane = thread % lanes, stretch = thread / lanes;
    float4 held = make_float4(0.0f, 0.0f, 0.0f, 0.0f), asked = held;
#pragma unroll
    for (int index = 0; index < kMostFours; ++index) {
        const int four = thread + index * kThreads;
        if (four >= fours) break;
        const float k = key[four / lanes], q = query[four / lanes];
        held.x = fmaf(k, state[index].x, held.x), held.y = fmaf(k, state[index].y, held.y), held.z = fmaf(k, state[index].z, held.z), held.w = fmaf(k, state[index].w, held.w);
        asked.x = fmaf(q, state[index].x, asked.x), asked.y = fmaf(q, state[index].y, asked.y), asked.z = fmaf(q, state[index].z, asked.z), asked.w = fmaf(q, state[index].w, asked.w);
    }
    *reinterpret_cast<float4*>(&remembered[stretch * value_dim + lane * 4]) = held;
    *reinterpret_cast<float4*>(&seen[stretch * value_dim + lane * 4]) = asked;
    __syncthreads();
    const float query_factor = rsqrtf(sums[0] + kUnitEps) * rsqrtf(static_cast<float>(key_dim)), key_factor = rsqrtf(sums[1] + kUnitEps);
    const float product = sums[2] * query_factor * key_factor;
    float squares = 0.0f;
    if (thread < value_dim) {
        float held_sum = 0.0f, asked_sum = 0.0f;
        for (int other = 0; other < kThreads / lanes; ++other) held_sum += remembered[other * value_dim + thread], asked_sum += seen[other * value_dim + thread];
        const float change = (value[thread] - decay * held_sum * key_factor) * beta;
        correction[thread] = change * key_factor;
        const float read = decay * asked_sum * query_factor + product * change;
        result[thread] = read;
        squares = read * read;
    }
    squares = block_sum(squares, norms);
    const float factor = rsqrtf(squares / value_dim + call.weights.norm.eps);
    if (thread < value_dim) {
        store_value(call.out.data, call.out.dtype, out + thread, result[thread] * factor * norm * silu(z));
    }
    const float4 change = *reinterpret_cast<const float4*>(&correction[lane * 4]);
#pragma unroll
    for (int index = 0; index < kMostFours; ++index) {
        const int four = thread + index * kThreads;
        if (four >= fours) break;
        const float k = key[four / lanes];
        reinterpret_cast<float4*>(matrix)[four] = make_float4(fmaf(k, change.x, decay * state[index].x), fmaf(k, change.y, decay * state[index].y),
                                                              fmaf(k, change.z, decay * state[index].z), fmaf(k, change.w, decay * state[index].w));
    }
    if (!is_last) return;                                   // of the key head's blocks, all of which have read what moves on
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int index = thread + turn * kThreads;
        if (index >= 2 * key_dim) continue;
#pragma unroll
        for (int tap = 1; tap < kTaps; ++tap)
            if (tap < taps) tail[(tap - 1) * conv_dim + channel_of(index)] = tap == taps - 1 ? inputs[turn] : past[turn][tap < kTaps - 1 ? tap : 0];
    }
}

}  // namespace

bool takes_delta_decode(const DeltaNetShape& shape) {
    const bool is_power = shape.value_dim >= 4 && (shape.value_dim & (shape.value_dim - 1)) == 0;
    return is_power && shape.value_dim <= kMostDim && shape.key_dim <= kMostDim && shape.conv_kernel <= kMostTaps &&
           shape.key_dim * shape.value_dim <= 4 * kMostFours * kThreads && shape.key_dim * shape.value_dim % 32 == 0;
}

void delta_decode(const Context& context, const DeltaNetCall& call, int num_rows, int* tickets) {
    const DeltaNetShape& shape = call.shape;
    const bool is_usual = 2 * shape.key_dim + shape.value_dim <= kThreads && shape.conv_kernel <= 4;
    launch(context, is_usual ? decode_kernel<1, 4> : decode_kernel<2, kMostTaps>, dim3(shape.num_value_heads, num_rows), kThreads, 0, call, tickets);
}

}  // namespace pocket::cuda
