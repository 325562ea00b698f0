// A model of the public Qwen3.5 shapes with random weights, made of the device's operators alone: what a step costs without the rest of the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pocket/device.h"

namespace pocket::cuda {

struct ModelShape {
    std::string name;
    int hidden, num_layers, num_heads, num_kv_heads, num_key_heads, num_value_heads, feed_forward;
    bool is_tied;

    int head_dim() const { return 256; }
    int vocab_size() const { return 248320; }
    AttentionShape attention() const { return {num_heads, num_kv_heads, head_dim(), 64}; }
    DeltaNetShape delta_net() const { return {num_key_heads, num_value_heads, 128, 128, 4}; }
    bool is_attention(int layer) const { return layer % 4 == 3; }
};

// Error(configuration) for a name that is none of 0.8b, 9b, 27b.
ModelShape model_shape(const std::string& name);

class SyntheticModel {
public:
    // `num_layers` 0 is all of them. Rows of `batch` have up to `context` tokens.
    SyntheticModel(Device& device, const ModelShape& shape, bool is_float8, int num_layers, int batch, int context, int max_tokens);

    // Steps of `rows` rows, each with `tokens` new tokens that end at `length`.
    Step step(int rows, int tokens, int length);
    Tensor forward(const Step& step);                       // logits [rows, vocab_size]

    // The parts of `forward`, for all layers; which: "in", "mixer", "attention", "delta", "out", "gate_up", "down", "head". Returns how many operators it was.
    int run_part(const std::string& which, const Step& step);
    std::size_t part_bytes(const std::string& which) const;  // of weights that run_part reads for one token
    std::size_t bytes_per_token() const;

private:
    struct Layer {
        std::unique_ptr<Matrix> in, out, gate_up, down;
        KvCache kv;
        StateCache states;
        bool is_attention = false;
    };

    std::unique_ptr<Matrix> random_matrix(std::int64_t rows, std::int64_t columns, bool is_float8);
    Tensor tensor(const std::unique_ptr<Buffer>& buffer, DType dtype, std::int64_t rows, std::int64_t columns) const { return {buffer->data(), dtype, rows, columns, columns}; }
    Buffer& keep(std::unique_ptr<Buffer> buffer);
    const std::int32_t* upload(const std::vector<std::int32_t>& values);
    void mix(Layer& layer, const Step& step);

    Device& device_;
    ModelShape shape_;
    DType activation_;
    int context_;
    std::vector<std::uint16_t> random_;                     // bfloat16 bits that all weights are cut from
    std::uint64_t cut_ = 0;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Layer> layers_;
    std::unique_ptr<Matrix> embedding_, head_;
    std::unique_ptr<Buffer> residual_, projections_, mixed_, gated_, sampled_, logits_;
    AttentionWeights attention_;
    DeltaNetWeights delta_net_;
    Norm norm_;
};

}  // namespace pocket::cuda
