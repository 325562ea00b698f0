// One request in the engine, and its share of a step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/logit_edits.h"
#include "engine/prefix.h"
#include "engine/request.h"
#include "engine/state_pool.h"

namespace pocket {

inline constexpr std::int32_t unknown_token = -1;                      // stands for an id that a step under way draws

// The scheduler's thread alone touches a row that was added.
struct Row {
    Row(RequestId id, Request request) : id(id), request(std::move(request)), token_ids(this->request.prompt_token_ids) {
        if (this->request.terms) edits.emplace(*this->request.terms, this->request.prompt_token_ids, this->request.stop_token_ids);
    }
    Row(const Row&) = delete;
    Row& operator=(const Row&) = delete;

    const RequestId id;
    const Request request;
    std::vector<std::int32_t> token_ids;                               // the prompt, then what was generated; the last may be unknown_token
    int num_computed_tokens = 0;                                       // leading tokens whose keys and values are in the cache
    std::vector<std::int32_t> block_table;                             // blocks that hold them, in order
    std::vector<Prefix> prefixes;                                      // that end with each of the row's full computed blocks
    int num_registered_blocks = 0;                                     // how many of those steps that are resolved computed, and so may be shared
    std::optional<int> cached_tokens;                                  // prompt tokens found in the prefix cache when the row first started
    bool is_complete = false;                                          // nothing may follow the token that the row has just drawn
    int slot = -1;                                                     // a running row's own number, and that of its recurrent state; else -1
    std::shared_ptr<Snapshot> snapshot;                                // the newest that was taken of it while it runs
    std::optional<LogitEdits> edits;                                   // where the request has terms
    int snapshot_end = 0;                                              // tokens up to the last whole block before the row's last token when it started
    int num_ranked = 0;                                                // of the prompt after its first, by steps that were advanced, where it asks for them
    std::vector<TokenLogprobs> prompt_logprobs;                        // of those, until the row's first output takes them

    int num_tokens() const noexcept { return static_cast<int>(token_ids.size()); }
    int num_generated() const noexcept { return static_cast<int>(token_ids.size() - request.prompt_token_ids.size()); }  // unknown ones included
    int num_pending_tokens() const noexcept { return num_tokens() - num_computed_tokens; }
    std::span<const std::int32_t> answer() const noexcept { return std::span(token_ids).subspan(request.prompt_token_ids.size()); }
    bool is_running() const noexcept { return slot >= 0; }
    bool awaits_end() const noexcept { return num_generated() >= std::max(1, request.max_tokens); }  // the id under way is the last that it may draw
    // Where in token_ids the first and, exclusively, the last of the prompt tokens are that the row's next `num_tokens` tokens rank, each by the token before.
    std::pair<int, int> ranked(int num_tokens) const noexcept {
        if (!request.prompt_logprobs) return {0, 0};
        const int begin = std::max(num_computed_tokens, num_ranked) + 1;
        return {begin, std::max(begin, std::min(num_computed_tokens + num_tokens + 1, static_cast<int>(request.prompt_token_ids.size())))};
    }
    bool is_stop(std::int32_t token_id) const noexcept { return std::ranges::find(request.stop_token_ids, token_id) != request.stop_token_ids.end(); }
};

// `num_tokens` of `row`, from its num_computed_tokens on, in this step. `samples` when that reaches the row's end.
struct ScheduledRow {
    std::shared_ptr<Row> row;
    int num_tokens = 0;
    bool samples = false;
};

// What one step did to one row that sampled.
struct RowUpdate {
    std::shared_ptr<Row> row;
    std::size_t place = 0;                                             // in the step
    std::optional<std::int32_t> token_id;                              // the new one, unless it is one that ends the row
    int num_generated = 0;
    std::optional<FinishReason> finish_reason;
};

}  // namespace pocket
