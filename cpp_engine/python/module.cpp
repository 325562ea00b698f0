// pocketllm_cpp: the native engine for Python. Token ids in, token ids out; no device handle and no tensor leaves it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "errors.h"
#include "pocket/device.h"

PYBIND11_MODULE(pocketllm_cpp, module) {
    using namespace pocket::python;
    module.doc() = "PocketLLM's native engine: QwenEngine, PersistentEngine, and QwenBatchScheduler for concurrent requests.";
    module.attr("__version__") = POCKET_VERSION;
    module.attr("backend") = POCKET_BACKEND;
    module.def("linked_devices", &pocket::linked_devices, "Devices that this build has and that are there, best first: \"cuda\" where there is a GPU, then \"cpu\".");
    bind_errors(module);
    bind_options(module);
    bind_engine(module);
    bind_sampling(module);
    bind_persistent(module);
    bind_scheduler(module);
    // Before the interpreter takes its threads down: one that wants the GIL after that hangs, or ends the process.
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
        const py::gil_scoped_release released;
        Lifetime::get().end();
    }));
}
