#include "engine/model_runner.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "engine/cache_plan.h"
#include "engine/sample_rows.h"
#include "pocket/error.h"

namespace pocket {

namespace {

constexpr int token_granularity = 256;      // room for steps grows by this many tokens
constexpr int graph_rows = 8;               // graphs are made for 1, 2, 4 and 8 rows, then for every eight more
constexpr int graph_blocks = 32;            // and for so many blocks a row, or a power of two of them
constexpr int logits_at_once = 64;          // tokens, which bounds the memory of logits() and rank()
constexpr std::size_t alignment = 64;       // bytes, of each layer's cache and each array of a step

std::size_t align(std::size_t num_bytes) { return (num_bytes + alignment - 1) / alignment * alignment; }

int padded_rows_of(int num_rows) {
    return num_rows < graph_rows ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_rows))) : (num_rows + graph_rows - 1) / graph_rows * graph_rows;
}

// Of a row whose logits are not finite, which fails when it draws: the lowest there is.
TokenLogprobs logprobs_of(const SampleOutput& output) {
    constexpr float lowest = -9999;
    TokenLogprobs found{output.is_finite ? output.logprob : lowest, {}};
    for (int rank = 0; rank < output.num_top; ++rank) found.top.emplace_back(output.top_ids[rank], output.top_logprobs[rank]);
    return found;
}

}  // namespace

ModelRunner::ModelRunner(Device& device, Model& model, const CacheShape& shape, DType kv_cache_dtype, int max_step_tokens, Communicator* ranks)
    : device_(device), model_(model), shape_(shape), slot_bytes_(slot_bytes(model)) {
    if (ranks) shared_.emplace(device, *ranks, model.vocab_size(), model.logit_share());
    allocate_kv(kv_cache_dtype);
    allocate_states();
    has_graphs_ = device.capture([] {}) != nullptr;
    reserve(max_step_tokens, padded_rows_of(shape.num_row_slots));
    try_step();
}

void ModelRunner::allocate_kv(DType dtype) {
    const auto num_layers = static_cast<std::size_t>(model_.num_attention_layers());
    const auto num_tokens = static_cast<std::size_t>(shape_.num_blocks) * static_cast<std::size_t>(shape_.block_size);
    const std::size_t half_bytes = align(num_tokens * static_cast<std::size_t>(model_.kv_size()) * item_size(dtype));  // keys, or values, of a layer
    kv_ = device_.allocate(2 * num_layers * half_bytes);
    auto* place = static_cast<std::byte*>(kv_->data());
    for (std::size_t layer = 0; layer < num_layers; ++layer, place += 2 * half_bytes) {
        kv_layers_.push_back({place, place + half_bytes, dtype, shape_.num_blocks, shape_.block_size});
    }
}

void ModelRunner::allocate_states() {
    if (slot_bytes_ == 0) return;
    const int num_layers = model_.num_delta_net_layers(), num_slots = shape_.num_row_slots + shape_.num_snapshot_slots;
    states_ = device_.allocate(static_cast<std::size_t>(num_slots) * slot_bytes_);
    auto* place = static_cast<std::byte*>(states_->data());
    const auto stride = static_cast<std::int64_t>(slot_bytes_ / sizeof(float));
    for (int layer = 0; layer < num_layers; ++layer, place += slot_bytes_ / static_cast<std::size_t>(num_layers)) {
        state_layers_.push_back({reinterpret_cast<float*>(place), stride, num_slots});
    }
}

// Whoever gets the block and the slot starts from its own first token, so nothing is left of this one.
void ModelRunner::try_step() {
    constexpr std::int32_t token_ids[] = {0}, block_table[] = {0};
    const Request greedy;
    RunRow row;
    row.token_ids = token_ids;
    row.block_table = block_table;
    row.slot = 0;
    row.samples = true;
    row.request = &greedy;
    run({&row, 1}, {});
}

void ModelRunner::copy_states(std::span<const StateCopy> copies) {
    for (const StateCopy& copy : copies) {
        auto* states = static_cast<std::byte*>(states_->data());
        device_.copy(states + static_cast<std::size_t>(copy.to) * slot_bytes_, states + static_cast<std::size_t>(copy.from) * slot_bytes_, slot_bytes_);
    }
}

void ModelRunner::reserve(int num_tokens, int num_samples) {
    if (num_tokens <= max_tokens_ && num_samples <= max_samples_) return;
    if (num_tokens > max_tokens_) max_tokens_ = (num_tokens + token_granularity - 1) / token_granularity * token_granularity;
    max_samples_ = std::max(max_samples_, num_samples);
    graphs_.clear();
    model_.reserve(max_tokens_, padded_rows_of(shape_.num_row_slots), max_samples_);
}

// Rows in `order`, those that compute one token first. `samples_all`: logits are wanted of every token, else of the last of each row that samples.
// With `padded_rows` all rows decode and sample, and rows that stand for none fill the step up; block tables are at least `padded_blocks` wide.
Step ModelRunner::upload(std::span<const RunRow> rows, std::span<const std::size_t> order, bool samples_all, int padded_rows, int padded_blocks) {
    Step step;
    step.num_rows = static_cast<int>(order.size());
    for (const std::size_t place : order) {
        const RunRow& row = rows[place];
        const int count = static_cast<int>(row.token_ids.size());
        step.num_tokens += count;
        step.num_decode += count == 1;
        step.num_samples += samples_all ? count : row.samples;
        step.max_query = std::max(step.max_query, count);
        step.max_length = std::max(step.max_length, row.num_computed_tokens + count);
        const int num_blocks = (row.num_computed_tokens + count + shape_.block_size - 1) / shape_.block_size;
        step.max_blocks = std::max(step.max_blocks, num_blocks);
    }
    const auto num_real = order.size();
    if (padded_rows > 0) {
        step.num_rows = step.num_decode = step.num_tokens = step.num_samples = padded_rows;
        step.max_blocks = std::max(step.max_blocks, padded_blocks);
        step.max_length = step.max_blocks * shape_.block_size;
    }
    const auto tokens = static_cast<std::size_t>(step.num_tokens), num_rows = static_cast<std::size_t>(step.num_rows);
    const auto width = static_cast<std::size_t>(step.max_blocks);
    std::size_t total = 0;
    const auto make_room = [&](std::size_t count) {  // place of an array of `count` in inputs_
        const std::size_t start = total;
        total += align(count * sizeof(std::int32_t)) / sizeof(std::int32_t);
        return start;
    };
    const std::size_t token_ids = make_room(tokens), positions = make_room(tokens), slot_mapping = make_room(tokens), row_starts = make_room(num_rows + 1);
    const std::size_t lengths = make_room(num_rows), block_tables = make_room(num_rows * width), state_slots = make_room(num_rows);
    const std::size_t sample_tokens = make_room(static_cast<std::size_t>(step.num_samples));
    std::size_t num_ranked = 0;
    for (const std::size_t place : order) num_ranked += rows[place].ranked.ids.size();
    const std::size_t ranked_tokens = make_room(num_ranked);
    inputs_.assign(total, 0);
    std::size_t token = 0, sample = sample_tokens, ranked = ranked_tokens;
    for (std::size_t index = 0; index < num_real; ++index) {
        const RunRow& row = rows[order[index]];
        inputs_[row_starts + index] = static_cast<std::int32_t>(token);
        for (std::size_t place = 0; place < row.ranked.ids.size(); ++place)
            inputs_[ranked++] = static_cast<std::int32_t>(token + place) + row.ranked.first;
        for (std::size_t place = 0; place < row.token_ids.size(); ++place, ++token) {
            const int position = row.num_computed_tokens + static_cast<int>(place);
            const std::int32_t block = row.block_table[static_cast<std::size_t>(position / shape_.block_size)];
            inputs_[token_ids + token] = row.token_ids[place];
            inputs_[positions + token] = position;
            inputs_[slot_mapping + token] = block * shape_.block_size + position % shape_.block_size;
            const bool is_last = place + 1 == row.token_ids.size();
            if (samples_all || (row.samples && is_last)) inputs_[sample++] = static_cast<std::int32_t>(token);
        }
        inputs_[lengths + index] = row.num_computed_tokens + static_cast<std::int32_t>(row.token_ids.size());
        std::copy_n(row.block_table.begin(), std::min(width, row.block_table.size()), inputs_.data() + block_tables + index * width);
        inputs_[state_slots + index] = row.slot;
    }
    for (std::size_t index = num_real; index < num_rows; ++index, ++token) {  // of length 0
        inputs_[row_starts + index] = inputs_[sample++] = static_cast<std::int32_t>(token);
        inputs_[slot_mapping + token] = inputs_[state_slots + index] = -1;
    }
    inputs_[row_starts + num_rows] = step.num_tokens;

    const std::size_t num_bytes = total * sizeof(std::int32_t);
    if (!device_inputs_ || device_inputs_->num_bytes() < num_bytes) {
        graphs_.clear();
        device_inputs_ = device_.allocate(num_bytes + num_bytes / 2);
    }
    device_.upload(device_inputs_->data(), inputs_.data(), num_bytes);
    const auto* base = static_cast<const std::int32_t*>(device_inputs_->data());
    step.token_ids = base + token_ids;
    step.positions = base + positions;
    step.slot_mapping = base + slot_mapping;
    step.row_starts = base + row_starts;
    step.lengths = base + lengths;
    step.block_tables = base + block_tables;
    step.state_slots = base + state_slots;
    step.sample_tokens = base + sample_tokens;
    ranked_tokens_ = base + ranked_tokens;
    return step;
}

std::vector<Draw> ModelRunner::run(std::span<const RunRow> rows, std::span<const StateCopy> copies) {
    copy_states(copies);
    std::vector<std::size_t> order(rows.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_partition(order.begin(), order.end(), [&](std::size_t place) { return rows[place].token_ids.size() == 1; });
    std::size_t num_tokens = 0, num_ranked = 0;
    for (const RunRow& row : rows) num_tokens += row.token_ids.size(), num_ranked += row.ranked.ids.size();
    reserve(static_cast<int>(num_tokens), std::max(static_cast<int>(rows.size()), static_cast<int>(std::min<std::size_t>(num_ranked, logits_at_once))));
    if (has_graphs_ && std::all_of(rows.begin(), rows.end(), [](const RunRow& row) { return row.token_ids.size() == 1 && row.samples; }))
        return sample(decode(rows, order), rows, order);
    const Step step = upload(rows, order, false);
    const Tensor logits = model_.forward(step, {kv_layers_, state_layers_});
    std::vector<Draw> draws;
    if (step.num_samples > 0) draws = sample(logits, rows, order);
    if (num_ranked > 0) rank(step, rows, order);  // last, since it writes over the logits
    if (draws.empty()) device_.synchronize();  // what went wrong is known now, not in a later step
    return draws;
}

// A draw under a mask that allows one id alone is that id, and its log probability is over all of them: so a device needs no operator more.
void ModelRunner::rank(Step step, std::span<const RunRow> rows, std::span<const std::size_t> order) {
    std::vector<const RankedTokens*> owners;                // of each ranked token, in the order of ranked_tokens_
    std::vector<std::int32_t> ids;
    for (const std::size_t place : order) {
        const RankedTokens& ranked = rows[place].ranked;
        owners.insert(owners.end(), ranked.ids.size(), &ranked);
        ids.insert(ids.end(), ranked.ids.begin(), ranked.ids.end());
    }
    const std::size_t words = (static_cast<std::size_t>(model_.vocab_size()) + 31) / 32;
    std::vector<std::uint32_t> allowed(words * logits_at_once);
    for (std::size_t first = 0; first < ids.size(); first += logits_at_once) {
        const std::size_t count = std::min<std::size_t>(logits_at_once, ids.size() - first);
        step.num_samples = static_cast<int>(count);
        step.sample_tokens = ranked_tokens_ + first;
        const std::vector<float> temperatures(count, 0.0F), top_ps(count, 1.0F);
        const std::vector<std::int32_t> zeros(count, 0);
        const std::vector<std::uint64_t> seeds(count, 0);
        std::vector<std::int32_t> num_logprobs;
        std::vector<const std::uint32_t*> masks;
        std::ranges::fill(allowed, 0U);
        for (std::size_t line = 0; line < count; ++line) {
            const auto id = static_cast<std::size_t>(ids[first + line]);
            allowed[line * words + id / 32] = 1U << id % 32;
            masks.push_back(allowed.data() + line * words);
            num_logprobs.push_back(owners[first + line]->num_top);
        }
        std::vector<SampleOutput> outputs(count);
        draw(model_.logits(step), {temperatures, top_ps, zeros, seeds, zeros, num_logprobs, masks}, outputs, std::vector<bool>(count));
        for (std::size_t line = 0; line < count; ++line) {
            owners[first + line]->found->push_back(logprobs_of(outputs[line]));
        }
    }
}

// A size is computed as it is when it is met first, and recorded for the next time.
Tensor ModelRunner::decode(std::span<const RunRow> rows, std::span<const std::size_t> order) {
    int num_blocks = graph_blocks;
    for (const RunRow& row : rows) num_blocks = std::max(num_blocks, row.num_computed_tokens / shape_.block_size + 1);
    const std::pair<int, int> size = {padded_rows_of(static_cast<int>(rows.size())), static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_blocks)))};
    const Step step = upload(rows, order, false, size.first, size.second);
    Tensor logits;
    if (const auto found = graphs_.find(size); found != graphs_.end()) {
        found->second.graph->replay();
        logits = found->second.logits;
    } else {
        logits = model_.forward(step, {kv_layers_, state_layers_});
        record(size, step);
    }
    logits.rows = static_cast<std::int64_t>(rows.size());
    return logits;
}

void ModelRunner::record(const std::pair<int, int>& size, const Step& step) {
    Recorded recorded;
    recorded.graph = device_.capture([&] { recorded.logits = model_.forward(step, {kv_layers_, state_layers_}); });
    graphs_.emplace(size, std::move(recorded));
}

void ModelRunner::draw(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs, const std::vector<bool>& changes) {
    if (shared_) {
        shared_->sample(logits, inputs, outputs, changes);
    } else {
        device_.sample(logits, inputs, outputs);
    }
}

std::vector<Draw> ModelRunner::sample(const Tensor& logits, std::span<const RunRow> rows, std::span<const std::size_t> order) {
    std::vector<std::size_t> sampling;  // places of the rows that sample, in the order of the logits
    SampleRows asked;
    std::vector<bool> changes;
    const bool has_terms = std::ranges::any_of(rows, [](const RunRow& row) { return row.samples && row.request->terms.has_value(); });
    for (const std::size_t place : order) {
        const RunRow& row = rows[place];
        if (!row.samples) continue;
        const Request& request = *row.request;
        sampling.push_back(place);
        asked.temperatures.push_back(request.temperature);
        asked.top_ps.push_back(request.top_p);
        asked.top_ks.push_back(request.top_k);
        asked.seeds.push_back(request.seed);
        asked.draws.push_back(row.draw);
        asked.num_logprobs.push_back(request.logprobs.value_or(-1));
        asked.masks.push_back(row.mask);
        changes.push_back(request.terms.has_value());
        if (has_terms) {
            asked.edits.push_back(row.edits);
            asked.min_ps.push_back(request.terms ? request.terms->min_p : 0.0f);
        }
    }
    std::vector<SampleOutput> outputs(sampling.size());
    draw(logits, asked.view(), outputs, changes);
    std::vector<std::size_t> by_place(sampling.size());  // outputs in the caller's order
    std::iota(by_place.begin(), by_place.end(), std::size_t{0});
    std::sort(by_place.begin(), by_place.end(), [&](std::size_t a, std::size_t b) { return sampling[a] < sampling[b]; });
    std::vector<Draw> results;
    for (const std::size_t index : by_place) {
        const SampleOutput& output = outputs[index];
        Draw& draw = results.emplace_back();
        draw.token_id = output.token_id;
        draw.is_finite = output.is_finite;
        if (!output.is_finite || asked.num_logprobs[index] < 0) continue;
        draw.logprobs = logprobs_of(output);
    }
    return results;
}

std::vector<float> ModelRunner::logits(const RunRow& row, std::span<const StateCopy> copies) {
    copy_states(copies);
    const auto vocab_size = static_cast<std::size_t>(model_.vocab_size());
    std::vector<float> values(row.token_ids.size() * vocab_size);
    constexpr std::size_t order[] = {0};
    for (std::size_t start = 0; start < row.token_ids.size(); start += logits_at_once) {
        RunRow part = row;
        part.token_ids = row.token_ids.subspan(start, std::min<std::size_t>(logits_at_once, row.token_ids.size() - start));
        part.num_computed_tokens = row.num_computed_tokens + static_cast<int>(start);
        const int count = static_cast<int>(part.token_ids.size());
        reserve(count, count);
        Tensor found = model_.forward(upload({&part, 1}, order, true), {kv_layers_, state_layers_});
        if (shared_) found = shared_->whole(found);
        device_.download(values.data() + start * vocab_size, found.data, part.token_ids.size() * vocab_size * sizeof(float));
    }
    return values;
}

}  // namespace pocket
