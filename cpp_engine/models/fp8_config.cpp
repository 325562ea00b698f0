#include "models/fp8_config.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "pocket/error.h"

namespace pocket {

namespace {

[[noreturn]] void fail(const std::string& message) { throw Error(ErrorKind::unsupported, message, "model"); }

bool is_skip_list(std::string_view key) { return key == "modules_to_not_convert" || key == "ignored_layers"; }

bool is_accepted(std::string_view key, const Json& value) {
    const auto is = [&](std::string_view word) { return value.is_string() && value.string() == word; };
    if (key == "quant_method") return is("fp8");
    if (key == "fmt") return is("e4m3");
    if (key == "activation_scheme") return is("dynamic");                                      // static ones bring scales of activations
    if (key == "weight_block_size") return value.text() == "[128, 128]";
    if (key == "scale_fmt") return value.is_null() || is("float") || is("ue8m0");             // how the scales were rounded, not how they are stored
    if (key == "dequantize") return value.is_boolean() && !value.boolean();
    return false;
}

// Whether `entry` of a list of modules names the tensor's module, one that holds it, or the last part of its name.
bool names(const std::string& entry, const std::string& tensor) {
    const std::string module = tensor.substr(0, tensor.rfind('.'));
    return module == entry || module.starts_with(entry + ".") || module.ends_with("." + entry);
}

}  // namespace

void check_quantization(const Checkpoint& checkpoint) {
    const Json* config = checkpoint.config("quantization_config");
    const std::vector<const HostTensor*> tensors = checkpoint.tensors();
    const auto is_fp8 = [](const HostTensor* tensor) { return tensor->dtype == DType::float8_e4m3; };
    if (!config || (config->is_object() && config->object().empty())) {
        const auto found = std::find_if(tensors.begin(), tensors.end(), is_fp8);
        if (found == tensors.end()) return;
        fail((*found)->file + " has the tensor " + (*found)->name + " of the type F8_E4M3, and " + checkpoint.config_path() +
             " has no quantization_config that says how it is scaled: use an unquantized checkpoint.");
    }
    const Json* method = config->is_object() ? config->find("quant_method") : config;
    const std::string method_text = method ? method->text() : "null";
    if (method_text != "\"fp8\"") {
        fail(checkpoint.config_path() + " has weights quantized with " + method_text + ", which is not supported: use an unquantized or an FP8 checkpoint.");
    }
    if (!config->is_object()) {
        fail(checkpoint.config_path() + " has quantization_config = " + config->text() + ", which should be an object: download it again.");
    }
    std::vector<std::string> skipped;
    for (const auto& [key, value] : config->object()) {
        if (is_skip_list(key)) {
            const auto is_name = [](const Json& name) { return name.is_string(); };
            if (value.is_null()) continue;
            if (!value.is_array() || !std::all_of(value.array().begin(), value.array().end(), is_name)) {
                const std::string found = "quantization_config with " + key + " = " + value.text();
                fail(checkpoint.config_path() + " has a " + found + ", which should be a list of module names: download it again.");
            }
            for (const Json& name : value.array()) skipped.push_back(name.string());
        } else if (!is_accepted(key, value)) {
            fail(checkpoint.config_path() + " has a quantization_config with " + key + " = " + value.text() +
                 ", which is not supported (FP8 is read as E4M3, activations dynamic, blocks of 128 x 128): use another checkpoint.");
        }
    }
    for (const char* key : {"activation_scheme", "weight_block_size"}) {
        if (!config->find(key)) fail(checkpoint.config_path() + " has a quantization_config that lacks " + key + ": download it again.");
    }
    for (const HostTensor* tensor : tensors) {
        if (!is_fp8(tensor)) continue;
        const auto entry = std::find_if(skipped.begin(), skipped.end(), [&](const std::string& one) { return names(one, tensor->name); });
        if (entry == skipped.end()) continue;
        const std::string lists = " of the type F8_E4M3, and the quantization_config of " + checkpoint.config_path() + " lists " + *entry;
        fail(tensor->file + " has the tensor " + tensor->name + lists + " as not converted: use another checkpoint.");
    }
}

}  // namespace pocket
