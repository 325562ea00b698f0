// The token ids that end an answer, as a checkpoint says it.
#pragma once

#include <cstdint>
#include <vector>

#include "io/checkpoint.h"

namespace pocket {

// The main one first; empty where nothing is said. generation_config.json, which knows the end of a turn, goes before config.json.
// Error(configuration) naming the file where eos_token_id is neither an id nor a list of them.
std::vector<std::int32_t> eos_token_ids(const Checkpoint& checkpoint);

}  // namespace pocket
