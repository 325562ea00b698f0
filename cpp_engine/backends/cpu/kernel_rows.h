// Element-wise loops over rows. `L` is a set of lanes (lanes_*.h); included inside POCKET_TARGET_BEGIN.
#pragma once

namespace pocket {

// e^x, some 1e-7 of it wrong; x is cut to [-87, 88], NaN stays NaN.
template <typename L>
inline typename L::F exponential(typename L::F x) {
    x = L::min(L::set(88.0f), L::max(L::set(-87.0f), x));  // in this order NaN passes
    const auto whole = L::round(L::mul(x, L::set(1.44269504f)));
    // ln 2 in two parts, the first of so few bits that its product is exact
    const auto rest = L::fma(whole, L::set(2.12194440e-4f), L::fma(whole, L::set(-0.693359375f), x));
    auto p = L::set(1.0f / 5040);
    p = L::fma(p, rest, L::set(1.0f / 720));
    p = L::fma(p, rest, L::set(1.0f / 120));
    p = L::fma(p, rest, L::set(1.0f / 24));
    p = L::fma(p, rest, L::set(1.0f / 6));
    p = L::fma(p, rest, L::set(0.5f));
    p = L::fma(p, rest, L::set(1.0f));
    p = L::fma(p, rest, L::set(1.0f));
    return L::scale2(p, whole);
}

template <typename L>
inline typename L::F sigmoid(typename L::F x) {
    return L::div(L::set(1.0f), L::add(L::set(1.0f), exponential<L>(L::sub(L::zero(), x))));
}

template <typename L>
inline typename L::F silu(typename L::F x) {
    return L::div(x, L::add(L::set(1.0f), exponential<L>(L::sub(L::zero(), x))));
}

// The first `count` of 16 values, then zeros.
template <typename L>
inline typename L::F load_some(const float* x, std::int64_t count) {
    if (count >= 16) return L::load(x);
    float lanes[16] = {};
    for (std::int64_t i = 0; i < count; ++i) lanes[i] = x[i];
    return L::load(lanes);
}

template <typename L>
inline void store_some(float* to, typename L::F x, int count) {
    if (count >= 16) return L::store(to, x);
    float lanes[16];
    L::store(lanes, x);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

// 1 / sqrt(mean(x^2) + eps)
template <typename L>
inline float norm_scale(const float* x, std::int64_t size, float eps) {
    auto squares = L::zero();
    for (std::int64_t i = 0; i < size; i += 16) {
        const auto value = load_some<L>(x + i, size - i);
        squares = L::fma(value, value, squares);
    }
    return 1.0f / __builtin_sqrtf(L::sum(squares) / static_cast<float>(size) + eps);
}

template <typename L>
void prepare(const float* x, std::int64_t stride, int rows, std::int64_t columns, std::int64_t padded, const Norm* norm, RowForm form, void* out) {
    for (int row = 0; row < rows; ++row) {
        const float* from = x + row * stride;
        const auto scale = L::set(norm ? norm_scale<L>(from, columns, norm->eps) : 1.0f);
        for (std::int64_t i = 0; i < padded; i += 16) {
            auto value = load_some<L>(from + i, columns - i);
            if (norm) value = L::mul(L::mul(value, scale), load_some<L>(norm->weight + i, columns - i));
            const std::int64_t at = form == RowForm::tiles ? row / 16 * 16 * padded + i / 32 * 512 + row % 16 * 32 + i % 32 : row * padded + i;
            if (form == RowForm::bfloat16 || form == RowForm::tiles) L::store_bfloat16(static_cast<std::uint16_t*>(out) + at, value);
            else L::store(static_cast<float*>(out) + at, form == RowForm::float32 ? value : L::round_to_bfloat16(value));
        }
    }
}

template <typename L>
void finish(Epilogue epilogue, const float* sums, const float* ups, int rows, int valid, float* out, std::int64_t stride) {
    for (int row = 0; row < rows; ++row, sums += 16, out += stride) {
        auto value = L::load(sums);
        if (epilogue == Epilogue::add) value = L::add(value, load_some<L>(out, valid));
        if (epilogue == Epilogue::swiglu) value = L::mul(silu<L>(value), L::load(ups + row * 16));
        store_some<L>(out, value, valid);
    }
}

template <typename L>
void store_values(const float* x, int count, DType dtype, void* out) {
    for (int i = 0; i < count; i += 16) {
        const auto value = L::load(x + i);
        if (dtype == DType::float32) L::store(static_cast<float*>(out) + i, value);
        else if (dtype == DType::float16) L::store_float16(static_cast<std::uint16_t*>(out) + i, value);
        else L::store_bfloat16(static_cast<std::uint16_t*>(out) + i, value);
    }
}

template <typename L>
void unit_rows(float* x, std::int64_t stride, int rows, int size, float scale) {
    for (int row = 0; row < rows; ++row, x += stride) {
        auto squares = L::zero();
        for (int i = 0; i < size; i += 16) squares = L::fma(L::load(x + i), L::load(x + i), squares);
        const auto factor = L::set(scale / __builtin_sqrtf(L::sum(squares) + 1e-6f));
        for (int i = 0; i < size; i += 16) L::store(x + i, L::mul(L::load(x + i), factor));
    }
}

template <typename L>
void gate_norm(const float* x, const Norm& norm, const float* gates, int size, float* out) {
    const auto scale = L::set(norm_scale<L>(x, size, norm.eps));
    for (int i = 0; i < size; i += 16) {
        L::store(out + i, L::mul(L::mul(L::mul(L::load(x + i), scale), L::load(norm.weight + i)), silu<L>(L::load(gates + i))));
    }
}

template <typename L>
void scan_logits(const float* logits, const std::uint32_t* mask, int begin, int end, float inverse_temperature, LogitScan& scan, float* block_largest) {
    const auto lowest = L::set(-__builtin_inff());
    auto largest = lowest, largest_allowed = lowest;
    unsigned nan = 0;
    for (int block = begin; block < end; block += kLogitBlock, ++block_largest) {
        const int stop = block + kLogitBlock < end ? block + kLogitBlock : end;
        auto own = lowest;
        for (int i = block; i < stop; i += 16) {
            const unsigned inside = stop - i >= 16 ? 0xffffu : (1u << (stop - i)) - 1;
            const auto value = L::where(inside, load_some<L>(logits + i, stop - i), lowest);
            nan |= L::unordered(value);
            largest = L::max(value, largest);
            own = L::max(mask ? L::where(mask[i / 32] >> (i % 32), value, lowest) : value, own);
        }
        *block_largest = L::largest(own);
        largest_allowed = L::max(own, largest_allowed);
    }
    scan.has_nan = nan != 0;
    scan.largest = L::largest(largest);
    scan.largest_allowed = L::largest(largest_allowed);
    auto sum = L::zero(), scaled = L::zero();
    const auto top = L::set(scan.largest), allowed = L::set(scan.largest_allowed), factor = L::set(inverse_temperature);
    const bool any = scan.largest_allowed > -__builtin_inff();
    const auto cut = L::set(-87.0f);
    for (int i = begin; i < end; i += 16) {
        const unsigned inside = end - i >= 16 ? 0xffffu : (1u << (end - i)) - 1;
        const auto value = L::where(inside, load_some<L>(logits + i, end - i), lowest);
        auto difference = L::sub(value, top);
        sum = L::add(sum, L::where(L::at_least(difference, cut), exponential<L>(difference), L::zero()));
        if (!any) continue;
        difference = L::mul(L::sub(value, allowed), factor);
        const unsigned bits = mask ? mask[i / 32] >> (i % 32) & 0xffffu : 0xffffu;
        scaled = L::add(scaled, L::where(bits & L::at_least(difference, cut), exponential<L>(difference), L::zero()));
    }
    scan.sum = L::sum(sum);
    scan.sum_scaled = L::sum(scaled);
}

}  // namespace pocket
