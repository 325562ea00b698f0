// One request at a time on an engine that stays loaded: the low-level engine of a process that serves a pipe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_options.h"
#include "engine/qwen_engine.h"
#include "engine/request.h"

namespace pocket {

struct PersistentOptions : QwenEngineOptions {
    bool warmup = true;                                     // run a step of each kind before the first request
};

struct PersistentRequest {
    std::string id;                                         // handed back with the result
    std::vector<std::int32_t> token_ids;                    // of the prompt
    int max_new_tokens = 128;                               // at least 1
    float temperature = 0;                                  // 0 is greedy
    float top_p = 1;                                        // (0, 1]; 1 is off
    int top_k = 0;                                          // 0 is off
    std::uint64_t seed = 0;
    std::optional<std::vector<std::int32_t>> stop_token_ids;  // without them, the EOS ids of the checkpoint
    std::optional<int> logprobs;                            // alternatives to rank at each token, 0 to 20
};

struct PersistentResult {
    std::string id;
    std::vector<std::int32_t> token_ids;                    // an id that ended the answer is left out
    FinishReason finish_reason = FinishReason::stop;
    int prompt_tokens = 0;
    int completion_tokens = 0;                              // the id that ended the answer included
    int cached_tokens = 0;                                  // of the prompt, that the answer before had left in the cache
    double prefill_seconds = 0;                             // until the first id
    double decode_seconds = 0;                              // after it
    std::vector<TokenLogprobs> logprobs;                    // one for each of token_ids where they were asked for
};

class PersistentEngine {
public:
    PersistentEngine(const std::string& checkpoint, const PersistentOptions& options, const LoadProgress& progress = {});

    // Answer one request. `on_token` hears of each id as it is drawn; what it throws ends the answer and leaves `run`.
    // Error(configuration) naming the field that is wrong, or when another request is being answered: its session would be continued by this one.
    PersistentResult run(const PersistentRequest& request, const std::function<void(std::int32_t)>& on_token = {});

    // End the answer that another thread waits for at its next token, with "cancelled".
    void cancel() noexcept { is_cancelled_ = true; }

    void reset() { engine_.reset(); }
    const QwenConfig& config() const noexcept { return engine_.config(); }
    std::optional<std::int32_t> eos_id() const { return engine_.eos_id(); }

private:
    QwenEngine engine_;
    std::atomic<bool> is_running_{false}, is_cancelled_{false};
};

}  // namespace pocket
