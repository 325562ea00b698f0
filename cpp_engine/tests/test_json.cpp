// core/json: what is read, and what is refused where.
#include "core/json.h"

#include <cstdint>
#include <string>

#include "check.h"
#include "pocket/error.h"

using pocket::Json;

namespace {

Json read(std::string_view text) { return Json::parse(text, "a.json"); }

}  // namespace

TEST(values_of_every_kind) {
    const Json value = read(R"( {"n": null, "t": true, "f": false, "i": -12, "d": 2.5e-1, "s": "a\"\\\/\b\f\n\r\té€😀", "l": [1, [], {}]} )");
    CHECK(value.find("n")->is_null());
    CHECK(value.find("t")->boolean());
    CHECK(!value.find("f")->boolean());
    CHECK_EQ(value.find("i")->integer(), -12);
    CHECK_EQ(value.find("i")->number(), -12.0);
    CHECK_EQ(value.find("d")->number(), 0.25);
    CHECK(!value.find("d")->is_integer());
    CHECK_EQ(value.find("s")->string(), std::string("a\"\\/\b\f\n\r\t\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
    CHECK_EQ(value.find("l")->array().size(), 3u);
    CHECK(value.find("absent") == nullptr);
    CHECK(value.find("l")->find("n") == nullptr);
}

TEST(members_keep_their_order) {
    const Json value = read(R"({"b": 1, "a": 2, "": 3, "aa": 4})");
    std::string keys;
    for (const auto& [key, member] : value.object()) keys += key + std::to_string(member.integer()) + " ";
    CHECK_EQ(keys, std::string("b1 a2 3 aa4 "));
    CHECK_EQ(value.find("")->integer(), 3);
    CHECK_EQ(value.find("aa")->integer(), 4);
}

TEST(integers_are_exact) {
    CHECK_EQ(read("9223372036854775807").integer(), INT64_MAX);
    CHECK_EQ(read("-9223372036854775808").integer(), INT64_MIN);
    CHECK_EQ(read("0").integer(), 0);
    CHECK_EQ(read("9007199254740993").integer(), 9007199254740993);
    CHECK_THROWS(read("9223372036854775808"), "a.json is not valid JSON (an integer of more than 64 bits, at byte 19): download it again.");
}

TEST(what_is_no_json_is_refused_at_its_byte) {
    const std::pair<std::string, const char*> cases[] = {
        {"", "it ends too early, at byte 0"},
        {"  ", "it ends too early, at byte 2"},
        {"[1, 2", "a list without end, at byte 5"},
        {"[1,]", "no value, at byte 3"},
        {"{\"a\": 1", "an object without end, at byte 7"},
        {"{\"a\"}", "a key without a value, at byte 4"},
        {"{a: 1}", "no key, at byte 1"},
        {"{\"a\": 1,}", "no key, at byte 8"},
        {"1 2", "something after the value, at byte 2"},
        {"tru", "no value, at byte 0"},
        {"NaN", "no value, at byte 0"},
        {"Infinity", "no value, at byte 0"},
        {"01", "something after the value, at byte 1"},
        {"-", "no value, at byte 1"},
        {"+1", "no value, at byte 0"},
        {".5", "no value, at byte 0"},
        {"1.", "a number without digits after its point, at byte 2"},
        {"1e", "a number without digits in its exponent, at byte 2"},
        {"1e999", "a number outside of what a double holds, at byte 5"},
        {"\"abc", "a string without end, at byte 4"},
        {"\"a\nb\"", "a control character in a string, at byte 2"},
        {"\"\\x\"", "an unknown escape"},
        {"\"\\u12g4\"", "an escape without four hexadecimal digits"},
        {"\"\\u12", "an escape without four hexadecimal digits"},
        {"\"\\ud800\"", "half of a surrogate pair"},
        {"\"\\udc00\"", "half of a surrogate pair"},
        {"\"\\ud800\\u0041\"", "half of a surrogate pair"},
        {"\"\xff\"", "bytes that are not UTF-8, at byte 1"},
        {"\"\xc0\x80\"", "bytes that are not UTF-8"},
        {"\"\xe2\x82\"", "bytes that are not UTF-8"},
        {"\"\xed\xa0\x80\"", "bytes that are not UTF-8"},
        {"\"\xf4\x90\x80\x80\"", "bytes that are not UTF-8"},
        {std::string("\0", 1), "no value, at byte 0"},
        {std::string("[1\0]", 4), "a list without end, at byte 2"},
        {"{\"a\": 1, \"b\": 2, \"a\": 3}", "the key \"a\" twice in the object that ends here, at byte 24"},
    };
    for (const auto& [text, words] : cases) CHECK_THROWS(read(text), words);
    for (const auto& [text, words] : cases) CHECK_THROWS(read(text), "a.json is not valid JSON");
}

TEST(depth_is_bounded) {
    CHECK(read(std::string(128, '[') + std::string(128, ']')).is_array());
    CHECK_THROWS(read(std::string(100000, '[')), "nested too deep, at byte 129");
}

TEST(a_value_of_another_kind) {
    const Json value = read(R"({"a": ["x", 1.5, null, true]})");
    CHECK_THROWS(value.integer(), "The JSON value {\"a\": [\"x\", 1.5, null, true]} should be an integer.");
    CHECK_THROWS(value.find("a")->object(), "should be an object");
    CHECK_THROWS(read("1.5").integer(), "should be an integer");
    CHECK_THROWS(read("1").string(), "should be a string");
}

TEST(long_values_are_cut_in_messages) {
    std::string numbers = "[0";
    for (int index = 0; index < 10000; ++index) numbers += ",1";
    const std::string text = read(numbers + "]").text();
    CHECK(text.size() < 200);
    CHECK(text.ends_with("..."));
    std::string accents = "\"x";
    for (int index = 0; index < 100; ++index) accents += "\xc3\xa9";
    accents = read(accents + "\"").text();
    CHECK_EQ(accents.substr(accents.size() - 5), std::string("\xc3\xa9..."));  // between two characters
}
