// The flags of one sub-command: parsed, checked, and explained by --help.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_options.h"

namespace pocket::launcher {

struct Flag {
    std::string name;                                       // "--tokens"
    std::string value;                                      // what --help calls its value; empty for a switch
    std::string help;
};

// What was asked for and can't be read: exit code 2.
struct UsageError {
    std::string message;
};

class Arguments {
public:
    // `summary` says what `command` does; `positional` names its positional argument, empty where it takes none.
    Arguments(std::string command, std::string summary, std::string positional, std::vector<Flag> flags);

    // UsageError naming the flag that is unknown, or lacks its value.
    void parse(const std::vector<std::string>& words);

    bool wants_help() const noexcept { return wants_help_; }
    std::string help() const;

    const std::optional<std::string>& positional() const noexcept { return given_positional_; }
    const std::string& required_positional() const;         // UsageError where it is missing
    bool has(const std::string& flag) const { return values_.contains(flag); }
    std::string text(const std::string& flag, const std::string& otherwise) const;
    std::int64_t integer(const std::string& flag, std::int64_t otherwise, std::int64_t least, std::int64_t most) const;
    double number(const std::string& flag, double otherwise) const;
    std::size_t size(const std::string& flag, std::size_t otherwise) const;                       // bytes of 1073741824, 512MiB or 2G
    std::vector<std::int32_t> token_ids(const std::string& flag) const;                           // "1,2,3"
    std::vector<int> integers(const std::string& flag, const std::vector<int>& otherwise, int most) const;  // likewise, each from 1 to `most`

private:
    [[noreturn]] void refuse(const std::string& flag, const std::string& wanted) const;

    std::string command_, summary_, positional_;
    std::vector<Flag> flags_;
    std::map<std::string, std::string> values_;
    std::optional<std::string> given_positional_;
    bool wants_help_ = false;
};

// "1,2 3" as token ids; nothing where a part is none.
std::optional<std::vector<std::int32_t>> parse_token_ids(const std::string& text);

// The flags by which every sub-command makes its engine, under the names that `pocketllm serve` has for them; --num-threads is its backend option.
std::vector<Flag> engine_flags(std::vector<Flag> others);
QwenEngineOptions engine_options(const Arguments& arguments);

}  // namespace pocket::launcher
