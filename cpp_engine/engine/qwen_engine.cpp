#include "engine/qwen_engine.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "comm/shared_memory.h"
#include "core/cores.h"
#include "core/splitmix.h"
#include "engine/model_runner.h"
#include "engine/warm_up.h"
#include "io/eos.h"
#include "models/qwen3_5.h"
#include "models/qwen3_5_config.h"
#include "pocket/error.h"

namespace pocket {

namespace {

const Request greedy;  // temperature 0, no more

// The type that the option `field` names; "auto" is `default_dtype`.
DType dtype_of(const char* field, const std::string& value, DType default_dtype) {
    if (value == "auto") return default_dtype;
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
        if (value == name(dtype)) return dtype;
    }
    throw Error(ErrorKind::configuration, "\"" + std::string(field) + "\" = \"" + value + "\" is not valid: send auto, float32, bfloat16 or float16.", field);
}

void check_counts(const QwenEngineOptions& options) {
    constexpr int any = std::numeric_limits<int>::max(), most_rows = 1 << 16, most_threads = 1024;
    const std::tuple<const char*, int, int> counts[] = {{"max_model_len", options.max_model_len, any},
                                                        {"max_batch_size", options.max_batch_size, most_rows},
                                                        {"prefill_chunk_tokens", options.prefill_chunk_tokens, any},
                                                        {"num_threads", options.num_threads, most_threads}};
    for (const auto& [field, value, most] : counts) {
        if (value >= 0 && value <= most) continue;
        const std::string wanted = most == any ? "of at least 0" : "from 0 to " + std::to_string(most);
        throw Error(ErrorKind::configuration, "\"" + std::string(field) + "\" = " + std::to_string(value) + " is not valid: send a whole number " + wanted + ".", field);
    }
    const int size = options.tensor_parallel_size, rank = options.tensor_parallel_rank;
    constexpr int most_ranks = 64;
    if (size < 1 || size > most_ranks) {
        throw Error(ErrorKind::configuration,
                    "\"tensor_parallel_size\" = " + std::to_string(size) + " is not valid: send a whole number from 1 to " + std::to_string(most_ranks) + ".",
                    "tensor_parallel_size");
    }
    if (rank < 0 || rank >= size) {
        throw Error(ErrorKind::configuration,
                    "\"tensor_parallel_rank\" = " + std::to_string(rank) + " is not valid: send a whole number from 0 to " + std::to_string(size - 1) + ".",
                    "tensor_parallel_rank");
    }
    if (size > 1 && options.rendezvous_dir.empty()) {
        throw Error(ErrorKind::configuration, "\"rendezvous_dir\" is empty, and the ranks have no place to meet: name a folder of this run alone.", "rendezvous_dir");
    }
}

// The type of the embeddings, which are never FP8.
DType stored_dtype(const Checkpoint& checkpoint) {
    for (const HostTensor* tensor : checkpoint.tensors()) {
        if (std::string_view(tensor->name).ends_with("embed_tokens.weight")) return tensor->dtype;
    }
    return DType::float32;  // the model says that they are missing
}

}  // namespace

DType weight_dtype(const QwenEngineOptions& options, const Checkpoint& checkpoint) { return dtype_of("dtype", options.dtype, stored_dtype(checkpoint)); }

CacheOptions cache_options(const QwenEngineOptions& options, const DeviceInfo& device, DType weights) {
    CacheOptions wanted;
    wanted.max_model_len = options.max_model_len;
    wanted.max_batch_size = options.max_batch_size;
    wanted.default_rows = device.default_rows;
    wanted.kv_cache_memory = options.kv_cache_memory;
    wanted.prefill_token_budget = options.prefill_chunk_tokens;
    wanted.enable_prefix_caching = options.enable_prefix_caching;
    wanted.kv_cache_dtype = dtype_of("kv_cache_dtype", options.kv_cache_dtype, weights == DType::float32 ? DType::float32 : device.kv_cache_dtype);
    return wanted;
}

QwenEngine::QwenEngine(const std::string& checkpoint_folder, const QwenEngineOptions& options, const LoadProgress& progress)
    : options_(options), process_(getpid()) {
    try {
        load(checkpoint_folder, progress);
    } catch (const std::exception& error) {
        if (ranks_) ranks_->abort(error.what());  // they wait for this one
        throw;
    }
}

void QwenEngine::load(const std::string& checkpoint_folder, const LoadProgress& progress) {
    // What is wrong is refused before a device is made, let alone gigabytes read.
    const QwenEngineOptions& options = options_;
    check_counts(options);
    dtype_of("kv_cache_dtype", options.kv_cache_dtype, DType::float32);
    Checkpoint checkpoint(checkpoint_folder);
    const DType dtype = weight_dtype(options, checkpoint);
    const EosIds eos = read_eos_ids(checkpoint);
    const int size = options.tensor_parallel_size;
    if (size > 1) share_config(read_qwen3_5_config(checkpoint), {options.tensor_parallel_rank, size}, checkpoint);

    const int own_cores = size > 1 ? std::max(1, available_cores() / size) : 0;  // of the ranks on this machine
    device_ = make_device(options.device, options.num_threads > 0 ? options.num_threads : own_cores);
    if (size > 1) meet(progress);
    model_ = std::make_unique<Qwen3_5>(checkpoint, *device_, dtype, options.max_model_len, progress, ranks_.get());
    if (ranks_) ranks_->barrier();  // the weights of all are loaded
    const CacheOptions wanted = cache_options(options, device_->info(), dtype);
    if (device_->info().warms_up) {
        if (progress) progress(1, "trying prompts");
        try_prompts(*device_, *model_, wanted, ranks_.get());
    }
    const DeviceInfo device = agreed_device();
    const CachePlan plan = plan_caches(*model_, device, wanted);
    const int step_tokens = options.prefill_chunk_tokens > 0 ? std::min(options.prefill_chunk_tokens, plan.shape.max_model_len) : 512;
    runner_ = std::make_unique<ModelRunner>(*device_, *model_, plan.shape, wanted.kv_cache_dtype, step_tokens + plan.shape.num_row_slots, ranks_.get());
    if (ranks_ && ranks_->rank() == 0) leader_ = std::make_unique<LeadingRunner>(*runner_, *ranks_);
    session_ = std::make_unique<Session>(leader_ ? static_cast<Runner&>(*leader_) : *runner_, SessionOptions{options.prefill_chunk_tokens, options.enable_prefix_caching, model_->num_delta_net_layers() > 0});

    config_.architecture = model_->architecture();
    config_.vocab_size = model_->vocab_size();
    config_.max_positions = model_->max_positions();
    config_.max_model_len = plan.shape.max_model_len;
    config_.max_batch_size = plan.shape.num_row_slots;
    config_.num_attention_layers = model_->num_attention_layers();
    config_.num_delta_net_layers = model_->num_delta_net_layers();
    config_.dtype = name(dtype);
    config_.kv_cache_dtype = name(wanted.kv_cache_dtype);
    config_.device = device.name;
    config_.device_description = device.description;
    config_.num_threads = device.num_threads;
    config_.weight_bytes = model_->weight_bytes();
    config_.bytes_per_token = model_->bytes_per_token();
    config_.kv_cache_bytes = plan.kv_bytes;
    config_.state_bytes = plan.state_bytes;
    config_.block_size = plan.shape.block_size;
    config_.kv_blocks = plan.shape.num_blocks;
    config_.state_snapshots = plan.shape.num_snapshot_slots;
    config_.snapshot_interval = plan.shape.snapshot_interval;
    config_.eos_token_ids = eos.token_ids;
    config_.eos_source = eos.source;
    config_.limits = plan.limits;
    capabilities_.max_slots = plan.shape.num_row_slots;
    capabilities_.prefix_caching = options.enable_prefix_caching;
    if (progress) progress(1, "ready");
}

void QwenEngine::meet(const LoadProgress& progress) {
    Meeting meeting;
    meeting.rank = options_.tensor_parallel_rank;
    meeting.size = options_.tensor_parallel_size;
    meeting.folder = options_.rendezvous_dir;
    const std::string message = "waiting for the other ranks of " + std::to_string(meeting.size);
    if (progress) meeting.check = [&] { progress(0, message); };
    ranks_ = device_->join(std::make_unique<SharedMemoryCommunicator>(meeting));
}

// The device with what each rank may take of its memory, so that all plan alike.
DeviceInfo QwenEngine::agreed_device() const {
    DeviceInfo device = device_->info();
    if (!ranks_) return device;
    const auto sharers = static_cast<std::size_t>(device.name == "cpu" ? ranks_->size() : 1);
    device.total_memory /= sharers;
    device.free_memory = static_cast<std::size_t>(ranks_->least(static_cast<std::int64_t>(device.free_memory / sharers)));
    return device;
}

QwenEngine::~QwenEngine() {
    if (!is_foreign()) {
        dismiss();
        return;
    }
    // In a fork the device's threads are gone, and joining them would never end. The process is a copy that ends soon.
    (void)session_.release(), (void)leader_.release(), (void)runner_.release(), (void)model_.release(), (void)ranks_.release(), (void)device_.release();
}

void QwenEngine::follow() {
    check_process();
    const std::lock_guard lock(mutex_);
    if (!ranks_ || leader_) {
        throw Error(ErrorKind::configuration, "follow can't be called on rank 0, which leads: call it on the other ranks.", "tensor_parallel_rank");
    }
    pocket::follow(*runner_, *ranks_);
}

void QwenEngine::dismiss() noexcept {
    if (!leader_ || is_dismissed_.exchange(true)) return;
    const std::lock_guard lock(mutex_);
    try {
        leader_->dismiss();
    } catch (const std::exception&) {
        // A rank is lost, or this one was told so: the others end by that.
    }
}

void QwenEngine::abandon(const std::string& reason) noexcept {
    if (ranks_) ranks_->abort(reason);
}

bool QwenEngine::is_foreign() const noexcept { return process_ != getpid(); }

void QwenEngine::check_process() const {
    if (is_foreign()) {
        throw Error(ErrorKind::unavailable, "The engine did not come along into this process, a fork of the one that loaded the model: load it here.");
    }
}

std::unique_lock<std::mutex> QwenEngine::enter(const char* call) const {
    check_process();
    if (ranks_ && !leader_) {
        throw Error(ErrorKind::configuration, std::string(call) + " can't be called on rank " + std::to_string(ranks_->rank()) + ", which computes what rank 0 orders: call it there.",
                    "tensor_parallel_rank");
    }
    std::unique_lock lock(mutex_);
    if (is_attached_) {
        throw Error(ErrorKind::configuration,
                    std::string(call) + " can't be called while a QwenBatchScheduler runs on this engine: submit requests to that, or stop it first.");
    }
    return lock;
}

std::int32_t QwenEngine::prefill(std::span<const std::int32_t> token_ids) { return prefill(token_ids, greedy).token_id; }

Draw QwenEngine::prefill(std::span<const std::int32_t> token_ids, const Request& request) {
    const auto lock = enter("prefill");
    return session_->prefill(token_ids, request);
}

std::int32_t QwenEngine::decode_step(std::int32_t token_id) { return decode_step(token_id, greedy, 0).token_id; }

Draw QwenEngine::decode_step(std::int32_t token_id, const Request& request, int draw) {
    const auto lock = enter("decode_step");
    return session_->decode_step(token_id, request, draw);
}

std::vector<std::int32_t> QwenEngine::generate(std::span<const std::int32_t> token_ids, int max_new_tokens, const std::function<void(std::int32_t)>& on_token) {
    if (max_new_tokens < 1) {
        throw Error(ErrorKind::configuration, "\"max_new_tokens\" = " + std::to_string(max_new_tokens) + " is not valid: send a whole number of at least 1.",
                    "max_new_tokens");
    }
    const std::int64_t wanted = static_cast<std::int64_t>(token_ids.size()) + max_new_tokens;
    if (wanted > config_.max_model_len) {
        throw Error(ErrorKind::configuration,
                    "\"max_new_tokens\" = " + std::to_string(max_new_tokens) + " after a prompt of " + std::to_string(token_ids.size()) +
                        " tokens is more than the context of " + std::to_string(config_.max_model_len) + " tokens: send less, or make the engine with a larger max_model_len.",
                    "max_new_tokens");
    }
    const auto lock = enter("generate");
    std::vector<std::int32_t> ids{session_->prefill(token_ids, greedy).token_id};
    ids.reserve(static_cast<std::size_t>(max_new_tokens));
    for (;;) {
        if (on_token) on_token(ids.back());
        if (static_cast<int>(ids.size()) == max_new_tokens) return ids;
        ids.push_back(session_->decode_step(ids.back(), greedy, static_cast<int>(ids.size())).token_id);
    }
}

std::vector<std::int32_t> QwenEngine::verify(std::span<const std::int32_t> token_ids) {
    const auto lock = enter("verify");
    return session_->verify(token_ids);
}

std::vector<float> QwenEngine::logits(std::span<const std::int32_t> token_ids) {
    const auto lock = enter("logits");
    return session_->logits(token_ids);
}

void QwenEngine::warmup() {
    const auto lock = enter("warmup");
    session_->reset();
    const std::vector<std::int32_t> prompt(static_cast<std::size_t>(std::clamp(config_.max_model_len - 1, 1, 16)), 0);
    session_->prefill(prompt, greedy);
    if (config_.max_model_len > 1) session_->decode_step(0, greedy, 1);
    session_->reset();
}

void QwenEngine::reset() {
    const auto lock = enter("reset");
    session_->reset();
}

std::int64_t QwenEngine::num_tokens() const {
    const auto lock = enter("num_tokens");
    return session_->num_tokens();
}

int QwenEngine::cached_tokens() const {
    const auto lock = enter("cached_tokens");
    return session_->cached_tokens();
}

std::optional<std::int32_t> QwenEngine::eos_id() const {
    if (config_.eos_token_ids.empty()) return std::nullopt;
    return config_.eos_token_ids.front();
}

Runner& QwenEngine::attach() {
    check_process();
    const std::lock_guard lock(mutex_);
    if (ranks_ && !leader_) throw Error(ErrorKind::configuration, "A QwenBatchScheduler runs on rank 0 alone: call follow on this one.", "engine");
    if (is_attached_) throw Error(ErrorKind::configuration, "A QwenBatchScheduler runs on this engine already: stop it first, or make a second engine.", "engine");
    is_attached_ = true;
    session_->reset();  // its blocks are the scheduler's now
    if (leader_) return *leader_;
    return *runner_;
}

void QwenEngine::detach() noexcept {
    if (is_foreign()) return;
    const std::lock_guard lock(mutex_);
    is_attached_ = false;
}

std::uint64_t QwenEngine::next_seed() noexcept { return splitmix64(options_.seed, num_seeds_++); }

}  // namespace pocket
