// JSON text, written as it comes.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace pocket::launcher {

std::string json_string(std::string_view text);

// A member without a key is an element of a list. Objects and lists are closed in the order in which they were opened.
class JsonWriter {
public:
    JsonWriter& begin_object(std::string_view key = {}) { return open(key, '{'); }
    JsonWriter& end_object() { return close('}'); }
    JsonWriter& begin_list(std::string_view key = {}) { return open(key, '['); }
    JsonWriter& end_list() { return close(']'); }
    JsonWriter& null(std::string_view key = {}) { return raw(key, "null"); }

    template <typename Value>
    JsonWriter& value(std::string_view key, const Value& value) {
        if constexpr (std::is_same_v<Value, bool>) {
            return raw(key, value ? "true" : "false");
        } else if constexpr (std::is_arithmetic_v<Value>) {
            if constexpr (std::is_floating_point_v<Value>) {
                if (!std::isfinite(value)) return null(key);
            }
            char digits[32];
            const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
            return raw(key, std::string_view(digits, static_cast<std::size_t>(end - digits)));
        } else {
            return raw(key, json_string(value));
        }
    }

    const std::string& text() const noexcept { return text_; }

private:
    void separate(std::string_view key);
    JsonWriter& raw(std::string_view key, std::string_view value);
    JsonWriter& open(std::string_view key, char bracket);
    JsonWriter& close(char bracket);

    std::string text_;
    bool needs_comma_ = false;
};

}  // namespace pocket::launcher
