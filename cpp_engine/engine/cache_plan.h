// How many KV blocks, rows with a state and snapshots fit into the memory that the caches may take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/runner.h"
#include "models/model.h"
#include "pocket/device.h"

namespace pocket {

// What the user asked of the caches; 0 leaves the choice to the engine.
struct CacheOptions {
    int max_model_len = 0;                                  // tokens of prompt and answer; 0: what the model was made for, or what fits
    int max_batch_size = 0;                                 // running rows; 0: `default_rows`, or fewer where their states would leave too little
    int default_rows = 8;
    std::size_t kv_cache_memory = 0;                        // bytes of keys, values and states; 0: what all rows can use, at most a share of the free memory
    int prefill_token_budget = 512;                         // most prompt tokens a step; 0: each prompt in one step
    bool enable_prefix_caching = true;                      // prefixes are reused, so states are kept for that
    DType kv_cache_dtype = DType::float32;                  // float32, float16 or bfloat16
};

struct CachePlan {
    CacheShape shape;
    std::size_t kv_bytes = 0;                               // of all blocks
    std::size_t state_bytes = 0;                            // of all slots
    std::vector<std::string> limits;                        // lines for the log: what is less than the model or the engine would allow
};

// Bytes that the states of one slot take over all layers; 0 in a model without any. The layers of a slot are neighbours, each at a multiple of 64 bytes.
std::size_t slot_bytes(const Model& model);

// Divides the memory: the states of the running rows, a quarter of what is left for snapshots (at most 4 a row), KV blocks. Rows that nobody asked for have
// at most half of it for their states. A context that was asked for comes before them, and before snapshots; one that was not is shortened to what fits.
// `device` is asked as it stands with the weights loaded. Error(configuration) naming the option, with the figures, where not even one row of the context
// (or of 256 tokens, where it may be shortened) fits.
CachePlan plan_caches(const Model& model, const DeviceInfo& device, const CacheOptions& options);

}  // namespace pocket
