#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "commands.h"
#include "engine/qwen_engine.h"
#include "io/checkpoint.h"
#include "io/eos.h"
#include "models/qwen3_5.h"
#include "pocket/error.h"
#include "weighing_device.h"

namespace pocket::launcher {

namespace {

std::string size_text(double bytes) {
    const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    std::size_t unit = 0;
    for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
    char text[32];
    std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
    return text;
}

// Place of the first value that is NaN or infinite, or -1.
std::int64_t first_odd_value(const HostTensor& tensor) {
    const std::int64_t count = tensor.num_elements();
    const auto find = [&](auto is_odd, auto zero) {
        using Value = decltype(zero);
        for (std::int64_t place = 0; place < count; ++place) {
            Value value;
            std::memcpy(&value, tensor.data + static_cast<std::size_t>(place) * sizeof value, sizeof value);
            if (is_odd(value)) return place;
        }
        return std::int64_t{-1};
    };
    // All exponent bits set, but for FP8 E4M3, which has no infinity.
    switch (tensor.dtype) {
        case DType::float32: return find([](std::uint32_t bits) { return (bits & 0x7f800000U) == 0x7f800000U; }, std::uint32_t{});
        case DType::bfloat16: return find([](std::uint16_t bits) { return (bits & 0x7f80U) == 0x7f80U; }, std::uint16_t{});
        case DType::float16: return find([](std::uint16_t bits) { return (bits & 0x7c00U) == 0x7c00U; }, std::uint16_t{});
        case DType::float8_e4m3: return find([](std::uint8_t bits) { return (bits & 0x7fU) == 0x7fU; }, std::uint8_t{});
        case DType::int32: return -1;
    }
    return -1;
}

class Audit {
public:
    explicit Audit(const QwenEngineOptions& options) : options_(options) {}

    // Every check that can be made; what a failed one leaves open is not.
    int run(const std::string& folder) {
        std::unique_ptr<Checkpoint> checkpoint;
        attempt([&] { checkpoint = std::make_unique<Checkpoint>(folder); });
        if (checkpoint) {
            fact("files", std::to_string(checkpoint->tensors().size()) + " tensors, " + size_text(stored_bytes(*checkpoint)));
            fact("architecture", checkpoint->architecture());
            attempt([&] { say_eos(*checkpoint); });
            attempt([&] { weigh(*checkpoint); });
            look_at_values(*checkpoint);
        }
        std::cout << (num_problems_ == 0 ? "ok: the engine runs it" : std::to_string(num_problems_) + (num_problems_ == 1 ? " problem" : " problems")) << std::endl;
        return num_problems_ == 0 ? 0 : 1;
    }

private:
    template <typename Check>
    void attempt(Check&& check) {
        try {
            check();
        } catch (const Error& error) {
            problem(error.what());
        }
    }

    void fact(const std::string& name, const std::string& value) { std::cout << name << ": " << value << std::endl; }

    void problem(const std::string& what) {
        ++num_problems_;
        std::cout << "problem: " << what << std::endl;
    }

    static double stored_bytes(const Checkpoint& checkpoint) {
        double bytes = 0;
        for (const HostTensor* tensor : checkpoint.tensors()) bytes += static_cast<double>(tensor->num_elements()) * static_cast<double>(item_size(tensor->dtype));
        return bytes;
    }

    void say_eos(const Checkpoint& checkpoint) {
        const EosIds eos = read_eos_ids(checkpoint);
        std::string ids;
        for (const std::int32_t token_id : eos.token_ids) ids += (ids.empty() ? "" : ", ") + std::to_string(token_id);
        fact("EOS ids", ids.empty() ? "none" : ids + " (" + eos.source + ")");
    }

    // Config, names and shapes of the tensors, and the memory that all of it takes.
    void weigh(Checkpoint& checkpoint) {
        const std::unique_ptr<Device> device = make_device(options_.device, options_.num_threads);
        DeviceInfo info = device->info();
        WeighingDevice scale(info);
        const DType dtype = weight_dtype(options_, checkpoint);
        const Qwen3_5 model(checkpoint, scale, dtype, options_.max_model_len);
        fact("layers", std::to_string(model.num_attention_layers()) + " of attention, " + std::to_string(model.num_delta_net_layers()) + " of Gated DeltaNet");
        fact("vocabulary", std::to_string(model.vocab_size()) + " ids");
        fact("context", std::to_string(model.max_positions()) + " tokens");
        fact("weights", size_text(static_cast<double>(model.weight_bytes())) + " as " + name(dtype) + " on " + info.description + ", which has " +
                            size_text(static_cast<double>(info.free_memory)) + " free");
        fact("a decoded token reads", size_text(static_cast<double>(model.bytes_per_token())) + " of weights");
        fact("a row's states take", size_text(static_cast<double>(slot_bytes(model))));
        if (model.weight_bytes() > info.free_memory) {
            problem("The weights take " + size_text(static_cast<double>(model.weight_bytes())) + " and " + info.name + " has " + size_text(static_cast<double>(info.free_memory)) +
                    " free: free some memory, or take a smaller model.");
            return;
        }
        info.free_memory -= model.weight_bytes();
        const CachePlan plan = plan_caches(model, info, cache_options(options_, info, dtype));
        fact("caches", size_text(static_cast<double>(plan.kv_bytes)) + " of keys and values for " + std::to_string(plan.shape.max_model_len) + " tokens of context and " +
                           std::to_string(plan.shape.num_row_slots) + " rows, " + size_text(static_cast<double>(plan.state_bytes)) + " of states");
        for (const std::string& limit : plan.limits) fact("limit", limit);
    }

    void look_at_values(const Checkpoint& checkpoint) {
        for (const HostTensor* tensor : checkpoint.tensors()) {
            const std::int64_t place = first_odd_value(*tensor);
            if (place >= 0) problem(tensor->file + " holds a NaN or an infinity in " + tensor->name + ", value " + std::to_string(place) + ": download the file again.");
        }
    }

    QwenEngineOptions options_;
    int num_problems_ = 0;
};

}  // namespace

int audit(const Words& words) {
    Arguments arguments("audit",
                        "Check a checkpoint without loading it: its files, its config, the names, shapes and values of its tensors, and the memory that it takes here.\n"
                        "One line a fact, one line a problem; exit code 1 where there is one.",
                        "CHECKPOINT", engine_flags({}));
    arguments.parse(words);
    if (arguments.wants_help()) {
        std::cout << arguments.help();
        return 0;
    }
    return Audit(engine_options(arguments)).run(arguments.required_positional());
}

}  // namespace pocket::launcher
