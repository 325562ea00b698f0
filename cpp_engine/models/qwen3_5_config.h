// The numbers of Qwen3.5's text decoder, without defaults of our own.
#pragma once

#include <cstdint>
#include <vector>

#include "core/share.h"
#include "io/checkpoint.h"
#include "pocket/device.h"

namespace pocket {

// What the model reads of config.json, under its names where it has them.
struct Qwen3_5Config {
    int vocab_size = 0;
    int hidden_size = 0;
    int intermediate_size = 0;
    int max_position_embeddings = 0;
    float rms_norm_eps = 0;
    float rope_theta = 0;
    bool tie_word_embeddings = false;
    AttentionShape attention;
    DeltaNetShape delta_net;
    std::vector<bool> is_attention;                         // a layer: whether it is full attention, else Gated DeltaNet

    int num_layers() const noexcept { return static_cast<int>(is_attention.size()); }
    int num_attention_layers() const noexcept;
    int num_delta_net_layers() const noexcept { return num_layers() - num_attention_layers(); }
};

// Reads model types qwen3_5 (nested in text_config, or flat) and qwen3_5_text. Error(configuration) naming config.json and the key that is missing or makes
// no sense; Error(unsupported) naming the key and value that this model does not compute, or the model type.
Qwen3_5Config read_qwen3_5_config(const Checkpoint& checkpoint);

// The config of one rank: its heads and its intermediate_size. Error(unsupported) naming config.json and the key that the number of ranks does not divide.
Qwen3_5Config share_config(const Qwen3_5Config& whole, const Share& share, const Checkpoint& checkpoint);

}  // namespace pocket
