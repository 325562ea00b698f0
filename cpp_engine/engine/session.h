// One row on a Runner, driven by its owner token by token, with a prefix cache of its own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/runner.h"

namespace pocket {

struct SessionOptions {
    int prefill_chunk_tokens = 512;                         // most prompt tokens a step; 0 computes a prompt in one step
    bool enable_prefix_caching = true;
    bool has_states = true;                                 // the model has recurrent states, so that a prefix is reusable only where one was kept
};

// The tokens of a session lie in the cache one after another, in blocks 0, 1, 2, ...; its state is that of slot 0, and every other slot may hold a
// snapshot: the state after a prefix of these tokens. So `prefill` reuses what the last prompt and answer have in common with the new prompt, up to the
// longest prefix whose state is still there. It owns no memory, and nobody else may use the Runner while a session is in use.
//
// Every call throws Error(configuration) where ids or lengths are wrong, and then changes nothing. When a step fails, the session is empty.
class Session {
public:
    Session(Runner& runner, const SessionOptions& options);

    // Make the session hold `token_ids`, at least one, and draw what follows as `request` says. The draw is number 0 of its row.
    Draw prefill(std::span<const std::int32_t> token_ids, const Request& request);

    // Append `token_id`, drawn or not, and draw what follows; `draw` is the draw's number in its row.
    Draw decode_step(std::int32_t token_id, const Request& request, int draw);

    // Append `token_ids`, the first of which is taken as given and the others as guesses, and return the greedy id after each of them. The session then
    // holds the given one and those guesses that equal the greedy id before them: where one was wrong, the state of before is restored and the right ones
    // are computed again, which costs one more step. So the first wrong guess's place holds the id with which to go on.
    std::vector<std::int32_t> verify(std::span<const std::int32_t> token_ids);

    // Make the session hold `token_ids` and return the logits of all of them, [token_ids.size(), vocab_size]. Reuses no prefix.
    std::vector<float> logits(std::span<const std::int32_t> token_ids);

    // Forget tokens and snapshots.
    void reset();

    std::int64_t num_tokens() const noexcept { return static_cast<std::int64_t>(token_ids_.size()); }
    int cached_tokens() const noexcept { return cached_tokens_; }   // that the last prefill found

private:
    struct Snapshot {
        int position = 0;                                   // tokens before it
        int slot = 0;
        bool is_mark = false;                               // marks an interval of a long prompt: given up first
        std::uint64_t last_use = 0;
    };

    void check(std::span<const std::int32_t> token_ids, std::int64_t before) const;
    int restore(std::span<const std::int32_t> token_ids);   // the longest reusable prefix, whose length is returned; the session then holds just that
    void keep(bool is_mark);                                // a snapshot of the state as it is, copied with the next step
    RunRow row(std::span<const std::int32_t> token_ids) const;
    std::vector<float> compute_logits(std::span<const std::int32_t> token_ids);
    Draw compute(std::span<const std::int32_t> token_ids, const Request* request, int draw);

    Runner& runner_;
    SessionOptions options_;
    std::vector<std::int32_t> block_table_;                 // 0, 1, 2, ...
    std::vector<std::int32_t> token_ids_;                   // whose keys, values and state are in the cache
    std::vector<Snapshot> snapshots_;
    std::vector<int> free_slots_;
    std::vector<StateCopy> copies_;                         // to be carried out before the next step
    std::uint64_t uses_ = 0;
    int cached_tokens_ = 0;
};

}  // namespace pocket
