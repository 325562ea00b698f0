// models/qwen3_5 on the CPU device: logits against the reference, whatever the checkpoint's form, and what a broken checkpoint is refused with.
#include "models/qwen3_5.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>

#include "check.h"
#include "engine/model_runner.h"
#include "pocket/error.h"
#include "reference_model.h"
#include "tiny_checkpoint.h"

using namespace pocket;

namespace {

using Change = std::function<void(TinyCheckpoint&)>;

std::vector<std::int32_t> text_of(int length) {
    Noise noise(static_cast<std::uint64_t>(length));
    std::vector<std::int32_t> ids;
    for (int place = 0; place < length; ++place) ids.push_back(static_cast<std::int32_t>(noise.uniform() * 151));
    return ids;
}

// The logits of a text, computed in chunks of `chunk` tokens in blocks that lie apart.
std::vector<float> logits_of(Device& device, Qwen3_5& model, const std::vector<std::int32_t>& text, std::size_t chunk) {
    CacheShape shape;
    shape.block_size = 4;
    shape.num_blocks = 64;
    shape.num_row_slots = 3;
    ModelRunner runner(device, model, shape, DType::float32, 8);
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(shape.num_blocks));
    for (std::size_t place = 0; place < blocks.size(); ++place) blocks[place] = static_cast<std::int32_t>(place * 37 % blocks.size());
    std::vector<float> all;
    for (std::size_t start = 0; start < text.size(); start += chunk) {
        RunRow row;
        row.token_ids = std::span(text).subspan(start, std::min(chunk, text.size() - start));
        row.num_computed_tokens = static_cast<int>(start);
        row.block_table = std::span(blocks).first((start + row.token_ids.size() + 3) / 4);
        row.slot = 1;
        const std::vector<float> part = runner.logits(row, {});
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

// The largest difference, relative to the largest logit.
double difference(const std::vector<float>& found, const std::vector<ReferenceModel::Values>& wanted) {
    double most = 0, largest = 0;
    std::size_t place = 0;
    for (const auto& row : wanted) {
        for (const double value : row) {
            const double off = std::abs(value - static_cast<double>(found.at(place++)));
            most = std::isnan(off) ? off : std::max(most, off);
            largest = std::max(largest, std::abs(value));
        }
    }
    CHECK_EQ(place, found.size());
    return most / largest;
}

void check_logits(const TinyCheckpoint& tiny, int num_shards, DType dtype, double tolerance) {
    const TemporaryFolder folder;
    tiny.write(folder.path(), num_shards);
    const auto device = make_device("cpu", 2);
    std::unique_ptr<Qwen3_5> model;
    {
        Checkpoint checkpoint(folder.path());
        model = std::make_unique<Qwen3_5>(checkpoint, *device, dtype);
        CHECK(checkpoint.leftovers().empty());
    }  // the files are unmapped: nothing may point into them
    const ReferenceModel reference(tiny);
    const auto text = text_of(131);
    const auto wanted = reference.logits(text);
    for (const std::size_t chunk : {std::size_t{1}, std::size_t{7}, std::size_t{131}}) {
        const double found = difference(logits_of(*device, *model, text, chunk), wanted);
        CHECK(found <= tolerance);
        if (!(found <= tolerance)) std::cerr << "chunk " << chunk << ": " << found << std::endl;
    }
}

TinyCheckpoint tiny_with(const Change& change = {}) {
    TinyCheckpoint tiny;
    if (change) change(tiny);
    tiny.make();
    return tiny;
}

// Loads a tiny checkpoint after `change`.
void load_with(const Change& change, const LoadProgress& progress = {}) {
    static const TinyCheckpoint whole = tiny_with();
    const TemporaryFolder folder;
    TinyCheckpoint tiny = whole;
    change(tiny);
    tiny.write(folder.path());
    const auto device = make_device("cpu", 1);
    Checkpoint checkpoint(folder.path());
    Qwen3_5 model(checkpoint, *device, DType::float32, 0, progress);
}

}  // namespace

TEST(logits_of_a_text_checkpoint) { check_logits(tiny_with(), 1, DType::float32, 1e-5); }

TEST(logits_of_a_multimodal_checkpoint_in_shards) { check_logits(tiny_with([](TinyCheckpoint& tiny) { tiny.is_multimodal = true; }), 3, DType::float32, 1e-5); }

TEST(logits_with_a_tied_head) { check_logits(tiny_with([](TinyCheckpoint& tiny) { tiny.is_tied = true; }), 1, DType::float32, 1e-5); }

TEST(a_tied_head_that_is_stored_counts_where_it_differs) {
    TinyCheckpoint tiny = tiny_with([](TinyCheckpoint& one) { one.is_tied = true; });
    tiny.tensors["lm_head.weight"] = tiny.tensors["model.embed_tokens.weight"];
    check_logits(tiny, 1, DType::float32, 1e-5);
    std::vector<float> values = values_of(tiny.tensors["lm_head.weight"]);
    std::reverse(values.begin(), values.end());
    tiny.tensors["lm_head.weight"] = store(values, {151, 48}, "F32");
    check_logits(tiny, 1, DType::float32, 1e-5);
}

TEST(logits_of_16_bit_checkpoints) {
    for (const char* type : {"BF16", "F16"}) check_logits(tiny_with([&](TinyCheckpoint& tiny) { tiny.type = type; }), 2, DType::float32, 1e-5);
}

TEST(logits_of_other_patterns_of_layers) {
    check_logits(tiny_with([](TinyCheckpoint& tiny) { tiny.full_attention_interval = 1; }), 1, DType::float32, 1e-5);
    const Change change = [](TinyCheckpoint& tiny) { tiny.full_attention_interval = 5, tiny.conv_kernel = 2, tiny.num_value_heads = 2, tiny.value_dim = 48; };
    check_logits(tiny_with(change), 1, DType::float32, 1e-5);
}

TEST(logits_of_fp8_matrices) {
    // Blocks of 128, some of them cut. The products round x to bfloat16.
    const Change change = [](TinyCheckpoint& tiny) { tiny.is_fp8 = true, tiny.hidden_size = 160, tiny.key_dim = 32, tiny.value_dim = 32, tiny.type = "BF16"; };
    check_logits(tiny_with(change), 1, DType::float32, 0.05);
}

TEST(logits_with_weights_in_16_bits) {
    check_logits(tiny_with(), 1, DType::bfloat16, 0.08);
    check_logits(tiny_with(), 1, DType::float16, 0.01);
}

TEST(what_is_said_while_loading) {
    const TemporaryFolder folder;
    tiny_with([](TinyCheckpoint& tiny) { tiny.is_multimodal = true; }).write(folder.path());
    const auto device = make_device("cpu", 1);
    Checkpoint checkpoint(folder.path());
    std::vector<std::string> lines;
    double last = 0;
    const auto progress = [&](double fraction, const std::string& line) {
        CHECK(fraction >= last && fraction <= 1);
        last = fraction;
        lines.push_back(line);
    };
    const Qwen3_5 model(checkpoint, *device, DType::float32, 100, progress);
    CHECK_EQ(lines.size(), 7u);
    CHECK_EQ(lines[0], folder.path().string() + " has a vision tower (1 tensor), which is skipped: it is not needed to compute text");
    CHECK_EQ(lines[1], folder.path().string() + " has a multi-token prediction head (1 tensor), which is skipped: it is not needed to compute text");
    CHECK_EQ(lines[6], std::string("loading weights: layer 5 of 5"));
    CHECK_EQ(last, 1.0);
    CHECK_EQ(model.architecture(), std::string("qwen3_5"));
    CHECK_EQ(model.vocab_size(), 151);
    CHECK_EQ(model.max_positions(), 512);
    CHECK_EQ(model.kv_size(), 32);
    CHECK_EQ(model.num_attention_layers(), 2);
    CHECK_EQ(model.num_delta_net_layers(), 3);
}

TEST(bytes_that_a_token_reads) {
    const TemporaryFolder folder;
    const TinyCheckpoint tiny = tiny_with();
    tiny.write(folder.path());
    const auto device = make_device("cpu", 1);
    Checkpoint checkpoint(folder.path());
    const Qwen3_5 model(checkpoint, *device, DType::float32);
    std::size_t stored = 0;
    for (const auto& [name, tensor] : tiny.tensors) stored += tensor.bytes.size();
    CHECK(model.weight_bytes() >= stored);  // a device may pad
    CHECK(model.bytes_per_token() < model.weight_bytes());
    CHECK(model.bytes_per_token() >= stored - tiny.tensors.at("model.embed_tokens.weight").bytes.size());
}

TEST(progress_ends_the_load) {
    int calls = 0;
    const auto stop = [&](double, const std::string&) {
        if (++calls == 2) throw Error(ErrorKind::unavailable, "The engine was closed while the model loaded.");
    };
    CHECK_THROWS(load_with([](TinyCheckpoint&) {}, stop), "The engine was closed");
    CHECK_EQ(calls, 2);
}

TEST(every_tensor_is_needed) {
    for (const auto& [name, stored] : tiny_with().tensors) {
        const auto erase = [&, &key = name](TinyCheckpoint& tiny) { tiny.tensors.erase(key); };
        CHECK_THROWS(load_with(erase), "model.safetensors lacks the tensor " + name + ": download");
    }
}

TEST(every_tensor_has_one_shape) {
    for (const auto& [name, stored] : tiny_with().tensors) {
        const auto transpose = [&, &key = name](TinyCheckpoint& tiny) {
            std::vector<std::int64_t>& shape = tiny.tensors[key].shape;
            std::reverse(shape.begin(), shape.end());
            if (shape.front() == shape.back()) shape.push_back(1);
        };
        CHECK_THROWS(load_with(transpose), "model.safetensors has the tensor " + name + " of the shape [");
    }
}

TEST(every_tensor_is_finite) {
    for (const auto& [name, stored] : tiny_with().tensors) {
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
            const auto spoil = [&, &key = name](TinyCheckpoint& tiny) {
                StoredTensor& tensor = tiny.tensors[key];
                std::vector<float> values = values_of(tensor);
                values[values.size() / 2] = bad;
                tensor = store(values, tensor.shape, "F32");
            };
            CHECK_THROWS(load_with(spoil), name);
            CHECK_THROWS(load_with(spoil), "model.safetensors");
        }
    }
}

TEST(tensors_without_a_place) {
    const auto add = [](const std::string& name) { return [name](TinyCheckpoint& tiny) { tiny.tensors[name] = store({1}, {1}, "F32"); }; };
    const char* const extra = "model.norm.weight.extra";
    CHECK_THROWS(load_with(add(extra)), "model.safetensors holds the tensor model.norm.weight.extra, which a qwen3_5_text model has no place for");
    CHECK_THROWS(load_with(add("model.layers.5.mlp.gate_proj.weight")), "holds the tensor model.layers.5.mlp.gate_proj.weight, which");
    CHECK_THROWS(load_with(add("model.layers.0.mlp.gate_proj.bias")), "holds the tensor model.layers.0.mlp.gate_proj.bias, which");
    load_with(add("mtp.layers.0.input_layernorm.weight"));
    load_with(add("model.visual.pos_embed.weight"));
}

TEST(a_decay_without_bounds) {
    const auto change = [](TinyCheckpoint& tiny) { tiny.tensors["model.layers.2.linear_attn.A_log"] = store(std::vector<float>(6, 89), {6}, "F32"); };
    CHECK_THROWS(load_with(change), "model.safetensors has the tensor model.layers.2.linear_attn.A_log with a value whose exponential is infinite");
}

TEST(embeddings_in_fp8) {
    const auto change = [](TinyCheckpoint& tiny) {
        tiny.config["quantization_config"] = R"({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})";
        tiny.tensors["model.embed_tokens.weight"] = store(std::vector<float>(151 * 48, 1), {151, 48}, "F8_E4M3");
        tiny.tensors["model.embed_tokens.weight_scale_inv"] = store({1, 1}, {2, 1}, "BF16");
    };
    CHECK_THROWS(load_with(change), "has the tensor model.embed_tokens.weight of the type F8_E4M3, in which a table of embeddings is not read");
}
