// A panel of 16 weight rows times some rows of x. `L` is a set of lanes; included inside POCKET_TARGET_BEGIN.
#pragma once

namespace pocket {

constexpr int kPrefetchAhead = 4096;  // bytes that are asked of memory before their use; past a matrix's end nothing is read

// Sums in flight for one row: with few rows, several hide the latency of additions.
constexpr int sums_of(int rows) { return rows <= 2 ? 4 : rows == 3 ? 2 : 1; }

// Formats whose columns lie one by one.
template <typename L>
struct Float32Panel {
    static constexpr int kBytes = 4;
    static typename L::F load(const std::byte* p) { return L::load(reinterpret_cast<const float*>(p)); }
};

template <typename L>
struct Float16Panel {
    static constexpr int kBytes = 2;
    static typename L::F load(const std::byte* p) { return L::load_float16(reinterpret_cast<const std::uint16_t*>(p)); }
};

template <typename L>
struct Float8Panel {
    static constexpr int kBytes = 1;
    static typename L::F load(const std::byte* p) { return L::load_float8(reinterpret_cast<const std::uint8_t*>(p)); }
};

// Adds the products of `columns` columns, a multiple of 4, to sums.
template <typename L, typename Panel, int N, int S>
inline void add_columns(const std::byte* panel, const float* x, std::int64_t stride, std::int64_t columns, typename L::F (&sums)[N][S]) {
    for (std::int64_t k = 0; k < columns; k += 4) {
        L::prefetch(panel + kPrefetchAhead);
        if constexpr (Panel::kBytes == 4) {
            L::prefetch(panel + kPrefetchAhead + 64);
            L::prefetch(panel + kPrefetchAhead + 128);
            L::prefetch(panel + kPrefetchAhead + 192);
        } else if constexpr (Panel::kBytes == 2) {
            L::prefetch(panel + kPrefetchAhead + 64);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j, panel += 16 * Panel::kBytes) {
            const auto weight = Panel::load(panel);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sums[n][j % S] = L::fma(weight, L::set(x[n * stride + k + j]), sums[n][j % S]);
        }
    }
}

template <typename L, int N, int S>
inline void clear(typename L::F (&sums)[N][S]) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) sums[n][s] = L::zero();
}

template <typename L, int S>
inline typename L::F total(const typename L::F (&sums)[S]) {
    if constexpr (S == 1) return sums[0];
    else if constexpr (S == 2) return L::add(sums[0], sums[1]);
    else return L::add(L::add(sums[0], sums[1]), L::add(sums[2], sums[3]));
}

template <typename L, typename Panel>
struct ByColumns {
    template <int N>
    static void run(const std::byte* panel, const void* x, std::int64_t columns, float* out) {
        typename L::F sums[N][sums_of(N)];
        clear<L>(sums);
        add_columns<L, Panel>(panel, static_cast<const float*>(x), columns, columns, sums);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) L::store(out + n * 16, total<L>(sums[n]));
    }
    static constexpr int kItemBytes = 4;
};

template <typename L>
struct ByScaledBlocks {  // float8
    template <int N>
    static void run(const std::byte* panel, const void* x, std::int64_t columns, float* out) {
        typename L::F results[N][1];
        clear<L>(results);
        for (std::int64_t k = 0; k < columns; k += kScaleBlock) {
            const std::int64_t count = columns - k < kScaleBlock ? columns - k : kScaleBlock;
            const auto scale = L::mul(L::load(reinterpret_cast<const float*>(panel)), L::set(256.0f));  // load_float8 gives 1 / 256 of a number
            panel += 16 * sizeof(float);
            typename L::F sums[N][sums_of(N)];
            clear<L>(sums);
            add_columns<L, Float8Panel<L>>(panel, static_cast<const float*>(x) + k, columns, count, sums);
            panel += 16 * count;
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) results[n][0] = L::fma(scale, total<L>(sums[n]), results[n][0]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) L::store(out + n * 16, results[n][0]);
    }
    static constexpr int kItemBytes = 4;
};

template <typename L>
struct ByPairs {  // bfloat16, x as float32
    template <int N>
    static void run(const std::byte* panel, const void* x, std::int64_t columns, float* out) {
        typename L::F sums[N][sums_of(N)];
        clear<L>(sums);
        const float* at = static_cast<const float*>(x);
        for (std::int64_t k = 0; k < columns; k += 4) {
            L::prefetch(panel + kPrefetchAhead);
            L::prefetch(panel + kPrefetchAhead + 64);
#pragma GCC unroll 2
            for (int j = 0; j < 4; j += 2, panel += 64) {
                typename L::F first, second;
                L::load_pairs(reinterpret_cast<const std::uint16_t*>(panel), first, second);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) {
                    constexpr int S = sums_of(N);
                    sums[n][j % S] = L::fma(first, L::set(at[n * columns + k + j]), sums[n][j % S]);
                    sums[n][(j + 1) % S] = L::fma(second, L::set(at[n * columns + k + j + 1]), sums[n][(j + 1) % S]);
                }
            }
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) L::store(out + n * 16, total<L>(sums[n]));
    }
    static constexpr int kItemBytes = 4;
};

template <typename Product, int N>
inline void run_rows(int rows, const std::byte* panel, const void* x, std::int64_t columns, float* out) {
    if (rows == N) return Product::template run<N>(panel, x, columns, out);
    if constexpr (N > 1) run_rows<Product, N - 1>(rows, panel, x, columns, out);
}

// Groups of about equal size, each of at most kMaxRows rows: a panel is read from memory once and from the cache for the others.
template <typename L, typename Product>
void product(const std::byte* panel, const void* x, int rows, std::int64_t columns, float* sums) {
    int groups = (rows + L::kMaxRows - 1) / L::kMaxRows;
    for (int done = 0; done < rows; --groups) {
        const int count = (rows - done + groups - 1) / groups;
        run_rows<Product, L::kMaxRows>(count, panel, static_cast<const std::byte*>(x) + done * columns * Product::kItemBytes, columns, sums + done * 16);
        done += count;
    }
}

}  // namespace pocket
