// A strict reader of JSON (RFC 8259).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace pocket {

// One value. Objects keep the order of their members.
class Json {
public:
    using Member = std::pair<std::string, Json>;

    // `text` holds one value, UTF-8, nested at most 128 deep. Integers are exact: one outside of int64 is refused, and so are a key that is there twice
    // and anything after the value. Error(configuration) with `field`: "<source> is not valid JSON (what, at byte N): <remedy>."
    static Json parse(std::string_view text, const std::string& source, const std::string& remedy = "download it again", const std::string& field = "model");

    Json() = default;  // null

    bool is_null() const noexcept { return std::holds_alternative<std::monostate>(value_); }
    bool is_boolean() const noexcept { return std::holds_alternative<bool>(value_); }
    bool is_integer() const noexcept { return std::holds_alternative<std::int64_t>(value_); }                  // written without fraction and exponent
    bool is_number() const noexcept { return is_integer() || std::holds_alternative<double>(value_); }
    bool is_string() const noexcept { return std::holds_alternative<std::string>(value_); }
    bool is_array() const noexcept { return std::holds_alternative<std::vector<Json>>(value_); }
    bool is_object() const noexcept { return std::holds_alternative<Object>(value_); }

    // The value, which must be of that kind: otherwise Error(configuration) with its text.
    bool boolean() const;
    std::int64_t integer() const;
    double number() const;                                  // an integer's too
    const std::string& string() const;
    const std::vector<Json>& array() const;
    const std::vector<Member>& object() const;

    // Member `key` of an object; null where there is none, and of what is no object.
    const Json* find(std::string_view key) const noexcept;

    // For people, one line: as JSON, long values cut.
    std::string text() const;

private:
    friend class JsonParser;
    struct Object {
        std::vector<Member> members;
        std::vector<std::uint32_t> by_key;                  // places in `members`, in the order of the keys' bytes
    };
    std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<Json>, Object> value_;
};

}  // namespace pocket
