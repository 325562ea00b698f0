#include "engine/persistent_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "pocket/error.h"

namespace pocket {

namespace {

[[noreturn]] void refuse(const char* field, const std::string& value, const char* wanted) {
    throw Error(ErrorKind::configuration, "\"" + std::string(field) + "\" = " + value + " is not valid: send " + wanted + ".", field);
}

void check(const PersistentRequest& request) {
    if (request.max_new_tokens < 1) refuse("max_new_tokens", std::to_string(request.max_new_tokens), "a whole number of at least 1");
    if (!std::isfinite(request.temperature) || request.temperature < 0) refuse("temperature", std::to_string(request.temperature), "a number of at least 0");
    if (!(request.top_p > 0 && request.top_p <= 1)) refuse("top_p", std::to_string(request.top_p), "a number above 0, and at most 1");
    if (request.top_k < 0) refuse("top_k", std::to_string(request.top_k), "a whole number of at least 0, where 0 is off");
    if (request.logprobs && (*request.logprobs < 0 || *request.logprobs > 20)) refuse("logprobs", std::to_string(*request.logprobs), "a whole number from 0 to 20");
}

double seconds_since(std::chrono::steady_clock::time_point start) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); }

}  // namespace

PersistentEngine::PersistentEngine(const std::string& checkpoint, const PersistentOptions& options, const LoadProgress& progress)
    : engine_(checkpoint, options, progress) {
    if (options.warmup) engine_.warmup();
}

PersistentResult PersistentEngine::run(const PersistentRequest& request, const std::function<void(std::int32_t)>& on_token) {
    check(request);
    if (is_running_.exchange(true)) {
        throw Error(ErrorKind::configuration, "run was called while another request is answered: wait for its end, or use QwenBatchScheduler, which answers many at a time.");
    }
    struct Running {
        std::atomic<bool>& flag;
        ~Running() { flag = false; }
    } const running{is_running_};
    is_cancelled_ = false;
    Request row;
    row.temperature = request.temperature;
    row.top_p = request.top_p;
    row.top_k = request.top_k;
    row.seed = request.seed;
    row.logprobs = request.logprobs;
    const std::vector<std::int32_t>& stops = request.stop_token_ids ? *request.stop_token_ids : engine_.config().eos_token_ids;

    PersistentResult result;
    result.id = request.id;
    result.prompt_tokens = static_cast<int>(request.token_ids.size());
    const int room = engine_.config().max_model_len - result.prompt_tokens;
    if (request.max_new_tokens > room && room >= 0) {
        refuse("max_new_tokens", std::to_string(request.max_new_tokens),
               ("at most " + std::to_string(room) + " after a prompt of " + std::to_string(result.prompt_tokens) + " tokens, or make the engine with a larger max_model_len").c_str());
    }
    const auto start = std::chrono::steady_clock::now();
    Draw draw = engine_.prefill(request.token_ids, row);
    result.prefill_seconds = seconds_since(start);
    result.cached_tokens = engine_.cached_tokens();
    const auto first = std::chrono::steady_clock::now();
    for (;;) {
        ++result.completion_tokens;
        if (std::find(stops.begin(), stops.end(), draw.token_id) != stops.end()) break;
        result.token_ids.push_back(draw.token_id);
        if (request.logprobs) result.logprobs.push_back(std::move(draw.logprobs));
        if (on_token) on_token(draw.token_id);
        if (result.completion_tokens == request.max_new_tokens || is_cancelled_) {
            result.finish_reason = result.completion_tokens == request.max_new_tokens ? FinishReason::length : FinishReason::cancelled;
            break;
        }
        draw = engine_.decode_step(result.token_ids.back(), row, result.completion_tokens);
    }
    result.decode_seconds = seconds_since(first);
    return result;
}

}  // namespace pocket
