#include "backends/cuda/bench/synthetic_model.h"

#include <algorithm>
#include <bit>

#include "pocket/error.h"

namespace pocket::cuda {

namespace {

constexpr int kBlockSize = 16;
constexpr std::size_t kRandom = std::size_t{1} << 27;       // values

float uniform(std::uint64_t& state) {                       // in [-1, 1)
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<float>(static_cast<double>(state >> 11) * 0x1p-52 - 1.0);
}

}  // namespace

ModelShape model_shape(const std::string& name) {
    const std::vector<ModelShape> all = {{"0.8b", 1024, 24, 8, 2, 16, 16, 3584, true}, {"9b", 4096, 32, 16, 4, 16, 32, 12288, false}, {"27b", 5120, 64, 24, 4, 16, 48, 17408, false}};
    for (const ModelShape& shape : all)
        if (shape.name == name) return shape;
    throw Error(ErrorKind::configuration, "There is no shape \"" + name + "\": take 0.8b, 9b or 27b.");
}

Buffer& SyntheticModel::keep(std::unique_ptr<Buffer> buffer) {
    buffers_.push_back(std::move(buffer));
    return *buffers_.back();
}

const std::int32_t* SyntheticModel::upload(const std::vector<std::int32_t>& values) {
    Buffer& buffer = keep(device_.allocate(values.size() * sizeof(std::int32_t)));
    device_.upload(buffer.data(), values.data(), buffer.num_bytes());
    return static_cast<const std::int32_t*>(buffer.data());
}

std::unique_ptr<Matrix> SyntheticModel::random_matrix(std::int64_t rows, std::int64_t columns, bool is_float8) {
    const std::int64_t size = rows * columns;
    std::vector<HostTensor> tensors;
    std::vector<MatrixPart> parts;
    std::vector<float> scales;
    HostTensor scale;
    if (is_float8) {
        scale = {"scales", "random", DType::float32, {(rows + 127) / 128, (columns + 127) / 128}, nullptr};
        scales.assign(static_cast<std::size_t>(scale.num_elements()), 1e-3f);
        scale.data = reinterpret_cast<const std::byte*>(scales.data());
    }
    // Parts of at most the random values there are, whole blocks of scales each.
    const std::int64_t bytes = is_float8 ? 1 : 2, most = static_cast<std::int64_t>(kRandom) * 2 / bytes / columns / 128 * 128;
    for (std::int64_t first = 0; first < rows; first += most) {
        const std::int64_t height = std::min(most, rows - first), room = static_cast<std::int64_t>(kRandom) * 2 - height * columns * bytes;
        cut_ = cut_ * 6364136223846793005ull + 1442695040888963407ull;
        const std::int64_t at = room > 0 ? static_cast<std::int64_t>((cut_ >> 20) % static_cast<std::uint64_t>(room)) / 16 * 16 : 0;
        tensors.push_back({"weight", "random", is_float8 ? DType::float8_e4m3 : DType::bfloat16, {height, columns}, reinterpret_cast<const std::byte*>(random_.data()) + at});
    }
    if (is_float8 && tensors.size() > 1) throw Error(ErrorKind::configuration, "A float8 matrix of " + std::to_string(size) + " values is too large for this benchmark.");
    for (const HostTensor& tensor : tensors) parts.push_back({&tensor, is_float8 ? &scale : nullptr});
    return device_.load_matrix(parts, activation_);
}

SyntheticModel::SyntheticModel(Device& device, const ModelShape& shape, bool is_float8, int num_layers, int batch, int context, int max_tokens)
    : device_(device), shape_(shape), activation_(device.info().activation_dtype), context_(context), random_(kRandom) {
    std::uint64_t state = 88172645463325252ull;
    // Small values, whose bytes are no NaN of float8_e4m3 either: the lower byte of 0x7f or 0xff is changed.
    for (std::uint16_t& bits : random_) {
        bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(uniform(state) * 0.02f) >> 16);
        if ((bits & 0x7fu) == 0x7fu) bits ^= 1u;
    }
    const int layers = num_layers > 0 ? num_layers : shape.num_layers;
    const AttentionShape attention = shape.attention();
    const DeltaNetShape delta = shape.delta_net();
    const std::int64_t query_size = static_cast<std::int64_t>(attention.num_heads) * attention.head_dim, kv_size = static_cast<std::int64_t>(attention.num_kv_heads) * attention.head_dim;
    const std::int64_t attention_rows = 2 * query_size + 2 * kv_size;
    const int blocks_of_row = (context + kBlockSize - 1) / kBlockSize;
    const DType cache_dtype = device.info().kv_cache_dtype;
    for (int index = 0; index < layers; ++index) {
        Layer layer;
        layer.is_attention = shape.is_attention(index);
        layer.in = random_matrix(layer.is_attention ? attention_rows : delta.projection_size(), shape.hidden, is_float8);
        layer.out = random_matrix(shape.hidden, layer.is_attention ? query_size : delta.value_size(), is_float8);
        layer.gate_up = random_matrix(2LL * shape.feed_forward, shape.hidden, is_float8);
        layer.down = random_matrix(shape.hidden, shape.feed_forward, is_float8);
        if (layer.is_attention) {
            const std::size_t bytes = static_cast<std::size_t>(batch) * blocks_of_row * kBlockSize * kv_size * item_size(cache_dtype);
            layer.kv = {keep(device.allocate(bytes)).data(), keep(device.allocate(bytes)).data(), cache_dtype, batch * blocks_of_row, kBlockSize};
        } else {
            layer.states = {static_cast<float*>(keep(device.allocate(sizeof(float) * static_cast<std::size_t>(batch * delta.state_size()))).data()), delta.state_size(), batch};
        }
        layers_.push_back(std::move(layer));
    }
    head_ = random_matrix(shape.vocab_size(), shape.hidden, false);
    if (!shape.is_tied) embedding_ = random_matrix(shape.vocab_size(), shape.hidden, false);
    const auto floats = [&](std::size_t count, float value) {
        Buffer& buffer = keep(device.allocate(count * sizeof(float)));
        const std::vector<float> values(count, value);
        device.upload(buffer.data(), values.data(), buffer.num_bytes());
        return static_cast<const float*>(buffer.data());
    };
    const auto wide = static_cast<std::size_t>(std::max<std::int64_t>(shape.hidden, 256));
    norm_ = {floats(wide, 1.0f), 1e-6f};
    attention_ = {norm_, norm_, floats(static_cast<std::size_t>(context + 1) * 32, 0.8f), floats(static_cast<std::size_t>(context + 1) * 32, 0.6f)};
    delta_net_ = {floats(static_cast<std::size_t>(delta.conv_kernel * delta.conv_dim()), 0.3f), floats(static_cast<std::size_t>(delta.num_value_heads), -1.0f),
                  floats(static_cast<std::size_t>(delta.num_value_heads), 0.1f), norm_};
    const auto tokens = static_cast<std::size_t>(max_tokens);
    residual_ = device.allocate(tokens * static_cast<std::size_t>(shape.hidden) * 4);
    projections_ = device.allocate(tokens * static_cast<std::size_t>(std::max(attention_rows, delta.projection_size())) * 4);
    mixed_ = device.allocate(tokens * static_cast<std::size_t>(std::max(query_size, delta.value_size())) * 4);
    gated_ = device.allocate(tokens * static_cast<std::size_t>(shape.feed_forward) * 4);
    sampled_ = device.allocate(static_cast<std::size_t>(batch) * static_cast<std::size_t>(shape.hidden) * 4);
    logits_ = device.allocate(static_cast<std::size_t>(batch) * static_cast<std::size_t>(shape.vocab_size()) * 4);
    device.reserve(max_tokens, batch);
}

Step SyntheticModel::step(int rows, int tokens, int length) {
    std::vector<std::int32_t> ids, positions, slots, starts = {0}, lengths, tables, states, samples;
    const int width = (context_ + kBlockSize - 1) / kBlockSize;
    for (int row = 0; row < rows; ++row) {
        for (int token = 0; token < tokens; ++token) {
            const int position = length - tokens + token;
            ids.push_back((row * 7919 + token * 104729 + 17) % shape_.vocab_size());
            positions.push_back(position);
            slots.push_back(row * width * kBlockSize + position);
        }
        starts.push_back(starts.back() + tokens), lengths.push_back(length), states.push_back(row), samples.push_back(starts.back() - 1);
        for (int block = 0; block < width; ++block) tables.push_back(row * width + block);
    }
    Step step;
    step.num_tokens = rows * tokens, step.num_rows = rows, step.num_decode = tokens == 1 ? rows : 0, step.num_samples = rows;
    step.max_blocks = width, step.max_query = tokens, step.max_length = length;
    step.token_ids = upload(ids), step.positions = upload(positions), step.slot_mapping = upload(slots), step.row_starts = upload(starts), step.lengths = upload(lengths);
    step.block_tables = upload(tables), step.state_slots = upload(states), step.sample_tokens = upload(samples);
    return step;
}

void SyntheticModel::mix(Layer& layer, const Step& step) {
    const Tensor projections = tensor(projections_, activation_, step.num_tokens, layer.in->rows()), out = tensor(mixed_, activation_, step.num_tokens, layer.out->columns());
    if (layer.is_attention) {
        device_.attention(step, shape_.attention(), attention_, projections, layer.kv, out);
    } else {
        device_.delta_net(step, shape_.delta_net(), delta_net_, projections, layer.states, out);
    }
}

Tensor SyntheticModel::forward(const Step& step) {
    const Tensor residual = tensor(residual_, DType::float32, step.num_tokens, shape_.hidden);
    device_.embed(step, embedding_ ? *embedding_ : *head_, residual);
    for (Layer& layer : layers_) {
        device_.linear(residual, &norm_, *layer.in, Epilogue::store, tensor(projections_, activation_, step.num_tokens, layer.in->rows()));
        mix(layer, step);
        device_.linear(tensor(mixed_, activation_, step.num_tokens, layer.out->columns()), nullptr, *layer.out, Epilogue::add, residual);
        const Tensor gated = tensor(gated_, activation_, step.num_tokens, shape_.feed_forward);
        device_.linear(residual, &norm_, *layer.gate_up, Epilogue::swiglu, gated);
        device_.linear(gated, nullptr, *layer.down, Epilogue::add, residual);
    }
    const Tensor sampled = tensor(sampled_, DType::float32, step.num_samples, shape_.hidden), logits = tensor(logits_, DType::float32, step.num_samples, shape_.vocab_size());
    device_.take_samples(step, residual, sampled);
    device_.linear(sampled, &norm_, *head_, Epilogue::store, logits);
    return logits;
}

int SyntheticModel::run_part(const std::string& which, const Step& step) {
    const Tensor residual = tensor(residual_, DType::float32, step.num_tokens, shape_.hidden), gated = tensor(gated_, activation_, step.num_tokens, shape_.feed_forward);
    int count = 0;
    for (Layer& layer : layers_) {
        const bool runs = (which != "attention" || layer.is_attention) && (which != "delta" || !layer.is_attention) && which != "head";
        if (!runs) continue;
        ++count;
        if (which == "in") {
            device_.linear(residual, &norm_, *layer.in, Epilogue::store, tensor(projections_, activation_, step.num_tokens, layer.in->rows()));
        } else if (which == "out") {
            device_.linear(tensor(mixed_, activation_, step.num_tokens, layer.out->columns()), nullptr, *layer.out, Epilogue::add, residual);
        } else if (which == "gate_up") {
            device_.linear(residual, &norm_, *layer.gate_up, Epilogue::swiglu, gated);
        } else if (which == "down") {
            device_.linear(gated, nullptr, *layer.down, Epilogue::add, residual);
        } else {
            mix(layer, step);
        }
    }
    if (which == "head") {
        device_.linear(tensor(sampled_, DType::float32, step.num_samples, shape_.hidden), &norm_, *head_, Epilogue::store,
                       tensor(logits_, DType::float32, step.num_samples, shape_.vocab_size()));
        count = 1;
    }
    return count;
}

std::size_t SyntheticModel::part_bytes(const std::string& which) const {
    std::size_t bytes = which == "head" ? head_->num_bytes() : 0;
    for (const Layer& layer : layers_)
        bytes += which == "in" ? layer.in->num_bytes() : which == "out" ? layer.out->num_bytes() : which == "gate_up" ? layer.gate_up->num_bytes() : which == "down" ? layer.down->num_bytes() : 0;
    return bytes;
}

std::size_t SyntheticModel::bytes_per_token() const {
    std::size_t bytes = 0;
    for (const char* which : {"in", "out", "gate_up", "down", "head"}) bytes += part_bytes(which);
    return bytes;
}

}  // namespace pocket::cuda
