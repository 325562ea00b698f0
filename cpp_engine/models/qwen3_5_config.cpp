#include "models/qwen3_5_config.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "core/json.h"
#include "pocket/error.h"

namespace pocket {

namespace {

constexpr std::int64_t most = 1 << 24;  // of any count: what is more is no model's

// Keys whose value decides what is computed, and the one value, as JSON, that this model computes. A key that is left out means it too.
constexpr struct {
    const char *key, *value;
} only[] = {
    {"hidden_act", "\"silu\""},         {"attention_bias", "false"},           {"mlp_bias", "false"},      {"attn_output_gate", "true"},
    {"output_gate_type", "\"swish\""}, {"mamba_ssm_dtype", "\"float32\""}, {"mlp_only_layers", "[]"},
};

class ConfigReader {
public:
    explicit ConfigReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

    Qwen3_5Config read() const {
        check_architecture();
        for (const auto& [key, value] : only) {
            const Json* found = checkpoint_.config(key);
            if (found && found->text() != value) unsupported(key, *found, std::string("only ") + value);
        }
        Qwen3_5Config config;
        config.vocab_size = count("vocab_size");
        config.hidden_size = count("hidden_size");
        config.intermediate_size = count("intermediate_size");
        config.max_position_embeddings = count("max_position_embeddings");
        config.rms_norm_eps = static_cast<float>(positive("rms_norm_eps", need("rms_norm_eps")));
        config.tie_word_embeddings = is_tied();
        config.attention.num_heads = count("num_attention_heads");
        config.attention.num_kv_heads = count("num_key_value_heads");
        config.attention.head_dim = count("head_dim");
        config.delta_net.num_key_heads = count("linear_num_key_heads");
        config.delta_net.num_value_heads = count("linear_num_value_heads");
        config.delta_net.key_dim = count("linear_key_head_dim");
        config.delta_net.value_dim = count("linear_value_head_dim");
        config.delta_net.conv_kernel = count("linear_conv_kernel_dim");
        check_divides("num_key_value_heads", "num_attention_heads");
        check_divides("linear_num_key_heads", "linear_num_value_heads");
        if (config.delta_net.conv_kernel < 2) bad("linear_conv_kernel_dim", need("linear_conv_kernel_dim"), "at least 2");
        read_rope(config);
        config.is_attention = layers(count("num_hidden_layers"));
        return config;
    }

private:
    [[noreturn]] void fail(ErrorKind kind, const std::string& message) const { throw Error(kind, checkpoint_.config_path() + message, "model"); }

    [[noreturn]] void bad(const std::string& key, const Json& value, const std::string& wanted) const {
        fail(ErrorKind::configuration, " has " + key + " = " + value.text() + ", which should be " + wanted + ": download it again.");
    }

    [[noreturn]] void unsupported(const std::string& key, const Json& value, const std::string& supported) const {
        const std::string found = " has " + key + " = " + value.text();
        fail(ErrorKind::unsupported, found + ", which is not supported for " + checkpoint_.architecture() + " (" + supported + "): use another model.");
    }

    const Json& need(const char* key) const {
        const Json* value = checkpoint_.config(key);
        if (!value) fail(ErrorKind::configuration, std::string(" lacks the key ") + key + ": download it again.");
        return *value;
    }

    int count(const char* key) const {
        const Json& value = need(key);
        if (!value.is_integer() || value.integer() < 1 || value.integer() > most) bad(key, value, "a whole number from 1 to " + std::to_string(most));
        return static_cast<int>(value.integer());
    }

    double positive(const std::string& key, const Json& value) const {
        if (!value.is_number() || !(value.number() > 0) || !std::isfinite(static_cast<float>(value.number()))) bad(key, value, "a number above 0");
        return value.number();
    }

    void check_divides(const char* few, const char* many) const {
        if (count(many) % count(few)) bad(few, need(few), std::string("a divisor of ") + many + " = " + std::to_string(count(many)));
    }

    void check_architecture() const {
        const std::string& type = checkpoint_.architecture();
        if (type != "qwen3_5" && type != "qwen3_5_text") {
            const char* const remedy = "\", which the native engine does not compute (only qwen3_5 and qwen3_5_text): use backend \"torch\".";
            fail(ErrorKind::unsupported, " has model_type = \"" + type + remedy);
        }
        const Json* text = checkpoint_.raw_config().find("text_config");
        if (!text || text->is_null()) return;
        if (!text->is_object()) bad("text_config", *text, "an object");
        const Json* inner = text->find("model_type");
        if (inner && inner->text() != "\"qwen3_5_text\"") unsupported("text_config.model_type", *inner, "only \"qwen3_5_text\"");
    }

    bool is_tied() const {
        const Json* value = checkpoint_.config("tie_word_embeddings");
        if (!value) return false;  // as transformers has it
        if (!value->is_boolean()) bad("tie_word_embeddings", *value, "true or false");
        return value->boolean();
    }

    // Two spellings: rope_parameters (transformers 5), and rope_theta and partial_rotary_factor beside rope_scaling.
    void read_rope(Qwen3_5Config& config) const {
        const char* const spelling = checkpoint_.config("rope_parameters") ? "rope_parameters" : "rope_scaling";
        const Json* parameters = checkpoint_.config(spelling);
        if (parameters && !parameters->is_object()) bad(spelling, *parameters, "an object");
        const auto find = [&](const char* key) {
            const Json* value = parameters ? parameters->find(key) : nullptr;
            return value && !value->is_null() ? value : nullptr;
        };
        for (const char* key : {"rope_type", "type"}) {
            const Json* type = find(key);
            if (type && type->text() != "\"default\"") unsupported(spelling, *parameters, "only rope_type \"default\"");
        }
        if (const Json* section = find("mrope_section")) {
            // Says which of a picture's three positions each pair takes; those of text are equal.
            const auto is_count = [](const Json& value) { return value.is_integer() && value.integer() >= 0; };
            const bool is_triple = section->is_array() && section->array().size() == 3;
            if (!is_triple || !std::all_of(section->array().begin(), section->array().end(), is_count)) {
                bad("mrope_section", *section, "a list of three whole numbers");
            }
        }
        const Json* theta = find("rope_theta");
        config.rope_theta = static_cast<float>(positive("rope_theta", theta ? *theta : need("rope_theta")));
        const Json* part = find("partial_rotary_factor");
        const Json& factor = part ? *part : need("partial_rotary_factor");
        const double rotary = config.attention.head_dim * positive("partial_rotary_factor", factor);
        if (!(rotary >= 2 && rotary <= config.attention.head_dim) || static_cast<int>(rotary) % 2) {
            bad("partial_rotary_factor", factor, "an even part of head_dim = " + std::to_string(config.attention.head_dim));
        }
        config.attention.rotary_dim = static_cast<int>(rotary);
    }

    std::vector<bool> layers(int num_layers) const {
        const Json* types = checkpoint_.config("layer_types");
        std::vector<bool> is_attention;
        if (!types) {
            const int interval = count("full_attention_interval");
            if (interval > num_layers) {
                bad("full_attention_interval", need("full_attention_interval"), "a whole number from 1 to num_hidden_layers = " + std::to_string(num_layers));
            }
            for (int layer = 1; layer <= num_layers; ++layer) is_attention.push_back(layer % interval == 0);
            return is_attention;
        }
        if (!types->is_array() || types->array().size() != static_cast<std::size_t>(num_layers)) {
            bad("layer_types", *types, "a list of num_hidden_layers = " + std::to_string(num_layers));
        }
        for (const Json& type : types->array()) {
            const std::string kind = type.text();
            if (kind != "\"full_attention\"" && kind != "\"linear_attention\"") {
                const std::string found = " has layer_types with layer " + std::to_string(is_attention.size()) + " of type " + kind;
                fail(ErrorKind::unsupported, found + ", which is not supported for " + checkpoint_.architecture() +
                                                 " (only linear_attention and full_attention): use another model.");
            }
            is_attention.push_back(kind == "\"full_attention\"");
        }
        const bool has_attention = std::find(is_attention.begin(), is_attention.end(), true) != is_attention.end();
        if (!has_attention) bad("layer_types", *types, "a list with at least one full_attention");
        return is_attention;
    }

    const Checkpoint& checkpoint_;
};

}  // namespace

int Qwen3_5Config::num_attention_layers() const noexcept { return static_cast<int>(std::count(is_attention.begin(), is_attention.end(), true)); }

Qwen3_5Config read_qwen3_5_config(const Checkpoint& checkpoint) { return ConfigReader(checkpoint).read(); }

Qwen3_5Config share_config(const Qwen3_5Config& whole, const Share& share, const Checkpoint& checkpoint) {
    Qwen3_5Config part = whole;
    const std::pair<const char*, int*> dealt_out[] = {
        {"num_attention_heads", &part.attention.num_heads},          {"num_key_value_heads", &part.attention.num_kv_heads},
        {"linear_num_key_heads", &part.delta_net.num_key_heads},     {"linear_num_value_heads", &part.delta_net.num_value_heads},
        {"intermediate_size", &part.intermediate_size},
    };
    for (const auto& [key, count] : dealt_out) {
        if (*count % share.size) {
            throw Error(ErrorKind::unsupported,
                        "\"tensor_parallel_size\" = " + std::to_string(share.size) + " does not divide " + key + " = " + std::to_string(*count) + " of " +
                            checkpoint.config_path() + ": send a number that does.",
                        "tensor_parallel_size");
        }
        *count /= share.size;
    }
    if (part.vocab_size < share.size) {
        throw Error(ErrorKind::unsupported,
                    "\"tensor_parallel_size\" = " + std::to_string(share.size) + " is more than vocab_size = " + std::to_string(part.vocab_size) + " of " +
                        checkpoint.config_path() + ": send fewer.",
                    "tensor_parallel_size");
    }
    return part;
}

}  // namespace pocket
