#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "errors.h"

namespace pocket::python {

namespace {

using TokenIds = std::vector<std::int32_t>;

py::array_t<float> as_array(std::vector<float>&& values, py::ssize_t rows) {
    auto* owned = new std::vector<float>(std::move(values));
    const py::capsule owner(owned, [](void* kept) { delete static_cast<std::vector<float>*>(kept); });
    const auto columns = static_cast<py::ssize_t>(owned->size()) / rows;
    return py::array_t<float>({rows, columns}, owned->data(), owner);
}

}  // namespace

LoadProgress load_progress(const py::object& progress) {
    if (progress.is_none()) return {};
    if (PyCallable_Check(progress.ptr()) == 0) throw py::type_error("\"progress\" = " + std::string(py::repr(progress)) + " can't be called: send a function of a fraction and a message, or None.");
    return [callback = keep_object(progress)](double fraction, const std::string& message) {
        const py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        (*callback)(fraction, message);  // what it raises ends the load
    };
}

std::shared_ptr<QwenEngine> load_engine(const std::string& checkpoint, const QwenEngineOptions& options, const LoadProgress& progress) {
    return std::shared_ptr<QwenEngine>(new QwenEngine(checkpoint, options, progress), [](QwenEngine* engine) {
        if (PyGILState_Check() != 0) {
            const py::gil_scoped_release released;
            delete engine;
        } else {
            delete engine;
        }
    });
}

void bind_engine(py::module_& module) {
    py::class_<QwenEngine, std::shared_ptr<QwenEngine>>(module, "QwenEngine",
                                                         "A loaded Qwen3.5 model with one session: tokens in, greedy tokens out.\n\n"
                                                         "Calls that compute give up the GIL; one of them runs at a time. While a QwenBatchScheduler runs on the engine they raise Error.")
        .def(py::init([](const std::string& checkpoint, const QwenEngineOptions& options) {
                 const Lifetime::Call running;
                 return load_engine(checkpoint, options, {});
             }),
             py::arg("checkpoint"), py::arg("options") = QwenEngineOptions(),
             "Load the checkpoint in the folder `checkpoint`, with the GIL held; `load` gives it up.")
        .def_static(
            "load",
            [](const std::string& checkpoint, const QwenEngineOptions& options, const py::object& progress) {
                const LoadProgress callback = load_progress(progress);
                return without_gil([&] { return load_engine(checkpoint, options, callback); });
            },
            py::arg("checkpoint"), py::arg("options") = QwenEngineOptions(), py::arg("progress") = py::none(),
            "Load as the constructor does, with the GIL given up. `progress(fraction, message)` hears of it; what it raises ends the load.")
        .def(
            "prefill", [](QwenEngine& self, const TokenIds& tokens) { return without_gil([&] { return self.prefill(tokens); }); }, py::arg("tokens"),
            "Make the session hold `tokens`, reusing what its cache has of them, and return the greedy id that follows.")
        .def(
            "decode_step", [](QwenEngine& self, std::int32_t token) { return without_gil([&] { return self.decode_step(token); }); }, py::arg("token"),
            "Append `token` to the session and return the greedy id that follows.")
        .def(
            "generate",
            [](QwenEngine& self, const TokenIds& tokens, int max_new_tokens) {
                return without_gil([&] {
                    SignalCheck check;
                    return self.generate(tokens, max_new_tokens, [&](std::int32_t) { check(); });
                });
            },
            py::arg("tokens"), py::arg("max_new_tokens"),
            "`max_new_tokens` greedy ids after `tokens`. No id ends it: the session holds all but the last of them.")
        .def(
            "verify", [](QwenEngine& self, const TokenIds& tokens) { return without_gil([&] { return self.verify(tokens); }); }, py::arg("tokens"),
            "Append `tokens`, the first as given and the others as guesses, and return the greedy id after each.\n\n"
            "The session then holds the first and the guesses before the first wrong one: where one was wrong, the recurrent state of before is restored\n"
            "and the right ones are computed again, in one more step. `num_tokens` says how many it holds.")
        .def(
            "logits",
            [](QwenEngine& self, const TokenIds& tokens) {
                std::vector<float> values = without_gil([&] { return self.logits(tokens); });
                return as_array(std::move(values), static_cast<py::ssize_t>(tokens.size()));
            },
            py::arg("tokens"), "Make the session hold `tokens`, computed from scratch, and return the logits after each: float32 [len(tokens), vocab_size].")
        .def("warmup", [](QwenEngine& self) { without_gil([&] { self.warmup(); }); }, "Run a step of each kind, so that the first request does not wait for memory. Empties the session.")
        .def("follow", [](QwenEngine& self) { without_gil([&] { self.follow(); }); },
             "On another rank than 0: compute what rank 0 orders, until it dismisses this one. Error where a rank is lost.")
        .def("dismiss", [](QwenEngine& self) {
                 const py::gil_scoped_release released;  // while Python shuts down too, as a scheduler's stop
                 self.dismiss();
             },
             "On rank 0: tell the other ranks that it stops. Stop its scheduler before.")
        .def("abandon", [](QwenEngine& self, const std::string& reason) { self.abandon(reason); }, py::arg("reason"),
             "From any thread: another rank is lost. A step under way fails with `reason`, and so does every later one.")
        .def("reset", [](QwenEngine& self) { without_gil([&] { self.reset(); }); }, "Empty the session and its prefix cache.")
        .def_property_readonly("num_tokens", [](QwenEngine& self) { return without_gil([&] { return self.num_tokens(); }); }, "tokens that the session holds")
        .def_property_readonly("cached_tokens", [](QwenEngine& self) { return without_gil([&] { return self.cached_tokens(); }); },
                               "tokens that the last prefill found in the cache")
        .def_property_readonly("eos_id", &QwenEngine::eos_id, "the checkpoint's main EOS id, or None")
        .def_property_readonly("config", [](const QwenEngine& self) { return self.config(); }, "facts of what was loaded")
        .def_property_readonly("options", [](const QwenEngine& self) { return self.options(); }, "what it was made with")
        .def("capabilities", [](const QwenEngine& self) { return self.capabilities(); }, "what it does: the same as QwenBatchScheduler.engine_caps()");
}

}  // namespace pocket::python
