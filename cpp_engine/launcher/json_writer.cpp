#include "json_writer.h"

#include <cstdio>

namespace pocket::launcher {

std::string json_string(std::string_view text) {
    std::string quoted = "\"";
    for (const char letter : text) {
        const auto byte = static_cast<unsigned char>(letter);
        if (letter == '"' || letter == '\\') {
            quoted += '\\';
            quoted += letter;
        } else if (byte < 0x20 || byte == 0x7f) {
            char escape[8];
            std::snprintf(escape, sizeof escape, "\\u%04x", byte);
            quoted += escape;
        } else {
            quoted += letter;
        }
    }
    return quoted + "\"";
}

void JsonWriter::separate(std::string_view key) {
    if (needs_comma_) text_ += ", ";
    if (!key.empty()) text_ += json_string(key) + ": ";
    needs_comma_ = true;
}

JsonWriter& JsonWriter::raw(std::string_view key, std::string_view value) {
    separate(key);
    text_ += value;
    return *this;
}

JsonWriter& JsonWriter::open(std::string_view key, char bracket) {
    separate(key);
    text_ += bracket;
    needs_comma_ = false;
    return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
    text_ += bracket;
    needs_comma_ = true;
    return *this;
}

}  // namespace pocket::launcher
