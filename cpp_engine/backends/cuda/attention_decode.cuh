// Attention of one row that computes one token, as a block of 256 threads computes a part of it: the query heads of one KV head (or as many of them as one block
// takes), and one split of the context. The block normalizes and rotates its queries itself. Where the split ends with the new token, it writes that token's key
// and value to the cache first. The last split of a row and group of heads to arrive puts all of them together, or combine_splits does it later.
//
// A warp takes a few tokens at a time, each lane 8 dimensions of all of them: the products of all pairs of token and head are summed over the lanes in one
// exchange, after which each lane has one pair's score.
#pragma once

#include "backends/cuda/attention_code.cuh"
#include "backends/cuda/stream_code.cuh"

namespace pocket::cuda {

struct AttentionPlace {
    int split, num_splits, group, num_groups, row;
};

template <int kGroup>
struct AttentionNotes {                                     // in shared memory
    float all_maxima[8][kGroup], all_sums[8][kGroup], block_maxima[kGroup], block_sums[kGroup];
    bool is_last;
};

// Sum each of kCount values (a power of two up to 32) over the warp; lane l gets the sum of value l >> (5 - log2(kCount)).
template <int kCount, int kStep = 16>
__device__ __forceinline__ float exchange_sums(const float (&values)[kCount]) {
    if constexpr (kCount == 1) {
        float sum = values[0];
#pragma unroll
        for (int step = kStep; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        return sum;
    } else {
        const bool upper = threadIdx.x & kStep;
        float half[kCount / 2];
#pragma unroll
        for (int index = 0; index < kCount / 2; ++index) {
            const float kept = upper ? values[index + kCount / 2] : values[index], sent = upper ? values[index] : values[index + kCount / 2];
            half[index] = kept + __shfl_xor_sync(0xffffffffu, sent, kStep);
        }
        return exchange_sums<kCount / 2, kStep / 2>(half);
    }
}

// Brings the keys and values that the block reads first closer, as far as the L2 cache: a line for each of `threads` in turn.
template <typename T>
__device__ __forceinline__ void prefetch_attention(const AttentionCall& call, const AttentionPlace& place, int heads_of_group, int thread, int threads) {
    constexpr int kMostTokens = 64, kLine = 128 / sizeof(T);
    const AttentionShape& shape = call.shape;
    const int length = max(call.step.lengths[place.row], 0), share = (length + place.num_splits * 8 - 1) / (place.num_splits * 8) * 8;
    const int begin = min(place.split * share, length), tokens = min(min(begin + share, length) - begin, kMostTokens), lines = (shape.head_dim + kLine - 1) / kLine;
    const int kv_head = place.group * heads_of_group / (shape.num_heads / shape.num_kv_heads);
    const std::int32_t* table = call.step.block_tables + static_cast<std::int64_t>(place.row) * call.step.max_blocks;
    for (int index = thread; index < 2 * tokens * lines; index += threads) {
        const int token = begin + index / (2 * lines), line = index % lines;
        const std::int64_t slot = static_cast<std::int64_t>(table[token / call.cache.block_size]) * call.cache.block_size + token % call.cache.block_size;
        const auto* from = static_cast<const T*>(index / lines % 2 == 0 ? call.cache.keys : call.cache.values);
        prefetch(from + cache_place(call.cache, shape.num_kv_heads, shape.head_dim, slot, kv_head) + line * kLine);
    }
}

// `memory`: float32 [8][kGroup][head_dim], or [num_splits][kGroup] where that is more; aligned to 16 bytes.
template <typename T, int kGroup, bool kCombines>
__device__ void attend(const AttentionCall& call, const AttentionPlace& place, float* partial, int* tickets, float* memory, AttentionNotes<kGroup>& shared) {
    constexpr int kWarps = 8, kThreads = 32 * kWarps;
    constexpr int kPadded = kGroup > 4 ? 8 : kGroup > 2 ? 4 : kGroup, kTokens = kPadded > 4 ? 32 / kPadded : 8, kPairs = kPadded * kTokens;
    constexpr int kShift = kPairs == 32 ? 0 : kPairs == 16 ? 1 : 2;  // lanes of one pair, as a power of two
    const AttentionShape& shape = call.shape;
    const int split = place.split, num_splits = place.num_splits, row = place.row, first_head = place.group * kGroup;
    auto &all_maxima = shared.all_maxima, &all_sums = shared.all_sums;
    auto &block_maxima = shared.block_maxima, &block_sums = shared.block_sums;
    bool& is_last = shared.is_last;
    const int kv_head = first_head / (shape.num_heads / shape.num_kv_heads);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head_dim = shape.head_dim, first = lane * 8;
    const bool has_dims = first < head_dim;
    const int length = max(call.step.lengths[row], 0);
    const int share = (length + num_splits * 8 - 1) / (num_splits * 8) * 8, begin = min(split * share, length), end = min(begin + share, length);
    const bool has_new = begin < end && end == length;
    const std::int32_t* table = call.step.block_tables + static_cast<std::int64_t>(row) * call.step.max_blocks;
    const T *keys = static_cast<const T*>(call.cache.keys), *values = static_cast<const T*>(call.cache.values);
    const auto place_of = [&](int token) {
        const std::int64_t slot = static_cast<std::int64_t>(table[token / call.cache.block_size]) * call.cache.block_size + token % call.cache.block_size;
        return cache_place(call.cache, shape.num_kv_heads, head_dim, slot, kv_head);
    };
    // The first tokens' keys and values, and constants, are on their way while the queries are prepared.
    Eight<T> key_words[kTokens], value_words[kTokens];
    const auto load_tokens = [&](int start) {
        const std::int64_t mine = place_of(min(start + lane % kTokens, end - 1));
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            const std::int64_t at = __shfl_sync(0xffffffffu, mine, token) + first;
            key_words[token].clear(), value_words[token].clear();
            if (has_dims && start + token < end) key_words[token].load(keys + at), value_words[token].load(values + at);
        }
    };
    const int first_start = begin + warp * kTokens;
    if (first_start < end) load_tokens(first_start);
    const int position = call.step.positions[row], half = shape.rotary_dim / 2;
    for (int index = 4 * threadIdx.x; index < half && half % 4 == 0; index += 4 * kThreads) {
        touch(call.weights.cosines + static_cast<std::int64_t>(position) * half + index);
        touch(call.weights.sines + static_cast<std::int64_t>(position) * half + index);
    }
    for (int index = 4 * threadIdx.x; index < head_dim; index += 4 * kThreads) touch(call.weights.query_norm.weight + index), touch(call.weights.key_norm.weight + index);

    const std::int64_t token_row = row, projections = token_row * call.projections.stride;
    const int query_size = 2 * shape.num_heads * head_dim;
    float *queries = memory, *new_key = memory + kGroup * head_dim;
    for (int item = warp; item < kGroup + (has_new ? 1 : 0); item += kWarps) {
        if (item < kGroup) {
            const std::int64_t at = projections + static_cast<std::int64_t>(first_head + item) * 2 * head_dim;
            LaneHead head = load_lane(call.projections.data, call.projections.dtype, at, head_dim);
            norm_and_rotate(head, call.weights.query_norm, shape, call.weights, position, queries + item * head_dim);
        } else {
            const std::int64_t at = projections + query_size + static_cast<std::int64_t>(kv_head) * head_dim;
            LaneHead head = load_lane(call.projections.data, call.projections.dtype, at, head_dim);
            norm_and_rotate(head, call.weights.key_norm, shape, call.weights, position, new_key);
            const LaneHead value = load_lane(call.projections.data, call.projections.dtype, at + static_cast<std::int64_t>(shape.num_kv_heads) * head_dim, head_dim);
            const std::int64_t new_place = place_of(length - 1) + first;
            if (has_dims && call.step.slot_mapping[row] >= 0) {
#pragma unroll
                for (int index = 0; index < 8; ++index) {
                    static_cast<T*>(call.cache.keys)[new_place + index] = from_float<T>(head.values[index]);
                    static_cast<T*>(call.cache.values)[new_place + index] = from_float<T>(value.values[index]);
                }
            }
        }
    }
    meet<kThreads>();

    const float scale = kLog2E * rsqrtf(static_cast<float>(head_dim));
    float asked[kGroup][8];
    float read[kGroup][8];                                  // of the values, not yet divided by the sum of the weights
#pragma unroll
    for (int member = 0; member < kGroup; ++member) {
#pragma unroll
        for (int index = 0; index < 8; ++index) {
            asked[member][index] = has_dims ? queries[member * head_dim + first + index] * scale : 0.0f;
            read[member][index] = 0.0f;
        }
    }
    float maximum = -INFINITY, own_sum = 0.0f;              // of this lane's head; own_sum of its pairs alone
    const int pair = lane >> kShift, my_token = pair / kPadded, my_member = pair % kPadded;

    for (int start = first_start; start < end; start += kWarps * kTokens) {
        // The first ones are loaded, but for the new token's, which was not there yet.
        if (start > first_start || (has_new && start + kTokens >= end)) load_tokens(start);
        float scores[kPairs];
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            float key[8];
            key_words[token].unpack(key);
#pragma unroll
            for (int member = 0; member < kPadded; ++member) {
                float sum = 0.0f;
                if (member < kGroup) {
#pragma unroll
                    for (int index = 0; index < 8; ++index) sum = fmaf(asked[member < kGroup ? member : 0][index], key[index], sum);
                }
                scores[token * kPadded + member] = sum;
            }
        }
        float score = exchange_sums(scores);
        if (my_token >= end - start) score = -INFINITY;
        float highest = score;
#pragma unroll
        for (int step = kPadded << kShift; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
        highest = fmaxf(highest, maximum);                  // finite: the first token of a round is always there
        const float fade = exp2f(maximum - highest), weight = exp2f(score - highest);
        own_sum = own_sum * fade + weight;
        maximum = highest;
        if (__any_sync(0xffffffffu, fade != 1.0f)) {
#pragma unroll
            for (int member = 0; member < kGroup; ++member) {
                const float factor = __shfl_sync(0xffffffffu, fade, member << kShift);
#pragma unroll
                for (int index = 0; index < 8; ++index) read[member][index] *= factor;
            }
        }
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            float value[8];
            value_words[token].unpack(value);
#pragma unroll
            for (int member = 0; member < kGroup; ++member) {
                const float factor = __shfl_sync(0xffffffffu, weight, (token * kPadded + member) << kShift);
#pragma unroll
                for (int index = 0; index < 8; ++index) read[member][index] = fmaf(factor, value[index], read[member][index]);
            }
        }
    }

    // The warps' shares, in units of the block's largest score.
#pragma unroll
    for (int step = kPadded << kShift; step < 32; step *= 2) own_sum += __shfl_xor_sync(0xffffffffu, own_sum, step);
    if (my_token == 0 && my_member < kGroup && (lane & ((1 << kShift) - 1)) == 0) all_maxima[warp][my_member] = maximum, all_sums[warp][my_member] = own_sum;
    meet<kThreads>();
#pragma unroll
    for (int member = 0; member < kGroup; ++member) {
        float highest = -INFINITY;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) highest = fmaxf(highest, all_maxima[other][member]);
        const float factor = highest == -INFINITY ? 0.0f : exp2f(all_maxima[warp][member] - highest);
        if (warp == 0) {                                    // the block's sum of weights
            const float part = lane < kWarps && highest > -INFINITY ? all_sums[lane][member] * exp2f(all_maxima[lane][member] - highest) : 0.0f;
            const float total = warp_sum(part);
            if (lane == 0) block_maxima[member] = highest, block_sums[member] = total;
        }
        if (has_dims) {
            auto* to = reinterpret_cast<float4*>(memory + (warp * kGroup + member) * head_dim + first);
            to[0] = make_float4(read[member][0] * factor, read[member][1] * factor, read[member][2] * factor, read[member][3] * factor);
            to[1] = make_float4(read[member][4] * factor, read[member][5] * factor, read[member][6] * factor, read[member][7] * factor);
        }
    }
    meet<kThreads>();

    const std::int64_t unit = static_cast<std::int64_t>(row) * place.num_groups + place.group;
    const int unit_size = kGroup * head_dim;
    // For all units [unit][split]: values [kGroup][head_dim], and behind all of these maxima and sums [2][kGroup].
    float* parts = partial + unit * num_splits * unit_size;
    float* notes = partial + static_cast<std::int64_t>(call.step.num_decode) * place.num_groups * num_splits * unit_size + unit * num_splits * 2 * kGroup;
    const auto gate_of = [&](int at, int index) {        // of value `index` of the four from `place` on
        const int member = at / head_dim, dim = at % head_dim + index;
        return load_value(call.projections.data, call.projections.dtype, projections + static_cast<std::int64_t>(first_head + member) * 2 * head_dim + head_dim + dim);
    };
    const auto finish = [&](int at, const float (&gates)[4], const float4& value, float factor) {
        const std::int64_t to = token_row * call.out.stride + static_cast<std::int64_t>(first_head) * head_dim + at;
        const float values[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int index = 0; index < 4; ++index) store_value(call.out.data, call.out.dtype, to + index, values[index] * factor * sigmoid(gates[index]));
    };
    for (int at = 4 * threadIdx.x; at < unit_size; at += 4 * kThreads) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const float4 part = *reinterpret_cast<const float4*>(memory + other * unit_size + at);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        if (num_splits > 1) {
            *reinterpret_cast<float4*>(parts + split * unit_size + at) = sum;
        } else {
            const float gates[4] = {gate_of(at, 0), gate_of(at, 1), gate_of(at, 2), gate_of(at, 3)}, total = block_sums[at / head_dim];
            finish(at, gates, sum, total > 0.0f ? 1.0f / total : 0.0f);
        }
    }
    if (num_splits == 1) return;
    if (threadIdx.x < kGroup) {
        notes[split * 2 * kGroup + threadIdx.x] = block_maxima[threadIdx.x];
        notes[(split * 2 + 1) * kGroup + threadIdx.x] = block_sums[threadIdx.x];
    }
    if constexpr (!kCombines) return;
    __threadfence();
    meet<kThreads>();
    if (threadIdx.x == 0) is_last = atomicAdd(&tickets[unit], 1) == num_splits - 1;
    meet<kThreads>();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) tickets[unit] = 0;
    float* factors = memory;                                // [num_splits][kGroup], of each split's values
    for (int member = warp; member < kGroup; member += kWarps) {
        constexpr int kNotes = 5;                           // of 32 splits each, which are asked for together
        float maxima[kNotes], sums[kNotes], highest = -INFINITY, total = 0.0f;
#pragma unroll
        for (int index = 0; index < kNotes; ++index) {
            const int other = lane + 32 * index;
            maxima[index] = other < num_splits ? __ldcg(notes + other * 2 * kGroup + member) : -INFINITY;
            sums[index] = other < num_splits ? __ldcg(notes + (other * 2 + 1) * kGroup + member) : 0.0f;
        }
#pragma unroll
        for (int index = 0; index < kNotes; ++index) highest = fmaxf(highest, maxima[index]);
        highest = warp_max(highest);
#pragma unroll
        for (int index = 0; index < kNotes; ++index) {
            maxima[index] = highest > -INFINITY ? exp2f(maxima[index] - highest) : 0.0f;
            total += maxima[index] * sums[index];
        }
        total = warp_sum(total);
#pragma unroll
        for (int index = 0; index < kNotes; ++index)
            if (lane + 32 * index < num_splits) factors[(lane + 32 * index) * kGroup + member] = total > 0.0f ? maxima[index] / total : 0.0f;
    }
    meet<kThreads>();
    for (int at = 4 * threadIdx.x; at < unit_size; at += 4 * kThreads) {
        const float gates[4] = {gate_of(at, 0), gate_of(at, 1), gate_of(at, 2), gate_of(at, 3)};
        const int member = at / head_dim;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 16
        for (int other = 0; other < num_splits; ++other) {
            const float4 part = __ldcg(reinterpret_cast<const float4*>(parts + other * unit_size + at));
            const float factor = factors[other * kGroup + member];
            sum.x = fmaf(factor, part.x, sum.x), sum.y = fmaf(factor, part.y, sum.y), sum.z = fmaf(factor, part.z, sum.z), sum.w = fmaf(factor, part.w, sum.w);
        }
        finish(at, gates, sum, 1.0f);
    }
}

// What the splits left of 64 values from `first` on, of a row's head, put together by a warp.
template <int kGroup>
__device__ __forceinline__ void combine_splits(const AttentionCall& call, int num_splits, const float* partial, int row, int head, int first) {
    constexpr int kNotes = 5;                               // of 32 splits each
    const AttentionShape& shape = call.shape;
    const int lane = threadIdx.x & 31, head_dim = shape.head_dim, num_groups = shape.num_heads / kGroup, member = head % kGroup, unit_size = kGroup * head_dim;
    const std::int64_t unit = static_cast<std::int64_t>(row) * num_groups + head / kGroup;
    const float* parts = partial + unit * num_splits * unit_size + member * head_dim;
    const float* notes = partial + static_cast<std::int64_t>(call.step.num_decode) * num_groups * num_splits * unit_size + unit * num_splits * 2 * kGroup + member;
    const int dim = first + 2 * lane;
    const bool has_dims = dim < head_dim;
    float maxima[kNotes], sums[kNotes], highest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int index = 0; index < kNotes; ++index) {
        const int split = lane + 32 * index;
        maxima[index] = split < num_splits ? __ldcg(notes + split * 2 * kGroup) : -INFINITY;
        sums[index] = split < num_splits ? __ldcg(notes + (split * 2 + 1) * kGroup) : 0.0f;
    }
    float gates[2] = {};
    const std::int64_t at = row * call.projections.stride + (static_cast<std::int64_t>(head) * 2 + 1) * head_dim + dim;
#pragma unroll
    for (int index = 0; index < 2; ++index)
        if (has_dims) gates[index] = load_value(call.projections.data, call.projections.dtype, at + index);
#pragma unroll
    for (int index = 0; index < kNotes; ++index) highest = fmaxf(highest, maxima[index]);
    highest = warp_max(highest);
#pragma unroll
    for (int index = 0; index < kNotes; ++index) {
        maxima[index] = highest > -INFINITY ? exp2f(maxima[index] - highest) : 0.0f;
        total += maxima[index] * sums[index];
    }
    total = warp_sum(total);
    float2 read = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int index = 0; index < kNotes; ++index) {
        const int count = min(num_splits - 32 * index, 32);
#pragma unroll 16
        for (int split = 0; split < count; ++split) {
            const float factor = __shfl_sync(0xffffffffu, maxima[index], split);
            float2 part = make_float2(0.0f, 0.0f);
            if (has_dims) part = __ldcg(reinterpret_cast<const float2*>(parts + static_cast<std::int64_t>(32 * index + split) * unit_size + dim));
            read.x = fmaf(factor, part.x, read.x), read.y = fmaf(factor, part.y, read.y);
        }
    }
    if (!has_dims) return;
    const float scale = total > 0.0f ? 1.0f / total : 0.0f;
    const std::int64_t to = row * call.out.stride + static_cast<std::int64_t>(head) * head_dim + dim;
    store_value(call.out.data, call.out.dtype, to, read.x * scale * sigmoid(gates[0]));
    store_value(call.out.data, call.out.dtype, to + 1, read.y * scale * sigmoid(gates[1]));
}

}  // namespace pocket::cuda
