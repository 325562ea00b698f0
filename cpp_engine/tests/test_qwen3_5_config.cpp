// models/qwen3_5_config, fp8_config and weights: what a checkpoint says is read as it is, and what the model does not compute is refused by name.
#include "models/qwen3_5_config.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "check.h"
#include "models/fp8_config.h"
#include "models/weights.h"
#include "pocket/error.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

using Change = std::function<void(TinyCheckpoint&)>;

// Reads a tiny checkpoint whose config has `key` = `value`; without the key where `value` is empty.
Qwen3_5Config read_with(const std::string& key, const std::string& value, const Change& change = {}) {
    const TemporaryFolder folder;
    TinyCheckpoint tiny;
    tiny.make();
    if (change) change(tiny);
    tiny.config[key] = value;
    if (value.empty()) tiny.config.erase(key);
    tiny.write(folder.path());
    return read_qwen3_5_config(Checkpoint(folder.path()));
}

void check_quantization_with(const std::string& key, const std::string& value) {
    const TemporaryFolder folder;
    TinyCheckpoint tiny;
    tiny.is_fp8 = true;
    tiny.make();
    if (!key.empty()) tiny.config[key] = value;
    if (value.empty()) tiny.config.erase(key);
    tiny.write(folder.path());
    check_quantization(Checkpoint(folder.path()));
}

std::string fp8_with(const std::string& more) {
    return R"({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128])" + more + "}";
}

template <typename Function>
ErrorKind kind_of(Function&& function) {
    try {
        function();
    } catch (const Error& error) {
        CHECK_EQ(error.field(), std::string("model"));
        return error.kind();
    }
    CHECK(!"it threw");
    return ErrorKind::device;
}

}  // namespace

TEST(a_flat_and_a_nested_config) {
    for (const bool is_nested : {false, true}) {
        const TemporaryFolder folder;
        TinyCheckpoint tiny;
        tiny.is_multimodal = is_nested;
        tiny.is_tied = is_nested;
        tiny.make();
        tiny.write(folder.path());
        const Checkpoint checkpoint(folder.path());
        const Qwen3_5Config config = read_qwen3_5_config(checkpoint);
        CHECK_EQ(checkpoint.architecture(), std::string(is_nested ? "qwen3_5" : "qwen3_5_text"));
        CHECK_EQ(config.vocab_size, 151);
        CHECK_EQ(config.hidden_size, 48);
        CHECK_EQ(config.intermediate_size, 80);
        CHECK_EQ(config.max_position_embeddings, 512);
        CHECK_EQ(config.rms_norm_eps, 1e-6f);
        CHECK_EQ(config.rope_theta, 1e4f);
        CHECK_EQ(config.tie_word_embeddings, is_nested);
        CHECK_EQ(config.attention.num_heads, 4);
        CHECK_EQ(config.attention.num_kv_heads, 2);
        CHECK_EQ(config.attention.head_dim, 16);
        CHECK_EQ(config.attention.rotary_dim, 4);
        CHECK_EQ(config.delta_net.num_key_heads, 2);
        CHECK_EQ(config.delta_net.num_value_heads, 6);
        CHECK_EQ(config.delta_net.key_dim, 32);
        CHECK_EQ(config.delta_net.value_dim, 16);
        CHECK_EQ(config.delta_net.conv_kernel, 4);
        CHECK_EQ(config.is_attention, (std::vector<bool>{false, true, false, true, false}));
        CHECK_EQ(config.num_attention_layers(), 2);
        CHECK_EQ(config.num_delta_net_layers(), 3);
    }
}

TEST(layer_types_go_before_the_interval) {
    const std::string types = R"(["full_attention", "linear_attention", "linear_attention", "full_attention", "full_attention"])";
    CHECK_EQ(read_with("layer_types", types).is_attention, (std::vector<bool>{true, false, false, true, true}));
    CHECK_EQ(read_with("full_attention_interval", "5").is_attention, (std::vector<bool>{false, false, false, false, true}));
    CHECK_EQ(read_with("full_attention_interval", "1").num_delta_net_layers(), 0);
}

TEST(both_spellings_of_rotation) {
    const Change old_spelling = [](TinyCheckpoint& tiny) {
        tiny.config.erase("rope_parameters");
        tiny.config["rope_theta"] = "10000000";
        tiny.config["partial_rotary_factor"] = "0.5";
    };
    for (const char* scaling : {"null", R"({"type": "default", "mrope_section": [1, 1, 2]})"}) {
        const Qwen3_5Config config = read_with("rope_scaling", scaling, old_spelling);
        CHECK_EQ(config.rope_theta, 1e7f);
        CHECK_EQ(config.attention.rotary_dim, 8);
    }
    CHECK_EQ(read_with("rope_theta", "5").rope_theta, 1e4f);  // that of rope_parameters counts
}

TEST(missing_keys_are_named) {
    for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
                            "max_position_embeddings", "rms_norm_eps", "full_attention_interval"}) {
        for (const char* value : {"", "null"}) CHECK_THROWS(read_with(key, value), std::string("config.json lacks the key ") + key + ": download it again.");
    }
    CHECK_THROWS(read_with("rope_parameters", ""), "config.json lacks the key rope_theta");
    CHECK_THROWS(read_with("rope_parameters", R"({"rope_theta": 1e4})"), "config.json lacks the key partial_rotary_factor");
}

TEST(values_that_make_no_sense) {
    const std::tuple<const char*, const char*, const char*> cases[] = {
        {"hidden_size", "0", "has hidden_size = 0, which should be a whole number from 1 to 16777216: download it again."},
        {"hidden_size", "48.0", "has hidden_size = 48, which should be a whole number"},
        {"hidden_size", "\"48\"", "has hidden_size = \"48\", which should be"},
        {"hidden_size", "true", "has hidden_size = true, which should be"},
        {"num_hidden_layers", "9223372036854775807", "has num_hidden_layers = 9223372036854775807"},
        {"num_key_value_heads", "3", "has num_key_value_heads = 3, which should be a divisor of num_attention_heads = 4"},
        {"linear_num_value_heads", "5", "has linear_num_key_heads = 2, which should be a divisor of linear_num_value_heads = 5"},
        {"linear_conv_kernel_dim", "1", "has linear_conv_kernel_dim = 1, which should be at least 2"},
        {"rms_norm_eps", "0", "has rms_norm_eps = 0, which should be a number above 0"},
        {"rms_norm_eps", "1e300", "has rms_norm_eps = 1e+300, which should be a number above 0"},
        {"tie_word_embeddings", "1", "has tie_word_embeddings = 1, which should be true or false"},
        {"full_attention_interval", "6", "has full_attention_interval = 6, which should be a whole number from 1 to num_hidden_layers = 5"},
        {"layer_types", R"(["full_attention"])", "has layer_types = [\"full_attention\"], which should be a list of num_hidden_layers = 5"},
        {"layer_types", "5", "has layer_types = 5, which should be a list"},
        {"rope_parameters", "3", "has rope_parameters = 3, which should be an object"},
        {"rope_parameters", R"({"rope_theta": -1, "partial_rotary_factor": 0.25})", "has rope_theta = -1, which should be a number above 0"},
        {"rope_parameters", R"({"rope_theta": 1e4, "partial_rotary_factor": 0.2})", "has partial_rotary_factor = 0.2, which should be an even part"},
        {"rope_parameters", R"({"rope_theta": 1e4, "partial_rotary_factor": 2})", "= 2, which should be an even part of head_dim = 16"},
        {"rope_parameters", R"({"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 2]})", "has mrope_section = [1, 2], which should be"},
    };
    for (const auto& [key, value, words] : cases) CHECK_THROWS(read_with(key, value), words);
    for (const auto& [key, value, words] : cases) CHECK_EQ(kind_of([&, key = key, value = value] { read_with(key, value); }), ErrorKind::configuration);
    CHECK_THROWS(read_with("layer_types", R"(["linear_attention", "linear_attention", "linear_attention", "linear_attention", "linear_attention"])"),
                 "which should be a list with at least one full_attention");
}

TEST(what_is_not_computed) {
    const std::tuple<const char*, const char*, const char*> cases[] = {
        {"hidden_act", "\"gelu\"", "config.json has hidden_act = \"gelu\", which is not supported for qwen3_5_text (only \"silu\"): use another model."},
        {"attention_bias", "true", "has attention_bias = true, which is not supported"},
        {"attn_output_gate", "false", "has attn_output_gate = false, which is not supported"},
        {"output_gate_type", "\"sigmoid\"", "has output_gate_type = \"sigmoid\", which is not supported"},
        {"mamba_ssm_dtype", "\"bfloat16\"", "has mamba_ssm_dtype = \"bfloat16\", which is not supported"},
        {"mlp_only_layers", "[1]", "has mlp_only_layers = [1], which is not supported"},
        {"rope_parameters", R"({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})", "has rope_parameters = {\"rope_type\": \"yarn\""},
        {"layer_types", R"(["linear_attention", "linear_attention", "sliding_attention", "full_attention", "full_attention"])",
         "has layer_types with layer 2 of type \"sliding_attention\", which is not supported for qwen3_5_text"},
        {"layer_types", R"([1, "linear_attention", "linear_attention", "full_attention", "full_attention"])", "has layer_types with layer 0 of type 1"},
        {"model_type", "\"qwen3_5_moe\"", "has model_type = \"qwen3_5_moe\", which the native engine does not compute"},
        {"model_type", "\"llama\"", "has model_type = \"llama\", which the native engine does not compute"},
    };
    for (const auto& [key, value, words] : cases) CHECK_THROWS(read_with(key, value), words);
    for (const auto& [key, value, words] : cases) CHECK_EQ(kind_of([&, key = key, value = value] { read_with(key, value); }), ErrorKind::unsupported);
    const Change nested = [](TinyCheckpoint& tiny) { tiny.is_multimodal = true; };
    CHECK_THROWS(read_with("model_type", "\"qwen3_5_moe_text\"", nested), "has text_config.model_type = \"qwen3_5_moe_text\", which is not supported");
    CHECK_EQ(read_with("output_gate_type", "\"swish\"").vocab_size, 151);
}

TEST(quantization) {
    check_quantization_with("", "x");
    check_quantization_with("quantization_config", fp8_with(R"(, "fmt": "e4m3", "scale_fmt": "ue8m0", "dequantize": false, "ignored_layers": null)"));
    const std::pair<std::string, const char*> cases[] = {
        {"", "of the type F8_E4M3, and"},
        {R"({"quant_method": "gptq"})", "config.json has weights quantized with \"gptq\", which is not supported"},
        {"\"fp8\"", "has quantization_config = \"fp8\", which should be an object"},
        {"{\"bits\": 4}", "has weights quantized with null"},
        {fp8_with(R"(, "fmt": "e5m2")"), "has a quantization_config with fmt = \"e5m2\", which is not supported"},
        {fp8_with(R"(, "scale_fmt": "e8")"), "with scale_fmt = \"e8\", which is not supported"},
        {fp8_with(R"(, "kv_cache_scheme": 1)"), "with kv_cache_scheme = 1, which is not supported"},
        {R"({"quant_method": "fp8", "weight_block_size": [128, 128]})", "has a quantization_config that lacks activation_scheme"},
        {R"({"quant_method": "fp8", "activation_scheme": "dynamic"})", "has a quantization_config that lacks weight_block_size"},
        {R"({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]})", "with activation_scheme = \"static\""},
        {R"({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]})", "with weight_block_size = [64, 128]"},
        {fp8_with(R"(, "modules_to_not_convert": 3)"), "with modules_to_not_convert = 3, which should be a list of module names"},
        {fp8_with(R"(, "modules_to_not_convert": ["model.layers.1.mlp"])"),
         "model.safetensors has the tensor model.layers.1.mlp.down_proj.weight of the type F8_E4M3, and the quantization_config of"},
        {fp8_with(R"(, "ignored_layers": ["o_proj"])"), "lists o_proj as not converted"},
    };
    for (const auto& [value, words] : cases) CHECK_THROWS(check_quantization_with("quantization_config", value), words);
    for (const auto& [value, words] : cases) {
        CHECK_EQ(kind_of([&, value = value] { check_quantization_with("quantization_config", value); }), ErrorKind::unsupported);
    }
}

TEST(tensors_of_the_wrong_kind) {
    const TemporaryFolder folder;
    TinyCheckpoint tiny;
    tiny.is_fp8 = true;
    tiny.make();
    const std::string gate = "model.layers.0.mlp.gate_proj.weight", norm = "model.norm.weight", file = (folder.path() / "model.safetensors").string();
    const auto weights_with = [&](const Change& change, const std::function<void(Weights&)>& use) {
        TinyCheckpoint changed = tiny;
        if (change) change(changed);
        changed.write(folder.path());
        Checkpoint checkpoint(folder.path());
        Weights weights(checkpoint);
        use(weights);
    };
    const auto take_gate = [&](Weights& weights) { weights.matrix(gate, 80, 48); };
    const auto take_norm = [&](Weights& weights) { weights.floats(norm, {48}); };
    weights_with({}, [&](Weights& weights) {
        const MatrixPart part = weights.matrix(gate, 80, 48);
        CHECK_EQ(part.scales->name, gate + "_scale_inv");
        CHECK_EQ(weights.checkpoint().num_taken(), 2u);
        CHECK(weights.matrix("model.embed_tokens.weight", 151, 48).scales == nullptr);
        CHECK_EQ(weights.floats(norm, {48}), values_of(tiny.tensors[norm]));
    });
    for (const char* type : {"F16", "BF16"}) {
        const StoredTensor stored = store(values_of(tiny.tensors[norm]), {48}, type);
        const auto check_norm = [&](Weights& weights) { CHECK_EQ(weights.floats(norm, {48}), values_of(stored)); };
        weights_with([&](TinyCheckpoint& one) { one.tensors[norm] = stored; }, check_norm);
    }
    CHECK_THROWS(weights_with([&](TinyCheckpoint& one) { one.tensors.erase(gate + "_scale_inv"); }, take_gate),
                 file + " has the tensor " + gate + " of the type F8_E4M3, and " + gate + "_scale_inv is missing where [1, 1] is needed");
    CHECK_THROWS(weights_with([&](TinyCheckpoint& one) { one.tensors[gate + "_scale_inv"] = store({1, 1}, {1, 2}, "F32"); }, take_gate),
                 "_scale_inv has the shape [1, 2] where [1, 1] is needed");
    CHECK_THROWS(weights_with([&](TinyCheckpoint& one) { one.tensors[gate + "_scale_inv"] = store({1}, {1, 1}, "F16"); }, take_gate),
                 file + " has the tensor " + gate + "_scale_inv of the type float16, and scales are float32 or bfloat16");
    CHECK_THROWS(weights_with([&](TinyCheckpoint& one) { one.tensors[gate].type = "I32", one.tensors[gate].bytes.resize(80 * 48 * 4); }, take_gate),
                 "of the type int32, which holds no weights");
    CHECK_THROWS(weights_with([&](TinyCheckpoint& one) { one.tensors[norm].type = "I32"; }, take_norm), "the tensor model.norm.weight of the type int32");
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        std::vector<float> values(48, 1);
        values[17] = value;
        CHECK_THROWS(weights_with([&](TinyCheckpoint& one) { one.tensors[norm] = store(values, {48}, "BF16"); }, take_norm),
                     file + " has the tensor model.norm.weight, whose value 17 is NaN or infinite: download the model again.");
    }
}
