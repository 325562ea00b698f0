// The engine's errors as Python's, and Python's errors on their way through the engine.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "python_object.h"

namespace pocket::python {

// What Python code raised while the engine called it: it ends the row that it belongs to, whose result carries the exception itself.
class PythonFault : public std::exception {
public:
    explicit PythonFault(const py::error_already_set& error);   // with the GIL held
    const char* what() const noexcept override { return text_.c_str(); }
    const py::object& exception() const noexcept { return *exception_; }

private:
    PythonObject exception_;
    std::string text_;
};

void bind_errors(py::module_& module);

// The exception object of `error`, or None where there is none. With the GIL held.
py::object to_python(const std::exception_ptr& error);

// Print `error` with its traceback on stderr, and forget it. With the GIL held.
void report(const py::error_already_set& error, const std::string& where);

}  // namespace pocket::python
