// Attention over paged keys and values. `L` is a set of lanes, `V` how a cached value is stored; included inside POCKET_TARGET_BEGIN.
#pragma once

namespace pocket {

template <typename L>
struct Float32Values {
    using Stored = float;
    static typename L::F load(const Stored* p) { return L::load(p); }
};
template <typename L>
struct Float16Values {
    using Stored = std::uint16_t;
    static typename L::F load(const Stored* p) { return L::load_float16(p); }
};
template <typename L>
struct Bfloat16Values {
    using Stored = std::uint16_t;
    static typename L::F load(const Stored* p) { return L::load_bfloat16(p); }
};

template <typename V>
inline const typename V::Stored* at(const void* base, const KvView& kv, int token) {
    const std::int64_t block = kv.block_table[token / kv.block_size];
    return static_cast<const typename V::Stored*>(base) + block * kv.block_stride + static_cast<std::int64_t>(token % kv.block_size) * kv.head_dim;
}

template <typename L>
void prepare_head(const float* x, const Norm& norm, const float* cosines, const float* sines, int half, int head_dim, float scale, float* out) {
    const auto factor = L::set(norm_scale<L>(x, head_dim, norm.eps) * scale);
    for (int i = 0; i < head_dim; i += 16) L::store(out + i, L::mul(L::mul(L::load(x + i), factor), L::load(norm.weight + i)));
    for (int i = 0; i < half; ++i) {
        const float first = out[i], second = out[i + half];
        out[i] = first * cosines[i] - second * sines[i];
        out[i + half] = second * cosines[i] + first * sines[i];
    }
}

template <typename L>
void gate_attention(const float* values, float total, const float* gates, int count, float* out) {
    const auto factor = L::set(1.0f / total);
    for (int i = 0; i < count; i += 16) L::store(out + i, L::mul(L::mul(L::load(values + i), factor), sigmoid<L>(L::load(gates + i))));
}

// Scores of N queries for the tokens [begin, end): scores [N][kKeyTile].
template <typename L, typename V, int N>
inline void token_scores(const float* queries, const KvView& kv, int begin, int end, float* scores) {
    const int dim = kv.head_dim;
    for (int token = begin; token < end; ++token) {
        const auto* key = at<V>(kv.keys, kv, token);
        typename L::F sums[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[n] = L::zero();
        for (int i = 0; i < dim; i += 16) {
            const auto k = V::load(key + i);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n] = L::fma(k, L::load(queries + n * dim + i), sums[n]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) scores[n * kKeyTile + token - begin] = L::sum(sums[n]);
    }
}

// values [N, head_dim] += weights [N][kKeyTile] times the values of the tokens [begin, end).
template <typename L, typename V, int N>
inline void add_values(const float* weights, const KvView& kv, int begin, int end, float* values) {
    const int dim = kv.head_dim;
    for (int i = 0; i < dim; i += 32) {  // two registers a query
        const bool both = i + 16 < dim;
        typename L::F sums[N][2];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            sums[n][0] = L::load(values + n * dim + i);
            sums[n][1] = both ? L::load(values + n * dim + i + 16) : L::zero();
        }
        for (int token = begin; token < end; ++token) {
            const auto* value = at<V>(kv.values, kv, token) + i;
            const auto first = V::load(value), second = both ? V::load(value + 16) : L::zero();
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const auto weight = L::set(weights[n * kKeyTile + token - begin]);
                sums[n][0] = L::fma(weight, first, sums[n][0]);
                sums[n][1] = L::fma(weight, second, sums[n][1]);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            L::store(values + n * dim + i, sums[n][0]);
            if (both) L::store(values + n * dim + i + 16, sums[n][1]);
        }
    }
}

// Takes a tile of scores of one query into its running softmax: scores become exp(score - largest), the last of 16 lanes filled up with 0.
template <typename L>
inline void soften(float* scores, int count, int head_dim, float& largest, float& total, float* values) {
    const auto lowest = L::set(-__builtin_inff());
    auto peak = L::set(largest);
    for (int i = 0; i < count; i += 16) {
        const unsigned inside = count - i >= 16 ? 0xffffu : (1u << (count - i)) - 1;
        peak = L::max(L::where(inside, L::load(scores + i), lowest), peak);
    }
    const float highest = L::largest(peak);
    if (highest > largest && total != 0) {
        float factor[16];
        L::store(factor, exponential<L>(L::set(largest - highest)));
        total *= factor[0];
        for (int i = 0; i < head_dim; i += 16) L::store(values + i, L::mul(L::load(values + i), L::set(factor[0])));
    }
    largest = highest;
    auto sum = L::zero();
    for (int i = 0; i < count; i += 16) {
        const unsigned inside = count - i >= 16 ? 0xffffu : (1u << (count - i)) - 1;
        const auto weight = L::where(inside, exponential<L>(L::sub(L::load(scores + i), L::set(highest))), L::zero());
        L::store(scores + i, weight);
        sum = L::add(sum, weight);
    }
    total += L::sum(sum);
}

template <typename L, typename V, int N>
inline void attend_queries(const float* queries, const KvView& kv, int begin, int end, const PartialAttention& out, int first) {
    const int dim = kv.head_dim;
    alignas(64) float scores[N * kKeyTile] = {};
    float* values = out.values + first * dim;
    for (int n = 0; n < N; ++n) {
        out.largest[first + n] = -__builtin_inff();
        out.total[first + n] = 0;
        for (int i = 0; i < dim; i += 16) L::store(values + n * dim + i, L::zero());
    }
    for (int tile = begin; tile < end; tile += kKeyTile) {
        const int stop = tile + kKeyTile < end ? tile + kKeyTile : end;
        token_scores<L, V, N>(queries + first * dim, kv, tile, stop, scores);
        for (int n = 0; n < N; ++n) soften<L>(scores + n * kKeyTile, stop - tile, dim, out.largest[first + n], out.total[first + n], values + n * dim);
        add_values<L, V, N>(scores, kv, tile, stop, values);
    }
}

template <typename L, typename V>
void attend_token_stored(const float* queries, int rows, const KvView& kv, int begin, int end, const PartialAttention& out) {
    int row = 0;
    for (; row + 4 <= rows; row += 4) attend_queries<L, V, 4>(queries, kv, begin, end, out, row);
    if (rows - row == 3) attend_queries<L, V, 3>(queries, kv, begin, end, out, row);
    else if (rows - row == 2) attend_queries<L, V, 2>(queries, kv, begin, end, out, row);
    else if (rows - row == 1) attend_queries<L, V, 1>(queries, kv, begin, end, out, row);
}

// c [N, c_stride] += a [N, depth] b [depth, W * 16]
template <typename L, int N, int W>
inline void add_tile(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, int depth, float* c, std::int64_t c_stride) {
    typename L::F sums[N][W];
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) sums[n][w] = L::load(c + n * c_stride + w * 16);
    for (int k = 0; k < depth; ++k, b += b_stride) {
        typename L::F right[W];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) right[w] = L::load(b + w * 16);
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) {
            const auto left = L::set(a[n * a_stride + k]);
#pragma GCC unroll 2
            for (int w = 0; w < W; ++w) sums[n][w] = L::fma(left, right[w], sums[n][w]);
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) L::store(c + n * c_stride + w * 16, sums[n][w]);
}

template <typename L, int N, int W>
inline void add_rows(int rows, const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, int depth, float* c, std::int64_t c_stride) {
    if (rows == N) return add_tile<L, N, W>(a, a_stride, b, b_stride, depth, c, c_stride);
    if constexpr (N > 1) add_rows<L, N - 1, W>(rows, a, a_stride, b, b_stride, depth, c, c_stride);
}

// A matrix [depth, columns] lies in strips of kStrip columns, [depth][kStrip] one after another (the last may be narrower): a strip fits into the first-level
// cache, and its rows don't fall on the same few of its sets. Strip of column `column`: at column * depth.
template <typename L>
constexpr int kStrip = 16 * L::kColumnVectors;

// c [rows, columns] += a [rows, depth] b, b in strips of [strip_depth, columns], of which the first `depth` rows count; columns a multiple of 16.
template <typename L>
inline void add_product(int rows, int columns, int depth, const float* a, std::int64_t a_stride, const float* b, int strip_depth, float* c,
                        std::int64_t c_stride) {
    constexpr int kRows = L::kMaxRows < 12 ? L::kMaxRows : 12;
    for (int column = 0; column < columns; column += kStrip<L>) {
        const int wide = columns - column < kStrip<L> ? columns - column : kStrip<L>;
        for (int row = 0; row < rows; row += kRows) {
            const int count = rows - row < kRows ? rows - row : kRows;
            const float *left = a + row * a_stride, *strip = b + static_cast<std::int64_t>(column) * strip_depth;
            float* to = c + row * c_stride + column;
            if (wide == kStrip<L>) add_rows<L, kRows, L::kColumnVectors>(count, left, a_stride, strip, wide, depth, to, c_stride);
            else add_rows<L, kRows, 1>(count, left, a_stride, strip, wide, depth, to, c_stride);
        }
    }
}

// Keys and values of the tokens [begin, begin + count) in strips: keys [dim, kKeyTile], values [kKeyTile, dim]. What stands for no token in the last 16 keys
// is masked later.
template <typename L, typename V>
inline void pack_tile(const KvView& kv, int begin, int count, float* keys, float* values) {
    const int dim = kv.head_dim;
    for (int first = 0; first < count; first += 16) {
        const typename V::Stored* rows[16];
        for (int j = 0; j < 16; ++j) rows[j] = at<V>(kv.keys, kv, begin + (first + j < count ? first + j : 0));
        float* strip = keys + first / kStrip<L> * kStrip<L> * dim + first % kStrip<L>;
        for (int i = 0; i < dim; i += 16) {
            typename L::F square[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j) square[j] = V::load(rows[j] + i);
            L::transpose(square);
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j) L::store(strip + (i + j) * kStrip<L>, square[j]);
        }
    }
    for (int token = 0; token < count; ++token) {
        const auto* value = at<V>(kv.values, kv, begin + token);
        for (int i = 0; i < dim; i += 16) {
            const int column = i / kStrip<L> * kStrip<L>, wide = dim - column < kStrip<L> ? dim - column : kStrip<L>;
            L::store(values + column * kKeyTile + token * wide + i - column, V::load(value + i));
        }
    }
}

template <typename L, typename V>
void attend_block_stored(const QueryBlock& block, const KvView& kv, const PartialAttention& out) {
    const int dim = kv.head_dim, rows = block.rows;
    float* keys = block.workspace;
    float* values = keys + kKeyTile * dim;
    float* scores = values + kKeyTile * dim;         // [rows, kKeyTile]
    for (int row = 0; row < rows; ++row) {
        out.largest[row] = -__builtin_inff();
        out.total[row] = 0;
        for (int i = 0; i < dim; i += 16) L::store(out.values + row * dim + i, L::zero());
    }
    const int end = block.first_position + (rows + block.heads - 1) / block.heads;  // behind the last token
    for (int tile = 0; tile < end; tile += kKeyTile) {
        const int count = end - tile < kKeyTile ? end - tile : kKeyTile;
        pack_tile<L, V>(kv, tile, count, keys, values);
        // Rows before `first` end before this tile.
        const int first = tile > block.first_position ? (tile - block.first_position) * block.heads : 0;
        for (int i = first * kKeyTile; i < rows * kKeyTile; i += 16) L::store(scores + i, L::zero());
        add_product<L>(rows - first, (count + kStrip<L> - 1) / kStrip<L> * kStrip<L>, dim, block.queries + first * dim, dim, keys, dim,
                       scores + first * kKeyTile, kKeyTile);
        for (int row = first; row < rows; ++row) {
            const int before = block.first_position + row / block.heads + 1 - tile, seen = before < count ? before : count;  // tokens of the tile
            float* own = scores + row * kKeyTile;
            soften<L>(own, seen, dim, out.largest[row], out.total[row], out.values + row * dim);
            for (int i = seen; i < count; ++i) own[i] = 0;
        }
        add_product<L>(rows - first, dim, count, scores + first * kKeyTile, kKeyTile, values, kKeyTile, out.values + first * dim, dim);
    }
}

template <typename L>
void attend_token(const float* queries, int rows, const KvView& kv, DType dtype, int begin, int end, const PartialAttention& out) {
    if (dtype == DType::float32) attend_token_stored<L, Float32Values<L>>(queries, rows, kv, begin, end, out);
    else if (dtype == DType::float16) attend_token_stored<L, Float16Values<L>>(queries, rows, kv, begin, end, out);
    else attend_token_stored<L, Bfloat16Values<L>>(queries, rows, kv, begin, end, out);
}

template <typename L>
void attend_block(const QueryBlock& block, const KvView& kv, DType dtype, const PartialAttention& out) {
    if (dtype == DType::float32) attend_block_stored<L, Float32Values<L>>(block, kv, out);
    else if (dtype == DType::float16) attend_block_stored<L, Float16Values<L>>(block, kv, out);
    else attend_block_stored<L, Bfloat16Values<L>>(block, kv, out);
}

}  // namespace pocket
