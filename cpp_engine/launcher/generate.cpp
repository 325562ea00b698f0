#include <iostream>
#include <iterator>
#include <limits>
#include <string>

#include "arguments.h"
#include "commands.h"
#include "engine/persistent_engine.h"
#include "json_writer.h"
#include "request_json.h"

namespace pocket::launcher {

int generate(const Words& words) {
    Arguments arguments("generate", "Answer one prompt of token ids, and print the ids of the answer on one line.", "CHECKPOINT",
                        engine_flags({
                            {"--tokens", "IDS", "the prompt, such as 1,2,3; - reads ids from stdin"},
                            {"--max-new-tokens", "N", "most tokens of the answer [128]"},
                            {"--temperature", "T", "0 takes the likeliest token each time [0]"},
                            {"--top-p", "P", "draw from the likeliest tokens of that much probability; 1 is off [1]"},
                            {"--top-k", "K", "draw from the K likeliest tokens; 0 is off [0]"},
                            {"--seed", "N", "of the random stream [0]"},
                            {"--stop-token-ids", "IDS", "ids that end the answer [the checkpoint's EOS ids]"},
                            {"--ignore-eos", "", "no id ends the answer"},
                            {"--json", "", "print one JSON object: ids, finish reason, counts and times"},
                        }));
    arguments.parse(words);
    if (arguments.wants_help()) {
        std::cout << arguments.help();
        return 0;
    }
    constexpr std::int64_t most = std::numeric_limits<int>::max();
    PersistentRequest request;
    if (arguments.text("--tokens", "") == "-") {
        const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
        const auto ids = parse_token_ids(text);
        if (!ids) throw UsageError{"stdin holds what is no token id: send ids such as 1,2,3."};
        request.token_ids = *ids;
    } else {
        request.token_ids = arguments.token_ids("--tokens");
    }
    if (request.token_ids.empty()) throw UsageError{"pocketllm_engine generate needs --tokens with at least one id."};
    request.max_new_tokens = static_cast<int>(arguments.integer("--max-new-tokens", request.max_new_tokens, 1, most));
    request.temperature = static_cast<float>(arguments.number("--temperature", 0));
    request.top_p = static_cast<float>(arguments.number("--top-p", 1));
    request.top_k = static_cast<int>(arguments.integer("--top-k", 0, 0, most));
    request.seed = static_cast<std::uint64_t>(arguments.integer("--seed", 0, 0, std::numeric_limits<std::int64_t>::max()));
    if (arguments.has("--ignore-eos")) {
        if (arguments.has("--stop-token-ids")) throw UsageError{"--ignore-eos and --stop-token-ids contradict each other: send one of them."};
        request.stop_token_ids.emplace();
    } else if (arguments.has("--stop-token-ids")) {
        request.stop_token_ids = arguments.token_ids("--stop-token-ids");
    }
    PersistentOptions options;
    static_cast<QwenEngineOptions&>(options) = engine_options(arguments);
    options.warmup = false;
    PersistentEngine engine(arguments.required_positional(), options);
    const PersistentResult result = engine.run(request);
    if (arguments.has("--json")) {
        JsonWriter json;
        write_result(json, result);
        std::cout << json.text() << std::endl;
        return 0;
    }
    const char* separator = "";
    for (const std::int32_t token_id : result.token_ids) {
        std::cout << separator << token_id;
        separator = " ";
    }
    std::cout << std::endl;
    return 0;
}

}  // namespace pocket::launcher
