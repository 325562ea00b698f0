// The parts of the module, each bound by the file of its noun.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <utility>

#include "engine/engine_options.h"
#include "engine/qwen_batch_scheduler.h"
#include "engine/qwen_engine.h"
#include "models/model.h"
#include "lifetime.h"
#include "python_object.h"

namespace pocket::python {

void bind_options(py::module_& module);     // QwenEngineOptions, EngineCaps, QwenConfig
void bind_engine(py::module_& module);      // QwenEngine
void bind_persistent(py::module_& module);  // PersistentEngine and its values
void bind_sampling(py::module_& module);    // QwenBatchSamplingParams, results and steps
void bind_scheduler(py::module_& module);   // QwenBatchScheduler

// Run `call` without the GIL, as one that the interpreter's end waits for.
template <typename Function>
auto without_gil(Function&& call) {
    const Lifetime::Call running;
    const py::gil_scoped_release released;
    return call();
}

// Every tenth of a second, ask Python for signals such as Ctrl-C, and whether it ends; called without the GIL. Throws what a handler raises.
class SignalCheck {
public:
    void operator()() {
        const auto now = std::chrono::steady_clock::now();
        if (now < due_) return;
        due_ = now + std::chrono::milliseconds(100);
        Lifetime::get().check();
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }

private:
    std::chrono::steady_clock::time_point due_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
};

// `progress` as the engine calls it, or nothing for None. TypeError where it can't be called.
LoadProgress load_progress(const py::object& progress);

// Load an engine that the GIL's holder owns; freeing it gives the GIL up, since unmapping gigabytes takes time.
std::shared_ptr<QwenEngine> load_engine(const std::string& checkpoint, const QwenEngineOptions& options, const LoadProgress& progress);

}  // namespace pocket::python
