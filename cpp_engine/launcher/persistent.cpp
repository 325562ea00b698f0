#include <iostream>
#include <string>

#include "arguments.h"
#include "commands.h"
#include "engine/persistent_engine.h"
#include "json_writer.h"
#include "pocket/error.h"
#include "request_json.h"

namespace pocket::launcher {

namespace {

void print_error(const std::string& id, const std::string& message, const std::string& field) {
    JsonWriter json;
    json.begin_object().value("id", id).begin_object("error").value("message", message);
    if (field.empty()) json.null("field");
    else json.value("field", field);
    json.end_object().end_object();
    std::cout << json.text() << std::endl;
}

// Answer one line. What is wrong with it is said on stdout, and the loop goes on.
void answer(PersistentEngine& engine, const std::string& line) {
    std::string id;
    try {
        const Json parsed = Json::parse(line, "The line", "send one JSON object", {});
        if (const Json* found = parsed.find("id"); found != nullptr && found->is_string()) id = found->string();
        const LineRequest read = read_request(parsed);
        const PersistentResult result = engine.run(read.request, [&](std::int32_t token_id) {
            if (!read.streams) return;
            JsonWriter json;
            json.begin_object().value("id", id).value("token_id", token_id).end_object();
            std::cout << json.text() << std::endl;
        });
        JsonWriter json;
        write_result(json, result);
        std::cout << json.text() << std::endl;
    } catch (const Error& error) {
        print_error(id, error.what(), error.field());
    }
}

}  // namespace

int persistent(const Words& words) {
    Arguments arguments("persistent",
                        "Load a checkpoint and answer prompts from stdin until it ends, one after another. Each line is one JSON object:\n"
                        "  {\"id\": \"a\", \"token_ids\": [1, 2, 3], \"max_new_tokens\": 16, \"stream\": true}\n"
                        "with temperature, top_p, top_k, seed, stop_token_ids and logprobs where they are wanted. So is each line of stdout: first\n"
                        "  {\"ready\": true, ...}, with \"stream\" {\"id\", \"token_id\"} for each token, then the result, or {\"id\", \"error\"}.\n"
                        "What a prompt has in common with the prompt and answer before it is not computed again.",
                        "CHECKPOINT", engine_flags({}));
    arguments.parse(words);
    if (arguments.wants_help()) {
        std::cout << arguments.help();
        return 0;
    }
    PersistentOptions options;
    static_cast<QwenEngineOptions&>(options) = engine_options(arguments);
    PersistentEngine engine(arguments.required_positional(), options);
    const QwenConfig& config = engine.config();
    JsonWriter json;
    json.begin_object().value("ready", true).value("architecture", config.architecture).value("device", config.device).value("dtype", config.dtype);
    json.value("vocab_size", config.vocab_size).value("max_model_len", config.max_model_len).begin_list("eos_token_ids");
    for (const std::int32_t token_id : config.eos_token_ids) json.value({}, token_id);
    json.end_list().end_object();
    std::cout << json.text() << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
        if (line.find_first_not_of(" \t\r") != std::string::npos) answer(engine, line);
    }
    return 0;
}

}  // namespace pocket::launcher
