// pocketllm_engine: the native engine from a shell. Token ids in, token ids out.
#include <exception>
#include <iostream>
#include <string>

#include "arguments.h"
#include "commands.h"
#include "pocket/error.h"

namespace {

constexpr const char* help =
    "usage: pocketllm_engine COMMAND [flags]\n"
    "       pocketllm_engine --serve MODEL [flags of pocketllm serve]\n"
    "\n"
    "PocketLLM's native engine: token ids in, token ids out. For text and HTTP there is `pocketllm`.\n"
    "\n"
    "commands:\n"
    "  audit CHECKPOINT        whether the engine runs a checkpoint, and what it takes: one line a fact, one a problem\n"
    "  generate CHECKPOINT     answer one prompt of token ids\n"
    "  persistent CHECKPOINT   answer prompts from stdin until it ends, one JSON object a line\n"
    "  bench [CHECKPOINT]      measure prefill and decode, beside what the memory could deliver\n"
    "  serve MODEL             the OpenAI-compatible server of `pocketllm serve` on this engine; --serve is the same\n"
    "\n"
    "pocketllm_engine COMMAND --help says more. Exit codes: 0 done, 1 a problem, 2 a flag that is wrong.\n"
    "\n"
    "examples:\n"
    "  pocketllm_engine audit path/to/Qwen3.5-0.8B\n"
    "  pocketllm_engine generate path/to/Qwen3.5-0.8B --tokens 9707,11 --max-new-tokens 32\n"
    "  echo '{\"id\": \"a\", \"token_ids\": [9707, 11]}' | pocketllm_engine persistent path/to/Qwen3.5-0.8B\n"
    "  pocketllm_engine bench --shape qwen3.5-0.8b --batch-sizes 1,8\n";

int run(const std::string& command, const pocket::launcher::Words& words, const std::string& own_path) {
    using namespace pocket::launcher;
    if (command == "--help" || command == "-h" || command == "help") {
        std::cout << help;
        return 0;
    }
    if (command == "audit") return audit(words);
    if (command == "generate") return generate(words);
    if (command == "persistent") return persistent(words);
    if (command == "bench") return bench(words);
    if (command == "serve" || command == "--serve") return serve(words, own_path);
    throw UsageError{"pocketllm_engine has no command \"" + command + "\": it has audit, generate, persistent, bench and serve. See --help."};
}

}  // namespace

int main(int count, char** values) {
    try {
        if (count < 2) {
            std::cerr << help;
            return 2;
        }
        return run(values[1], pocket::launcher::Words(values + 2, values + count), values[0]);
    } catch (const pocket::launcher::UsageError& error) {
        std::cerr << error.message << std::endl;
        return 2;
    } catch (const pocket::Error& error) {
        std::cerr << error.what() << std::endl;
    } catch (const std::exception& error) {
        std::cerr << "pocketllm_engine failed: " << error.what() << std::endl;
    }
    return 1;
}
