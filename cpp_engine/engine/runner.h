// What the engine's loop needs of whatever computes its steps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"
#include "pocket/device.h"
#include "pocket/error.h"

namespace pocket {

// Tokens whose log probabilities a row's step is to give: ids[0] by the logits of the row's token `first` in this step, and so on.
struct RankedTokens {
    int first = 0;
    std::span<const std::int32_t> ids;
    int num_top = 0;                                        // alternatives
    std::vector<TokenLogprobs>* found = nullptr;            // where they are put, one behind the other
};

// One row's share of a step, as the scheduler chose it. Pointers are valid during the call.
struct RunRow {
    std::span<const std::int32_t> token_ids;                // the tokens to compute
    int num_computed_tokens = 0;                            // tokens before them, whose keys and values are in the cache
    std::span<const std::int32_t> block_table;              // blocks of all its tokens, those of this step included
    int slot = -1;                                          // of its recurrent state
    bool samples = false;                                   // whether its last token's logits are drawn from
    const Request* request = nullptr;                       // how
    int draw = 0;                                           // number of this draw in its row, from 0
    const std::uint32_t* mask = nullptr;                    // ids that its constraint and its request allow, or null
    std::span<const LogitEdit> edits = {};                  // of its logits
    RankedTokens ranked = {};                               // of its prompt
};

// The recurrent state of one slot becomes that of another, in all layers.
struct StateCopy {
    int from = 0;
    int to = 0;
};

// What a row drew. `is_finite` false: its logits were not finite, and it fails.
struct Draw {
    std::int32_t token_id = -1;
    bool is_finite = true;
    TokenLogprobs logprobs;                                 // where the request asked for them
};

struct CacheShape {
    int block_size = 16;                                    // tokens
    int num_blocks = 0;
    int num_row_slots = 0;                                  // most running rows; theirs are the slots [0, num_row_slots)
    int num_snapshot_slots = 0;                             // states kept beside those of the rows, in the slots after theirs
    int snapshot_interval = 0;                              // tokens between snapshots of a long prompt, a multiple of block_size; 0: no layer has a state
    int max_model_len = 0;                                  // most tokens of prompt and answer together; 0 is as many as the blocks hold
};

// One model with its cache. One thread calls it, the engine's.
class Runner {
public:
    virtual ~Runner() = default;
    virtual int vocab_size() const noexcept = 0;
    virtual const CacheShape& cache() const noexcept = 0;

    // Carry out `copies` in order, then compute the step, of at least one row. One Draw for each row that samples, in the order of `rows`. A row whose first
    // token this is starts from an empty state, whatever its slot holds. No row is told to a runner when it ends: its blocks and slot go to others.
    // What it throws ends every row, and the engine is dead.
    virtual std::vector<Draw> run(std::span<const RunRow> rows, std::span<const StateCopy> copies) = 0;

    // Carry out `copies`, compute one row and return the logits of each of its tokens, float32 [row.token_ids.size(), vocab_size()] in host memory; nothing
    // is drawn. For sessions, which evaluate and verify; the engine's loop does not call it. Error(unsupported) where a runner has none.
    virtual std::vector<float> logits(const RunRow& row, std::span<const StateCopy> copies) {
        (void)row, (void)copies;
        throw Error(ErrorKind::unsupported, "This runner gives no logits of single tokens: use the engine of a model.");
    }
};

}  // namespace pocket
