#include "constraint.h"

#include <algorithm>
#include <string>
#include <utility>

#include "errors.h"

namespace pocket::python {

PythonConstraint::PythonConstraint(py::object object) {
    for (const char* part : {"fill", "accept", "is_complete"}) {
        if (!py::hasattr(object, part)) {
            throw py::type_error("\"constraint\" = " + std::string(py::repr(object)) + " has no " + part + ": send an object with fill(mask), accept(token_id) and is_complete.");
        }
    }
    object_ = keep_object(std::move(object));
}

void PythonConstraint::fill(std::span<std::uint32_t> mask) {
    const py::gil_scoped_acquire gil;
    try {
        if (!mask_) mask_ = keep_object(py::array_t<std::uint32_t>(static_cast<py::ssize_t>(mask.size())));
        auto array = py::reinterpret_borrow<py::array_t<std::uint32_t>>(*mask_);
        // Not the engine's own memory, which Python code could keep a view of.
        std::uint32_t* words = array.mutable_data();
        std::fill(words, words + mask.size(), 0U);
        object_->attr("fill")(array);
        std::copy(words, words + mask.size(), mask.begin());
    } catch (const py::error_already_set& error) {
        throw PythonFault(error);
    }
}

void PythonConstraint::accept(std::int32_t token_id) {
    const py::gil_scoped_acquire gil;
    try {
        object_->attr("accept")(token_id);
    } catch (const py::error_already_set& error) {
        throw PythonFault(error);
    }
}

bool PythonConstraint::is_complete() {
    const py::gil_scoped_acquire gil;
    try {
        py::object answer = object_->attr("is_complete");
        if (PyCallable_Check(answer.ptr()) != 0) answer = answer();
        const int truth = PyObject_IsTrue(answer.ptr());
        if (truth < 0) throw py::error_already_set();
        return truth != 0;
    } catch (const py::error_already_set& error) {
        throw PythonFault(error);
    }
}

}  // namespace pocket::python
