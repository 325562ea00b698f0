#include "backends/cuda/step_recorder.h"

#include <algorithm>

#include "backends/cuda/call.h"

namespace pocket::cuda {

namespace {

constexpr int kFewestStages = 3;
// Where the kernel was seen to be faster than one for each operator, on an H200: beside float8_e4m3 weights (which others multiply at their own rate, not the
// memory's), and for contexts whose attention does not want several blocks on a multiprocessor.
constexpr int kMostLength = 16384;

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

int item_columns(DType dtype) { return kPieceBytes / static_cast<int>(item_size(dtype)); }
int row_padding(DType dtype) { return dtype == DType::float8_e4m3 ? 16 : 64; }

class StepGraph : public Graph {
public:
    StepGraph(const Context& context, const StepPlan& plan, std::vector<std::unique_ptr<Buffer>> buffers) : context_(context), plan_(plan), buffers_(std::move(buffers)) {}
    void replay() override { decode_step(context_, plan_); }

private:
    const Context& context_;                                // the device's, which outlives this
    StepPlan plan_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace

Phase* StepRecorder::add(PhaseKind kind, std::int64_t rows) {
    if (rows_ == 0) rows_ = rows;
    if (context_.capability < 80 || rows != rows_ || rows > kStepRows || ((gathered_ || ungated_) && kind != PhaseKind::product)) refuse();
    if (!is_possible_) return nullptr;
    phases_.emplace_back().kind = kind;
    return &phases_.back();
}

void StepRecorder::embed(const Step& step, std::span<const Segment> table, std::int64_t columns, const Tensor& out) {
    Phase* phase = add(PhaseKind::embed, step.num_tokens);
    if (!phase) return;
    if (table.size() != 1 || table.front().dtype == DType::float8_e4m3 || step.num_decode != step.num_tokens) return refuse();
    phase->embed = {table.front(), columns, step.token_ids, static_cast<float*>(out.data), out.stride, {}};
}

// The last phase that wrote the residual stream `x` leaves it as the product after it takes it.
bool StepRecorder::ask_rounded(const void* x, const float* norm) {
    for (auto phase = phases_.rbegin(); phase != phases_.rend(); ++phase) {
        Rounded* rounded = nullptr;
        if (phase->kind == PhaseKind::embed && phase->embed.out == x) rounded = &phase->embed.rounded;
        if (phase->kind == PhaseKind::product && phase->product.adds && phase->product.out == x) rounded = &phase->product.rounded;
        if (!rounded) continue;
        if (rounded->norm && rounded->norm != norm) return false;
        rounded->norm = norm;
        return true;
    }
    return false;
}

void StepRecorder::linear(const Tensor& x, const Norm* norm, std::span<const Segment> weight, std::int64_t columns, Epilogue epilogue, const Tensor& out) {
    const bool is_swiglu = epilogue == Epilogue::swiglu, is_gated = ungated_ != nullptr, is_single = weight.size() == 1, adds = epilogue == Epilogue::add;
    if ((gathered_ && gathered_ != x.data) || (is_gated && (ungated_ != x.data || norm)) || ((is_swiglu || is_gated || adds) && !is_single)) return refuse();
    const DeltaNetCall source = is_gated ? phases_.back().delta_net : DeltaNetCall();
    const Tensor& from = gathered_ ? gathered_from_ : x;
    if (norm ? from.dtype != DType::float32 || !ask_rounded(from.data, norm->weight) : from.dtype != DType::bfloat16) return refuse();
    if (norm) stream_columns_ = std::max(stream_columns_, columns);
    for (const Segment& segment : weight) {
        Phase* phase = add(PhaseKind::product, x.rows);
        if (!phase) return;
        phase->meets = &segment == &weight.back();
        phase->moves_tails = is_gated;
        if (is_gated) phase->delta_net = source;
        ProductPhase& p = phase->product;
        p.weight = segment;
        p.columns = static_cast<int>(columns);
        p.row_bytes = columns * static_cast<std::int64_t>(item_size(segment.dtype));
        p.limit = static_cast<int>(is_swiglu ? segment.rows / 2 : segment.rows);
        p.is_swiglu = is_swiglu, p.adds = adds;
        p.x = static_cast<const std::uint16_t*>(from.data), p.x_stride = from.stride;
        if (gathered_) p.x_rows = gathered_rows_;
        if (norm) {                                         // finish() knows where x lies then
            p.x = nullptr, p.x_stride = columns;
            p.norm_columns = p.columns, p.num_squares = context_.num_multiprocessors, p.eps = norm->eps;
        } else if (is_gated) {
            if (columns != source.shape.value_size() || source.shape.num_value_heads > kStepHeads || source.shape.num_value_heads == 1) return refuse();
            p.x = nullptr, p.x_stride = columns;
            p.norm_columns = source.shape.value_dim, p.num_squares = delta_squares(source.shape.value_dim), p.eps = source.weights.norm.eps;
        }
        p.out = static_cast<std::byte*>(out.data) + segment.first_row * static_cast<std::int64_t>(item_size(out.dtype));
        p.out_dtype = out.dtype, p.out_stride = out.stride;
        const bool is_kind = segment.dtype == DType::bfloat16 || segment.dtype == DType::float8_e4m3;
        if (!is_kind || p.row_bytes % 64 != 0 || !is_aligned(segment.values) || p.x_stride % 8 != 0 || !is_aligned(p.x)) return refuse();
    }
    gathered_ = ungated_ = nullptr;
}

void StepRecorder::attention(const AttentionCall& call) {
    const AttentionShape& shape = call.shape;
    Phase* phase = add(PhaseKind::attention, call.step.num_tokens);
    if (!phase) return;
    const int share = shape.num_heads / shape.num_kv_heads, group = share == 6 ? 6 : share % 4 == 0 ? 4 : 2;
    const bool is_same = attention_shape_.num_heads == 0 ||
                         (attention_shape_.num_heads == shape.num_heads && attention_shape_.num_kv_heads == shape.num_kv_heads && attention_shape_.head_dim == shape.head_dim);
    if (!is_same || share % 2 != 0 || call.step.max_length > kMostLength || call.cache.dtype != DType::bfloat16 || shape.head_dim > 256 || shape.head_dim % 8 != 0 || call.step.num_decode != call.step.num_tokens) return refuse();
    attention_shape_ = shape;
    plan_.attention_group = group;
    plan_.num_splits = decode_splits(context_, shape, call.step.num_decode, call.step.max_length);
    partial_size_ = decode_partial_size(shape, call.step.num_decode, plan_.num_splits);
    phase->attention = call;
    if (plan_.num_splits == 1) return;
    if (Phase* last = add(PhaseKind::combine, call.step.num_tokens)) last->attention = call;
}

void StepRecorder::delta_net(const DeltaNetCall& call) {
    Phase* phase = add(PhaseKind::delta_net, call.step.num_tokens);
    if (!phase) return;
    if (!takes_delta_step(call.shape) || !is_aligned(call.states.states) || call.states.slot_stride % 4 != 0 || call.step.num_decode != call.step.num_tokens) return refuse();
    const auto rows = static_cast<std::size_t>(call.step.num_decode);
    results_size_ = std::max(results_size_, rows * static_cast<std::size_t>(call.shape.value_size()));
    head_squares_ = std::max(head_squares_, rows * static_cast<std::size_t>(call.shape.num_value_heads * delta_squares(call.shape.value_dim)));
    phase->delta_net = call;
    plan_.delta_width = delta_step_width(context_, call.shape, call.step.num_decode);
    ungated_ = call.out.data;
}

void StepRecorder::take_samples(const Step& step, const Tensor& x, const Tensor& out) {
    if (gathered_ || ungated_ || step.num_samples != rows_) return refuse();
    gathered_ = out.data, gathered_from_ = x, gathered_rows_ = step.sample_tokens;
}

// x takes what its products need, but no more than a third of shared memory: of a larger one as many columns at a time as go in there. The ring has the rest.
bool StepRecorder::cut_products() {
    const int rows = static_cast<int>(rows_), room = context_.shared_memory - static_cast<int>(decode_step_bytes(rows, 0, 0)), most = std::max(room / 3, 1024);
    std::size_t work = results_size_ ? delta_step_bytes() : 0;
    if (attention_shape_.num_heads) work = std::max(work, attention_step_bytes(attention_shape_, plan_.attention_group, plan_.num_splits));
    for (Phase& phase : phases_) {
        if (phase.kind != PhaseKind::product) continue;
        ProductPhase& p = phase.product;
        const int padding = row_padding(p.weight.dtype), piece = item_columns(p.weight.dtype);
        p.staged_columns = std::min(p.columns, std::max(1, (most / rows - padding) / 2 / piece) * piece);
        if (p.staged_columns < p.columns) {
            const int most_rows = (p.limit + context_.num_multiprocessors - 1) / context_.num_multiprocessors, per_tile = p.is_swiglu ? kStageRows / 2 : kStageRows;
            if (rows == 1 || (most_rows + per_tile - 1) / per_tile * kStageRows > kKeptRows) return false;
        }
        work = std::max(work, static_cast<std::size_t>(rows * (2 * p.staged_columns + padding)));
    }
    plan_.work_bytes = static_cast<int>((work + 127) / 128 * 128);
    plan_.num_stages = std::min(kMostStages, (room - plan_.work_bytes) / kStageBytes);
    return plan_.num_stages >= kFewestStages;
}

std::unique_ptr<Graph> StepRecorder::finish() {
    const bool has_float8 = std::any_of(phases_.begin(), phases_.end(), [](const Phase& phase) { return phase.kind == PhaseKind::product && phase.product.weight.dtype == DType::float8_e4m3; });
    if (!is_possible_ || !has_float8 || gathered_ || ungated_ || !cut_products()) return nullptr;
    std::vector<std::unique_ptr<Buffer>> buffers;
    const auto make = [&](std::size_t num_bytes) { return buffers.emplace_back(device_.allocate(std::max<std::size_t>(num_bytes, 64)))->data(); };
    const auto rows = static_cast<std::size_t>(rows_), columns = static_cast<std::size_t>(stream_columns_), blocks = static_cast<std::size_t>(context_.num_multiprocessors);
    const DeltaResults results = {static_cast<std::uint16_t*>(make(results_size_ * sizeof(std::uint16_t))), static_cast<float*>(make(head_squares_ * sizeof(float)))};
    const Rounded stream = {nullptr, static_cast<std::uint16_t*>(make(rows * columns * sizeof(std::uint16_t))), stream_columns_, static_cast<float*>(make(rows * blocks * sizeof(float)))};
    const auto place = [&](Rounded& rounded) { rounded.values = stream.values, rounded.stride = stream.stride, rounded.squares = stream.squares; };
    phases_.back().meets = false;
    for (Phase& phase : phases_) {
        phase.results = results;
        place(phase.embed.rounded), place(phase.product.rounded);
        ProductPhase& p = phase.product;
        const bool is_stream = p.norm_columns == p.columns;
        if (p.norm_columns > 0) p.x = is_stream ? stream.values : results.values, p.squares = is_stream ? stream.squares : results.squares;
        if (is_stream) p.x_stride = stream.stride;
        plan_.num_meetings += phase.meets;
    }
    if (plan_.num_meetings == 0) return nullptr;            // the kernel counts on one
    plan_.partial = static_cast<float*>(make(partial_size_ * sizeof(float)));
    plan_.meetings = static_cast<std::uint32_t*>(make(2 * sizeof(std::uint32_t)));
    void* phases = make(phases_.size() * sizeof(Phase));
    device_.upload(phases, phases_.data(), phases_.size() * sizeof(Phase));
    plan_.phases = static_cast<const Phase*>(phases);
    std::vector<CopyRun> runs;
    for (const Phase& phase : phases_) {
        const ProductPhase& p = phase.product;
        if (phase.kind != PhaseKind::product) continue;
        runs.push_back({static_cast<const std::uint8_t*>(p.weight.values), static_cast<std::int32_t>(p.row_bytes), static_cast<std::int32_t>(p.staged_columns * static_cast<int>(item_size(p.weight.dtype))), p.limit, p.is_swiglu});
    }
    if (runs.empty()) return nullptr;
    void* place_of_runs = make(runs.size() * sizeof(CopyRun));
    device_.upload(place_of_runs, runs.data(), runs.size() * sizeof(CopyRun));
    plan_.runs = static_cast<const CopyRun*>(place_of_runs);
    plan_.num_runs = static_cast<int>(runs.size());
    plan_.num_phases = static_cast<int>(phases_.size());
    plan_.rows = static_cast<int>(rows_);
    return std::make_unique<StepGraph>(context_, plan_, std::move(buffers));
}

}  // namespace pocket::cuda
