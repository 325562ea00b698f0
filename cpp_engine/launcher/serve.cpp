#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <vector>

#include "arguments.h"
#include "commands.h"

namespace pocket::launcher {

int serve(const Words& words, const std::string& own_path) {
    if (words.empty() || words[0].starts_with("-")) {
        if (!words.empty() && (words[0] == "--help" || words[0] == "-h")) {
            std::cout << "usage: pocketllm_engine --serve MODEL [flags]\n\nRuns `python -m pocketllm serve --backend cpp --model MODEL`, the one HTTP server of both planes, in place of this "
                         "process. The flags are those of `pocketllm serve`, whose --help lists them.\n";
            return 0;
        }
        throw UsageError{"pocketllm_engine --serve needs a MODEL first: a checkpoint's folder or a repository's name."};
    }
    // The python of the environment that this program was installed into, else the first one on the path.
    std::error_code ignored;  // a file that can't be read is none
    const std::filesystem::path beside = std::filesystem::path(std::filesystem::read_symlink("/proc/self/exe", ignored)).parent_path() / "python";
    const std::string python = std::filesystem::exists(beside, ignored) ? beside.string() : "python3";
    std::vector<std::string> command = {python, "-m", "pocketllm", "serve", "--backend", "cpp", "--model"};
    command.insert(command.end(), words.begin(), words.end());
    std::vector<char*> pointers;
    for (std::string& word : command) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    execvp(pointers[0], pointers.data());
    std::cerr << own_path << " can't start " << python << " (" << std::strerror(errno) << "): install pocketllm, and put its python on the PATH." << std::endl;
    return 1;
}

}  // namespace pocket::launcher
