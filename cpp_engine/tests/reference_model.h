// Qwen3.5 in double precision, a token after the other, as the papers and transformers' documentation say it: what the engine's answers are measured by.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tiny_checkpoint.h"

namespace pocket {

class ReferenceModel {
public:
    using Values = std::vector<double>;

    explicit ReferenceModel(const TinyCheckpoint& tiny) : tiny_(tiny) {
        for (const auto& [name, stored] : tiny.tensors) {
            if (name.ends_with("_scale_inv")) continue;
            const std::vector<float> values = values_of(stored);
            Values& kept = tensors_[name] = Values(values.begin(), values.end());
            const auto scales = tiny.tensors.find(name + "_scale_inv");
            if (scales == tiny.tensors.end()) continue;
            const std::vector<float> factors = values_of(scales->second);
            const auto columns = static_cast<std::size_t>(stored.shape[1]), wide = static_cast<std::size_t>(scales->second.shape[1]);
            for (std::size_t place = 0; place < kept.size(); ++place) kept[place] *= factors[place / columns / 128 * wide + place % columns / 128];
        }
    }

    // The logits after each of `token_ids`, [vocab_size] each.
    std::vector<Values> logits(const std::vector<std::int32_t>& token_ids) const {
        std::vector<Values> hidden;
        const Values& table = tensor("embed_tokens.weight");
        const auto size = static_cast<std::size_t>(tiny_.hidden_size);
        for (const std::int32_t id : token_ids) {
            const auto row = table.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(id) * size);
            hidden.emplace_back(row, row + static_cast<std::ptrdiff_t>(size));
        }
        for (int layer = 0; layer < tiny_.num_layers; ++layer) {
            const std::string name = "layers." + std::to_string(layer) + ".";
            std::vector<Values> inputs;
            for (const Values& x : hidden) inputs.push_back(norm(x, tensor(name + "input_layernorm.weight"), 1));
            const std::vector<Values> mixed = tiny_.is_attention(layer) ? attend(name + "self_attn.", inputs) : remember(name + "linear_attn.", inputs);
            for (std::size_t token = 0; token < hidden.size(); ++token) {
                Values& x = hidden[token];
                add(x, mixed[token]);
                const Values input = norm(x, tensor(name + "post_attention_layernorm.weight"), 1);
                Values gate = product(tensor(name + "mlp.gate_proj.weight"), input);
                const Values up = product(tensor(name + "mlp.up_proj.weight"), input);
                for (std::size_t place = 0; place < gate.size(); ++place) gate[place] = silu(gate[place]) * up[place];
                add(x, product(tensor(name + "mlp.down_proj.weight"), gate));
            }
        }
        const auto head = tensors_.find("lm_head.weight");
        std::vector<Values> all;
        for (const Values& x : hidden) all.push_back(product(head == tensors_.end() ? table : head->second, norm(x, tensor("norm.weight"), 1)));
        return all;
    }

private:
    const Values& tensor(const std::string& name) const { return tensors_.at(tiny_.prefix() + name); }

    static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
    static double silu(double x) { return x * sigmoid(x); }

    static void add(Values& x, const Values& y) {
        for (std::size_t place = 0; place < x.size(); ++place) x[place] += y[place];
    }

    static Values product(const Values& matrix, const Values& x) {
        Values out(matrix.size() / x.size());
        for (std::size_t row = 0; row < out.size(); ++row) {
            for (std::size_t place = 0; place < x.size(); ++place) out[row] += matrix[row * x.size() + place] * x[place];
        }
        return out;
    }

    static Values norm(Values x, const Values& weight, double offset) {
        double squares = 0;
        for (const double value : x) squares += value * value;
        const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
        for (std::size_t place = 0; place < x.size(); ++place) x[place] *= scale * (weight[place] + offset);
        return x;
    }

    static Values part(const Values& x, std::size_t start, std::size_t count) {
        return Values(x.begin() + static_cast<std::ptrdiff_t>(start), x.begin() + static_cast<std::ptrdiff_t>(start + count));
    }

    Values rotated(Values x, std::size_t position) const {
        const std::size_t rotary = x.size() / 4, half = rotary / 2;
        for (std::size_t pair = 0; pair < half; ++pair) {
            const double angle = static_cast<double>(position) * std::pow(1e4, -2.0 * static_cast<double>(pair) / static_cast<double>(rotary));
            const double a = x[pair], b = x[pair + half];
            x[pair] = a * std::cos(angle) - b * std::sin(angle);
            x[pair + half] = b * std::cos(angle) + a * std::sin(angle);
        }
        return x;
    }

    std::vector<Values> attend(const std::string& name, const std::vector<Values>& inputs) const {
        const auto heads = static_cast<std::size_t>(tiny_.num_heads), kv_heads = static_cast<std::size_t>(tiny_.num_kv_heads);
        const auto dim = static_cast<std::size_t>(tiny_.head_dim);
        std::vector<std::vector<Values>> keys(kv_heads), values(kv_heads);
        std::vector<Values> outputs;
        for (std::size_t token = 0; token < inputs.size(); ++token) {
            const Values queries = product(tensor(name + "q_proj.weight"), inputs[token]), key = product(tensor(name + "k_proj.weight"), inputs[token]);
            const Values value = product(tensor(name + "v_proj.weight"), inputs[token]);
            for (std::size_t head = 0; head < kv_heads; ++head) {
                keys[head].push_back(rotated(norm(part(key, head * dim, dim), tensor(name + "k_norm.weight"), 1), token));
                values[head].push_back(part(value, head * dim, dim));
            }
            Values read;
            for (std::size_t head = 0; head < heads; ++head) {
                const Values query = rotated(norm(part(queries, 2 * head * dim, dim), tensor(name + "q_norm.weight"), 1), token);
                const std::size_t kv_head = head / (heads / kv_heads);
                Values shares, sum(dim);
                double total = 0;
                for (const Values& other : keys[kv_head]) {
                    shares.push_back(std::exp(product(other, query)[0] / std::sqrt(static_cast<double>(dim))));
                    total += shares.back();
                }
                for (std::size_t other = 0; other < shares.size(); ++other) {
                    for (std::size_t place = 0; place < dim; ++place) sum[place] += shares[other] / total * values[kv_head][other][place];
                }
                for (std::size_t place = 0; place < dim; ++place) read.push_back(sum[place] * sigmoid(queries[(2 * head + 1) * dim + place]));
            }
            outputs.push_back(product(tensor(name + "o_proj.weight"), read));
        }
        return outputs;
    }

    std::vector<Values> remember(const std::string& name, const std::vector<Values>& inputs) const {
        const auto key_heads = static_cast<std::size_t>(tiny_.num_key_heads), heads = static_cast<std::size_t>(tiny_.num_value_heads);
        const auto key_dim = static_cast<std::size_t>(tiny_.key_dim), value_dim = static_cast<std::size_t>(tiny_.value_dim);
        const auto kernel = static_cast<std::size_t>(tiny_.conv_kernel);
        const Values& conv = tensor(name + "conv1d.weight");
        std::vector<Values> before, states(heads, Values(key_dim * value_dim)), outputs;
        for (const Values& input : inputs) {
            before.push_back(product(tensor(name + "in_proj_qkv.weight"), input));
            Values mixed(before.back().size());
            for (std::size_t channel = 0; channel < mixed.size(); ++channel) {
                for (std::size_t place = 0; place < kernel; ++place) {
                    if (before.size() + place < kernel) continue;
                    mixed[channel] += conv[channel * kernel + place] * before[before.size() + place - kernel][channel];
                }
                mixed[channel] = silu(mixed[channel]);
            }
            const Values z = product(tensor(name + "in_proj_z.weight"), input), b = product(tensor(name + "in_proj_b.weight"), input);
            const Values a = product(tensor(name + "in_proj_a.weight"), input);
            Values read;
            for (std::size_t head = 0; head < heads; ++head) {
                const std::size_t key_head = head / (heads / key_heads);
                const Values query = unit(part(mixed, key_head * key_dim, key_dim)), key = unit(part(mixed, (key_heads + key_head) * key_dim, key_dim));
                const Values value = part(mixed, 2 * key_heads * key_dim + head * value_dim, value_dim);
                const double rate = -std::exp(tensor(name + "A_log")[head]), step = std::log1p(std::exp(a[head] + tensor(name + "dt_bias")[head]));
                const double decay = std::exp(rate * step);
                Values &state = states[head], seen(value_dim), out(value_dim);
                for (double& one : state) one *= decay;
                for (std::size_t i = 0; i < key_dim; ++i) {
                    for (std::size_t j = 0; j < value_dim; ++j) seen[j] += key[i] * state[i * value_dim + j];
                }
                for (std::size_t i = 0; i < key_dim; ++i) {
                    for (std::size_t j = 0; j < value_dim; ++j) {
                        state[i * value_dim + j] += key[i] * sigmoid(b[head]) * (value[j] - seen[j]);
                        out[j] += query[i] / std::sqrt(static_cast<double>(key_dim)) * state[i * value_dim + j];
                    }
                }
                out = norm(out, tensor(name + "norm.weight"), 0);
                for (std::size_t place = 0; place < value_dim; ++place) read.push_back(out[place] * silu(z[head * value_dim + place]));
            }
            outputs.push_back(product(tensor(name + "out_proj.weight"), read));
        }
        return outputs;
    }

    static Values unit(Values x) {
        double squares = 1e-6;
        for (const double value : x) squares += value * value;
        for (double& value : x) value /= std::sqrt(squares);
        return x;
    }

    TinyCheckpoint tiny_;
    std::map<std::string, Values> tensors_;
};

}  // namespace pocket
