// What the engine needs of a model: its sizes, and a step's logits. Of a model that ranks share, sizes of heads, caches and weights are this rank's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "pocket/device.h"

namespace pocket {

// How far loading has come: `fraction` in [0, 1] and a line for people. What it throws ends the load.
using LoadProgress = std::function<void(double fraction, const std::string& message)>;

// Where a step's cache lies: for each attention layer its keys and values, for each DeltaNet layer its states, in the order of the layers.
struct ModelCaches {
    std::span<const KvCache> kv;
    std::span<const StateCache> states;
};

// The ids whose logits one of several ranks computes.
struct LogitShare {
    int first = 0;
    int count = 0;
    int widest = 0;                                               // of all ranks
};

class Model {
public:
    virtual ~Model() = default;

    virtual std::string architecture() const = 0;                 // model_type of the checkpoint
    virtual int vocab_size() const noexcept = 0;
    virtual int max_positions() const noexcept = 0;
    virtual int num_attention_layers() const noexcept = 0;
    virtual int num_delta_net_layers() const noexcept = 0;
    virtual std::int64_t kv_size() const noexcept = 0;            // values of keys (as many of values) of one token and layer
    virtual AttentionShape attention_shape() const noexcept = 0;
    virtual DeltaNetShape delta_net_shape() const noexcept = 0;
    virtual std::size_t weight_bytes() const noexcept = 0;        // on the device
    virtual std::size_t bytes_per_token() const noexcept = 0;     // of weights that decoding one token reads, the embedding table's other rows left out

    // Make room for steps of up to `max_tokens` tokens and `max_samples` samples.
    virtual void reserve(int max_tokens, int max_rows, int max_samples) = 0;

    virtual LogitShare logit_share() const noexcept { return {0, vocab_size(), vocab_size()}; }

    // logits [step.num_samples, logit_share().count] float32, rows logit_share().widest apart, in memory of the model that is valid until the next call.
    // Where ranks share the model, all of them make the call, with the same step.
    virtual Tensor forward(const Step& step, const ModelCaches& caches) = 0;

    // The same for other samples of the step that `forward` has just computed: `step` is that step with sample_tokens of its own.
    virtual Tensor logits(const Step& step) = 0;
};

}  // namespace pocket
