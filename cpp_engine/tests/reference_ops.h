// The operators once more, straight from their formulas, in float64 and token by token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "pocket/device.h"

namespace pocket::reference {

using Vector = std::vector<double>;

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }

inline Vector norm(const Vector& x, const std::vector<float>& weight, double eps) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    Vector out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) out[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + eps) * weight[i];
    return out;
}

template <typename T>
Vector slice(const std::vector<T>& from, std::size_t start, std::size_t count) {
    return Vector(from.begin() + static_cast<std::ptrdiff_t>(start), from.begin() + static_cast<std::ptrdiff_t>(start + count));
}

// One row's keys and values of one layer. `round` is what the cache does to a number.
class Attention {
public:
    AttentionShape shape;
    std::vector<float> query_weight, key_weight;
    double eps = 0;
    double theta = 0;
    double (*round)(double) = nullptr;

    // projections of one token -> [num_heads * head_dim]
    Vector token(const Vector& projections) {
        const std::size_t dim = static_cast<std::size_t>(shape.head_dim), heads = static_cast<std::size_t>(shape.num_heads),
                          kv_heads = static_cast<std::size_t>(shape.num_kv_heads);
        const int position = static_cast<int>(keys_.size() / kv_heads);
        for (std::size_t head = 0; head < kv_heads; ++head) {
            keys_.push_back(cached(rotated(norm(slice(projections, (2 * heads + head) * dim, dim), key_weight, eps), position)));
            values_.push_back(cached(slice(projections, (2 * heads + kv_heads + head) * dim, dim)));
        }
        Vector out;
        for (std::size_t head = 0; head < heads; ++head) {
            const Vector query = rotated(norm(slice(projections, 2 * head * dim, dim), query_weight, eps), position),
                         gate = slice(projections, (2 * head + 1) * dim, dim);
            const std::size_t kv_head = head / (heads / kv_heads);
            Vector scores, values(dim, 0.0);
            for (std::size_t at = kv_head; at < keys_.size(); at += kv_heads) {
                double score = 0;
                for (std::size_t i = 0; i < dim; ++i) score += query[i] * keys_[at][i];
                scores.push_back(score / std::sqrt(static_cast<double>(dim)));
            }
            const double largest = *std::max_element(scores.begin(), scores.end());
            double total = 0;
            for (double& score : scores) total += score = std::exp(score - largest);
            for (std::size_t token = 0; token < scores.size(); ++token)
                for (std::size_t i = 0; i < dim; ++i) values[i] += scores[token] / total * values_[token * kv_heads + kv_head][i];
            for (std::size_t i = 0; i < dim; ++i) out.push_back(values[i] * sigmoid(gate[i]));
        }
        return out;
    }

private:
    Vector rotated(Vector x, int position) const {
        const int half = shape.rotary_dim / 2;
        for (int i = 0; i < half; ++i) {
            const double angle = position * std::pow(theta, -2.0 * i / shape.rotary_dim), first = x[static_cast<std::size_t>(i)],
                         second = x[static_cast<std::size_t>(i + half)];
            x[static_cast<std::size_t>(i)] = first * std::cos(angle) - second * std::sin(angle);
            x[static_cast<std::size_t>(i + half)] = second * std::cos(angle) + first * std::sin(angle);
        }
        return x;
    }
    Vector cached(Vector x) const {
        for (double& value : x) value = round(value);
        return x;
    }

    std::vector<Vector> keys_, values_;  // token after token, [num_kv_heads] each
};

// One row's state of one layer, in the layout of DeltaNetShape::state_size.
class DeltaNet {
public:
    DeltaNetShape shape;
    std::vector<float> conv, rate, dt_bias, norm_weight;
    double eps = 0;
    Vector state;

    // projections of one token -> [value_size]
    Vector token(const Vector& projections) {
        const std::size_t key_dim = static_cast<std::size_t>(shape.key_dim), value_dim = static_cast<std::size_t>(shape.value_dim),
                          conv_dim = static_cast<std::size_t>(shape.conv_dim());
        const std::size_t heads = static_cast<std::size_t>(shape.num_value_heads), key_heads = static_cast<std::size_t>(shape.num_key_heads),
                          past = static_cast<std::size_t>(shape.conv_kernel - 1);
        const std::size_t matrix = key_dim * value_dim, tail = heads * matrix;
        Vector mixed(conv_dim);
        for (std::size_t i = 0; i < conv_dim; ++i) {
            double sum = projections[i] * conv[past * conv_dim + i];
            for (std::size_t j = 0; j < past; ++j) sum += state[tail + j * conv_dim + i] * conv[j * conv_dim + i];
            mixed[i] = silu(sum);
            for (std::size_t j = 0; j + 1 < past; ++j) state[tail + j * conv_dim + i] = state[tail + (j + 1) * conv_dim + i];
            state[tail + (past - 1) * conv_dim + i] = projections[i];
        }
        const std::size_t z = conv_dim, b = z + heads * value_dim, a = b + heads;
        Vector out;
        for (std::size_t head = 0; head < heads; ++head) {
            const std::size_t key_head = head / (heads / key_heads);
            Vector query = slice(mixed, key_head * key_dim, key_dim), key = slice(mixed, (key_heads + key_head) * key_dim, key_dim),
                   value = slice(mixed, 2 * key_heads * key_dim + head * value_dim, value_dim);
            unit(query, 1.0 / std::sqrt(static_cast<double>(key_dim)));
            unit(key, 1.0);
            const double decay = std::exp(rate[head] * std::log1p(std::exp(projections[a + head] + dt_bias[head]))), beta = sigmoid(projections[b + head]);
            double* s = state.data() + head * matrix;
            Vector read(value_dim, 0.0);
            for (std::size_t column = 0; column < value_dim; ++column) {
                double known = 0;
                for (std::size_t i = 0; i < key_dim; ++i) known += (s[i * value_dim + column] *= decay) * key[i];
                for (std::size_t i = 0; i < key_dim; ++i) {
                    s[i * value_dim + column] += key[i] * beta * (value[column] - known);
                    read[column] += s[i * value_dim + column] * query[i];
                }
            }
            const Vector normed = norm(read, norm_weight, eps);
            for (std::size_t i = 0; i < value_dim; ++i) out.push_back(normed[i] * silu(projections[z + head * value_dim + i]));
        }
        return out;
    }

private:
    static void unit(Vector& x, double scale) {
        double squares = 0;
        for (const double value : x) squares += value * value;
        for (double& value : x) value *= scale / std::sqrt(squares + 1e-6);
    }
};

}  // namespace pocket::reference
