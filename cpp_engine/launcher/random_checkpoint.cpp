#include "random_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/splitmix.h"
#include "json_writer.h"
#include "pocket/error.h"

namespace pocket::launcher {

namespace {

struct Shape {
    const char* name;
    int hidden, layers, intermediate, heads, kv_heads, value_heads;
    bool is_tied;
    int key_heads = 16, head_dim = 256, linear_dim = 128, vocab = 248320, max_positions = 262144;

    int conv_dim() const { return 2 * key_heads * linear_dim + value_heads * linear_dim; }
    int value_size() const { return value_heads * linear_dim; }
};

constexpr Shape shapes[] = {
    {"qwen3.5-0.8b", 1024, 24, 3584, 8, 2, 16, true},
    {"qwen3.5-2b", 2048, 24, 6144, 8, 2, 16, true},
    {"qwen3.5-4b", 2560, 32, 9216, 16, 4, 32, true},
    {"qwen3.5-9b", 4096, 32, 12288, 16, 4, 32, false},
    {"tiny", 64, 4, 160, 4, 2, 4, true, 2, 32, 16, 1000, 8192},
};
constexpr int conv_kernel = 4, full_attention_interval = 4;

// A tensor to be written: normal deviates of 0.02, or a constant where `is_constant`.
struct Entry {
    std::string name;
    std::vector<std::int64_t> sizes;
    bool is_constant = false;
    float constant = 0;

    std::int64_t num_elements() const {
        std::int64_t count = 1;
        for (const std::int64_t size : sizes) count *= size;
        return count;
    }
};

std::vector<Entry> entries_of(const Shape& shape) {
    std::vector<Entry> entries = {{"model.embed_tokens.weight", {shape.vocab, shape.hidden}}, {"model.norm.weight", {shape.hidden}, true}};
    if (!shape.is_tied) entries.push_back({"lm_head.weight", {shape.vocab, shape.hidden}});
    for (int number = 0; number < shape.layers; ++number) {
        const std::string layer = "model.layers." + std::to_string(number) + ".";
        const auto matrix = [&](const char* name, int rows, int columns) { entries.push_back({layer + name, {rows, columns}}); };
        const auto vector = [&](const char* name, int size, float value) { entries.push_back({layer + name, {size}, true, value}); };
        vector("input_layernorm.weight", shape.hidden, 0);
        vector("post_attention_layernorm.weight", shape.hidden, 0);
        if ((number + 1) % full_attention_interval == 0) {
            matrix("self_attn.q_proj.weight", 2 * shape.heads * shape.head_dim, shape.hidden);
            matrix("self_attn.k_proj.weight", shape.kv_heads * shape.head_dim, shape.hidden);
            matrix("self_attn.v_proj.weight", shape.kv_heads * shape.head_dim, shape.hidden);
            matrix("self_attn.o_proj.weight", shape.hidden, shape.heads * shape.head_dim);
            vector("self_attn.q_norm.weight", shape.head_dim, 0);
            vector("self_attn.k_norm.weight", shape.head_dim, 0);
        } else {
            matrix("linear_attn.in_proj_qkv.weight", shape.conv_dim(), shape.hidden);
            matrix("linear_attn.in_proj_z.weight", shape.value_size(), shape.hidden);
            matrix("linear_attn.in_proj_b.weight", shape.value_heads, shape.hidden);
            matrix("linear_attn.in_proj_a.weight", shape.value_heads, shape.hidden);
            matrix("linear_attn.out_proj.weight", shape.hidden, shape.value_size());
            entries.push_back({layer + "linear_attn.conv1d.weight", {shape.conv_dim(), 1, conv_kernel}});
            vector("linear_attn.A_log", shape.value_heads, 0);
            vector("linear_attn.dt_bias", shape.value_heads, 1);
            vector("linear_attn.norm.weight", shape.linear_dim, 1);
        }
        matrix("mlp.gate_proj.weight", shape.intermediate, shape.hidden);
        matrix("mlp.up_proj.weight", shape.intermediate, shape.hidden);
        matrix("mlp.down_proj.weight", shape.hidden, shape.intermediate);
    }
    return entries;
}

std::string config_of(const Shape& shape) {
    JsonWriter json;
    json.begin_object().value("model_type", "qwen3_5_text").value("dtype", "bfloat16").value("hidden_act", "silu").value("rms_norm_eps", 1e-6);
    json.value("hidden_size", shape.hidden).value("num_hidden_layers", shape.layers).value("intermediate_size", shape.intermediate);
    json.value("num_attention_heads", shape.heads).value("num_key_value_heads", shape.kv_heads).value("head_dim", shape.head_dim);
    json.value("linear_num_key_heads", shape.key_heads).value("linear_num_value_heads", shape.value_heads);
    json.value("linear_key_head_dim", shape.linear_dim).value("linear_value_head_dim", shape.linear_dim).value("linear_conv_kernel_dim", conv_kernel);
    json.value("full_attention_interval", full_attention_interval).value("max_position_embeddings", shape.max_positions);
    json.value("vocab_size", shape.vocab).value("tie_word_embeddings", shape.is_tied).value("attention_bias", false);
    json.begin_object("rope_parameters").value("rope_type", "default").value("rope_theta", 1e7).value("partial_rotary_factor", 0.25).end_object();
    return json.end_object().text();
}

// Cut off, not rounded: noise is noise, and the constants are exact.
std::uint16_t to_bfloat16(float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); }

// A million and a few normal deviates of 0.02 in bfloat16, from which every matrix is cut; an odd number, so that rows differ.
std::vector<std::uint16_t> noise() {
    std::vector<std::uint16_t> values((1U << 20) + 7);
    for (std::size_t place = 0; place < values.size(); ++place) {
        const double first = static_cast<double>(splitmix64(place, 0) >> 11) * 0x1p-53, second = static_cast<double>(splitmix64(place, 1) >> 11) * 0x1p-53;
        values[place] = to_bfloat16(static_cast<float>(0.02 * std::sqrt(-2 * std::log(1 - first)) * std::cos(6.283185307179586 * second)));
    }
    return values;
}

void write_weights(const std::filesystem::path& path, const std::vector<Entry>& entries) {
    JsonWriter header;
    header.begin_object();
    std::int64_t end = 0;
    for (const Entry& entry : entries) {
        const std::int64_t start = end;
        end += 2 * entry.num_elements();
        header.begin_object(entry.name).value("dtype", "BF16").begin_list("shape");
        for (const std::int64_t size : entry.sizes) header.value({}, size);
        header.end_list().begin_list("data_offsets").value({}, start).value({}, end).end_list().end_object();
    }
    std::string text = header.end_object().text();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    std::ofstream file(path, std::ios::binary);
    const std::uint64_t length = text.size();
    file.write(reinterpret_cast<const char*>(&length), 8).write(text.data(), static_cast<std::streamsize>(text.size()));
    const std::vector<std::uint16_t> random = noise();
    std::size_t place = 0;
    for (const Entry& entry : entries) {
        std::int64_t left = entry.num_elements();
        if (entry.is_constant) {
            const std::vector<std::uint16_t> values(static_cast<std::size_t>(left), to_bfloat16(entry.constant));
            file.write(reinterpret_cast<const char*>(values.data()), 2 * left);
            continue;
        }
        while (left > 0) {
            const std::int64_t part = std::min<std::int64_t>(left, static_cast<std::int64_t>(random.size() - place));
            file.write(reinterpret_cast<const char*>(random.data() + place), 2 * part);
            place = (place + static_cast<std::size_t>(part)) % random.size();
            left -= part;
        }
    }
    if (!file.flush()) throw Error(ErrorKind::device, path.string() + " can't be written (" + std::strerror(errno) + "): name a folder with " + std::to_string(end >> 20) + " MiB of room with --scratch.");
}

}  // namespace

std::vector<std::string> shape_names() {
    std::vector<std::string> names;
    for (const Shape& shape : shapes) names.emplace_back(shape.name);
    return names;
}

RandomCheckpoint::RandomCheckpoint(const std::string& name, const std::filesystem::path& parent) {
    const auto shape = std::find_if(std::begin(shapes), std::end(shapes), [&](const Shape& one) { return one.name == name; });
    if (shape == std::end(shapes)) {
        std::string known;
        for (const Shape& one : shapes) known += (known.empty() ? "" : ", ") + std::string(one.name);
        throw Error(ErrorKind::configuration, "\"" + name + "\" is no shape: there are " + known + ".", "shape");
    }
    std::string pattern = (parent / "pocketllm-bench-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
        throw Error(ErrorKind::configuration, "No folder can be made in " + parent.string() + " (" + std::strerror(errno) + "): name another one with --scratch.", "scratch");
    }
    path_ = pattern;
    try {
        write_weights(std::filesystem::path(path_) / "model.safetensors", entries_of(*shape));
        std::ofstream config(std::filesystem::path(path_) / "config.json");
        config << config_of(*shape) << "\n";
        if (!config.flush()) throw Error(ErrorKind::device, path_ + "/config.json can't be written: name a folder with more room with --scratch.");
    } catch (...) {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
        throw;
    }
}

RandomCheckpoint::~RandomCheckpoint() {
    std::error_code ignored;  // nobody is left to tell
    std::filesystem::remove_all(path_, ignored);
}

}  // namespace pocket::launcher
