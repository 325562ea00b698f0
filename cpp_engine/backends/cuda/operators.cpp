// The operators of the CUDA device: which kernels compute a call.
#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cuda/call.h"
#include "backends/cuda/cuda_device.h"

namespace pocket::cuda {

namespace {

constexpr int kFewRows = 64;                                // up to here a product waits for its weights
constexpr int kFloat8Rows = 256;                            // from here on x becomes float8_e4m3 beside weights that are
constexpr int kChunkedTokens = 16;                          // of a row, from which on DeltaNet goes by chunks
constexpr std::size_t kExpandedBytes = 64 << 20;            // of a float8 matrix at a time

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::unsupported, message); }

Tensor columns_of(const Tensor& tensor, std::int64_t first, std::int64_t columns) {
    Tensor part = tensor;
    part.data = static_cast<std::byte*>(tensor.data) + first * static_cast<std::int64_t>(item_size(tensor.dtype));
    part.columns = columns;
    return part;
}

Tensor rows_of(const Tensor& tensor, std::int64_t first, std::int64_t rows) {
    Tensor part = tensor;
    part.data = static_cast<std::byte*>(tensor.data) + first * tensor.stride * static_cast<std::int64_t>(item_size(tensor.dtype));
    part.rows = rows;
    return part;
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

}  // namespace

void CudaDevice::embed(const Step& step, const Matrix& table, const Tensor& out) {
    use();
    if (recorder_) return recorder_->embed(step, static_cast<const CudaMatrix&>(table).segments(), table.columns(), out);
    for (const Segment& segment : static_cast<const CudaMatrix&>(table).segments())
        gather_rows(context_, segment, table.columns(), table.columns(), step.token_ids, step.num_tokens, out);
}

void CudaDevice::take_samples(const Step& step, const Tensor& x, const Tensor& out) {
    use();
    if (recorder_) return recorder_->take_samples(step, x, out);
    Segment rows;
    rows.values = x.data, rows.rows = x.rows, rows.dtype = x.dtype;
    gather_rows(context_, rows, x.stride, x.columns, step.sample_tokens, step.num_samples, out);
}

// x's rows in `to`, contiguous: x itself where it is so already.
Tensor CudaDevice::prepare(const Tensor& x, const Norm* norm, DType to, DType round_first, float** row_scales) {
    if (!norm && !row_scales && x.dtype == to && x.stride == x.columns && is_aligned(x.data)) return x;
    const std::size_t bytes = static_cast<std::size_t>(x.rows * x.columns) * item_size(to), scales_at = (bytes + 255) / 256 * 256;
    void* prepared = prepared_.take(scales_at + sizeof(float) * static_cast<std::size_t>(x.rows));
    if (row_scales) *row_scales = reinterpret_cast<float*>(static_cast<std::byte*>(prepared) + scales_at);
    if (x.rows > kFewRows && !row_scales && to == round_first && to != DType::float32 && takes_prepare_wide(x, norm, to)) {
        prepare_wide(context_, x, norm, prepared, to, nullptr);
    } else {
        prepare_rows(context_, x, norm, prepared, to, round_first, row_scales ? *row_scales : nullptr);
    }
    return {prepared, to, x.rows, x.columns, x.columns};
}

// x is 16-bit already. Where cuBLASLt can't write out's type, the sums take a way through float32.
void CudaDevice::wide_product(const Tensor& x, const Segment& segment, const Tensor& out, bool adds) {
    void* workspace = workspace_.take(WideProduct::kWorkspaceBytes);
    const bool is_float8 = segment.dtype == DType::float8_e4m3;
    const std::int64_t row_bytes = x.columns * static_cast<std::int64_t>(item_size(segment.dtype));
    const std::int64_t piece = is_float8 ? std::max<std::int64_t>(128, static_cast<std::int64_t>(kExpandedBytes) / (2 * x.columns) / 128 * 128) : segment.rows;
    for (std::int64_t first = 0; first < segment.rows; first += piece) {
        const std::int64_t rows = std::min(piece, segment.rows - first);
        const void* weight = static_cast<const std::byte*>(segment.values) + first * row_bytes;
        if (is_float8) {
            void* expanded = expanded_.take(static_cast<std::size_t>(2 * piece * x.columns));
            expand_float8(context_, segment, x.columns, first, rows, expanded, x.dtype);
            weight = expanded;
        }
        const Tensor part = columns_of(out, first, rows);
        if (part.dtype == DType::float32 || (part.dtype == x.dtype && !adds)) {
            wide_->run(context_, x, weight, rows, part, adds, workspace);
        } else {
            auto* sums = static_cast<float*>(both_.take(sizeof(float) * static_cast<std::size_t>(x.rows * rows)));
            wide_->run(context_, x, weight, rows, {sums, DType::float32, x.rows, rows, rows}, false, workspace);
            store_rows(context_, sums, rows, part, adds);
        }
    }
}

void CudaDevice::segment_product(const Tensor& x, const Norm* norm, const Segment& segment, std::int64_t columns, Epilogue epilogue, const Tensor& out) {
    const bool is_float8 = segment.dtype == DType::float8_e4m3, has_bfloat16 = context_.capability >= 80;
    const DType rounded = is_float8 ? DType::bfloat16 : segment.dtype;
    const bool is_tensor_kind = takes_few(context_, segment.dtype, columns, segment.values);
    if (x.rows <= kFewRows && is_tensor_kind && (x.rows > 1 || (is_aligned(x.data) && (!norm || is_aligned(norm->weight))))) {
        FewProduct product;
        product.rows = static_cast<int>(x.rows);
        product.columns = columns;
        product.weight = segment;
        product.epilogue = epilogue;
        product.out = out;
        if (x.rows == 1) {
            product.x = x.data, product.x_dtype = x.dtype;
            if (norm) product.norm = *norm;
        } else {
            float* row_scales = nullptr;
            const Tensor prepared = prepare(x, norm, is_float8 ? DType::float16 : segment.dtype, rounded, is_float8 ? &row_scales : nullptr);
            product.x = prepared.data, product.x_dtype = prepared.dtype, product.row_scales = row_scales;
        }
        product_few(context_, product);
        return;
    }
    if (epilogue == Epilogue::swiglu) throw Error(ErrorKind::device, "A product with a gate came undivided: this is a fault of the engine, please report it.");
    const bool adds = epilogue == Epilogue::add;
    const bool is_wide = x.rows > 8 && (is_float8 || segment.dtype == DType::float16 || (segment.dtype == DType::bfloat16 && has_bfloat16)) && columns % 8 == 0 &&
                         is_aligned(segment.values) && out.stride * static_cast<std::int64_t>(item_size(out.dtype)) % 16 == 0 && is_aligned(out.data);
    // Many rows go through Hopper's float8 tensor cores, a scale for each 128 values of a row; up to three rows are left over for the kernels of few.
    const std::int64_t whole = x.rows / 4 * 4;
    if (is_wide && is_float8 && x.rows >= kFloat8Rows && WideProduct::takes_float8(context_, segment, whole, columns) && takes_prepare_wide(x, norm, DType::float8_e4m3) && out.dtype != DType::float16) {
        const std::size_t values_bytes = static_cast<std::size_t>(whole * columns);
        auto* values = static_cast<std::byte*>(prepared_.take(values_bytes + sizeof(float) * static_cast<std::size_t>(whole * (columns / 128))));
        auto* scales = reinterpret_cast<float*>(values + values_bytes);
        prepare_wide(context_, rows_of(x, 0, whole), norm, values, DType::float8_e4m3, scales);
        wide_->run(context_, {values, scales, whole, columns}, segment, rows_of(out, 0, whole), adds, workspace_.take(WideProduct::kWorkspaceBytes));
        if (whole < x.rows) segment_product(rows_of(x, whole, x.rows - whole), norm, segment, columns, epilogue, rows_of(out, whole, x.rows - whole));
        return;
    }
    if (is_wide) {
        const DType kind = is_float8 ? (has_bfloat16 ? DType::bfloat16 : DType::float16) : segment.dtype;
        wide_product(prepare(x, norm, kind, kind, nullptr), segment, out, adds);
        return;
    }
    const Tensor source = norm ? prepare(x, norm, DType::float32, DType::float32, nullptr) : x;
    if (out.dtype == DType::float32) {
        product_plain(context_, source, rounded, segment, columns, static_cast<float*>(out.data), out.stride, adds);
    } else {
        auto* sums = static_cast<float*>(expanded_.take(sizeof(float) * static_cast<std::size_t>(x.rows * segment.rows)));
        product_plain(context_, source, rounded, segment, columns, sums, segment.rows, false);
        store_rows(context_, sums, segment.rows, out, adds);
    }
}

void CudaDevice::linear(const Tensor& x, const Norm* norm, const Matrix& weight, Epilogue epilogue, const Tensor& out) {
    use();
    if (x.rows == 0) return;
    const auto segments = static_cast<const CudaMatrix&>(weight).segments();
    const std::int64_t columns = weight.columns(), half = weight.rows() / 2;
    if (recorder_) return recorder_->linear(x, norm, segments, columns, epilogue, out);
    if (epilogue != Epilogue::swiglu) {
        for (const Segment& segment : segments) segment_product(x, norm, segment, columns, epilogue, columns_of(out, segment.first_row, segment.rows));
        return;
    }
    const Segment& first = segments.front();
    const bool is_aligned_norm = x.rows > 1 || (is_aligned(x.data) && (!norm || is_aligned(norm->weight)));
    if (segments.size() == 1 && x.rows <= kFewRows && takes_few(context_, first.dtype, columns, first.values) && is_aligned_norm &&
        (first.dtype != DType::float8_e4m3 || half % 128 == 0)) {
        segment_product(x, norm, first, columns, epilogue, out);
        return;
    }
    // Gates and ups first, a few rows at a time, in out's type: what is rounded there once more is as exact as what becomes of it.
    const std::int64_t most = std::max<std::int64_t>(1, both_bytes_ / static_cast<std::int64_t>(item_size(out.dtype)) / weight.rows());
    const std::int64_t pieces = (x.rows + most - 1) / most, piece = (x.rows + pieces - 1) / pieces;  // equal ones: a small rest would read all weights again
    for (std::int64_t row = 0; row < x.rows; row += piece) {
        const std::int64_t rows = std::min(piece, x.rows - row);
        const Tensor both = {queries_.take(static_cast<std::size_t>(rows * weight.rows()) * item_size(out.dtype)), out.dtype, rows, weight.rows(), weight.rows()};
        for (const Segment& segment : segments) segment_product(rows_of(x, row, rows), norm, segment, columns, Epilogue::store, columns_of(both, segment.first_row, segment.rows));
        Tensor results = rows_of(out, row, rows);
        results.columns = half;
        if (takes_swiglu_wide(both, results)) {
            combine_swiglu_wide(context_, both, results);
        } else {
            combine_swiglu(context_, both, results);
        }
    }
}

void CudaDevice::attention(const Step& step, const AttentionShape& shape, const AttentionWeights& weights, const Tensor& projections, const KvCache& cache,
                           const Tensor& out) {
    use();
    if (shape.head_dim > 256 || shape.head_dim % 8 != 0)
        refuse("Heads of " + std::to_string(shape.head_dim) + " values are not supported by the CUDA device: a multiple of 8 up to 256 is. Use device \"cpu\".");
    if (cache.dtype != DType::float32 && cache.dtype != DType::bfloat16 && cache.dtype != DType::float16)
        refuse(std::string("A KV cache of ") + name(cache.dtype) + " is not supported by the CUDA device: use kv_cache_dtype float32, float16 or bfloat16.");
    const AttentionCall call = {shape, weights, projections, out, cache, step};
    if (recorder_) return recorder_->attention(call);
    if (step.num_decode > 0) {
        const int splits = decode_splits(context_, shape, step.num_decode, step.max_length);
        auto* partial = static_cast<float*>(partial_.take(sizeof(float) * decode_partial_size(shape, step.num_decode, splits)));
        attention_decode(context_, call, splits, partial, tickets(static_cast<std::size_t>(step.num_decode) * shape.num_heads));
    }
    const int tokens = step.num_tokens - step.num_decode;
    if (tokens > 0) {
        const bool is_flash = takes_flash(context_, shape, cache);
        const DType dtype = is_flash ? cache.dtype : DType::float32;
        void* queries = queries_.take(static_cast<std::size_t>(tokens) * shape.num_heads * shape.head_dim * item_size(dtype));
        attention_heads(context_, call, step.num_decode, tokens, queries, dtype);
        if (is_flash && takes_hopper(context_, call)) {
            attention_prefill_hopper(context_, call, step.num_decode, queries);
        } else if (is_flash) {
            attention_prefill_flash(context_, call, step.num_decode, queries);
        } else {
            attention_prefill_plain(context_, call, step.num_decode, queries, dtype);
        }
    }
}

void CudaDevice::delta_net(const Step& step, const DeltaNetShape& shape, const DeltaNetWeights& weights, const Tensor& projections, const StateCache& states,
                           const Tensor& out) {
    use();
    if (shape.key_dim > 256 || shape.conv_kernel > 17)
        refuse("DeltaNet heads of more than 256 key channels, or a convolution over more than 17 tokens, are not supported by the CUDA device. Use device \"cpu\".");
    const DeltaNetCall call = {shape, weights, projections, out, states, step};
    if (recorder_) return recorder_->delta_net(call);
    const bool is_fast = takes_delta_decode(shape) && is_aligned(states.states) && states.slot_stride % 4 == 0;
    const int num_decode = is_fast ? step.num_decode : 0;
    if (num_decode > 0) delta_decode(context_, call, num_decode, tickets(static_cast<std::size_t>(num_decode) * shape.num_key_heads));
    const int tokens = step.num_tokens - num_decode;
    if (tokens > 0 && step.max_query >= kChunkedTokens && takes_delta_chunks(context_, call)) {
        delta_chunks(context_, call, num_decode, num_decode, mixed_.take(delta_chunks_bytes(shape, tokens, step.num_rows - num_decode)));
    } else if (tokens > 0) {
        auto* mixed = static_cast<float*>(mixed_.take(sizeof(float) * static_cast<std::size_t>(tokens * shape.conv_dim())));
        auto* read = static_cast<float*>(read_.take(sizeof(float) * static_cast<std::size_t>(tokens * shape.value_size())));
        delta_prefill(context_, call, num_decode, num_decode, mixed, read);
    }
}

void CudaDevice::sample(const Tensor& logits, const SampleInputs& inputs, std::span<SampleOutput> outputs) {
    use();
    const std::size_t rows = outputs.size();
    if (rows == 0) return;
    std::size_t num_masks = 0;
    for (const std::uint32_t* mask : inputs.masks) num_masks += mask != nullptr;
    const auto draws = [&](std::size_t row) { return inputs.temperatures[row] > 0 && inputs.top_ks[row] != 1; };
    const auto min_p_of = [&](std::size_t row) { return inputs.min_ps.empty() || !draws(row) ? 0.0f : inputs.min_ps[row]; };
    const auto edits_of = [&](std::size_t row) { return inputs.edits.empty() ? std::span<const LogitEdit>() : inputs.edits[row]; };
    DrawNeeds needs;
    std::size_t num_edits = 0, num_copies = 0;
    for (std::size_t row = 0; row < rows; ++row) {
        const bool is_changed = !edits_of(row).empty() || min_p_of(row) > 0;
        num_edits += edits_of(row).size(), num_copies += is_changed;
        needs.changes = needs.changes || is_changed, needs.cuts_unlikely = needs.cuts_unlikely || min_p_of(row) > 0;
    }
    const std::size_t mask_words = static_cast<std::size_t>(logits.columns + 31) / 32, mask_bytes = num_masks * mask_words * sizeof(std::uint32_t);
    // Seeds first, so that they are aligned; then six arrays of 4-byte values, with changes three more; then the masks, then the edits.
    const std::size_t change_bytes = needs.changes ? (3 * rows + 1) * sizeof(std::int32_t) : 0;
    const std::size_t input_bytes = rows * (sizeof(std::uint64_t) + 6 * sizeof(std::int32_t)) + change_bytes, masks_at = (input_bytes + 63) / 64 * 64;
    const std::size_t edits_at = masks_at + mask_bytes, sent = edits_at + num_edits * sizeof(LogitEdit), outputs_at = (sent + 63) / 64 * 64, pinned = outputs_at + rows * sizeof(SampleOutput);
    if (pinned > pinned_bytes_) {
        if (pinned_) call(cudaFreeHost(pinned_), "pinned memory for draws");
        pinned_ = nullptr, pinned_bytes_ = 0;
        call(cudaHostAlloc(reinterpret_cast<void**>(&pinned_), pinned, cudaHostAllocDefault), "pinned memory for draws");
        pinned_bytes_ = pinned;
    }
    auto* seeds = reinterpret_cast<std::uint64_t*>(pinned_);
    auto* temperatures = reinterpret_cast<float*>(seeds + rows);
    auto* top_ps = temperatures + rows;
    auto* top_ks = reinterpret_cast<std::int32_t*>(top_ps + rows);
    std::int32_t *numbers = top_ks + rows, *num_logprobs = numbers + rows, *mask_rows = num_logprobs + rows;
    std::int32_t *copies = mask_rows + rows, *edit_starts = copies + rows;
    auto* min_ps = reinterpret_cast<float*>(edit_starts + rows + 1);
    auto* edits = reinterpret_cast<LogitEdit*>(pinned_ + edits_at);
    std::int32_t line = 0;
    for (std::size_t row = 0; row < rows; ++row) {
        seeds[row] = inputs.seeds[row], temperatures[row] = inputs.temperatures[row], top_ps[row] = inputs.top_ps[row], top_ks[row] = inputs.top_ks[row];
        numbers[row] = inputs.draws[row], num_logprobs[row] = inputs.num_logprobs[row], mask_rows[row] = -1;
        needs.draws = needs.draws || draws(row), needs.cuts = needs.cuts || (draws(row) && top_ps[row] < 1), needs.ranks = needs.ranks || num_logprobs[row] > 0;
        const std::uint32_t* mask = inputs.masks.empty() ? nullptr : inputs.masks[row];
        if (!mask) continue;
        std::memcpy(pinned_ + masks_at + static_cast<std::size_t>(line) * mask_words * sizeof(std::uint32_t), mask, mask_words * sizeof(std::uint32_t));
        mask_rows[row] = line++;
    }
    if (needs.changes) {
        std::int32_t copy = 0, first = 0;
        for (std::size_t row = 0; row < rows; ++row) {
            const std::span<const LogitEdit> own = edits_of(row);
            min_ps[row] = min_p_of(row), edit_starts[row] = first;
            copies[row] = own.empty() && min_ps[row] <= 0 ? -1 : copy++;
            std::ranges::copy(own, edits + first);
            first += static_cast<std::int32_t>(own.size());
        }
        edit_starts[rows] = first;
    }
    auto* device = static_cast<std::byte*>(drawn_.take(pinned));
    call(cudaMemcpyAsync(device, pinned_, sent, cudaMemcpyHostToDevice, context_.stream), "a draw");
    const auto here = [&](const auto* host) { return reinterpret_cast<decltype(host)>(device + (reinterpret_cast<const std::byte*>(host) - pinned_)); };
    DrawInputs how = {};
    how.temperatures = here(static_cast<const float*>(temperatures)), how.top_ps = here(static_cast<const float*>(top_ps));
    how.top_ks = here(static_cast<const std::int32_t*>(top_ks)), how.seeds = here(static_cast<const std::uint64_t*>(seeds));
    how.draws = here(static_cast<const std::int32_t*>(numbers)), how.num_logprobs = here(static_cast<const std::int32_t*>(num_logprobs));
    how.mask_rows = here(static_cast<const std::int32_t*>(mask_rows));
    how.masks = reinterpret_cast<const std::uint32_t*>(device + masks_at);
    how.mask_stride = static_cast<int>(mask_words);
    if (needs.changes) {
        how.copies = here(static_cast<const std::int32_t*>(copies)), how.edit_starts = here(static_cast<const std::int32_t*>(edit_starts));
        how.edits = here(static_cast<const LogitEdit*>(edits)), how.min_ps = here(static_cast<const float*>(min_ps));
        how.changed = static_cast<float*>(changed_.take(num_copies * static_cast<std::size_t>(logits.columns) * sizeof(float)));
    }
    if (static_cast<int>(rows) > max_samples_ || logits.columns > max_vocab_size_) {
        // The tickets' place follows from these two: with other ones it may hold what another draw left, so all of it is zeroed.
        max_samples_ = std::max(max_samples_, static_cast<int>(rows)), max_vocab_size_ = std::max(max_vocab_size_, logits.columns);
        const std::size_t bytes = draw_scratch_bytes(max_samples_, max_vocab_size_);
        call(cudaMemsetAsync(draws_.take(bytes), 0, bytes, context_.stream), "a draw");
    }
    auto* results = reinterpret_cast<SampleOutput*>(device + outputs_at);
    draw(context_, logits, how, needs, draws_.take(draw_scratch_bytes(max_samples_, max_vocab_size_)), max_samples_, results);
    call(cudaMemcpyAsync(pinned_ + outputs_at, results, rows * sizeof(SampleOutput), cudaMemcpyDeviceToHost, context_.stream), "a draw");
    synchronize();
    std::memcpy(outputs.data(), pinned_ + outputs_at, rows * sizeof(SampleOutput));
}

}  // namespace pocket::cuda
