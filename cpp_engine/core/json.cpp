#include "core/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <numeric>

#include "pocket/error.h"

namespace pocket {

namespace {

constexpr int max_depth = 128;
constexpr std::size_t max_text = 120;  // bytes of a value that a message quotes

// Length of the UTF-8 sequence at the start of `text`, or 0 where there is no valid one (RFC 3629).
std::size_t sequence_length(std::string_view text) {
    const auto byte = [&](std::size_t place) { return static_cast<unsigned char>(text[place]); };
    const unsigned char first = byte(0);
    if (first < 0x80) return 1;
    const std::size_t length = first >= 0xc2 && first < 0xe0 ? 2 : (first & 0xf0) == 0xe0 ? 3 : first >= 0xf0 && first < 0xf5 ? 4 : 0;
    if (length == 0 || text.size() < length) return 0;
    for (std::size_t place = 1; place < length; ++place) {
        if ((byte(place) & 0xc0) != 0x80) return 0;
    }
    const unsigned char second = byte(1);
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0)) return 0;  // too long a form, or half of a surrogate pair
    if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90)) return 0;  // too long a form, or past the last character
    return length;
}

void append_utf8(std::string& out, std::uint32_t code) {
    if (code < 0x80) {
        out += static_cast<char>(code);
        return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes after the first
    constexpr std::uint32_t marks[] = {0, 0xc0, 0xe0, 0xf0};
    out += static_cast<char>(marks[more] | (code >> (6 * more)));
    for (int place = more - 1; place >= 0; --place) out += static_cast<char>(0x80u | ((code >> (6 * place)) & 0x3fu));
}

void append_quoted(std::string& out, std::string_view text) {
    out += '"';
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') {
            out += '\\';
            out += letter;
        } else if (static_cast<unsigned char>(letter) < 0x20) {
            char escape[8];
            std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(letter));
            out += escape;
        } else {
            out += letter;
        }
    }
    out += '"';
}

}  // namespace

class JsonParser {
public:
    JsonParser(std::string_view text, const std::string& source, const std::string& remedy, const std::string& field)
        : text_(text), source_(source), remedy_(remedy), field_(field) {}

    Json parse() {
        Json value = parse_value(0);
        skip_space();
        if (place_ < text_.size()) fail("something after the value");
        return value;
    }

private:
    [[noreturn]] void fail(const char* what) const {
        const std::string where = std::to_string(place_);
        throw Error(ErrorKind::configuration, source_ + " is not valid JSON (" + what + ", at byte " + where + "): " + remedy_ + ".", field_);
    }

    char peek() const { return place_ < text_.size() ? text_[place_] : '\0'; }

    void skip_space() {
        while (place_ < text_.size() && (text_[place_] == ' ' || text_[place_] == '\n' || text_[place_] == '\r' || text_[place_] == '\t')) ++place_;
    }

    bool take(char letter) {
        if (peek() != letter || place_ >= text_.size()) return false;
        ++place_;
        return true;
    }

    Json parse_value(int depth) {
        if (depth > max_depth) fail("nested too deep");
        skip_space();
        if (place_ >= text_.size()) fail("it ends too early");
        Json value;
        switch (peek()) {
            case '{': value.value_ = parse_object(depth); break;
            case '[': value.value_ = parse_array(depth); break;
            case '"': value.value_ = parse_string(); break;
            case 't': parse_word("true"); value.value_ = true; break;
            case 'f': parse_word("false"); value.value_ = false; break;
            case 'n': parse_word("null"); break;
            default: parse_number(value);
        }
        return value;
    }

    void parse_word(std::string_view word) {
        if (text_.substr(place_, word.size()) != word) fail("no value");
        place_ += word.size();
    }

    std::vector<Json> parse_array(int depth) {
        std::vector<Json> values;
        ++place_;
        skip_space();
        if (take(']')) return values;
        do {
            values.push_back(parse_value(depth + 1));
            skip_space();
        } while (take(','));
        if (!take(']')) fail("a list without end");
        return values;
    }

    Json::Object parse_object(int depth) {
        Json::Object object;
        ++place_;
        skip_space();
        if (take('}')) return object;
        do {
            skip_space();
            if (peek() != '"') fail("no key");
            std::string key = parse_string();
            skip_space();
            if (!take(':')) fail("a key without a value");
            Json value = parse_value(depth + 1);
            object.members.emplace_back(std::move(key), std::move(value));
            skip_space();
        } while (take(','));
        if (!take('}')) fail("an object without end");
        object.by_key.resize(object.members.size());
        std::iota(object.by_key.begin(), object.by_key.end(), 0u);
        const auto key_at = [&](std::uint32_t place) -> const std::string& { return object.members[place].first; };
        std::sort(object.by_key.begin(), object.by_key.end(), [&](std::uint32_t a, std::uint32_t b) { return key_at(a) < key_at(b); });
        const auto same = [&](std::uint32_t a, std::uint32_t b) { return key_at(a) == key_at(b); };
        const auto twice = std::adjacent_find(object.by_key.begin(), object.by_key.end(), same);
        if (twice != object.by_key.end()) {
            std::string quoted;
            append_quoted(quoted, key_at(*twice));
            fail(("the key " + quoted + " twice in the object that ends here").c_str());
        }
        return object;
    }

    std::uint32_t parse_hex() {
        std::uint32_t code = 0;
        const char* const first = text_.data() + std::min(place_, text_.size());
        const char* const last = text_.data() + std::min(place_ + 4, text_.size());
        const auto [end, error] = std::from_chars(first, last, code, 16);
        if (error != std::errc{} || end != first + 4) fail("an escape without four hexadecimal digits");
        place_ += 4;
        return code;
    }

    void parse_escape(std::string& out) {
        const char letter = peek();
        ++place_;
        switch (letter) {
            case '"':
            case '\\':
            case '/': out += letter; return;
            case 'b': out += '\b'; return;
            case 'f': out += '\f'; return;
            case 'n': out += '\n'; return;
            case 'r': out += '\r'; return;
            case 't': out += '\t'; return;
            case 'u': break;
            default: fail("an unknown escape");
        }
        std::uint32_t code = parse_hex();
        if (code >= 0xd800 && code < 0xe000) {
            if (code >= 0xdc00 || text_.substr(place_, 2) != "\\u") fail("half of a surrogate pair");
            place_ += 2;
            const std::uint32_t low = parse_hex();
            if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        append_utf8(out, code);
    }

    std::string parse_string() {
        std::string out;
        ++place_;
        while (place_ < text_.size()) {
            const char letter = text_[place_];
            if (letter == '"') {
                ++place_;
                return out;
            }
            if (static_cast<unsigned char>(letter) < 0x20) fail("a control character in a string");
            if (letter == '\\') {
                ++place_;
                parse_escape(out);
                continue;
            }
            const std::size_t length = sequence_length(text_.substr(place_));
            if (length == 0) fail("bytes that are not UTF-8");
            out += text_.substr(place_, length);
            place_ += length;
        }
        fail("a string without end");
    }

    bool take_digits() {
        const std::size_t start = place_;
        while (peek() >= '0' && peek() <= '9') ++place_;
        return place_ > start;
    }

    void parse_number(Json& value) {
        const std::size_t start = place_;
        take('-');
        if (!take('0') && !take_digits()) fail("no value");
        bool is_integer = true;
        if (take('.')) {
            is_integer = false;
            if (!take_digits()) fail("a number without digits after its point");
        }
        if (peek() == 'e' || peek() == 'E') {
            is_integer = false;
            ++place_;
            if (!take('-')) take('+');
            if (!take_digits()) fail("a number without digits in its exponent");
        }
        const char *const first = text_.data() + start, *const last = text_.data() + place_;
        if (is_integer) {
            std::int64_t number = 0;
            if (std::from_chars(first, last, number).ec != std::errc{}) fail("an integer of more than 64 bits");
            value.value_ = number;
        } else {
            double number = 0;
            if (std::from_chars(first, last, number).ec != std::errc{}) fail("a number outside of what a double holds");
            value.value_ = number;
        }
    }

    std::string_view text_;
    const std::string &source_, &remedy_, &field_;
    std::size_t place_ = 0;
};

namespace {

void append_text(std::string& out, const Json& value) {
    if (out.size() > max_text) return;  // cut by the caller
    if (value.is_null()) {
        out += "null";
    } else if (value.is_boolean()) {
        out += value.boolean() ? "true" : "false";
    } else if (value.is_integer()) {
        out += std::to_string(value.integer());
    } else if (value.is_number()) {
        char number[32];
        const auto end = std::to_chars(number, number + sizeof number, value.number()).ptr;
        out.append(number, end);
    } else if (value.is_string()) {
        append_quoted(out, value.string());
    } else if (value.is_array()) {
        const char* separator = "[";
        for (const Json& part : value.array()) {
            out += separator;
            append_text(out, part);
            separator = ", ";
            if (out.size() > max_text) return;
        }
        out += value.array().empty() ? "[]" : "]";
    } else {
        const char* separator = "{";
        for (const auto& [key, part] : value.object()) {
            out += separator;
            append_quoted(out, key);
            out += ": ";
            append_text(out, part);
            separator = ", ";
            if (out.size() > max_text) return;
        }
        out += value.object().empty() ? "{}" : "}";
    }
}

template <typename T, typename Variant>
const T& get(const Variant& value, const Json& json, const char* kind) {
    if (const T* found = std::get_if<T>(&value)) return *found;
    throw Error(ErrorKind::configuration, "The JSON value " + json.text() + " should be " + kind + ".");
}

}  // namespace

Json Json::parse(std::string_view text, const std::string& source, const std::string& remedy, const std::string& field) {
    return JsonParser(text, source, remedy, field).parse();
}

bool Json::boolean() const { return get<bool>(value_, *this, "true or false"); }

std::int64_t Json::integer() const { return get<std::int64_t>(value_, *this, "an integer"); }

double Json::number() const {
    if (const std::int64_t* whole = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*whole);
    return get<double>(value_, *this, "a number");
}

const std::string& Json::string() const { return get<std::string>(value_, *this, "a string"); }

const std::vector<Json>& Json::array() const { return get<std::vector<Json>>(value_, *this, "a list"); }

const std::vector<Json::Member>& Json::object() const { return get<Object>(value_, *this, "an object").members; }

const Json* Json::find(std::string_view key) const noexcept {
    const Object* object = std::get_if<Object>(&value_);
    if (!object) return nullptr;
    const auto before = [&](std::uint32_t place, std::string_view wanted) { return object->members[place].first < wanted; };
    const auto found = std::lower_bound(object->by_key.begin(), object->by_key.end(), key, before);
    if (found == object->by_key.end() || object->members[*found].first != key) return nullptr;
    return &object->members[*found].second;
}

std::string Json::text() const {
    std::string out;
    append_text(out, *this);
    if (out.size() <= max_text) return out;
    std::size_t end = max_text;
    while (end > 0 && (static_cast<unsigned char>(out[end]) & 0xc0) == 0x80) --end;  // not within a character
    return out.substr(0, end) + "...";
}

}  // namespace pocket
