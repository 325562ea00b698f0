#include "engine/persistent_engine.h"

#include "bindings.h"
#include "errors.h"
#include "value_type.h"

namespace pocket::python {

void bind_persistent(py::module_& module) {
    ValueType<PersistentOptions, QwenEngineOptions>(module, "PersistentOptions", "QwenEngineOptions, and what a persistent engine adds.", true)
        .field("warmup", &PersistentOptions::warmup, "run a step of each kind before the first request");

    using Request = PersistentRequest;
    ValueType<Request>(module, "PersistentRequest", "One prompt, and how to answer it.", true)
        .field("id", &Request::id, "handed back with the result")
        .field("token_ids", &Request::token_ids, "of the prompt")
        .field("max_new_tokens", &Request::max_new_tokens, "at least 1")
        .field("temperature", &Request::temperature, "0 is greedy")
        .field("top_p", &Request::top_p, "in (0, 1]; 1 is off")
        .field("top_k", &Request::top_k, "0 is off")
        .field("seed", &Request::seed, "of the random stream")
        .field("stop_token_ids", &Request::stop_token_ids, "ids that end the answer; None is the checkpoint's EOS ids")
        .field("logprobs", &Request::logprobs, "alternatives to rank at each token, 0 to 20, or None");

    using Result = PersistentResult;
    ValueType<Result>(module, "PersistentResult", "One answer.", false)
        .field("id", &Result::id, "of the request")
        .field("token_ids", &Result::token_ids, "of the answer; an id that ended it is left out")
        .computed("finish_reason", [](const Result& self) { return name(self.finish_reason); }, "\"stop\", \"length\" or \"cancelled\"")
        .field("prompt_tokens", &Result::prompt_tokens, "of the prompt")
        .field("completion_tokens", &Result::completion_tokens, "generated, the id that ended the answer included")
        .field("cached_tokens", &Result::cached_tokens, "of the prompt, found in the cache")
        .field("prefill_seconds", &Result::prefill_seconds, "until the first id")
        .field("decode_seconds", &Result::decode_seconds, "after the first id")
        .field("logprobs", &Result::logprobs, "one TokenLogprobs a token where they were asked for");

    using Persistent = PersistentEngine;
    py::class_<Persistent, std::shared_ptr<Persistent>>(module, "PersistentEngine", "One request at a time on an engine that stays loaded.")
        .def(py::init([](const std::string& checkpoint, const PersistentOptions& options) {
                 const Lifetime::Call running;
                 return std::make_shared<Persistent>(checkpoint, options);
             }),
             py::arg("checkpoint"), py::arg("options") = PersistentOptions())
        .def(
            "run",
            [](Persistent& self, const Request& request, const py::object& on_token) {
                if (!on_token.is_none() && PyCallable_Check(on_token.ptr()) == 0) throw py::type_error("\"on_token\" = " + std::string(py::repr(on_token)) + " can't be called: send a function of a token id, or None.");
                return without_gil([&] {
                    SignalCheck check;
                    return self.run(request, [&](std::int32_t token_id) {
                        check();
                        if (on_token.is_none()) return;
                        const py::gil_scoped_acquire gil;
                        on_token(token_id);
                    });
                });
            },
            py::arg("request"), py::arg("on_token") = py::none(), "Answer one request. `on_token(id)` hears of each id; what it raises ends the answer.")
        .def("cancel", &Persistent::cancel, "End the answer that another thread waits for, at its next token.")
        .def("reset", [](Persistent& self) { without_gil([&] { self.reset(); }); }, "Empty the prefix cache.")
        .def_property_readonly("eos_id", &Persistent::eos_id, "the checkpoint's main EOS id, or None")
        .def_property_readonly("config", [](const Persistent& self) { return self.config(); }, "facts of what was loaded");
}

}  // namespace pocket::python
