#include "arguments.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

namespace pocket::launcher {

namespace {

template <typename Number>
std::optional<Number> parse_number(const std::string& text) {
    Number value{};
    const char* end = text.data() + text.size();
    const auto [stopped, fault] = std::from_chars(text.data(), end, value);
    if (fault != std::errc() || stopped != end) return std::nullopt;
    return value;
}

// "  --flag VALUE   help", the help broken into lines under itself.
std::string help_line(const std::string& left, const std::string& help) {
    constexpr std::size_t column = 34, width = 110;
    std::string line = "  " + left;
    line.resize(std::max(line.size() + 2, column), ' ');
    std::size_t used = line.size(), place = 0;
    while (place < help.size()) {
        const std::size_t end = std::min(help.find(' ', place), help.size());
        const std::string word = help.substr(place, end - place);
        if (used + word.size() > width) {
            line += "\n" + std::string(column, ' ');
            used = column;
        }
        line += word + " ";
        used += word.size() + 1;
        place = end + 1;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    return line + "\n";
}

}  // namespace

Arguments::Arguments(std::string command, std::string summary, std::string positional, std::vector<Flag> flags)
    : command_(std::move(command)), summary_(std::move(summary)), positional_(std::move(positional)), flags_(std::move(flags)) {}

void Arguments::parse(const std::vector<std::string>& words) {
    for (std::size_t place = 0; place < words.size(); ++place) {
        std::string word = words[place];
        if (word == "--help" || word == "-h") {
            wants_help_ = true;
            return;
        }
        if (!word.starts_with("--")) {
            if (positional_.empty() || given_positional_) throw UsageError{"pocketllm_engine " + command_ + " takes no argument \"" + word + "\": see --help."};
            given_positional_ = word;
            continue;
        }
        std::optional<std::string> value;
        if (const std::size_t equals = word.find('='); equals != std::string::npos) {
            value = word.substr(equals + 1);
            word.resize(equals);
        }
        const auto flag = std::find_if(flags_.begin(), flags_.end(), [&](const Flag& one) { return one.name == word; });
        if (flag == flags_.end()) {
            std::string known;
            for (const Flag& one : flags_) known += (known.empty() ? "" : ", ") + one.name;
            throw UsageError{"pocketllm_engine " + command_ + " has no flag " + word + ": it has " + known + "."};
        }
        if (flag->value.empty() && value) throw UsageError{word + " is a switch and takes no value."};
        if (!flag->value.empty() && !value) {
            if (++place == words.size()) throw UsageError{word + " lacks its value, " + flag->value + "."};
            value = words[place];
        }
        values_[word] = value.value_or("");
    }
}

std::string Arguments::help() const {
    std::string text = "usage: pocketllm_engine " + command_ + (positional_.empty() ? "" : " " + positional_) + " [flags]\n\n" + summary_ + "\n\nflags:\n";
    for (const Flag& flag : flags_) text += help_line(flag.name + (flag.value.empty() ? "" : " " + flag.value), flag.help);
    return text + help_line("--help", "this text");
}

const std::string& Arguments::required_positional() const {
    if (!given_positional_) throw UsageError{"pocketllm_engine " + command_ + " needs " + positional_ + ": see --help."};
    return *given_positional_;
}

void Arguments::refuse(const std::string& flag, const std::string& wanted) const { throw UsageError{flag + " = " + values_.at(flag) + " is not valid: send " + wanted + "."}; }

std::string Arguments::text(const std::string& flag, const std::string& otherwise) const { return has(flag) ? values_.at(flag) : otherwise; }

std::int64_t Arguments::integer(const std::string& flag, std::int64_t otherwise, std::int64_t least, std::int64_t most) const {
    if (!has(flag)) return otherwise;
    const auto value = parse_number<std::int64_t>(values_.at(flag));
    if (!value || *value < least || *value > most) {
        const bool is_bounded = most != std::numeric_limits<std::int64_t>::max() && most != std::numeric_limits<int>::max();
        refuse(flag, "a whole number " + (is_bounded ? "from " + std::to_string(least) + " to " + std::to_string(most) : "of at least " + std::to_string(least)));
    }
    return *value;
}

double Arguments::number(const std::string& flag, double otherwise) const {
    if (!has(flag)) return otherwise;
    const auto value = parse_number<double>(values_.at(flag));
    if (!value || !std::isfinite(*value)) refuse(flag, "a number");
    return *value;
}

std::size_t Arguments::size(const std::string& flag, std::size_t otherwise) const {
    if (!has(flag)) return otherwise;
    std::string text = values_.at(flag);
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
    if (text.ends_with("b")) text.pop_back();
    if (text.ends_with("i")) text.pop_back();
    int shift = 0;
    if (!text.empty()) {
        if (const std::size_t unit = std::string("kmgt").find(text.back()); unit != std::string::npos) {
            shift = 10 * (static_cast<int>(unit) + 1);
            text.pop_back();
        }
    }
    const auto value = parse_number<double>(text);
    const double bytes = value.value_or(0) * std::ldexp(1.0, shift);
    if (!(bytes >= 1 && bytes < 0x1p62)) refuse(flag, "bytes, or a number with a unit such as 512MiB or 2GiB");
    return static_cast<std::size_t>(bytes);
}

std::optional<std::vector<std::int32_t>> parse_token_ids(const std::string& text) {
    std::vector<std::int32_t> ids;
    std::string part;
    for (const char letter : text + ",") {
        if (letter != ',' && std::isspace(static_cast<unsigned char>(letter)) == 0) {
            part += letter;
        } else if (!part.empty()) {
            const auto id = parse_number<std::int32_t>(part);
            if (!id || *id < 0) return std::nullopt;
            ids.push_back(*id);
            part.clear();
        }
    }
    return ids;
}

std::vector<std::int32_t> Arguments::token_ids(const std::string& flag) const {
    if (!has(flag)) return {};
    const auto ids = parse_token_ids(values_.at(flag));
    if (!ids || ids->empty()) refuse(flag, "token ids such as 1,2,3");
    return *ids;
}

std::vector<int> Arguments::integers(const std::string& flag, const std::vector<int>& otherwise, int most) const {
    if (!has(flag)) return otherwise;
    const auto values = parse_token_ids(values_.at(flag));
    if (!values || values->empty() || std::ranges::any_of(*values, [most](int value) { return value < 1 || value > most; })) {
        refuse(flag, "whole numbers from 1 to " + std::to_string(most) + ", such as 1,8,32");
    }
    return {values->begin(), values->end()};
}

std::vector<Flag> engine_flags(std::vector<Flag> others) {
    const std::vector<Flag> common = {
        {"--device", "NAME", "cpu, cuda or cuda:N where it is built in, or auto for the best that is there [auto]"},
        {"--dtype", "TYPE", "of the weights: float32, bfloat16, float16, or auto for as they are stored [auto]"},
        {"--kv-cache-dtype", "TYPE", "of cached keys and values: float32, bfloat16, float16, or auto [auto]"},
        {"--max-model-len", "N", "most tokens of prompt and answer together [what the model was made for, or what fits]"},
        {"--max-batch-size", "N", "most running requests [8, or fewer where memory is short]"},
        {"--kv-cache-memory", "SIZE", "of cached keys, values and states, such as 2GiB [room for all, at most a quarter of free memory]"},
        {"--prefill-chunk-tokens", "N", "most prompt tokens a step; 0 computes each prompt in one step [512]"},
        {"--no-enable-prefix-caching", "", "compute every prompt from its start"},
        {"--num-threads", "N", "threads that a step uses [every core that the process may use]"},
    };
    others.insert(others.end(), common.begin(), common.end());
    return others;
}

QwenEngineOptions engine_options(const Arguments& arguments) {
    constexpr std::int64_t most = std::numeric_limits<int>::max();
    QwenEngineOptions options;
    options.device = arguments.text("--device", options.device);
    options.dtype = arguments.text("--dtype", options.dtype);
    options.kv_cache_dtype = arguments.text("--kv-cache-dtype", options.kv_cache_dtype);
    options.max_model_len = static_cast<int>(arguments.integer("--max-model-len", 0, 2, most));
    options.max_batch_size = static_cast<int>(arguments.integer("--max-batch-size", 0, 1, most));
    options.kv_cache_memory = arguments.size("--kv-cache-memory", 0);
    options.prefill_chunk_tokens = static_cast<int>(arguments.integer("--prefill-chunk-tokens", options.prefill_chunk_tokens, 0, most));
    options.enable_prefix_caching = !arguments.has("--no-enable-prefix-caching");
    options.num_threads = static_cast<int>(arguments.integer("--num-threads", 0, 1, 1024));
    return options;
}

}  // namespace pocket::launcher
