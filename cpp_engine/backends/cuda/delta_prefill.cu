// Gated DeltaNet of prompts in exact float32, token by token: the convolution and the unit length of queries and keys for all tokens at once, then one pass
// in which the recurrent matrices stay in registers, then the gated norm.
#include "backends/cuda/device_code.cuh"

namespace pocket::cuda {

namespace {

constexpr int kThreads = 128;
constexpr float kUnitEps = 1e-6f;

// The row of a prompt token: rows from `first_row` on are prompts.
__device__ __forceinline__ int row_of(const Step& step, int first_row, int token) {
    int low = first_row, high = step.num_rows - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (step.row_starts[middle] <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

__device__ __forceinline__ float* tail_of(const DeltaNetCall& call, int slot) {
    return call.states.states + slot * call.states.slot_stride + static_cast<std::int64_t>(call.shape.num_value_heads) * call.shape.key_dim * call.shape.value_dim;
}

// Input of the convolution `back` tokens before `token`; the row's first token in this step is `start`.
__device__ __forceinline__ float input_at(const DeltaNetCall& call, const float* tail, bool is_first, int start, int token, int back, std::int64_t channel) {
    const int from = token - back;
    if (from >= start) return load_value(call.projections.data, call.projections.dtype, from * call.projections.stride + channel);
    return is_first ? 0.0f : tail[(call.shape.conv_kernel - 1 + from - start) * call.shape.conv_dim() + channel];
}

// One block a token and head: query heads, key heads, value heads. mixed [tokens, conv_dim].
__global__ void conv_kernel(const DeltaNetCall call, int first_row, int first_token, float* mixed) {
    __shared__ float sums[32];
    const DeltaNetShape& shape = call.shape;
    const int token = first_token + static_cast<int>(blockIdx.x), row = row_of(call.step, first_row, token), start = call.step.row_starts[row];
    const int slot = call.step.state_slots[row];
    if (slot < 0) return;
    const bool is_first = call.step.positions[start] == 0;
    const float* tail = tail_of(call, slot);
    const int head = blockIdx.y, num_keys = 2 * shape.num_key_heads;
    const bool is_value = head >= num_keys;
    const int dims = is_value ? shape.value_dim : shape.key_dim;
    const std::int64_t first = is_value ? static_cast<std::int64_t>(num_keys) * shape.key_dim + static_cast<std::int64_t>(head - num_keys) * shape.value_dim
                                        : static_cast<std::int64_t>(head) * shape.key_dim;
    float* to = mixed + blockIdx.x * shape.conv_dim() + first;
    float squares = 0.0f;
    for (int dim = threadIdx.x; dim < dims; dim += kThreads) {
        float sum = 0.0f;
        for (int tap = 0; tap < shape.conv_kernel; ++tap)
            sum = fmaf(input_at(call, tail, is_first, start, token, shape.conv_kernel - 1 - tap, first + dim), call.weights.conv[tap * shape.conv_dim() + first + dim], sum);
        sum = silu(sum);
        to[dim] = sum;
        squares += sum * sum;
    }
    if (is_value) return;
    float factor = rsqrtf(block_sum(squares, sums) + kUnitEps);
    if (head < shape.num_key_heads) factor *= rsqrtf(static_cast<float>(shape.key_dim));
    for (int dim = threadIdx.x; dim < dims; dim += kThreads) to[dim] *= factor;
}

// The past inputs as the next step finds them; a thread has one channel of one row.
__global__ void tail_kernel(const DeltaNetCall call, int first_row) {
    constexpr int kMostPast = 16;
    const int row = first_row + static_cast<int>(blockIdx.y), past = call.shape.conv_kernel - 1;
    const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x, conv_dim = call.shape.conv_dim();
    const int slot = call.step.state_slots[row];
    if (channel >= conv_dim || slot < 0) return;
    const int start = call.step.row_starts[row], last = call.step.row_starts[row + 1] - 1;
    const bool is_first = call.step.positions[start] == 0;
    float* tail = tail_of(call, slot);
    float kept[kMostPast];
#pragma unroll
    for (int index = 0; index < kMostPast; ++index)
        if (index < past) kept[index] = input_at(call, tail, is_first, start, last, past - 1 - index, channel);
#pragma unroll
    for (int index = 0; index < kMostPast; ++index)
        if (index < past) tail[index * conv_dim + channel] = kept[index];
}

// A block has 16 value channels of one head and row. Eight neighbouring lanes share a channel: lane p has four neighbouring key channels of every 32, from 4 p
// on, of its column. With S the matrix before the token, what the token reads of S' = decay S + k c^T is decay S^T q + (q k) c: so S is read once.
template <int kFours>
__global__ __launch_bounds__(kThreads) void scan_kernel(const DeltaNetCall call, int first_row, int first_token, const float* mixed, float* read) {
    constexpr int kTokens = 16, kParts = 8, kColumns = kThreads / kParts, kKeys = 4 * kFours * kParts;
    __shared__ __align__(16) float queries[kTokens][kKeys], keys[kTokens][kKeys];
    __shared__ float values[kTokens][kColumns], betas[kTokens], decays[kTokens], products[kTokens];
    const DeltaNetShape& shape = call.shape;
    const int row = first_row + static_cast<int>(blockIdx.z), head = blockIdx.y, first_column = blockIdx.x * kColumns;
    const int slot = call.step.state_slots[row];
    if (slot < 0) return;
    const int start = call.step.row_starts[row], end = call.step.row_starts[row + 1];
    const int part = threadIdx.x % kParts, within = threadIdx.x / kParts, column = first_column + within;
    const bool has_column = column < shape.value_dim;
    float* matrix = call.states.states + slot * call.states.slot_stride + static_cast<std::int64_t>(head) * shape.key_dim * shape.value_dim;
    const bool is_first = call.step.positions[start] == 0;
    float4 state[kFours];
    const auto at = [&](int four, int index) { return four * 4 * kParts + part * 4 + index; };
    const auto load = [&](int key) { return has_column && key < shape.key_dim && !is_first ? matrix[static_cast<std::int64_t>(key) * shape.value_dim + column] : 0.0f; };
#pragma unroll
    for (int four = 0; four < kFours; ++four) state[four] = make_float4(load(at(four, 0)), load(at(four, 1)), load(at(four, 2)), load(at(four, 3)));
    const std::int64_t conv_dim = shape.conv_dim(), num_keys = static_cast<std::int64_t>(shape.num_key_heads) * shape.key_dim;
    const std::int64_t query_at = static_cast<std::int64_t>(head / (shape.num_value_heads / shape.num_key_heads)) * shape.key_dim;
    const std::int64_t value_at = 2 * num_keys + static_cast<std::int64_t>(head) * shape.value_dim;
    const std::int64_t gates = conv_dim + shape.value_size();
    for (int first = start; first < end; first += kTokens) {
        const int count = min(kTokens, end - first);
        __syncthreads();
        for (int index = threadIdx.x; index < kTokens * kKeys; index += kThreads) {
            const int token = index / kKeys, key = index % kKeys;
            const bool is_there = token < count && key < shape.key_dim;
            const float* from = mixed + (first - first_token + token) * conv_dim + query_at + key;
            queries[token][key] = is_there ? from[0] : 0.0f;
            keys[token][key] = is_there ? from[num_keys] : 0.0f;
        }
        for (int index = threadIdx.x; index < kTokens * kColumns; index += kThreads) {
            const int token = index / kColumns, other = index % kColumns;
            values[token][other] = token < count && first_column + other < shape.value_dim ? mixed[(first - first_token + token) * conv_dim + value_at + first_column + other] : 0.0f;
        }
        if (static_cast<int>(threadIdx.x) < count) {
            const std::int64_t from = (first + static_cast<int>(threadIdx.x)) * call.projections.stride + gates + head;
            betas[threadIdx.x] = sigmoid(load_value(call.projections.data, call.projections.dtype, from));
            const float a = load_value(call.projections.data, call.projections.dtype, from + shape.num_value_heads);
            decays[threadIdx.x] = expf(call.weights.rate[head] * softplus(a + call.weights.dt_bias[head]));
        }
        __syncthreads();
        for (int token = threadIdx.x >> 5; token < kTokens; token += kThreads / 32) {
            float product = 0.0f;
            for (int key = threadIdx.x & 31; key < kKeys; key += 32) product = fmaf(queries[token][key], keys[token][key], product);
            product = warp_sum(product);
            if ((threadIdx.x & 31) == 0) products[token] = product;
        }
        __syncthreads();
        for (int token = 0; token < count; ++token) {
            const float4* query = reinterpret_cast<const float4*>(queries[token]) + part;
            const float4* key = reinterpret_cast<const float4*>(keys[token]) + part;
            float4 k[kFours];
            float held[2] = {}, asked[2] = {};
#pragma unroll
            for (int four = 0; four < kFours; ++four) {
                k[four] = key[four * kParts];
                const float4 q = query[four * kParts];
                const float4 s = state[four];
                held[0] = fmaf(k[four].x, s.x, held[0]), held[1] = fmaf(k[four].y, s.y, held[1]), asked[0] = fmaf(q.x, s.x, asked[0]), asked[1] = fmaf(q.y, s.y, asked[1]);
                held[0] = fmaf(k[four].z, s.z, held[0]), held[1] = fmaf(k[four].w, s.w, held[1]), asked[0] = fmaf(q.z, s.z, asked[0]), asked[1] = fmaf(q.w, s.w, asked[1]);
            }
            float all_held = held[0] + held[1], all_asked = asked[0] + asked[1];
#pragma unroll
            for (int step = 1; step < kParts; step *= 2) {
                all_held += __shfl_xor_sync(0xffffffffu, all_held, step);
                all_asked += __shfl_xor_sync(0xffffffffu, all_asked, step);
            }
            const float decay = decays[token], change = (values[token][within] - decay * all_held) * betas[token];
#pragma unroll
            for (int four = 0; four < kFours; ++four) {
                state[four].x = fmaf(k[four].x, change, decay * state[four].x), state[four].y = fmaf(k[four].y, change, decay * state[four].y);
                state[four].z = fmaf(k[four].z, change, decay * state[four].z), state[four].w = fmaf(k[four].w, change, decay * state[four].w);
            }
            if (part == 0 && has_column)
                read[(first - first_token + token) * shape.value_size() + static_cast<std::int64_t>(head) * shape.value_dim + column] = fmaf(products[token], change, decay * all_asked);
        }
    }
    if (!has_column) return;
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
        const float lanes[4] = {state[four].x, state[four].y, state[four].z, state[four].w};
#pragma unroll
        for (int index = 0; index < 4; ++index)
            if (at(four, index) < shape.key_dim) matrix[static_cast<std::int64_t>(at(four, index)) * shape.value_dim + column] = lanes[index];
    }
}

// One warp a token and value head.
__global__ void norm_kernel(const DeltaNetCall call, int first_row, int first_token, const float* read) {
    const DeltaNetShape& shape = call.shape;
    const int token = first_token + static_cast<int>(blockIdx.x), head = blockIdx.y * (kThreads / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (head >= shape.num_value_heads) return;
    const bool is_row = call.step.state_slots[row_of(call.step, first_row, token)] >= 0;
    const std::int64_t first = static_cast<std::int64_t>(head) * shape.value_dim;
    const float* from = read + blockIdx.x * shape.value_size() + first;
    float squares = 0.0f;
    for (int dim = lane; dim < shape.value_dim && is_row; dim += 32) squares += from[dim] * from[dim];
    const float factor = rsqrtf(warp_sum(squares) / shape.value_dim + call.weights.norm.eps);
    for (int dim = lane; dim < shape.value_dim; dim += 32) {
        const float z = load_value(call.projections.data, call.projections.dtype, token * call.projections.stride + shape.conv_dim() + first + dim);
        store_value(call.out.data, call.out.dtype, token * call.out.stride + first + dim, is_row ? from[dim] * factor * call.weights.norm.weight[dim] * silu(z) : 0.0f);
    }
}

}  // namespace

void delta_tails(const Context& context, const DeltaNetCall& call, int first_row) {
    launch(context, tail_kernel, dim3(ceil_div(call.shape.conv_dim(), kThreads), call.step.num_rows - first_row), kThreads, 0, call, first_row);
}

void delta_prefill(const Context& context, const DeltaNetCall& call, int first_row, int first_token, float* mixed, float* read) {
    const DeltaNetShape& shape = call.shape;
    const int tokens = call.step.num_tokens - first_token, rows = call.step.num_rows - first_row;
    launch(context, conv_kernel, dim3(tokens, 2 * shape.num_key_heads + shape.num_value_heads), kThreads, 0, call, first_row, first_token, mixed);
    delta_tails(context, call, first_row);
    const dim3 grid(ceil_div(shape.value_dim, kThreads / 8), shape.num_value_heads, rows);
    if (shape.key_dim <= 64) {
        launch(context, scan_kernel<2>, grid, kThreads, 0, call, first_row, first_token, mixed, read);
    } else if (shape.key_dim <= 128) {
        launch(context, scan_kernel<4>, grid, kThreads, 0, call, first_row, first_token, mixed, read);
    } else {
        launch(context, scan_kernel<8>, grid, kThreads, 0, call, first_row, first_token, mixed, read);
    }
    launch(context, norm_kernel, dim3(tokens, ceil_div(shape.num_value_heads, kThreads / 32)), kThreads, 0, call, first_row, first_token, read);
}

}  // namespace pocket::cuda
