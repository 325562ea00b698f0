// Requests and results of the persistent loop as JSON.
#pragma once

#include <string>

#include "core/json.h"
#include "engine/persistent_engine.h"
#include "json_writer.h"

namespace pocket::launcher {

struct LineRequest {
    PersistentRequest request;
    bool streams = false;                                   // a line for each token, before the result
};

// Error(configuration) naming the field that is unknown, missing or of another type.
LineRequest read_request(const Json& line);

// The result as one object.
void write_result(JsonWriter& json, const PersistentResult& result);

}  // namespace pocket::launcher
