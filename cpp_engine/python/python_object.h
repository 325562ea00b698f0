// A Python object that C++ threads may hold and drop without the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace pocket::python {

namespace py = pybind11;

using PythonObject = std::shared_ptr<const py::object>;

// The last owner takes the GIL to drop the object. Where the interpreter is gone, so is the object.
inline PythonObject keep_object(py::object object) {
    return PythonObject(new py::object(std::move(object)), [](const py::object* kept) {
        if (!Py_IsInitialized()) return;
        const py::gil_scoped_acquire gil;
        delete kept;
    });
}

}  // namespace pocket::python
