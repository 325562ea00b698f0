// The token ids that end an answer, as a checkpoint says it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace pocket {

struct EosIds {
    std::vector<std::int32_t> token_ids;                    // the main one first; empty where nothing is said
    std::string source = "none";                            // name of the file that says it
};

// generation_config.json, which knows the end of a turn, goes before config.json. Error(configuration) naming the file where eos_token_id is neither an id
// nor a list of them.
EosIds read_eos_ids(const Checkpoint& checkpoint);

}  // namespace pocket
