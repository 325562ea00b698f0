// Gated attention over paged keys and values.
#include <algorithm>
#include <cmath>
#include <string>

#include "backends/cpu/cpu_device.h"
#include "pocket/error.h"

namespace pocket {
namespace {

constexpr int kSplit = 512;  // tokens of a context that one task of decoding reads. The same for every batch, so that a row's result is.

}  // namespace

struct CpuDevice::AttentionCall {
    const Step& step;
    const AttentionShape& shape;
    const AttentionWeights& weights;
    const Tensor& projections;
    const KvCache& cache;
    const Tensor& out;
    int group = 0, dim = 0, half = 0;
    float scale = 0;

    const float* token(int index) const { return static_cast<const float*>(projections.data) + index * projections.stride; }
    const float* query(int index, int head) const { return token(index) + 2 * head * dim; }
    const float* gate(int index, int head) const { return query(index, head) + dim; }
    const float* key(int index, int head) const { return token(index) + (2 * shape.num_heads + head) * dim; }
    const float* value(int index, int head) const { return key(index, shape.num_kv_heads + head); }
    float* result(int index, int head) const { return static_cast<float*>(out.data) + index * out.stride + head * dim; }
    std::byte* slot(void* base, int index, int head) const {
        const std::int64_t slot = step.slot_mapping[index], block = slot / cache.block_size, offset = slot % cache.block_size;
        return static_cast<std::byte*>(base) +
               (((block * shape.num_kv_heads + head) * cache.block_size + offset) * dim) * static_cast<std::int64_t>(item_size(cache.dtype));
    }
    KvView view(int row, int head) const {
        const std::int64_t size = static_cast<std::int64_t>(cache.block_size) * dim;
        const std::int64_t start = head * size * static_cast<std::int64_t>(item_size(cache.dtype));
        return {static_cast<const std::byte*>(cache.keys) + start,
                static_cast<const std::byte*>(cache.values) + start,
                size * shape.num_kv_heads,
                step.block_tables + static_cast<std::int64_t>(row) * step.max_blocks,
                cache.block_size,
                dim};
    }
    void prepare(const Kernels& kernels, const float* x, const Norm& norm, int index, float factor, float* to) const {
        const std::int64_t at = static_cast<std::int64_t>(step.positions[index]) * half;
        kernels.prepare_head(x, norm, weights.cosines + at, weights.sines + at, half, dim, factor, to);
    }
    // The token's key and value of one head to their slot. `workspace` [dim]
    void store(const Kernels& kernels, int index, int head, float* workspace) const {
        prepare(kernels, key(index, head), weights.key_norm, index, 1.0f, workspace);
        kernels.store_values(workspace, dim, cache.dtype, slot(cache.keys, index, head));
        kernels.store_values(value(index, head), dim, cache.dtype, slot(cache.values, index, head));
    }
};

void CpuDevice::attention(const Step& step, const AttentionShape& shape, const AttentionWeights& weights, const Tensor& projections, const KvCache& cache,
                          const Tensor& out) {
    if (shape.head_dim % 16 != 0 || shape.num_kv_heads <= 0 || shape.num_heads % shape.num_kv_heads != 0 || shape.num_heads / shape.num_kv_heads > kQueryRows) {
        throw Error(ErrorKind::unsupported, "cpu: attention with heads of " + std::to_string(shape.head_dim) + " values (multiples of 16 are computed), " +
                                                std::to_string(shape.num_heads) + " of them for " + std::to_string(shape.num_kv_heads) + " heads of keys: use backend \"torch\" for this model", "model");
    }
    if (cache.dtype != DType::float32 && cache.dtype != DType::float16 && cache.dtype != DType::bfloat16) {
        throw Error(ErrorKind::unsupported,
                    std::string("kv_cache_dtype: the CPU holds keys and values as float32, float16 or bfloat16, not ") + pocket::name(cache.dtype),
                    "kv_cache_dtype");
    }
    const AttentionCall call{step,
                             shape,
                             weights,
                             projections,
                             cache,
                             out,
                             shape.num_heads / shape.num_kv_heads,
                             shape.head_dim,
                             shape.rotary_dim / 2,
                             1.0f / std::sqrt(static_cast<float>(shape.head_dim))};
    if (step.num_decode > 0) attend_decode(call);
    if (step.num_decode < step.num_rows) attend_prefill(call);
}

// A task is a row, a KV head and a stretch of the context. Where a context is one stretch, that is all; else a second loop joins them.
void CpuDevice::attend_decode(const AttentionCall& call) {
    const Step& step = call.step;
    const int heads = call.shape.num_kv_heads, group = call.group, dim = call.dim;
    int longest = 1;
    for (int row = 0; row < step.num_decode; ++row) longest = std::max(longest, step.lengths[row]);
    const int splits = (longest + kSplit - 1) / kSplit, size = group * (dim + 2);
    own_.reserve<float>(pool_.size(), static_cast<std::size_t>(group * dim + size));
    if (splits > 1) shared_.reserve<float>(1, static_cast<std::size_t>(step.num_decode) * heads * splits * size);

    pool_.parallel_for(static_cast<std::int64_t>(step.num_decode) * heads * splits, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        float* queries = own_.of<float>(thread);
        for (std::int64_t task = begin; task < end; ++task) {
            const int row = static_cast<int>(task / (heads * splits)), head = static_cast<int>(task / splits % heads), split = static_cast<int>(task % splits);
            const int length = step.lengths[row], first = split * kSplit, last = std::min(first + kSplit, length), token = step.row_starts[row];
            if (first >= length) continue;
            if (last == length) call.store(kernels_, token, head, queries);
            for (int i = 0; i < group; ++i)
                call.prepare(kernels_, call.query(token, head * group + i), call.weights.query_norm, token, call.scale, queries + i * dim);
            float* partial = length > kSplit ? shared_.of<float>(0) + task * size : queries + group * dim;
            const PartialAttention sums{partial, partial + group, partial + 2 * group};
            kernels_.attend_token(queries, group, call.view(row, head), call.cache.dtype, first, last, sums);
            if (length > kSplit) continue;
            for (int i = 0; i < group; ++i) {
                kernels_.gate_attention(sums.values + i * dim, sums.total[i], call.gate(token, head * group + i), dim, call.result(token, head * group + i));
            }
        }
    });
    if (splits == 1) return;
    pool_.parallel_for(static_cast<std::int64_t>(step.num_decode) * heads, [&](std::int64_t begin, std::int64_t end, int thread) {
        float* values = own_.of<float>(thread);
        for (std::int64_t task = begin; task < end; ++task) {
            const int row = static_cast<int>(task / heads), head = static_cast<int>(task % heads), length = step.lengths[row], token = step.row_starts[row];
            if (length <= kSplit) continue;
            const float* partials = shared_.of<float>(0) + task * splits * size;
            const int count = (length + kSplit - 1) / kSplit;
            for (int i = 0; i < group; ++i) {
                float largest = partials[i], total = 0;
                for (int split = 1; split < count; ++split) largest = std::max(largest, partials[split * size + i]);
                std::fill_n(values, dim, 0.0f);
                for (int split = 0; split < count; ++split) {
                    const float* partial = partials + split * size;
                    const float factor = std::exp(partial[i] - largest);
                    total += factor * partial[group + i];
                    for (int j = 0; j < dim; ++j) values[j] += factor * partial[2 * group + i * dim + j];
                }
                kernels_.gate_attention(values, total, call.gate(token, head * group + i), dim, call.result(token, head * group + i));
            }
        }
    });
}

// First all keys, values and queries of the rows; then blocks of neighbouring queries that share a KV head.
void CpuDevice::attend_prefill(const AttentionCall& call) {
    const Step& step = call.step;
    const int heads = call.shape.num_kv_heads, group = call.group, dim = call.dim, first_token = step.row_starts[step.num_decode];
    const int num_tokens = step.num_tokens - first_token, block_tokens = kQueryRows / group;
    shared_.reserve<float>(1, static_cast<std::size_t>(num_tokens) * heads * group * dim);
    const auto queries_of = [&](int head, int token) {
        return shared_.of<float>(0) + (static_cast<std::int64_t>(head) * num_tokens + token - first_token) * group * dim;
    };
    own_.reserve<float>(pool_.size(), static_cast<std::size_t>(block_workspace_size(dim) + kQueryRows * (dim + 2)));
    pool_.parallel_for(num_tokens, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (int token = first_token + static_cast<int>(begin); token < first_token + static_cast<int>(end); ++token) {
            for (int head = 0; head < heads; ++head) {
                call.store(kernels_, token, head, own_.of<float>(thread));
                for (int i = 0; i < group; ++i)
                    call.prepare(kernels_, call.query(token, head * group + i), call.weights.query_norm, token, call.scale, queries_of(head, token) + i * dim);
            }
        }
    });

    blocks_.clear();
    for (int row = step.num_decode; row < step.num_rows; ++row)
        for (int token = step.row_starts[row]; token < step.row_starts[row + 1]; token += block_tokens) blocks_.push_back({row, token});
    const std::int64_t num_blocks = static_cast<std::int64_t>(blocks_.size());
    pool_.parallel_for(num_blocks * heads, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (std::int64_t task = begin; task < end; ++task) {
            const auto [row, token] = blocks_[static_cast<std::size_t>(num_blocks - 1 - task / heads)];  // the last of a prompt attend to most, and go first
            const int head = static_cast<int>(task % heads), count = std::min(block_tokens, step.row_starts[row + 1] - token);
            float* partial = own_.of<float>(thread);
            const PartialAttention sums{partial, partial + kQueryRows, partial + 2 * kQueryRows};
            const QueryBlock block{queries_of(head, token), count * group, group, step.positions[token], partial + kQueryRows * (dim + 2)};
            kernels_.attend_block(block, call.view(row, head), call.cache.dtype, sums);
            for (int i = 0; i < count * group; ++i) {
                const int at = token + i / group, query_head = head * group + i % group;
                kernels_.gate_attention(sums.values + i * dim, sums.total[i], call.gate(at, query_head), dim, call.result(at, query_head));
            }
        }
    });
}

}  // namespace pocket
