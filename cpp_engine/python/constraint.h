// A TokenConstraint whose answers are a Python object's.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <span>

#include "engine/request.h"
#include "python_object.h"

namespace pocket::python {

// The object has fill(mask), which writes a numpy array of uint32 whose bit i % 32 of word i // 32 stands for id i; accept(token_id); and is_complete, a
// property or a method. Made with the GIL held; called on the engine's thread, which takes it.
class PythonConstraint : public TokenConstraint {
public:
    explicit PythonConstraint(py::object object);   // TypeError where a part is missing
    void fill(std::span<std::uint32_t> mask) override;
    void accept(std::int32_t token_id) override;
    bool is_complete() override;
    const py::object& object() const noexcept { return *object_; }

private:
    PythonObject object_;
    PythonObject mask_;                                     // the array, made once
};

}  // namespace pocket::python
