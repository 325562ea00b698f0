// Gated DeltaNet of prompts on tensor cores, in chunks of 64 tokens (the parallel form of Yang et al., arXiv 2406.06484 and 2412.06464).
//
// Within a chunk, each token's correction u_i = beta_i (v_i - what the decayed state and the tokens before it give for k_i) solves a unit lower triangular system.
// (1 + L)^-1 turns it into u = U - W S with S the state before the chunk, so that only S is left to go from chunk to chunk. g is the sum of the decays' logarithms
// over the chunk's tokens so far.
//
//   mix     all tokens at once: convolution, SiLU, unit length; a chunk's head becomes a tile [64, 128] of bfloat16, zeros behind the row's last token
//   solve   all chunks at once: U = (1 + L)^-1 beta v and W = (1 + L)^-1 beta exp(g) k
//   states  a row's chunks one after another: u = U - W S, then S <- exp(g_last) S + k^T (exp(g_last - g) u)
//   read    all chunks at once: o = exp(g) q S + (q k^T, decayed, later tokens cut off) u, then the gated norm of each head
//
// Sums and states are float32, operands of products bfloat16. No entry of (1 + L)^-1 or of L is above 1 in size, as keys have length 1 and beta is below 1, so
// float16 with its 11 bits serves for them.
#include "backends/cuda/tensor_code.cuh"

namespace pocket::cuda {

namespace {

using Half = __half;
using Bfloat = __nv_bfloat16;

constexpr int kChunk = 64, kDim = 128, kTaps = 4;
constexpr int kTileValues = kChunk * kDim, kTileBytes = 2 * kTileValues, kStateValues = kDim * kDim;
constexpr int kMixTokens = 16;                              // of a warp
constexpr int kSplit = 32;                                  // value channels of a block of `states`
constexpr int kStages = 3;                                  // chunks that `states` has on their way
constexpr float kUnitEps = 1e-6f;

// What the kernels leave for each other; a chunk's tiles lie one behind the other, head by head. Rows get one chunk more than their tokens may need, so that the
// first chunk of a row follows from its first token alone.
struct ChunkBuffers {
    Bfloat* mixed;                                          // [chunks, query heads then key heads then value heads, 64, 128]
    Bfloat* corrections;                                    // [chunks, value heads, 64, 128], U and then u
    Bfloat* from_state;                                     // [chunks, value heads, 64, 128], W
    Bfloat* states;                                         // [chunks, value heads, 128, 128], before each chunk
    float* decays;                                          // [chunks, value heads, 64], g
};

struct Chunk {
    int row, first, length;                                 // first: token of the step; length 0 where it is no row's
};

__device__ __forceinline__ int first_chunk(const Step& step, int first_row, int first_token, int row) { return (step.row_starts[row] - first_token) / kChunk + (row - first_row); }

__device__ __forceinline__ Chunk chunk_at(const Step& step, int first_row, int first_token, int chunk) {
    int low = first_row, high = step.num_rows - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_chunk(step, first_row, first_token, middle) <= chunk) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const int first = step.row_starts[low] + (chunk - first_chunk(step, first_row, first_token, low)) * kChunk;
    const int length = step.state_slots[low] < 0 ? 0 : max(0, min(kChunk, step.row_starts[low + 1] - first));
    return {low, first, length};
}

__device__ __forceinline__ const float* tail_of(const DeltaNetCall& call, int slot) {
    return call.states.states + slot * call.states.slot_stride + static_cast<std::int64_t>(call.shape.num_value_heads) * kStateValues;
}

// One warp: 16 tokens of a head; a lane has four channels.
__global__ __launch_bounds__(128) void mix_kernel(const DeltaNetCall call, int first_row, int first_token, const ChunkBuffers buffers) {
    constexpr int kParts = kChunk / kMixTokens;
    const DeltaNetShape& shape = call.shape;
    const int heads = 2 * shape.num_key_heads + shape.num_value_heads, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (head >= heads) return;
    const int number = blockIdx.x / kParts, within = blockIdx.x % kParts * kMixTokens;
    const Chunk chunk = chunk_at(call.step, first_row, first_token, number);
    if (chunk.length == 0) return;
    const std::int64_t channel = static_cast<std::int64_t>(head) * kDim + lane * 4, conv_dim = shape.conv_dim();
    auto* to = reinterpret_cast<uint2*>(buffers.mixed + (static_cast<std::int64_t>(number) * heads + head) * kTileValues + within * kDim + lane * 4);
    const auto* from = static_cast<const Bfloat*>(call.projections.data) + channel;
    float4 taps[kTaps], past[kTaps - 1];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) taps[tap] = *reinterpret_cast<const float4*>(call.weights.conv + tap * conv_dim + channel);
    const auto load = [&](int token) {
        const uint2 words = *reinterpret_cast<const uint2*>(from + token * call.projections.stride);
        const float2 low = unpack<Bfloat>(words.x), high = unpack<Bfloat>(words.y);
        return make_float4(low.x, low.y, high.x, high.y);
    };
    const int start = call.step.row_starts[chunk.row];
    const bool is_first = call.step.positions[start] == 0;
#pragma unroll
    for (int index = 0; index < kTaps - 1; ++index) {
        const int token = chunk.first + within - (kTaps - 1) + index;
        if (within >= chunk.length) {
            past[index] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else if (token >= start) {
            past[index] = load(token);
        } else {
            const float* tail = tail_of(call, call.step.state_slots[chunk.row]) + (kTaps - 1 + token - start) * conv_dim + channel;
            past[index] = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : make_float4(tail[0], tail[1], tail[2], tail[3]);
        }
    }
    const bool is_query = head < shape.num_key_heads, is_value = head >= 2 * shape.num_key_heads;
#pragma unroll
    for (int group = 0; group < kMixTokens; group += 4) {
        float4 inputs[4];
#pragma unroll
        for (int index = 0; index < 4; ++index) inputs[index] = within + group + index < chunk.length ? load(chunk.first + within + group + index) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            const float4 now = inputs[index];
            const auto mixed = [&](float a, float b, float c, float d, float float4::*lane_of) {
                return silu(fmaf(now.*lane_of, d, fmaf(past[2].*lane_of, c, fmaf(past[1].*lane_of, b, past[0].*lane_of * a))));
            };
            float4 out = make_float4(mixed(taps[0].x, taps[1].x, taps[2].x, taps[3].x, &float4::x), mixed(taps[0].y, taps[1].y, taps[2].y, taps[3].y, &float4::y),
                                     mixed(taps[0].z, taps[1].z, taps[2].z, taps[3].z, &float4::z), mixed(taps[0].w, taps[1].w, taps[2].w, taps[3].w, &float4::w));
            past[0] = past[1], past[1] = past[2], past[2] = now;
            if (!is_value) {
                float factor = rsqrtf(warp_sum(out.x * out.x + out.y * out.y + out.z * out.z + out.w * out.w) + kUnitEps);
                if (is_query) factor *= rsqrtf(static_cast<float>(kDim));
                out.x *= factor, out.y *= factor, out.z *= factor, out.w *= factor;
            }
            const bool is_live = within + group + index < chunk.length;
            to[(group + index) * (kDim / 4)] = is_live ? make_uint2(pack<Bfloat>(out.x, out.y), pack<Bfloat>(out.z, out.w)) : make_uint2(0, 0);
        }
    }
}

// Products with a lower triangular matrix of four blocks of 16 rows: a warp's rows from 16 * `block` on times columns [0, 128) of `right`, to global memory.
template <typename Scale>
__device__ __forceinline__ void multiply_triangle(const Tile<128>& triangle, const Tile<256>& right, int block, const Scale& scale, Bfloat* out) {
    const int lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    float sums[kDim / 8][4] = {};
    for (int step = 0; step <= block; ++step) {
        std::uint32_t words[4], left[4];
        triangle.left(words, block * 16, 2 * step);
        const int column = step * 16 + quarter * 2;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float2 pair = unpack<Half>(words[word]);
            const int at = column + (word >> 1) * 8;
            left[word] = pack<Bfloat>(pair.x * scale(at), pair.y * scale(at + 1));
        }
#pragma unroll
        for (int pair = 0; pair < kDim / 16; ++pair) {
            std::uint32_t operand[4];
            right.right(operand, step * 16, 2 * pair);
            multiply<Bfloat>(sums[2 * pair], sums[2 * pair + 1], left, operand);
        }
    }
#pragma unroll
    for (int column = 0; column < kDim / 8; ++column) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            auto* to = reinterpret_cast<std::uint32_t*>(out + (block * 16 + group + half * 8) * kDim + column * 8 + quarter * 2);
            *to = pack<Bfloat>(sums[column][2 * half], sums[column][2 * half + 1]);
        }
    }
}

// One block: a chunk, one value head.
constexpr std::size_t kSolveBytes = 2 * kTileBytes + 2 * 2 * kChunk * kChunk;
__global__ __launch_bounds__(128) void solve_kernel(const DeltaNetCall call, int first_row, int first_token, const ChunkBuffers buffers) {
    extern __shared__ __align__(128) std::uint8_t memory[];
    __shared__ float sums[kChunk], betas[kChunk], whole;    // sums: g
    const DeltaNetShape& shape = call.shape;
    const int head = blockIdx.x, number = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    const Chunk chunk = chunk_at(call.step, first_row, first_token, number);
    if (chunk.length == 0) return;
    const int heads = 2 * shape.num_key_heads + shape.num_value_heads, key_head = shape.num_key_heads + head / (shape.num_value_heads / shape.num_key_heads);
    const Bfloat* tiles = buffers.mixed + static_cast<std::int64_t>(number) * heads * kTileValues;
    const Tile<256> keys = {shared_address(memory)}, values = {keys.start + kTileBytes};
    const Tile<128> system = {values.start + kTileBytes}, inverse = {system.start + 2 * kChunk * kChunk};
    keys.fetch<128>(tiles + key_head * kTileValues, kChunk, 256);
    values.fetch<128>(tiles + (2 * shape.num_key_heads + head) * kTileValues, kChunk, 256);
    end_copies();
    const std::int64_t place = static_cast<std::int64_t>(number) * shape.num_value_heads + head;
    float decay = 0.0f;
    if (threadIdx.x < kChunk) {
        float beta = 0.0f;
        if (static_cast<int>(threadIdx.x) < chunk.length) {
            const auto* gates = static_cast<const Bfloat*>(call.projections.data) + (chunk.first + static_cast<int>(threadIdx.x)) * call.projections.stride + shape.conv_dim() +
                                shape.value_size() + head;
            beta = sigmoid(to_float(gates[0]));
            decay = call.weights.rate[head] * softplus(to_float(gates[shape.num_value_heads]) + call.weights.dt_bias[head]);
        }
        betas[threadIdx.x] = beta;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, decay, step);
            if (lane >= step) decay += other;
        }
        if (threadIdx.x == 31) whole = decay;
    }
    wait_for_copies<0>();
    __syncthreads();
    if (threadIdx.x < kChunk) {
        if (warp == 1) decay += whole;
        sums[threadIdx.x] = decay;
        buffers.decays[place * kChunk + threadIdx.x] = decay;
    }
    __syncthreads();

    // L, 16 rows a warp, up to the diagonal.
    float products[kChunk / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        std::uint32_t left[4];
        keys.left(left, warp * 16, 2 * step);
#pragma unroll
        for (int pair = 0; pair < kChunk / 16; ++pair) {
            if (pair > warp) continue;
            std::uint32_t right[4];
            keys.right_of_transposed(right, pair * 16, 2 * step);
            multiply<Bfloat>(products[2 * pair], products[2 * pair + 1], left, right);
        }
    }
#pragma unroll
    for (int column = 0; column < kChunk / 8; ++column) {
        if (column / 2 > warp) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = warp * 16 + group + half * 8, j = column * 8 + quarter * 2;
            const auto entry = [&](int which) { return i > j + which ? products[column][2 * half + which] * __expf(sums[i] - sums[j + which]) * betas[i] : 0.0f; };
            store_word(system.at(i, column) + quarter * 4, pack<Half>(entry(0), entry(1)));
        }
    }
    __syncwarp();
    // The inverse of the block on the diagonal, a column a lane (both halves of the warp do the same).
    {
        float found[16];
        const int own = lane & 15;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const uint4 low = load_words(system.at(warp * 16 + i, 2 * warp)), high = load_words(system.at(warp * 16 + i, 2 * warp + 1));
            const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            float even = i == own ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
            for (int m = 0; m < i; m += 2) {
                const float2 pair = unpack<Half>(words[m / 2]);
                even = fmaf(-pair.x, found[m], even);
                if (m + 1 < i) odd = fmaf(-pair.y, found[m + 1], odd);
            }
            found[i] = even + odd;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float next = __shfl_xor_sync(0xffffffffu, found[i], 1);
            if (lane < 16 && lane % 2 == 0) store_word(inverse.at(warp * 16 + i, 2 * warp + lane / 8) + lane % 8 / 2 * 4, pack<Half>(found[i], next));
        }
    }
    __syncthreads();
    // Below the diagonal: the inverse of [[A, 0], [C, B]] has -B^-1 C A^-1 there. Sums of -B^-1 C for 16 rows and 16 columns become a left operand in place.
    const auto part = [&](std::uint32_t (&to)[4], int row, int first, int column) {
        float sums_[2][4] = {};
        for (int m = first; m <= row; ++m) {
            std::uint32_t left[4], right[4];
            inverse.left(left, row * 16, 2 * m);
            system.right(right, m * 16, 2 * column);
            multiply<Half>(sums_[0], sums_[1], left, right);
        }
        to[0] = pack<Half>(-sums_[0][0], -sums_[0][1]), to[1] = pack<Half>(-sums_[0][2], -sums_[0][3]);
        to[2] = pack<Half>(-sums_[1][0], -sums_[1][1]), to[3] = pack<Half>(-sums_[1][2], -sums_[1][3]);
    };
    const auto below = [&](int row, int first, int column, int last_column) {
        float sums_[2][4] = {};
        for (int m = column; m <= last_column; ++m) {
            std::uint32_t left[4], right[4];
            part(left, row, first, m);
            inverse.right(right, m * 16, 2 * column);
            multiply<Half>(sums_[0], sums_[1], left, right);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_word(inverse.at(row * 16 + group + half * 8, 2 * column + tile) + quarter * 4, pack<Half>(sums_[tile][2 * half], sums_[tile][2 * half + 1]));
        }
    };
    if (warp & 1) below(warp, warp, warp - 1, warp - 1);
    __syncthreads();
    below(2 + (warp >> 1), 2, warp & 1, 1);
    __syncthreads();

    multiply_triangle(inverse, values, warp, [&](int j) { return betas[j]; }, buffers.corrections + place * kTileValues);
    multiply_triangle(inverse, keys, warp, [&](int j) { return betas[j] * __expf(sums[j]); }, buffers.from_state + place * kTileValues);
}

// One block: kSplit value channels of one head and row.
constexpr std::size_t kStageBytes = 2 * kTileBytes + 2 * kChunk * kSplit + sizeof(float) * kChunk;
constexpr std::size_t kStatesBytes = kStages * kStageBytes + 2 * kSplit * (kDim + kChunk);
__global__ __launch_bounds__(256) void states_kernel(const DeltaNetCall call, int first_row, int first_token, const ChunkBuffers buffers) {
    constexpr int kThreads = 256;
    extern __shared__ __align__(128) std::uint8_t memory[];
    const DeltaNetShape& shape = call.shape;
    const int row = first_row + static_cast<int>(blockIdx.z), head = blockIdx.y, first_channel = blockIdx.x * kSplit;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    const int slot = call.step.state_slots[row];
    if (slot < 0) return;
    const int start = call.step.row_starts[row], num_chunks = (call.step.row_starts[row + 1] - start + kChunk - 1) / kChunk;
    const int first = first_chunk(call.step, first_row, first_token, row);
    const int heads = 2 * shape.num_key_heads + shape.num_value_heads, key_head = shape.num_key_heads + head / (shape.num_value_heads / shape.num_key_heads);
    const std::uint32_t base = shared_address(memory);
    const Tile<64> operand = {base + static_cast<std::uint32_t>(kStages * kStageBytes)}, decayed = {operand.start + 2 * kSplit * kDim};
    const auto stage_at = [&](int chunk) { return base + static_cast<std::uint32_t>(chunk % kStages * kStageBytes); };
    const auto fetch = [&](int chunk) {
        if (chunk < num_chunks) {
            const std::int64_t place = static_cast<std::int64_t>(first + chunk) * shape.num_value_heads + head;
            const std::uint32_t at = stage_at(chunk);
            Tile<256>{at}.fetch<kThreads>(buffers.from_state + place * kTileValues, kChunk, 256);
            Tile<256>{at + kTileBytes}.fetch<kThreads>(buffers.mixed + (static_cast<std::int64_t>(first + chunk) * heads + key_head) * kTileValues, kChunk, 256);
            Tile<64>{at + 2 * kTileBytes}.fetch<kThreads>(buffers.corrections + place * kTileValues + first_channel, kChunk, 256);
            if (threadIdx.x < kChunk / 4) copy_16_bytes(at + 2 * kTileBytes + 2 * kChunk * kSplit + threadIdx.x * 16, buffers.decays + place * kChunk + threadIdx.x * 4);
        }
        end_copies();
    };
#pragma unroll
    for (int chunk = 0; chunk < kStages - 1; ++chunk) fetch(chunk);

    // The state: 16 key channels a warp, from 16 * warp on.
    float* matrix = call.states.states + slot * call.states.slot_stride + static_cast<std::int64_t>(head) * kStateValues + first_channel;
    const bool is_first = call.step.positions[start] == 0;
    float state[kSplit / 8][4];
    const auto state_at = [&](int column, int half) { return matrix + (warp * 16 + group + half * 8) * kDim + column * 8 + quarter * 2; };
#pragma unroll
    for (int column = 0; column < kSplit / 8; ++column) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            state[column][2 * half] = is_first ? 0.0f : state_at(column, half)[0];
            state[column][2 * half + 1] = is_first ? 0.0f : state_at(column, half)[1];
        }
    }
    const auto publish = [&] {
#pragma unroll
        for (int column = 0; column < kSplit / 8; ++column) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_word(operand.at(warp * 16 + group + half * 8, column) + quarter * 4, pack<Bfloat>(state[column][2 * half], state[column][2 * half + 1]));
        }
    };
    publish();
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        fetch(chunk + kStages - 1);                         // goes where the chunk before was
        const std::uint32_t at = stage_at(chunk);
        const Tile<256> from_state = {at}, keys = {at + kTileBytes};
        const Tile<64> given = {at + 2 * kTileBytes};
        const std::uint32_t sums = at + 2 * kTileBytes + 2 * kChunk * kSplit;
        const std::int64_t place = static_cast<std::int64_t>(first + chunk) * shape.num_value_heads + head;
        for (int index = threadIdx.x; index < kDim * kSplit / 8; index += kThreads) {
            const int key = index / (kSplit / 8), part = index % (kSplit / 8);
            *reinterpret_cast<uint4*>(buffers.states + place * kStateValues + key * kDim + first_channel + part * 8) = load_words(operand.at(key, part));
        }
        const int token = warp % 4 * 16, pair = warp / 4;   // a warp's 16 tokens and 16 channels of W S
        float products[2][2][4] = {};
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            std::uint32_t left[4], right[4];
            from_state.left(left, token, 2 * step);
            operand.right(right, step * 16, 2 * pair);
            multiply<Bfloat>(products[step % 2][0], products[step % 2][1], left, right);
        }
        const float last = __uint_as_float(load_word(sums + 4 * (kChunk - 1)));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = token + group + half * 8;
            const float fade = __expf(last - __uint_as_float(load_word(sums + 4 * i)));
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int column = 2 * pair + tile;
                const float2 before = unpack<Bfloat>(load_word(given.at(i, column) + quarter * 4));
                const float low = before.x - (products[0][tile][2 * half] + products[1][tile][2 * half]);
                const float high = before.y - (products[0][tile][2 * half + 1] + products[1][tile][2 * half + 1]);
                *reinterpret_cast<std::uint32_t*>(buffers.corrections + place * kTileValues + i * kDim + first_channel + column * 8 + quarter * 2) = pack<Bfloat>(low, high);
                store_word(decayed.at(i, column) + quarter * 4, pack<Bfloat>(low * fade, high * fade));
            }
        }
        __syncthreads();
        const float kept = __expf(last);
#pragma unroll
        for (int column = 0; column < kSplit / 8; ++column) {
#pragma unroll
            for (int index = 0; index < 4; ++index) state[column][index] *= kept;
        }
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step) {
            std::uint32_t left[4];
            keys.left_of_transposed(left, step * 16, 2 * warp);
#pragma unroll
            for (int two = 0; two < kSplit / 16; ++two) {
                std::uint32_t right[4];
                decayed.right(right, step * 16, 2 * two);
                multiply<Bfloat>(state[2 * two], state[2 * two + 1], left, right);
            }
        }
        publish();
    }
#pragma unroll
    for (int column = 0; column < kSplit / 8; ++column) {
#pragma unroll
        for (int half = 0; half < 2; ++half) state_at(column, half)[0] = state[column][2 * half], state_at(column, half)[1] = state[column][2 * half + 1];
    }
}

// One block: a chunk, one value head; 16 tokens a warp.
constexpr std::size_t kReadBytes = 3 * kTileBytes + 2 * kStateValues;
__global__ __launch_bounds__(128) void read_kernel(const DeltaNetCall call, int first_row, int first_token, const ChunkBuffers buffers) {
    extern __shared__ __align__(128) std::uint8_t memory[];
    __shared__ float sums[kChunk];
    const DeltaNetShape& shape = call.shape;
    const int head = blockIdx.x, number = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quarter = lane & 3;
    const Chunk chunk = chunk_at(call.step, first_row, first_token, number);
    if (chunk.length == 0) return;
    const int heads = 2 * shape.num_key_heads + shape.num_value_heads, key_head = head / (shape.num_value_heads / shape.num_key_heads);
    const Bfloat* tiles = buffers.mixed + static_cast<std::int64_t>(number) * heads * kTileValues;
    const std::int64_t place = static_cast<std::int64_t>(number) * shape.num_value_heads + head;
    const Tile<256> queries = {shared_address(memory)}, keys = {queries.start + kTileBytes}, corrections = {keys.start + kTileBytes}, state = {corrections.start + kTileBytes};
    queries.fetch<128>(tiles + key_head * kTileValues, kChunk, 256);
    state.fetch<128>(buffers.states + place * kStateValues, kDim, 256);
    end_copies();
    keys.fetch<128>(tiles + (shape.num_key_heads + key_head) * kTileValues, kChunk, 256);
    corrections.fetch<128>(buffers.corrections + place * kTileValues, kChunk, 256);
    end_copies();
    if (threadIdx.x < kChunk) sums[threadIdx.x] = buffers.decays[place * kChunk + threadIdx.x];
    wait_for_copies<1>();
    __syncthreads();

    float read[kDim / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        std::uint32_t left[4];
        queries.left(left, warp * 16, 2 * step);
#pragma unroll
        for (int pair = 0; pair < kDim / 16; ++pair) {
            std::uint32_t right[4];
            state.right(right, step * 16, 2 * pair);
            multiply<Bfloat>(read[2 * pair], read[2 * pair + 1], left, right);
        }
    }
    const float own[2] = {sums[warp * 16 + group], sums[warp * 16 + group + 8]}, shrink[2] = {__expf(own[0]), __expf(own[1])};
#pragma unroll
    for (int column = 0; column < kDim / 8; ++column) {
#pragma unroll
        for (int index = 0; index < 4; ++index) read[column][index] *= shrink[index / 2];
    }
    wait_for_copies<0>();
    __syncthreads();
    for (int block = 0; block <= warp; ++block) {           // 16 tokens that these see
        float products[2][4] = {};
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            std::uint32_t left[4], right[4];
            queries.left(left, warp * 16, 2 * step);
            keys.right_of_transposed(right, block * 16, 2 * step);
            multiply<Bfloat>(products[0], products[1], left, right);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int index = 0; index < 4; ++index) {
                const int i = warp * 16 + group + index / 2 * 8, j = block * 16 + tile * 8 + quarter * 2 + index % 2;
                products[tile][index] = i >= j ? products[tile][index] * __expf(own[index / 2] - sums[j]) : 0.0f;
            }
        }
        const std::uint32_t left[4] = {pack<Bfloat>(products[0][0], products[0][1]), pack<Bfloat>(products[0][2], products[0][3]), pack<Bfloat>(products[1][0], products[1][1]),
                                       pack<Bfloat>(products[1][2], products[1][3])};
#pragma unroll
        for (int pair = 0; pair < kDim / 16; ++pair) {
            std::uint32_t right[4];
            corrections.right(right, block * 16, 2 * pair);
            multiply<Bfloat>(read[2 * pair], read[2 * pair + 1], left, right);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float squares = 0.0f;
#pragma unroll
        for (int column = 0; column < kDim / 8; ++column) squares += read[column][2 * half] * read[column][2 * half] + read[column][2 * half + 1] * read[column][2 * half + 1];
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        const float factor = rsqrtf(squares / kDim + call.weights.norm.eps);
        const int i = warp * 16 + group + half * 8;
        if (i >= chunk.length) continue;
        const std::int64_t token = chunk.first + i;
        const auto* gates = reinterpret_cast<const std::uint32_t*>(static_cast<const Bfloat*>(call.projections.data) + token * call.projections.stride + shape.conv_dim() + head * kDim) + quarter;
        auto* to = reinterpret_cast<std::uint32_t*>(static_cast<Bfloat*>(call.out.data) + token * call.out.stride + head * kDim) + quarter;
        const auto* weights = reinterpret_cast<const float2*>(call.weights.norm.weight) + quarter;
#pragma unroll
        for (int column = 0; column < kDim / 8; ++column) {
            const float2 gate = unpack<Bfloat>(gates[column * 4]), weight = weights[column * 4];
            to[column * 4] = pack<Bfloat>(read[column][2 * half] * factor * weight.x * silu(gate.x), read[column][2 * half + 1] * factor * weight.y * silu(gate.y));
        }
    }
}

int num_chunks_of(int tokens, int rows) { return tokens / kChunk + rows; }

struct Layout {
    std::size_t corrections, from_state, states, decays, end;
    Layout(const DeltaNetShape& shape, int tokens, int rows) {
        const std::size_t chunks = static_cast<std::size_t>(num_chunks_of(tokens, rows)), heads = static_cast<std::size_t>(shape.num_value_heads);
        corrections = chunks * (2 * static_cast<std::size_t>(shape.num_key_heads) + heads) * kTileBytes;
        from_state = corrections + chunks * heads * kTileBytes;
        states = from_state + chunks * heads * kTileBytes;
        decays = states + chunks * heads * 2 * kStateValues;
        end = decays + chunks * heads * kChunk * sizeof(float);
    }
};

bool is_aligned(const void* data, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; }

}  // namespace

bool takes_delta_chunks(const Context& context, const DeltaNetCall& call) {
    const DeltaNetShape& shape = call.shape;
    return context.capability >= 80 && shape.key_dim == kDim && shape.value_dim == kDim && shape.conv_kernel == kTaps && call.projections.dtype == DType::bfloat16 &&
           call.out.dtype == DType::bfloat16 && is_aligned(call.projections.data, 8) && call.projections.stride % 4 == 0 && is_aligned(call.out.data, 4) && call.out.stride % 2 == 0 &&
           is_aligned(call.weights.conv, 16) && is_aligned(call.weights.norm.weight, 8);
}

std::size_t delta_chunks_bytes(const DeltaNetShape& shape, int tokens, int rows) { return Layout(shape, tokens, rows).end; }

void delta_chunks(const Context& context, const DeltaNetCall& call, int first_row, int first_token, void* scratch) {
    const DeltaNetShape& shape = call.shape;
    const int tokens = call.step.num_tokens - first_token, rows = call.step.num_rows - first_row, chunks = num_chunks_of(tokens, rows);
    const Layout layout(shape, tokens, rows);
    auto* bytes = static_cast<std::byte*>(scratch);
    const ChunkBuffers buffers = {reinterpret_cast<Bfloat*>(bytes), reinterpret_cast<Bfloat*>(bytes + layout.corrections), reinterpret_cast<Bfloat*>(bytes + layout.from_state),
                                  reinterpret_cast<Bfloat*>(bytes + layout.states), reinterpret_cast<float*>(bytes + layout.decays)};
    launch(context, mix_kernel, dim3(chunks * (kChunk / kMixTokens), ceil_div(2 * shape.num_key_heads + shape.num_value_heads, 4)), 128, 0, call, first_row, first_token, buffers);
    delta_tails(context, call, first_row);
    launch(context, solve_kernel, dim3(shape.num_value_heads, chunks), 128, kSolveBytes, call, first_row, first_token, buffers);
    launch(context, states_kernel, dim3(kDim / kSplit, shape.num_value_heads, rows), 256, kStatesBytes, call, first_row, first_token, buffers);
    launch(context, read_kernel, dim3(shape.num_value_heads, chunks), 128, kReadBytes, call, first_row, first_token, buffers);
}

}  // namespace pocket::cuda
