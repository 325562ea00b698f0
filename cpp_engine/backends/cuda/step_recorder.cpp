#include "backends/cuda/step_recorder.h"

#include <algorithm>

#include "backends/cuda/call.h"

namespace pocket::cuda {

namespace {

constexpr int kFewestStages = 3;

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
    phase->embed = {table.front(), columns, step.token_ids, static_cast<float*>(out.data), out.stride};
}

void StepRecorder::linear(const Tensor& x, const Norm* norm, std::span<const Segment> weight, std::int64_t columns, Epilogue epilogue, const Tensor& out) {
    const bool is_swiglu = epilogue == Epilogue::swiglu;
    if ((gathered_ && gathered_ != x.data) || (ungated_ && ungated_ != x.data) || (is_swiglu && weight.size() != 1)) return refuse();
    const bool is_ungated = ungated_ != nullptr;
    const DeltaNetCall source = is_ungated ? phases_.back().delta_net : DeltaNetCall();
    for (const Segment& segment : weight) {
        Phase* phase = add(PhaseKind::product, x.rows);
        if (!phase) return;
        phase->meets = &segment == &weight.back();
        ProductPhase& p = phase->product;
        p.weight = segment;
        p.columns = static_cast<int>(columns);
        p.row_bytes = columns * static_cast<std::int64_t>(item_size(segment.dtype));
        p.limit = static_cast<int>(is_swiglu ? segment.rows / 2 : segment.rows);
        p.is_swiglu = is_swiglu;
        p.adds = epilogue == Epilogue::add;
        p.x = x.data, p.x_dtype = x.dtype, p.x_stride = x.stride;
        if (gathered_) p.x = gathered_from_.data, p.x_stride = gathered_from_.stride, p.x_rows = gathered_rows_;
        if (norm) p.norm = norm->weight, p.eps = norm->eps;
        if (is_ungated) {
            const Tensor& projections = source.projections;
            if (norm || columns != source.shape.value_size()) return refuse();
            p.x = nullptr, p.x_dtype = DType::float32, p.x_stride = columns;  // x: where finish() puts the results
            p.norm = source.weights.norm.weight, p.eps = source.weights.norm.eps;
            p.gates = static_cast<const std::byte*>(projections.data) + source.shape.conv_dim() * static_cast<std::int64_t>(item_size(projections.dtype));
            p.gates_stride = projections.stride;
            p.head_dim = source.shape.value_dim;
            if (projections.dtype != DType::bfloat16 || projections.stride % 4 != 0 || reinterpret_cast<std::uintptr_t>(p.gates) % 8 != 0) return refuse();
        }
        p.out = static_cast<std::byte*>(out.data) + segment.first_row * static_cast<std::int64_t>(item_size(out.dtype));
        p.out_dtype = out.dtype, p.out_stride = out.stride;
        const bool is_kind = segment.dtype == DType::bfloat16 || segment.dtype == DType::float8_e4m3;
        if (!is_kind || p.row_bytes % 64 != 0 || !is_aligned(segment.values) || (p.x_dtype != DType::float32 && p.x_dtype != DType::bfloat16) || p.x_stride % 4 != 0 ||
            !is_aligned(p.x) || !is_aligned(p.norm))
            return refuse();
    }
    gathered_ = ungated_ = nullptr;
}

void StepRecorder::attention(const AttentionCall& call) {
    const AttentionShape& shape = call.shape;
    Phase* phase = add(PhaseKind::attention, call.step.num_tokens);
    if (!phase) return;
    const int share = shape.num_heads / shape.num_kv_heads, group = share == 6 ? 6 : share % 4 == 0 ? 4 : share % 2 == 0 ? 2 : 1;
    const bool is_same = attention_shape_.num_heads == 0 ||
                         (attention_shape_.num_heads == shape.num_heads && attention_shape_.num_kv_heads == shape.num_kv_heads && attention_shape_.head_dim == shape.head_dim);
    if (!is_same || call.cache.dtype != DType::bfloat16 || shape.head_dim > 256 || shape.head_dim % 8 != 0 || call.step.num_decode != call.step.num_tokens) return refuse();
    attention_shape_ = shape;
    plan_.attention_group = group;
    plan_.num_splits = decode_splits(context_, shape, call.step.num_decode, call.step.max_length);
    partial_size_ = decode_partial_size(shape, call.step.num_decode, plan_.num_splits);
    num_tickets_ = std::max(num_tickets_, static_cast<std::size_t>(call.step.num_decode) * static_cast<std::size_t>(shape.num_heads));
    phase->attention = call;
}

void StepRecorder::delta_net(const DeltaNetCall& call) {
    Phase* phase = add(PhaseKind::delta_net, call.step.num_tokens);
    if (!phase) return;
    if (!takes_delta_step(call.shape) || !is_aligned(call.states.states) || call.states.slot_stride % 4 != 0 || call.step.num_decode != call.step.num_tokens) return refuse();
    const auto rows = static_cast<std::size_t>(call.step.num_decode);
    num_tickets_ = std::max(num_tickets_, rows * static_cast<std::size_t>(call.shape.num_key_heads));
    results_size_ = std::max(results_size_, rows * static_cast<std::size_t>(call.shape.value_size()));
    phase->delta_net = call;
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
    if (!is_possible_ || phases_.empty() || gathered_ || ungated_ || !cut_products()) return nullptr;
    std::vector<std::unique_ptr<Buffer>> buffers;
    const auto make = [&](std::size_t num_bytes) { return buffers.emplace_back(device_.allocate(std::max<std::size_t>(num_bytes, 64)))->data(); };
    auto* results = static_cast<float*>(make(results_size_ * sizeof(float)));
    phases_.back().meets = false;
    for (Phase& phase : phases_) {
        if (phase.kind == PhaseKind::delta_net) phase.results = results;
        if (phase.kind == PhaseKind::product && phase.product.gates) phase.product.x = results;
        plan_.num_meetings += phase.meets;
    }
    if (plan_.num_meetings == 0) return nullptr;            // the kernel counts on one
    plan_.partial = static_cast<float*>(make(partial_size_ * sizeof(float)));
    plan_.tickets = static_cast<int*>(make(num_tickets_ * sizeof(int)));
    plan_.meetings = static_cast<std::uint32_t*>(make(2 * sizeof(std::uint32_t)));
    void* phases = make(phases_.size() * sizeof(Phase));
    device_.upload(phases, phases_.data(), phases_.size() * sizeof(Phase));
    plan_.phases = static_cast<const Phase*>(phases);
    plan_.num_phases = static_cast<int>(phases_.size());
    plan_.rows = static_cast<int>(rows_);
    return std::make_unique<StepGraph>(context_, plan_, std::move(buffers));
}

}  // namespace pocket::cuda
