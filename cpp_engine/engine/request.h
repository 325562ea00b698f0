// What goes into the engine and what comes out of it. Token ids are the only currency.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/logit_terms.h"

namespace pocket {

// What one row may say next, such as a grammar. It belongs to the row; the engine's thread alone calls it. A preempted row keeps it.
class TokenConstraint {
public:
    virtual ~TokenConstraint() = default;
    // Bit i % 32 of word i / 32 is to be set where id i may come next; `mask` has ceil(vocab_size / 32) words. What it throws ends the row.
    virtual void fill(std::span<std::uint32_t> mask) = 0;
    // The row has drawn an id that the last mask allowed; an id that ends the row is not told.
    virtual void accept(std::int32_t token_id) = 0;
    // Nothing may follow what was accepted: the row ends with "stop".
    virtual bool is_complete() = 0;
};

// One row, every default resolved.
struct Request {
    std::vector<std::int32_t> prompt_token_ids;             // at least one, each in [0, vocab_size)
    int max_tokens = 1;                                     // at least 1, or 0 with prompt_logprobs, where nothing is generated
    float temperature = 0;                                  // 0 is greedy; then top_p, top_k and seed are not read
    float top_p = 1;                                        // (0, 1]; 1 is off
    int top_k = 0;                                          // 0 is off
    std::uint64_t seed = 0;
    std::vector<std::int32_t> stop_token_ids;               // ids that end the row; the id itself is not part of the answer
    std::optional<int> logprobs;                            // alternatives to rank at each token, 0 to 20
    std::shared_ptr<TokenConstraint> constraint;
    std::optional<LogitTerms> terms;                        // what changes the logits; none, and nothing is paid for it
    int priority = 0;                                       // rows with a lower number are started first and preempted last
    std::optional<int> prompt_logprobs;                     // alternatives to rank at each token of the prompt but the first, 0 to 20; no prefix is then reused
};

using RequestId = std::uint64_t;

enum class FinishReason : std::uint8_t { stop, length, cancelled, error };

constexpr const char* name(FinishReason reason) noexcept {
    switch (reason) {
        case FinishReason::stop: return "stop";
        case FinishReason::length: return "length";
        case FinishReason::cancelled: return "cancelled";
        case FinishReason::error: return "error";
    }
    return "";
}

// Natural log probabilities at one token, over the whole vocabulary; none is below -9999.
struct TokenLogprobs {
    float logprob = 0;
    std::vector<std::pair<std::int32_t, float>> top;        // most likely first; of equal ones the lower id first
};

// What one step gave one row. Outputs of a row arrive in order; nothing follows a finish.
struct StepOutput {
    RequestId request_id = 0;
    std::vector<std::int32_t> token_ids;                    // new ids; an id that ends the row is left out
    int num_generated = 0;                                  // tokens generated so far, the one that ended the row included
    std::optional<FinishReason> finish_reason;
    int cached_tokens = 0;                                  // prompt tokens that the prefix cache held
    std::exception_ptr error;                               // with FinishReason::error
    std::vector<TokenLogprobs> logprobs;                    // one for each of token_ids where the request asked for them
    std::vector<TokenLogprobs> prompt_logprobs;             // with the row's first output, one for each token of the prompt but the first, where it asked
};

// Called on the engine's thread; must return at once. What it throws is written to stderr and swallowed.
using StepCallback = std::function<void(const StepOutput&)>;

}  // namespace pocket
