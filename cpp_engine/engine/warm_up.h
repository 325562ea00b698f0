// What a device that warms up is to meet before the first request.
#pragma once

#include "engine/cache_plan.h"
#include "models/model.h"
#include "pocket/communicator.h"
#include "pocket/device.h"

namespace pocket {

// Computes prompts as long as a step may be and shorter ones, on caches of their own, which are freed again. So the device chooses its algorithms now, and what
// a step takes beside the caches is in use when their share of the memory is measured. Error(device) with the figures where there is no room for it.
// `ranks`: those that share the model, or null; all of them make the call.
void try_prompts(Device& device, Model& model, const CacheOptions& options, Communicator* ranks = nullptr);

}  // namespace pocket
