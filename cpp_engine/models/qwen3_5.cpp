#include "models/qwen3_5.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "pocket/error.h"

namespace pocket {

namespace {

constexpr std::int64_t vocab_unit = 128;  // ids: a border between ranks' parts of the head lies at a multiple, and so at one of FP8 blocks
constexpr const char* multimodal_prefix = "model.language_model.";
constexpr std::pair<const char*, const char*> skipped_parts[] = {{"model.visual.", "vision tower"}, {"mtp.", "multi-token prediction head"}};

void skip_parts(Checkpoint& checkpoint, const LoadProgress& progress) {
    for (const auto& [prefix, what] : skipped_parts) {
        const int count = checkpoint.skip(prefix);
        if (!count || !progress) continue;
        const std::string tensors = std::to_string(count) + (count == 1 ? " tensor" : " tensors");
        progress(0, checkpoint.path() + " has a " + what + " (" + tensors + "), which is skipped: it is not needed to compute text");
    }
}

bool are_equal(const HostTensor& a, const HostTensor& b) {
    const std::size_t num_bytes = static_cast<std::size_t>(a.num_elements()) * item_size(a.dtype);
    return a.dtype == b.dtype && a.shape == b.shape && std::memcmp(a.data, b.data, num_bytes) == 0;
}

Share share_of(const Communicator* ranks) { return ranks ? Share{ranks->rank(), ranks->size()} : Share{}; }

LogitShare logit_share_of(std::int64_t vocab_size, const Share& share) {
    const std::int64_t unit = vocab_size >= vocab_unit * share.size ? vocab_unit : 1;
    LogitShare logits;
    for (int rank = 0; rank < share.size; ++rank) {
        logits.widest = std::max(logits.widest, static_cast<int>(Share{rank, share.size}.nearly(vocab_size, unit).size()));
    }
    const Range mine = share.nearly(vocab_size, unit);
    logits.first = static_cast<int>(mine.begin);
    logits.count = static_cast<int>(mine.size());
    return logits;
}

}  // namespace

Qwen3_5::Qwen3_5(Checkpoint& checkpoint, Device& device, DType dtype, int max_model_len, const LoadProgress& progress, Communicator* ranks)
    : device_(device),
      ranks_(ranks),
      architecture_(checkpoint.architecture()),
      config_(share_config(read_qwen3_5_config(checkpoint), share_of(ranks), checkpoint)),
      logits_of_(logit_share_of(config_.vocab_size, share_of(ranks))),
      dtype_(dtype),
      activation_dtype_(dtype == DType::float32 ? DType::float32 : device.info().activation_dtype),  // exact weights want exact products
      num_rotations_(max_model_len > 0 ? std::min(max_model_len, config_.max_position_embeddings) : config_.max_position_embeddings) {
    Weights weights(checkpoint, share_of(ranks));
    skip_parts(checkpoint, progress);
    const std::string prefix = checkpoint.has_prefix(multimodal_prefix) ? multimodal_prefix : "model.";
    const MatrixPart table = weights.matrix(prefix + "embed_tokens.weight", config_.vocab_size, config_.hidden_size);
    if (table.scales) {
        const std::string found = table.weight->file + " has the tensor " + table.weight->name + " of the type F8_E4M3";
        throw Error(ErrorKind::unsupported, found + ", in which a table of embeddings is not read: use another checkpoint.", "model");
    }
    table_ = load({table});
    load_head(weights, table);
    final_norm_ = load_norm(weights, prefix + "norm.weight", config_.hidden_size);
    const int num_layers = config_.num_layers();
    for (int index = 0; index < num_layers; ++index) {
        layers_.push_back(load_layer(weights, prefix + "layers." + std::to_string(index) + ".", config_.is_attention[static_cast<std::size_t>(index)]));
        weights.forget_parts();
        const std::string message = "loading weights: layer " + std::to_string(index + 1) + " of " + std::to_string(num_layers);
        if (progress) progress(static_cast<double>(index + 1) / num_layers, message);
    }
    checkpoint.check_leftovers();
    load_rotations();
    device_.synchronize();
    if (own_head_) bytes_per_token_ -= table_->num_bytes();  // of the table it reads one row; a tied head it reads whole
}

std::int64_t Qwen3_5::kv_size() const noexcept { return static_cast<std::int64_t>(config_.attention.num_kv_heads) * config_.attention.head_dim; }

std::unique_ptr<Matrix> Qwen3_5::load(const std::vector<MatrixPart>& parts) {
    std::unique_ptr<Matrix> matrix = device_.load_matrix(parts, dtype_);
    weight_bytes_ += matrix->num_bytes();
    bytes_per_token_ += matrix->num_bytes();
    return matrix;
}

const float* Qwen3_5::keep(const std::vector<float>& values) {
    const std::size_t num_bytes = values.size() * sizeof(float);
    vectors_.push_back(device_.allocate(num_bytes));
    device_.upload(vectors_.back()->data(), values.data(), num_bytes);
    weight_bytes_ += num_bytes;
    bytes_per_token_ += num_bytes;
    return static_cast<const float*>(vectors_.back()->data());
}

// The norm whose factor is the stored weight plus `offset`, in float32 whatever it is stored in.
Norm Qwen3_5::load_norm(Weights& weights, const std::string& name, int size, float offset) {
    std::vector<float> values = weights.floats(name, {size});
    for (float& value : values) value += offset;
    return {keep(values), config_.rms_norm_eps};
}

void Qwen3_5::load_head(Weights& weights, const MatrixPart& table) {
    MatrixPart head = table;
    if (!config_.tie_word_embeddings || weights.checkpoint().find("lm_head.weight")) {
        const MatrixPart stored = weights.matrix("lm_head.weight", config_.vocab_size, config_.hidden_size);
        const bool counts = !config_.tie_word_embeddings || !are_equal(*stored.weight, *table.weight);  // a tied one where it differs, as for transformers
        if (counts) head = stored;
    }
    head_ = table_.get();
    if (head.weight == table.weight && !ranks_) return;
    own_head_ = load({weights.rows(head, {logits_of_.first, logits_of_.first + logits_of_.count})});
    head_ = own_head_.get();
}

void Qwen3_5::load_rotations() {
    // [num_rotations_, rotary_dim / 2] each, float32 throughout, as the model was trained: at high positions other roundings are other angles.
    const int half = config_.attention.rotary_dim / 2;
    std::vector<float> frequencies;
    for (int pair = 0; pair < half; ++pair) {
        const float exponent = static_cast<float>(2 * pair) / static_cast<float>(config_.attention.rotary_dim);
        frequencies.push_back(1.0f / std::pow(config_.rope_theta, exponent));
    }
    std::vector<float> cosines, sines;
    cosines.reserve(static_cast<std::size_t>(num_rotations_) * frequencies.size());
    sines.reserve(cosines.capacity());
    for (int position = 0; position < num_rotations_; ++position) {
        for (const float frequency : frequencies) {
            const float angle = static_cast<float>(position) * frequency;
            cosines.push_back(std::cos(angle));
            sines.push_back(std::sin(angle));
        }
    }
    const std::size_t weight_bytes = weight_bytes_, bytes_per_token = bytes_per_token_;
    const float *const cosine_table = keep(cosines), *const sine_table = keep(sines);
    for (Layer& layer : layers_) {
        layer.attention.cosines = cosine_table;
        layer.attention.sines = sine_table;
    }
    weight_bytes_ = weight_bytes;  // tables are no weights
    bytes_per_token_ = bytes_per_token;
}

Qwen3_5::Layer Qwen3_5::load_layer(Weights& weights, const std::string& prefix, bool is_attention) {
    Layer layer;
    layer.is_attention = is_attention;
    const std::int64_t hidden = config_.hidden_size, inner = static_cast<std::int64_t>(config_.intermediate_size) * weights.share().size;
    const auto shared = [&](const char* name) { return weights.share_rows(weights.matrix(prefix + name, inner, hidden), 0, inner); };
    layer.mixer_norm = load_norm(weights, prefix + "input_layernorm.weight", config_.hidden_size);
    if (is_attention) {
        load_attention(weights, prefix + "self_attn.", layer);
    } else {
        load_delta_net(weights, prefix + "linear_attn.", layer);
    }
    layer.feed_forward_norm = load_norm(weights, prefix + "post_attention_layernorm.weight", config_.hidden_size);
    layer.gate_up = load({shared("mlp.gate_proj.weight"), shared("mlp.up_proj.weight")});
    layer.down = load({weights.share_columns(weights.matrix(prefix + "mlp.down_proj.weight", hidden, inner))});
    return layer;
}

void Qwen3_5::load_attention(Weights& weights, const std::string& prefix, Layer& layer) {
    const AttentionShape& shape = config_.attention;
    const std::int64_t hidden = config_.hidden_size, size = weights.share().size;
    const std::int64_t query_size = size * shape.num_heads * shape.head_dim;  // of all ranks
    const auto shared = [&](const char* name, std::int64_t rows) { return weights.share_rows(weights.matrix(prefix + name, rows, hidden), 0, rows); };
    layer.projection = load({
        shared("q_proj.weight", 2 * query_size),  // of each head its query, then its gate
        shared("k_proj.weight", size * kv_size()),
        shared("v_proj.weight", size * kv_size()),
    });
    layer.attention.query_norm = load_norm(weights, prefix + "q_norm.weight", shape.head_dim);
    layer.attention.key_norm = load_norm(weights, prefix + "k_norm.weight", shape.head_dim);
    layer.output = load({weights.share_columns(weights.matrix(prefix + "o_proj.weight", hidden, query_size))});
}

void Qwen3_5::load_delta_net(Weights& weights, const std::string& prefix, Layer& layer) {
    const DeltaNetShape& shape = config_.delta_net;
    DeltaNetShape whole = shape;  // of all ranks
    whole.num_key_heads *= weights.share().size;
    whole.num_value_heads *= weights.share().size;
    const std::int64_t hidden = config_.hidden_size, keys = static_cast<std::int64_t>(whole.num_key_heads) * whole.key_dim, values = whole.value_size();
    const std::int64_t heads = whole.num_value_heads;
    const MatrixPart channels = weights.matrix(prefix + "in_proj_qkv.weight", whole.conv_dim(), hidden);  // of queries, keys and values
    std::vector<MatrixPart> parts{channels};
    if (ranks_) parts = {weights.share_rows(channels, 0, keys), weights.share_rows(channels, keys, keys), weights.share_rows(channels, 2 * keys, values)};
    for (const auto& [name, rows] : {std::pair("in_proj_z.weight", values), std::pair("in_proj_b.weight", heads), std::pair("in_proj_a.weight", heads)}) {
        parts.push_back(weights.share_rows(weights.matrix(prefix + name, rows, hidden), 0, rows));
    }
    layer.projection = load(parts);
    const auto own = [&](const std::vector<float>& all, std::int64_t first, std::int64_t count) {  // this rank's of `count` values from `first` on
        const Range part = weights.share().of(count);
        return std::vector<float>(all.begin() + first + part.begin, all.begin() + first + part.end);
    };
    const std::vector<float> stored = weights.floats(prefix + "conv1d.weight", {whole.conv_dim(), 1, shape.conv_kernel});
    std::vector<float> own_channels;  // [conv_dim, conv_kernel] of this rank
    for (const auto& [first, count] : {std::pair(std::int64_t{0}, keys), std::pair(keys, keys), std::pair(2 * keys, values)}) {
        const std::vector<float> part = own(stored, first * shape.conv_kernel, count * shape.conv_kernel);
        own_channels.insert(own_channels.end(), part.begin(), part.end());
    }
    std::vector<float> conv(own_channels.size());
    const auto kernel = static_cast<std::size_t>(shape.conv_kernel), num_channels = static_cast<std::size_t>(shape.conv_dim());
    for (std::size_t channel = 0; channel < num_channels; ++channel) {
        for (std::size_t place = 0; place < kernel; ++place) conv[place * num_channels + channel] = own_channels[channel * kernel + place];
    }
    std::vector<float> rate = own(weights.floats(prefix + "A_log", {heads}), 0, heads);
    for (float& value : rate) {
        value = -std::exp(value);
        if (!std::isfinite(value)) {
            const std::string found = weights.checkpoint().find(prefix + "A_log")->file + " has the tensor " + prefix + "A_log";
            throw Error(ErrorKind::configuration, found + " with a value whose exponential is infinite: download it again.", "model");
        }
    }
    layer.delta_net.conv = keep(conv);
    layer.delta_net.rate = keep(rate);
    layer.delta_net.dt_bias = keep(own(weights.floats(prefix + "dt_bias", {heads}), 0, heads));
    layer.delta_net.norm = load_norm(weights, prefix + "norm.weight", shape.value_dim, 0);
    layer.output = load({weights.share_columns(weights.matrix(prefix + "out_proj.weight", hidden, values))});
}

void Qwen3_5::reserve(int max_tokens, int max_rows, int max_samples) {
    const std::size_t item = item_size(activation_dtype_);
    if (max_tokens > max_tokens_) {
        std::int64_t wide = config_.intermediate_size, mixed = 0;
        for (const Layer& layer : layers_) {
            wide = std::max(wide, layer.projection->rows());
            mixed = std::max(mixed, layer.output->columns());
        }
        const auto tokens = static_cast<std::size_t>(max_tokens);
        hidden_ = device_.allocate(tokens * static_cast<std::size_t>(config_.hidden_size) * sizeof(float));
        projected_ = device_.allocate(tokens * static_cast<std::size_t>(wide) * item);
        mixed_ = device_.allocate(tokens * static_cast<std::size_t>(mixed) * item);
        max_tokens_ = max_tokens;
    }
    if (max_samples > max_samples_) {
        const auto samples = static_cast<std::size_t>(max_samples);
        sampled_ = device_.allocate(samples * static_cast<std::size_t>(config_.hidden_size) * sizeof(float));
        logits_ = device_.allocate(samples * static_cast<std::size_t>(logits_of_.widest) * sizeof(float));
        max_samples_ = max_samples;
    }
    max_rows_ = std::max(max_rows_, max_rows);
    device_.reserve(max_tokens_, max_rows_);
}

Tensor Qwen3_5::view(const std::unique_ptr<Buffer>& buffer, DType dtype, std::int64_t rows, std::int64_t columns) const {
    return {buffer ? buffer->data() : nullptr, dtype, rows, columns, columns};
}

// hidden += x W^T over all ranks, each of which has some columns of W. The residual stream goes into the sum once, with the part of rank 0.
void Qwen3_5::add_product(const Tensor& x, const Matrix& weight, const Tensor& hidden) {
    const bool brings_hidden = !ranks_ || ranks_->rank() == 0;
    device_.linear(x, nullptr, weight, brings_hidden ? Epilogue::add : Epilogue::store, hidden);
    if (ranks_) ranks_->sum(static_cast<float*>(hidden.data), static_cast<std::size_t>(hidden.rows * hidden.columns));
}

Tensor Qwen3_5::forward(const Step& step, const ModelCaches& caches) {
    const int num_tokens = step.num_tokens;
    const Tensor hidden = view(hidden_, DType::float32, num_tokens, config_.hidden_size);
    const Tensor inner = view(projected_, activation_dtype_, num_tokens, config_.intermediate_size);  // once the mixer has read its projection
    device_.embed(step, *table_, hidden);
    std::size_t attention_layer = 0, delta_net_layer = 0;
    for (const Layer& layer : layers_) {
        const Tensor projected = view(projected_, activation_dtype_, num_tokens, layer.projection->rows());
        const Tensor mixed = view(mixed_, activation_dtype_, num_tokens, layer.output->columns());
        device_.linear(hidden, &layer.mixer_norm, *layer.projection, Epilogue::store, projected);
        if (layer.is_attention) {
            device_.attention(step, config_.attention, layer.attention, projected, caches.kv[attention_layer++], mixed);
        } else {
            device_.delta_net(step, config_.delta_net, layer.delta_net, projected, caches.states[delta_net_layer++], mixed);
        }
        add_product(mixed, *layer.output, hidden);
        device_.linear(hidden, &layer.feed_forward_norm, *layer.gate_up, Epilogue::swiglu, inner);
        add_product(inner, *layer.down, hidden);
    }
    return logits(step);
}

Tensor Qwen3_5::logits(const Step& step) {
    const Tensor hidden = view(hidden_, DType::float32, step.num_tokens, config_.hidden_size);
    Tensor logits = view(logits_, DType::float32, step.num_samples, logits_of_.count);
    logits.stride = logits_of_.widest;
    if (step.num_samples == 0) return logits;
    const Tensor sampled = view(sampled_, DType::float32, step.num_samples, config_.hidden_size);
    device_.take_samples(step, hidden, sampled);
    device_.linear(sampled, &final_norm_, *head_, Epilogue::store, logits);
    return logits;
}

}  // namespace pocket
