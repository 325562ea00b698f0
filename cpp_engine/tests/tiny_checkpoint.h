// Small random Qwen3.5 checkpoints on disk, whole or broken on purpose.
//
//   TemporaryFolder folder;
//   TinyCheckpoint tiny;                       // change sizes, then make(), then change tensors and config
//   tiny.make();
//   tiny.write(folder.path());
#pragma once

#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/number_formats.h"

namespace pocket {

// A new folder, deleted with all it holds.
class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "pocket-XXXXXX").string();
        if (!::mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
        path_ = pattern;
    }
    ~TemporaryFolder() {
        std::error_code ignored;  // a destructor has nobody to tell
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    const std::filesystem::path& path() const { return path_; }

private:
    std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) throw std::runtime_error("can't write " + path.string());
}

// A tensor as a safetensors file has it.
struct StoredTensor {
    std::string type;                          // "F32", "F16", "BF16", "F8_E4M3"
    std::vector<std::int64_t> shape;
    std::string bytes;
};

using StoredTensors = std::map<std::string, StoredTensor>;

// `values` rounded to `type`.
inline StoredTensor store(const std::vector<float>& values, std::vector<std::int64_t> shape, const std::string& type) {
    StoredTensor stored{type, std::move(shape), {}};
    const auto append = [&](const auto& bits) { stored.bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits); };
    for (const float value : values) {
        if (type == "F32") append(value);
        else if (type == "BF16") append(to_bfloat16(value));
        else if (type == "F16") append(to_float16(value));
        else if (type == "F8_E4M3") append(to_float8_e4m3(value));
        else throw std::runtime_error("no type " + type);
    }
    return stored;
}

// The values of a stored tensor, without any scales.
inline std::vector<float> values_of(const StoredTensor& stored) {
    std::vector<float> values;
    const std::size_t size = stored.type == "F32" ? 4 : stored.type == "F8_E4M3" ? 1 : 2;
    for (std::size_t place = 0; place < stored.bytes.size(); place += size) {
        float value = 0;
        std::uint16_t half = 0;
        std::memcpy(size == 4 ? static_cast<void*>(&value) : static_cast<void*>(&half), stored.bytes.data() + place, size);
        if (stored.type == "BF16") value = from_bfloat16(half);
        if (stored.type == "F16") value = from_float16(half);
        if (stored.type == "F8_E4M3") value = from_float8_e4m3(static_cast<std::uint8_t>(stored.bytes[place]));
        values.push_back(value);
    }
    return values;
}

inline std::string shape_json(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (std::size_t place = 0; place < shape.size(); ++place) text += (place ? "," : "") + std::to_string(shape[place]);
    return text + "]";
}

// A whole safetensors file; `header` replaces the JSON that describes the tensors.
inline std::string safetensors_bytes(const StoredTensors& tensors, std::string header = {}) {
    std::string data, entries;
    for (const auto& [name, stored] : tensors) {
        entries += (entries.empty() ? "" : ",");
        entries += "\"" + name + "\":{\"dtype\":\"" + stored.type + "\",\"shape\":" + shape_json(stored.shape) + ",\"data_offsets\":[";
        entries += std::to_string(data.size()) + "," + std::to_string(data.size() + stored.bytes.size()) + "]}";
        data += stored.bytes;
    }
    if (header.empty()) {
        header += "{";
        header += entries + "}";
        header.resize((header.size() + 7) / 8 * 8, ' ');
    }
    const std::uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// Normal deviates of a seed, the same on every machine up to the last bit of log and cos.
class Noise {
public:
    explicit Noise(std::uint64_t seed) : state_(seed) {}

    float next() {
        const double radius = std::sqrt(-2 * std::log(1 - uniform()));
        return static_cast<float>(radius * std::cos(6.283185307179586 * uniform()));
    }

    double uniform() {  // [0, 1), splitmix64
        state_ += 0x9e3779b97f4a7c15u;
        std::uint64_t bits = state_;
        bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
        bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
        return static_cast<double>((bits ^ (bits >> 31)) >> 11) * 0x1p-53;
    }

private:
    std::uint64_t state_;
};

struct TinyCheckpoint {
    int vocab_size = 151, hidden_size = 48, intermediate_size = 80, num_layers = 5, full_attention_interval = 2;
    int num_heads = 4, num_kv_heads = 2, head_dim = 16;
    int num_key_heads = 2, num_value_heads = 6, key_dim = 32, value_dim = 16, conv_kernel = 4;
    int max_positions = 512;
    bool is_tied = false;
    bool is_multimodal = false;                // nested config, model.language_model., a tensor of a vision tower and one of a multi-token prediction head
    bool is_fp8 = false;                       // matrices in FP8 with block scales, but the table, the head, in_proj_a and in_proj_b
    std::string type = "F32";                  // of all that is not FP8
    std::uint64_t seed = 11;

    // What make() makes, and write() writes.
    StoredTensors tensors;
    std::map<std::string, std::string> config;  // key to JSON; where the config is nested, those of text_config

    std::string prefix() const { return is_multimodal ? "model.language_model." : "model."; }
    bool is_attention(int layer) const { return (layer + 1) % full_attention_interval == 0; }

    // Random weights, large enough that greedy answers wander.
    void make() {
        tensors.clear();
        Noise noise(seed);
        matrix(noise, prefix() + "embed_tokens.weight", vocab_size, hidden_size, 2.0f * std::sqrt(static_cast<float>(hidden_size)), false);
        if (!is_tied) matrix(noise, "lm_head.weight", vocab_size, hidden_size, 1, false);
        vector(noise, prefix() + "norm.weight", hidden_size, 0);
        for (int layer = 0; layer < num_layers; ++layer) make_layer(noise, prefix() + "layers." + std::to_string(layer) + ".", is_attention(layer));
        if (is_multimodal) {
            tensors["model.visual.patch_embed.proj.weight"] = store(std::vector<float>(6, 1), {2, 3}, type);
            tensors["mtp.fc.weight"] = store(std::vector<float>(2, 1), {1, 2}, type);
        }
        make_config();
    }

    // One file, or `num_shards` files with an index.
    void write(const std::filesystem::path& folder, int num_shards = 1) const {
        std::string text;
        for (const auto& [key, value] : config) text += (text.empty() ? "\"" : ", \"") + key + "\": " + value;
        text = "{" + text + "}";
        const std::string top = R"({"model_type": "qwen3_5", "tie_word_embeddings": )" + config.at("tie_word_embeddings");
        if (is_multimodal) text = top + ", \"text_config\": " + text + "}";
        write_file(folder / "config.json", text);
        if (num_shards == 1) return write_file(folder / "model.safetensors", safetensors_bytes(tensors));
        std::vector<StoredTensors> shards(static_cast<std::size_t>(num_shards));
        std::string index;
        std::size_t place = 0;
        for (const auto& [name, stored] : tensors) {
            const std::size_t shard = place++ % shards.size();
            shards[shard][name] = stored;
            index += (index.empty() ? "\"" : ", \"") + name + "\": \"" + shard_name(shard) + "\"";
        }
        for (std::size_t shard = 0; shard < shards.size(); ++shard) write_file(folder / shard_name(shard), safetensors_bytes(shards[shard]));
        write_file(folder / "model.safetensors.index.json", R"({"metadata": {"total_size": 1}, "weight_map": {)" + index + "}}");
    }

    static std::string shard_name(std::size_t shard) { return "model-" + std::to_string(shard) + ".safetensors"; }

private:
    void make_layer(Noise& noise, const std::string& layer, bool has_attention) {
        const int conv_dim = 2 * num_key_heads * key_dim + num_value_heads * value_dim, value_size = num_value_heads * value_dim;
        vector(noise, layer + "input_layernorm.weight", hidden_size, 0);
        vector(noise, layer + "post_attention_layernorm.weight", hidden_size, 0);
        if (has_attention) {
            matrix(noise, layer + "self_attn.q_proj.weight", 2 * num_heads * head_dim, hidden_size);
            matrix(noise, layer + "self_attn.k_proj.weight", num_kv_heads * head_dim, hidden_size);
            matrix(noise, layer + "self_attn.v_proj.weight", num_kv_heads * head_dim, hidden_size);
            matrix(noise, layer + "self_attn.o_proj.weight", hidden_size, num_heads * head_dim);
            vector(noise, layer + "self_attn.q_norm.weight", head_dim, 0);
            vector(noise, layer + "self_attn.k_norm.weight", head_dim, 0);
        } else {
            matrix(noise, layer + "linear_attn.in_proj_qkv.weight", conv_dim, hidden_size);
            matrix(noise, layer + "linear_attn.in_proj_z.weight", value_size, hidden_size);
            matrix(noise, layer + "linear_attn.in_proj_b.weight", num_value_heads, hidden_size, 1, false);
            matrix(noise, layer + "linear_attn.in_proj_a.weight", num_value_heads, hidden_size, 1, false);
            matrix(noise, layer + "linear_attn.out_proj.weight", hidden_size, value_size);
            matrix(noise, layer + "linear_attn.conv1d.weight", conv_dim, conv_kernel, 1, false);
            tensors[layer + "linear_attn.conv1d.weight"].shape = {conv_dim, 1, conv_kernel};
            std::vector<float> rates(static_cast<std::size_t>(num_value_heads));
            for (float& rate : rates) rate = std::abs(noise.next()) / 2;
            tensors[layer + "linear_attn.A_log"] = store(rates, {num_value_heads}, type);
            vector(noise, layer + "linear_attn.dt_bias", num_value_heads, 1);
            vector(noise, layer + "linear_attn.norm.weight", value_dim, 1);
        }
        matrix(noise, layer + "mlp.gate_proj.weight", intermediate_size, hidden_size);
        matrix(noise, layer + "mlp.up_proj.weight", intermediate_size, hidden_size);
        matrix(noise, layer + "mlp.down_proj.weight", hidden_size, intermediate_size);
    }

    void vector(Noise& noise, const std::string& name, int size, float middle) {
        std::vector<float> values(static_cast<std::size_t>(size));
        for (float& value : values) value = middle + noise.next() / 4;
        tensors[name] = store(values, {size}, type);
    }

    void matrix(Noise& noise, const std::string& name, std::int64_t rows, std::int64_t columns, float scale = 1, bool may_be_fp8 = true) {
        std::vector<float> values(static_cast<std::size_t>(rows * columns));
        for (float& value : values) value = noise.next() * scale / std::sqrt(static_cast<float>(columns));
        if (!is_fp8 || !may_be_fp8) {
            tensors[name] = store(values, {rows, columns}, type);
            return;
        }
        const std::int64_t high = (rows + 127) / 128, wide = (columns + 127) / 128;
        std::vector<float> scales(static_cast<std::size_t>(high * wide));
        for (float& one : scales) one = from_bfloat16(to_bfloat16(static_cast<float>(noise.uniform() + 0.5) / 100));
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t column = 0; column < columns; ++column) {
                values[static_cast<std::size_t>(row * columns + column)] /= scales[static_cast<std::size_t>(row / 128 * wide + column / 128)];
            }
        }
        tensors[name] = store(values, {rows, columns}, "F8_E4M3");
        tensors[name + "_scale_inv"] = store(scales, {high, wide}, "BF16");
    }

    void make_config() {
        const auto number = [](int value) { return std::to_string(value); };
        config = {
            {"model_type", "\"qwen3_5_text\""},
            {"vocab_size", number(vocab_size)},
            {"hidden_size", number(hidden_size)},
            {"intermediate_size", number(intermediate_size)},
            {"num_hidden_layers", number(num_layers)},
            {"full_attention_interval", number(full_attention_interval)},
            {"num_attention_heads", number(num_heads)},
            {"num_key_value_heads", number(num_kv_heads)},
            {"head_dim", number(head_dim)},
            {"linear_num_key_heads", number(num_key_heads)},
            {"linear_num_value_heads", number(num_value_heads)},
            {"linear_key_head_dim", number(key_dim)},
            {"linear_value_head_dim", number(value_dim)},
            {"linear_conv_kernel_dim", number(conv_kernel)},
            {"max_position_embeddings", number(max_positions)},
            {"rms_norm_eps", "1e-06"},
            {"hidden_act", "\"silu\""},
            {"tie_word_embeddings", is_tied ? "true" : "false"},
            {"rope_parameters", R"({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]})"},
        };
        if (is_fp8) {
            config["quantization_config"] = R"({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],)"
                                            R"( "modules_to_not_convert": ["lm_head", "embed_tokens", "in_proj_a", "in_proj_b", "conv1d"]})";
        }
    }
};

}  // namespace pocket
