// SampleRows: what the rows of a draw ask for, owned; the device's SampleInputs are a view of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pocket/device.h"

namespace pocket {

// One entry a row in each, in the order of the logits; `edits` and `min_ps` are empty where no row has any. See SampleInputs.
struct SampleRows {
    std::vector<float> temperatures, top_ps;
    std::vector<std::int32_t> top_ks, draws, num_logprobs;
    std::vector<std::uint64_t> seeds;
    std::vector<const std::uint32_t*> masks;
    std::vector<std::span<const LogitEdit>> edits;
    std::vector<float> min_ps;

    SampleInputs view() const { return {temperatures, top_ps, top_ks, seeds, draws, num_logprobs, masks, edits, min_ps}; }
};

}  // namespace pocket
