#include "request_json.h"

#include <cmath>
#include <limits>
#include <vector>

#include "pocket/error.h"

namespace pocket::launcher {

namespace {

constexpr const char* fields = "id, token_ids, max_new_tokens, temperature, top_p, top_k, seed, stop_token_ids, logprobs, stream";

[[noreturn]] void refuse(const std::string& field, const Json& value, const std::string& wanted) {
    throw Error(ErrorKind::configuration, "\"" + field + "\" = " + value.text() + " is not valid: send " + wanted + ".", field);
}

std::int64_t integer(const std::string& field, const Json& value, std::int64_t least, std::int64_t most) {
    if (!value.is_integer() || value.integer() < least || value.integer() > most) {
        refuse(field, value, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return value.integer();
}

float number(const std::string& field, const Json& value) {
    if (!value.is_number() || !std::isfinite(static_cast<float>(value.number()))) refuse(field, value, "a number");
    return static_cast<float>(value.number());
}

std::vector<std::int32_t> ids(const std::string& field, const Json& value) {
    std::vector<std::int32_t> found;
    if (!value.is_array()) refuse(field, value, "a list of token ids");
    for (const Json& one : value.array()) {
        if (!one.is_integer() || one.integer() < 0 || one.integer() > std::numeric_limits<std::int32_t>::max()) refuse(field, one, "a list of token ids");
        found.push_back(static_cast<std::int32_t>(one.integer()));
    }
    return found;
}

}  // namespace

LineRequest read_request(const Json& line) {
    if (!line.is_object()) throw Error(ErrorKind::configuration, std::string("A line is to hold one JSON object with ") + fields + ".");
    constexpr std::int64_t most = std::numeric_limits<int>::max();
    LineRequest read;
    PersistentRequest& request = read.request;
    for (const auto& [field, value] : line.object()) {
        if (field == "id") {
            if (!value.is_string()) refuse(field, value, "a string");
            request.id = value.string();
        } else if (field == "token_ids") {
            request.token_ids = ids(field, value);
        } else if (field == "max_new_tokens") {
            request.max_new_tokens = static_cast<int>(integer(field, value, 1, most));
        } else if (field == "temperature") {
            request.temperature = number(field, value);
        } else if (field == "top_p") {
            request.top_p = number(field, value);
        } else if (field == "top_k") {
            request.top_k = static_cast<int>(integer(field, value, 0, most));
        } else if (field == "seed") {
            request.seed = static_cast<std::uint64_t>(integer(field, value, 0, std::numeric_limits<std::int64_t>::max()));
        } else if (field == "stop_token_ids") {
            request.stop_token_ids = ids(field, value);
        } else if (field == "logprobs") {
            request.logprobs = static_cast<int>(integer(field, value, 0, 20));
        } else if (field == "stream") {
            if (!value.is_boolean()) refuse(field, value, "true or false");
            read.streams = value.boolean();
        } else {
            throw Error(ErrorKind::configuration, "\"" + field + "\" is no field of a request: there are " + fields + ".", field);
        }
    }
    if (line.find("token_ids") == nullptr) throw Error(ErrorKind::configuration, "\"token_ids\" is missing: send the prompt as a list of token ids.", "token_ids");
    return read;
}

void write_result(JsonWriter& json, const PersistentResult& result) {
    json.begin_object();
    json.value("id", result.id);
    json.begin_list("token_ids");
    for (const std::int32_t token_id : result.token_ids) json.value({}, token_id);
    json.end_list();
    json.value("finish_reason", name(result.finish_reason));
    json.value("prompt_tokens", result.prompt_tokens);
    json.value("completion_tokens", result.completion_tokens);
    json.value("cached_tokens", result.cached_tokens);
    json.value("prefill_seconds", result.prefill_seconds);
    json.value("decode_seconds", result.decode_seconds);
    if (!result.logprobs.empty()) {
        json.begin_list("logprobs");
        for (const TokenLogprobs& one : result.logprobs) {
            json.begin_object().value("logprob", one.logprob).begin_list("top");
            for (const auto& [token_id, logprob] : one.top) json.begin_list().value({}, token_id).value({}, logprob).end_list();
            json.end_list().end_object();
        }
        json.end_list();
    }
    json.end_object();
}

}  // namespace pocket::launcher
