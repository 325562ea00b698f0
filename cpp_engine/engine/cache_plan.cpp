#include "engine/cache_plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "pocket/error.h"

namespace pocket {

namespace {

constexpr std::int64_t block_size = 16;                     // tokens
constexpr std::int64_t snapshots_a_row = 4;
constexpr std::int64_t least_snapshot_interval = 512;       // tokens
constexpr std::int64_t unchunked_snapshot_interval = 8192;  // tokens; each snapshot cuts a prompt that would be computed in one step
constexpr std::int64_t least_context = 256;                 // tokens; a context is not shortened below this to make it fit
constexpr std::size_t state_alignment = 64;                 // bytes

std::int64_t ceil_div(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

std::string mebibytes(std::int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.0f", static_cast<double>(bytes) / (1 << 20));
    return text;
}

[[noreturn]] void fail(const char* field, const std::string& message) { throw Error(ErrorKind::configuration, message, field); }

// What the caches of one model take, and what may be bent to make them fit.
struct Needs {
    std::int64_t block_bytes = 0;                           // keys and values of a block over all layers
    std::int64_t slot_bytes = 0;
    std::int64_t max_rows = 0, context = 0;
    bool may_lower_rows = false, may_shorten = false;
};

void check_options(const Model& model, const CacheOptions& options) {
    const std::pair<const char*, int> counts[] = {{"max_model_len", options.max_model_len},
                                                  {"max_batch_size", options.max_batch_size},
                                                  {"prefill_chunk_tokens", options.prefill_token_budget}};
    for (const auto& [field, value] : counts) {
        if (value < 0) fail(field, "\"" + std::string(field) + "\" = " + std::to_string(value) + " is not valid: send a whole number of 0 or more.");
    }
    if (options.max_model_len > model.max_positions()) {
        const std::string asked = "\"max_model_len\" = " + std::to_string(options.max_model_len), most = std::to_string(model.max_positions());
        fail("max_model_len", asked + " is more than the " + most + " tokens that the model was made for: lower it, or leave it out.");
    }
    if (item_size(options.kv_cache_dtype) < 2 || options.kv_cache_dtype == DType::int32) {
        fail("kv_cache_dtype", std::string("\"kv_cache_dtype\" = \"") + name(options.kv_cache_dtype) + "\" is not valid: send float32, float16 or bfloat16.");
    }
}

Needs needs_of(const Model& model, const CacheOptions& options) {
    Needs needs;
    needs.block_bytes = 2 * model.num_attention_layers() * model.kv_size() * static_cast<std::int64_t>(item_size(options.kv_cache_dtype)) * block_size;
    needs.slot_bytes = static_cast<std::int64_t>(slot_bytes(model));
    needs.may_lower_rows = options.max_batch_size == 0;
    needs.max_rows = needs.may_lower_rows ? options.default_rows : options.max_batch_size;
    needs.may_shorten = options.max_model_len == 0;
    needs.context = needs.may_shorten ? model.max_positions() : options.max_model_len;
    return needs;
}

// Bytes that the caches may take.
std::int64_t memory_of(const DeviceInfo& device, const CacheOptions& options) {
    const std::string asked = "\"kv_cache_memory\" = " + std::to_string(options.kv_cache_memory) + " is more than the ";
    const auto free = static_cast<std::int64_t>(device.free_memory), kept = static_cast<std::int64_t>(device.kept_memory);
    if (!options.kv_cache_memory) return std::max<std::int64_t>(0, std::min(static_cast<std::int64_t>(static_cast<double>(free) * device.cache_share), free - kept));
    if (options.kv_cache_memory > device.total_memory) {
        fail("kv_cache_memory", asked + mebibytes(static_cast<std::int64_t>(device.total_memory)) + " MiB of memory that " + device.name + " has: lower it.");
    }
    if (kept > 0 && options.kv_cache_memory > device.free_memory) {
        fail("kv_cache_memory", asked + mebibytes(free) + " MiB that are free on " + device.name + " beside the weights and what a step takes: lower it.");
    }
    return static_cast<std::int64_t>(options.kv_cache_memory);
}

}  // namespace

std::size_t slot_bytes(const Model& model) {
    const std::size_t layer_bytes = static_cast<std::size_t>(model.delta_net_shape().state_size()) * sizeof(float);
    return static_cast<std::size_t>(model.num_delta_net_layers()) * ((layer_bytes + state_alignment - 1) / state_alignment * state_alignment);
}

CachePlan plan_caches(const Model& model, const DeviceInfo& device, const CacheOptions& options) {
    check_options(model, options);
    const Needs needs = needs_of(model, options);
    const std::int64_t memory = memory_of(device, options);
    const bool is_explicit = options.kv_cache_memory != 0;
    std::int64_t context = needs.context, max_rows = needs.max_rows, num_snapshots = 0;
    const std::int64_t per_row = ceil_div(context, block_size), promised = needs.may_shorten ? 0 : per_row * needs.block_bytes;
    if (needs.slot_bytes) {
        if (needs.may_lower_rows) max_rows = std::clamp<std::int64_t>((memory - std::max(memory / 2, promised)) / needs.slot_bytes, 1, max_rows);
        if (options.enable_prefix_caching) {
            const std::int64_t left = memory - max_rows * needs.slot_bytes;
            num_snapshots = std::clamp<std::int64_t>(std::min(left / 4, left - promised) / needs.slot_bytes, 0, snapshots_a_row * max_rows);
        }
    }
    const std::int64_t state_bytes = (max_rows + num_snapshots) * needs.slot_bytes;
    std::int64_t num_blocks = std::max<std::int64_t>(0, memory - state_bytes) / needs.block_bytes;
    if (num_blocks < per_row && needs.may_shorten && num_blocks * block_size >= std::min(least_context, context)) {
        context = num_blocks * block_size;
    } else if (num_blocks < per_row) {
        const std::string beside = state_bytes ? " beside " + mebibytes(state_bytes) + " MiB of recurrent states" : "";
        const std::string figures = "A context of " + std::to_string(context) + " tokens needs " + mebibytes(per_row * needs.block_bytes) +
                                    " MiB of KV cache and " + mebibytes(num_blocks * needs.block_bytes) + " MiB may be used" + beside;
        const std::string remedy = is_explicit ? "raise kv_cache_memory" : "free some memory, set kv_cache_memory";
        fail("kv_cache_memory", figures + ": " + remedy + ", or lower max_model_len" + (state_bytes && max_rows > 1 ? " or max_batch_size." : "."));
    }
    if (!is_explicit) num_blocks = std::min(num_blocks, ceil_div(context, block_size) * max_rows);
    num_blocks = std::min<std::int64_t>(num_blocks, std::numeric_limits<std::int32_t>::max() / block_size);  // slot_mapping is int32

    CachePlan plan;
    const std::int64_t chunk = options.prefill_token_budget;
    const std::int64_t interval = chunk ? std::max(chunk, least_snapshot_interval) : unchunked_snapshot_interval;
    plan.shape.block_size = static_cast<int>(block_size);
    plan.shape.num_blocks = static_cast<int>(num_blocks);
    plan.shape.num_row_slots = static_cast<int>(max_rows);
    plan.shape.num_snapshot_slots = static_cast<int>(num_snapshots);
    plan.shape.snapshot_interval = needs.slot_bytes ? static_cast<int>(ceil_div(interval, block_size) * block_size) : 0;
    plan.shape.max_model_len = static_cast<int>(context);
    plan.kv_bytes = static_cast<std::size_t>(num_blocks * needs.block_bytes);
    plan.state_bytes = static_cast<std::size_t>(state_bytes);
    const std::string share = device.cache_share == 0.25 ? "a quarter" : std::to_string(static_cast<int>(100 * device.cache_share + 0.5)) + "%";
    const std::string where = is_explicit ? "kv_cache_memory = " + std::to_string(options.kv_cache_memory) : share + " of the free memory";
    if (context < needs.context) {
        plan.limits.push_back("max_model_len is " + std::to_string(context) + ": the model was made for " + std::to_string(needs.context) +
                              ", whose KV cache does not fit into " + where);
    }
    if (max_rows < needs.max_rows) {
        plan.limits.push_back("max_batch_size is " + std::to_string(max_rows) + ": the recurrent states of " + std::to_string(needs.max_rows) +
                              " rows leave too little of " + where + " to the KV cache");
    }
    return plan;
}

}  // namespace pocket
