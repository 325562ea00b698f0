#include "io/eos.h"

#include <limits>

#include "pocket/error.h"

namespace pocket {

EosIds read_eos_ids(const Checkpoint& checkpoint) {
    const Json& config = checkpoint.raw_config();
    const Json* const text = config.find("text_config");
    const Json* found = checkpoint.generation_config().find("eos_token_id");
    const bool is_generation = found && !found->is_null();
    if (!is_generation) found = config.find("eos_token_id");
    if ((!found || found->is_null()) && text) found = text->find("eos_token_id");
    if (!found || found->is_null()) return {};
    const auto is_id = [](const Json& value) {
        return value.is_integer() && value.integer() >= 0 && value.integer() <= std::numeric_limits<std::int32_t>::max();
    };
    EosIds eos{{}, is_generation ? "generation_config.json" : "config.json"};
    bool is_valid = found->is_array() || is_id(*found);
    if (is_id(*found)) eos.token_ids.push_back(static_cast<std::int32_t>(found->integer()));
    if (found->is_array()) {
        for (const Json& id : found->array()) {
            is_valid = is_valid && is_id(id);
            if (is_valid) eos.token_ids.push_back(static_cast<std::int32_t>(id.integer()));
        }
    }
    if (!is_valid) {
        const std::string file = (std::filesystem::path(checkpoint.path()) / eos.source).string();
        const char* const wanted = ", which should be a token id or a list of them: download it again.";
        throw Error(ErrorKind::configuration, file + " has eos_token_id = " + found->text() + wanted, "model");
    }
    return eos;
}

}  // namespace pocket
