// The launcher's sub-commands. Each takes the words behind its name, writes to stdout and stderr, and returns the exit code.
#pragma once

#include <string>
#include <vector>

namespace pocket::launcher {

using Words = std::vector<std::string>;

int audit(const Words& words);
int generate(const Words& words);
int persistent(const Words& words);
int bench(const Words& words);
int serve(const Words& words, const std::string& own_path);

}  // namespace pocket::launcher
