// Gated DeltaNet. `L` is a set of lanes; included inside POCKET_TARGET_BEGIN.
//
// Tokens go through the state a few at a time, with the triangular system between them solved in registers: the state is read once for a few tokens, and
// hardly more is computed than token by token. Longer chunks would cost more arithmetic than they save in reads, since a slice of the state stays in the
// first-level cache.
#pragma once

namespace pocket {

template <typename L>
void convolve(const float* x, std::int64_t stride, int tokens, int channels, const float* weight, std::int64_t weight_stride, int kernel, float* tail,
              std::int64_t tail_stride, float* out, std::int64_t out_stride) {
    const int past = kernel - 1;
    constexpr int kAhead = 8;  // tokens: their rows lie too far apart for the processor to guess
    for (int token = 0; token < tokens; ++token) {
        for (int i = 0; i < channels; i += 16) {
            if (token + kAhead < tokens) L::prefetch(x + (token + kAhead) * stride + i);
            auto sum = L::zero();
            for (int j = 0; j < kernel; ++j) {
                const int from = token + j - past;
                const float* source = from < 0 ? tail + (from + past) * tail_stride : x + from * stride;
                sum = L::fma(L::load(source + i), L::load(weight + j * weight_stride + i), sum);
            }
            L::store(out + token * out_stride + i, silu<L>(sum));
        }
    }
    for (int j = 0; j < past; ++j) {  // row j of the new tail is row j + tokens of the old one with x behind it: upwards, nothing is lost
        const int from = j + tokens - past;
        const float* source = from < 0 ? tail + (from + past) * tail_stride : x + from * stride;
        for (int i = 0; i < channels; i += 16) L::store(tail + j * tail_stride + i, L::load(source + i));
    }
}

// What C tokens are to each other. `within` and `seen` hold the decay between the two tokens.
template <int C>
struct ChunkFactors {
    float start[C];  // decay from the state before to token c
    float end[C];  // decay from token c to the state behind
    float within[C][C];  // key of c times key of j < c
    float seen[C][C];  // query of c times key of j <= c
};

template <typename L>
inline float dot(const float* a, const float* b, int size) {
    auto sum = L::zero();
    for (int i = 0; i < size; i += 16) sum = L::fma(L::load(a + i), L::load(b + i), sum);
    return L::sum(sum);
}

template <typename L, int C>
inline void find_factors(const DeltaTokens& t, int first, ChunkFactors<C>& factors) {
    float since[C];  // logarithm of start
    float decay = 0;
    for (int c = 0; c < C; ++c) since[c] = decay += t.decays[first + c];
    for (int c = 0; c < C; ++c) {
        factors.start[c] = __builtin_expf(since[c]);
        factors.end[c] = __builtin_expf(since[C - 1] - since[c]);
        const float *key = t.keys + (first + c) * t.key_stride, *query = t.queries + (first + c) * t.key_stride;
        for (int j = 0; j <= c; ++j) {
            const float* other = t.keys + (first + j) * t.key_stride;
            const float between = j == c ? 1.0f : __builtin_expf(since[c] - since[j]);
            if (j < c) factors.within[c][j] = between * dot<L>(key, other, t.key_dim);
            factors.seen[c][j] = between * dot<L>(query, other, t.key_dim);
        }
    }
}

// C tokens through W * 16 columns of the state, which lie at `state`, rows `stride` apart.
template <typename L, int C, int W>
inline void delta_chunk(const DeltaTokens& t, int first, const ChunkFactors<C>& factors, int column, float* state, std::int64_t stride) {
    const float *keys = t.keys + first * t.key_stride, *queries = t.queries + first * t.key_stride;
    typename L::F known[C][W], read[C][W];  // S^T k and S^T q of the state before
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) known[c][w] = read[c][w] = L::zero();
    for (int i = 0; i < t.key_dim; ++i) {
        typename L::F s[W];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) s[w] = L::load(state + i * stride + w * 16);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const auto key = L::set(keys[c * t.key_stride + i]), query = L::set(queries[c * t.key_stride + i]);
#pragma GCC unroll 2
            for (int w = 0; w < W; ++w) {
                known[c][w] = L::fma(key, s[w], known[c][w]);
                read[c][w] = L::fma(query, s[w], read[c][w]);
            }
        }
    }
    typename L::F delta[C][W];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        const auto start = L::set(factors.start[c]), beta = L::set(t.betas[first + c]);
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) {
            auto left = L::sub(L::load(t.values + (first + c) * t.value_stride + column + w * 16), L::mul(start, known[c][w]));
#pragma GCC unroll 4
            for (int j = 0; j < c; ++j) left = L::sub(left, L::mul(L::set(factors.within[c][j]), delta[j][w]));
            delta[c][w] = L::mul(beta, left);
            auto output = L::mul(start, read[c][w]);
#pragma GCC unroll 4
            for (int j = 0; j <= c; ++j) output = L::fma(L::set(factors.seen[c][j]), delta[j][w], output);
            L::store(t.outputs + (first + c) * t.output_stride + column + w * 16, output);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) delta[c][w] = L::mul(delta[c][w], L::set(factors.end[c]));
    const auto all = L::set(factors.start[C - 1]);
    for (int i = 0; i < t.key_dim; ++i) {
        typename L::F s[W];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) s[w] = L::mul(all, L::load(state + i * stride + w * 16));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const auto key = L::set(keys[c * t.key_stride + i]);
#pragma GCC unroll 2
            for (int w = 0; w < W; ++w) s[w] = L::fma(key, delta[c][w], s[w]);
        }
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) L::store(state + i * stride + w * 16, s[w]);
    }
}

// W * 16 columns of the state and all tokens.
template <typename L, int W>
inline void delta_slice(const DeltaTokens& t, const ChunkFactors<L::kDeltaChunk>* whole, const ChunkFactors<1>* single, int column, float* state,
                        float* workspace) {
    constexpr int C = L::kDeltaChunk;
    const bool copies = t.count > C;  // side by side, the slice stays in the cache
    float* at = copies ? workspace : state + column;
    const std::int64_t stride = copies ? W * 16 : t.value_dim;
    for (int i = 0; copies && i < t.key_dim; ++i)
        for (int w = 0; w < W; ++w) L::store(workspace + (i * W + w) * 16, L::load(state + i * t.value_dim + column + w * 16));
    int first = 0;
    for (; first + C <= t.count; first += C) delta_chunk<L, C, W>(t, first, *whole++, column, at, stride);
    for (; first < t.count; ++first) delta_chunk<L, 1, W>(t, first, *single++, column, at, stride);
    for (int i = 0; copies && i < t.key_dim; ++i)
        for (int w = 0; w < W; ++w) L::store(state + i * t.value_dim + column + w * 16, L::load(workspace + (i * W + w) * 16));
}

template <typename L>
void delta_rule(const DeltaTokens& t, float* state, float* workspace) {
    constexpr int C = L::kDeltaChunk, W = L::kColumnVectors;
    ChunkFactors<C> whole[kDeltaTokens / C];
    ChunkFactors<1> single[C];
    int first = 0;
    for (int chunk = 0; first + C <= t.count; ++chunk, first += C) find_factors<L, C>(t, first, whole[chunk]);
    for (int chunk = 0; first < t.count; ++chunk, ++first) find_factors<L, 1>(t, first, single[chunk]);
    int column = 0;
    for (; column + W * 16 <= t.value_dim; column += W * 16) delta_slice<L, W>(t, whole, single, column, state, workspace);
    for (; column < t.value_dim; column += 16) delta_slice<L, 1>(t, whole, single, column, state, workspace);
}

}  // namespace pocket
