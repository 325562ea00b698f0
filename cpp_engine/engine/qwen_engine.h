// A loaded Qwen3.5 model with its device and its cache: the session calls, and what a scheduler needs of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/cache_plan.h"
#include "engine/engine_options.h"
#include "engine/ranked_runner.h"
#include "engine/request.h"
#include "engine/runner.h"
#include "engine/session.h"
#include "io/checkpoint.h"
#include "models/model.h"
#include "pocket/communicator.h"
#include "pocket/device.h"

namespace pocket {

// It owns device, model, cache and session. Calls may be made from any thread; one runs at a time. While a scheduler runs on the engine, which then has
// the cache to itself, the session calls throw Error(configuration), and so they do on the other ranks than 0.
class QwenEngine {
public:
    // Loads the checkpoint in the folder `checkpoint`. Error naming the file, the tensor, the key or the option, and nothing is left behind.
    // With several ranks it returns when all of them have loaded; where one fails, all do.
    QwenEngine(const std::string& checkpoint, const QwenEngineOptions& options, const LoadProgress& progress = {});
    ~QwenEngine();
    QwenEngine(const QwenEngine&) = delete;
    QwenEngine& operator=(const QwenEngine&) = delete;

    // --- the session: see Session for what each call keeps and reuses ---
    std::int32_t prefill(std::span<const std::int32_t> token_ids);                          // the greedy id that follows
    std::int32_t decode_step(std::int32_t token_id);                                        // the greedy id that follows it
    // `max_new_tokens` ids: none ends it. `on_token` hears of each; what it throws ends it.
    std::vector<std::int32_t> generate(std::span<const std::int32_t> token_ids, int max_new_tokens, const std::function<void(std::int32_t)>& on_token = {});
    std::vector<std::int32_t> verify(std::span<const std::int32_t> token_ids);              // the greedy id after each
    std::vector<float> logits(std::span<const std::int32_t> token_ids);                     // [token_ids.size(), vocab_size]
    void warmup();                                                                          // a short prompt and a decode step; the session is empty then
    void reset();                                                                           // the session is empty, and so is its prefix cache
    std::int64_t num_tokens() const;                                                        // that the session holds
    int cached_tokens() const;                                                              // that the last prefill reused

    // The same with sampling, for those who run one request at a time.
    Draw prefill(std::span<const std::int32_t> token_ids, const Request& request);
    Draw decode_step(std::int32_t token_id, const Request& request, int draw);

    // --- facts ---
    std::optional<std::int32_t> eos_id() const;
    const QwenConfig& config() const noexcept { return config_; }
    const EngineCaps& capabilities() const noexcept { return capabilities_; }
    const QwenEngineOptions& options() const noexcept { return options_; }

    // --- for a scheduler ---
    // Hand over the Runner; the session is emptied. Error(configuration) when a scheduler has it already.
    Runner& attach();
    void detach() noexcept;

    // --- for several ranks ---
    // On another rank than 0: compute what rank 0 orders until it dismisses this one. Error(unavailable) where a rank is lost.
    void follow();
    // On rank 0: tell the others that it stops, once. Nothing else may compute meanwhile. Ranks that are lost already need not be told.
    void dismiss() noexcept;
    // From any thread: another rank is lost, as `reason` says. A step under way fails with it, and so does every later one.
    void abandon(const std::string& reason) noexcept;

    // Seed of the next request that has none.
    std::uint64_t next_seed() noexcept;

    // Whether this process is a fork of the one that loaded the model.
    bool is_foreign() const noexcept;

    // Throws Error(unavailable) in a fork of the process that loaded the model: its threads did not come along.
    void check_process() const;

private:
    void load(const std::string& checkpoint, const LoadProgress& progress);
    void meet(const LoadProgress& progress);
    DeviceInfo agreed_device() const;
    std::unique_lock<std::mutex> enter(const char* call) const;

    QwenEngineOptions options_;
    std::unique_ptr<Device> device_;                        // the others live on it
    std::unique_ptr<Communicator> ranks_;                   // null for one
    std::unique_ptr<Model> model_;
    std::unique_ptr<Runner> runner_;
    std::unique_ptr<LeadingRunner> leader_;                 // on rank 0 of several
    std::unique_ptr<Session> session_;
    QwenConfig config_;
    EngineCaps capabilities_;
    mutable std::mutex mutex_;                              // of what follows, and of every call that computes
    bool is_attached_ = false;
    std::atomic<bool> is_dismissed_ = false;
    std::atomic<std::uint64_t> num_seeds_{0};
    int process_ = 0;
};

// What the options ask of the weights: the type that is stored where they leave it open. Error(configuration) naming "dtype".
DType weight_dtype(const QwenEngineOptions& options, const Checkpoint& checkpoint);

// What they ask of the caches on a device. Error(configuration) naming "kv_cache_dtype".
CacheOptions cache_options(const QwenEngineOptions& options, const DeviceInfo& device, DType weights);

}  // namespace pocket
