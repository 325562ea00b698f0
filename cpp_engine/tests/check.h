// The tests' own frame: TEST cases in one executable a file, run all of them or those named on the command line.
//
//   TEST(a_name) { CHECK_EQ(1 + 1, 2); }
//
// A failed CHECK is printed with its place and the case goes on; an exception that leaves a case fails it. The header brings `main`, so one file of an
// executable includes it. Checks may be made on other threads than the case's.
#pragma once

#include <atomic>
#include <cmath>
#include <exception>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace pocket::check {

struct Case {
    const char* name;
    void (*run)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

inline std::atomic<int> failures{0};  // of all cases so far

struct Registration {
    Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

inline void fail(const char* file, int line, const std::string& what) {
    static std::mutex one_line_at_a_time;
    const std::lock_guard lock(one_line_at_a_time);
    ++failures;
    std::cerr << file << ":" << line << ": " << what << std::endl;
}

// What a failed check prints of a value.
template <typename T>
std::string show(const T& value) {
    std::ostringstream out;
    out.precision(9);
    if constexpr (std::is_enum_v<T>) {
        out << static_cast<long long>(value);
    } else if constexpr (requires { out << value; }) {
        out << value;
    } else if constexpr (requires { value.begin(); value.end(); }) {
        out << "[";
        const char* separator = "";
        for (const auto& part : value) {
            out << separator << show(part);
            separator = ", ";
        }
        out << "]";
    } else {
        out << "(a value that has no text)";
    }
    return out.str();
}

template <typename A, typename B>
void equal(const char* file, int line, const char* text, const A& found, const B& wanted) {
    if (!(found == wanted)) fail(file, line, std::string(text) + ": " + show(found) + " is not " + show(wanted));
}

// NaN is near nothing.
inline void near(const char* file, int line, const char* text, double found, double wanted, double tolerance) {
    if (std::abs(found - wanted) <= tolerance) return;
    fail(file, line, std::string(text) + ": " + show(found) + " is not within " + show(tolerance) + " of " + show(wanted));
}

template <typename Function>
void throws(const char* file, int line, const char* text, std::string_view part, Function&& function) {
    try {
        function();
    } catch (const std::exception& error) {
        const std::string message = error.what(), threw = std::string(text) + " threw \"" + message + "\"";
        if (message.find(part) == std::string::npos) fail(file, line, threw + ", which lacks \"" + std::string(part) + "\"");
        if (message.find('\n') != std::string::npos) fail(file, line, threw + ", more than one line");
        return;
    }
    fail(file, line, std::string(text) + " threw nothing; wanted \"" + std::string(part) + "\"");
}

inline int run(int count, char** arguments) {
    int passed = 0, failed = 0;
    for (const Case& test : cases()) {
        bool wanted = count < 2;
        for (int index = 1; index < count; ++index) wanted = wanted || std::string_view(arguments[index]) == test.name;
        if (!wanted) continue;
        const int before = failures;
        try {
            test.run();
        } catch (const std::exception& error) {
            fail(test.name, 0, std::string("left with the exception \"") + error.what() + "\"");
        }
        if (failures == before) {
            ++passed;
        } else {
            ++failed;
            std::cerr << "FAILED " << test.name << std::endl;
        }
    }
    if (passed + failed == 0) {
        std::cerr << "no test has that name" << std::endl;
        return 1;
    }
    std::cout << passed << " passed";
    if (failed) std::cout << ", " << failed << " failed";
    std::cout << std::endl;
    return failed ? 1 : 0;
}

}  // namespace pocket::check

#define TEST(name)                                                               \
    static void name();                                                          \
    static const pocket::check::Registration name##_registration{#name, &name};  \
    static void name()

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) pocket::check::fail(__FILE__, __LINE__, #condition);   \
    } while (false)

#define CHECK_EQ(found, wanted) pocket::check::equal(__FILE__, __LINE__, #found, (found), (wanted))

#define CHECK_NEAR(found, wanted, tolerance) pocket::check::near(__FILE__, __LINE__, #found, (found), (wanted), (tolerance))

// The message of what the expression throws must hold `part`, and be one line.
#define CHECK_THROWS(expression, part) pocket::check::throws(__FILE__, __LINE__, #expression, (part), [&] { static_cast<void>(expression); })

int main(int count, char** arguments) { return pocket::check::run(count, arguments); }
