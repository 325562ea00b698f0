// qwen3_5 and qwen3_5_text: a hybrid decoder, Gated DeltaNet in most layers and gated attention in every few; text only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "models/model.h"
#include "models/qwen3_5_config.h"
#include "models/weights.h"
#include "pocket/communicator.h"
#include "pocket/device.h"

namespace pocket {

// The weights are copied to the device: the checkpoint is not needed afterwards. The device must outlive the model.
class Qwen3_5 final : public Model {
public:
    // `dtype`: of the stored values of matrices that are not FP8. `max_model_len`: most tokens of a row; 0 or more than max_position_embeddings is that.
    // A vision tower and a multi-token prediction head are skipped, which `progress` is told.
    // `ranks`: those that share the model, each with as many heads, inner values and nearly as many ids of the head; they must outlive it. Null for one.
    // Error naming the file and the tensor or the key: a tensor is missing, left over, has another shape or type, or holds a NaN or an infinity, or can't be
    // shared by so many ranks.
    Qwen3_5(Checkpoint& checkpoint, Device& device, DType dtype, int max_model_len = 0, const LoadProgress& progress = {}, Communicator* ranks = nullptr);

    std::string architecture() const override { return architecture_; }
    int vocab_size() const noexcept override { return config_.vocab_size; }
    int max_positions() const noexcept override { return config_.max_position_embeddings; }
    int num_attention_layers() const noexcept override { return config_.num_attention_layers(); }
    int num_delta_net_layers() const noexcept override { return config_.num_delta_net_layers(); }
    std::int64_t kv_size() const noexcept override;
    AttentionShape attention_shape() const noexcept override { return config_.attention; }
    DeltaNetShape delta_net_shape() const noexcept override { return config_.delta_net; }
    std::size_t weight_bytes() const noexcept override { return weight_bytes_; }
    std::size_t bytes_per_token() const noexcept override { return bytes_per_token_; }

    LogitShare logit_share() const noexcept override { return logits_of_; }
    void reserve(int max_tokens, int max_rows, int max_samples) override;
    Tensor forward(const Step& step, const ModelCaches& caches) override;
    Tensor logits(const Step& step) override;

    const Qwen3_5Config& config() const noexcept { return config_; }  // this rank's

private:
    // x += output(mixer(projection(norm(x)))), then x += down(swiglu(gate_up(norm(x)))). Ranks have rows of projection and gate_up, those of their heads and
    // inner values, and the columns of output and down that take these.
    struct Layer {
        bool is_attention = false;
        Norm mixer_norm, feed_forward_norm;
        AttentionWeights attention;                         // of the one kind
        DeltaNetWeights delta_net;                          // of the other
        std::unique_ptr<Matrix> projection, output, gate_up, down;
    };

    Layer load_layer(Weights& weights, const std::string& prefix, bool is_attention);
    void load_attention(Weights& weights, const std::string& prefix, Layer& layer);
    void load_delta_net(Weights& weights, const std::string& prefix, Layer& layer);
    void load_head(Weights& weights, const MatrixPart& table);
    void load_rotations();
    std::unique_ptr<Matrix> load(const std::vector<MatrixPart>& parts);
    const float* keep(const std::vector<float>& values);
    Norm load_norm(Weights& weights, const std::string& name, int size, float offset = 1);
    void add_product(const Tensor& x, const Matrix& weight, const Tensor& hidden);
    Tensor view(const std::unique_ptr<Buffer>& buffer, DType dtype, std::int64_t rows, std::int64_t columns) const;

    Device& device_;
    Communicator* ranks_;
    std::string architecture_;
    Qwen3_5Config config_;
    LogitShare logits_of_;
    DType dtype_, activation_dtype_;
    int num_rotations_ = 0;                                 // positions that the tables of rotations have
    std::size_t weight_bytes_ = 0, bytes_per_token_ = 0;

    std::unique_ptr<Matrix> table_, own_head_;              // a tied head that ranks don't share is the table
    const Matrix* head_ = nullptr;
    Norm final_norm_;
    std::vector<Layer> layers_;
    std::vector<std::unique_ptr<Buffer>> vectors_;          // what the pointers of norms and layers point into

    // Of one step, as reserve() made them.
    int max_tokens_ = 0, max_rows_ = 0, max_samples_ = 0;
    std::unique_ptr<Buffer> hidden_;                        // [max_tokens, hidden_size] float32, the residual stream
    std::unique_ptr<Buffer> projected_;                     // [max_tokens, the widest of the projections] and, when they are used, inner values
    std::unique_ptr<Buffer> mixed_;                         // [max_tokens, the widest output of a mixer]
    std::unique_ptr<Buffer> sampled_;                       // [max_samples, hidden_size] float32
    std::unique_ptr<Buffer> logits_;                        // [max_samples, logits_of_.widest] float32
};

}  // namespace pocket
