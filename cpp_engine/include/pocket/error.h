// The one exception of the engine.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace pocket {

enum class ErrorKind {
    configuration,  // a file, an option or a request that is wrong
    unsupported,    // right, but not what this engine or this device runs
    unavailable,    // the engine is not loaded, dead or closed
    device,         // memory or a call of the device
};

// One line for people: it names the file, the tensor, the option or the field, and the remedy.
class Error : public std::runtime_error {
public:
    // `field` is the option or the request field at fault, empty where there is none.
    Error(ErrorKind kind, const std::string& message, std::string field = {}) : std::runtime_error(message), kind_(kind), field_(std::move(field)) {}

    ErrorKind kind() const noexcept { return kind_; }
    const std::string& field() const noexcept { return field_; }

private:
    ErrorKind kind_;
    std::string field_;
};

}  // namespace pocket
