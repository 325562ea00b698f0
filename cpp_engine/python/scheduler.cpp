#include <pybind11/stl.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "errors.h"

namespace pocket::python {

namespace {

// Dropping it stops the scheduler.
class PythonScheduler {
public:
    PythonScheduler(std::shared_ptr<QwenEngine> engine, int max_batch_size) {
        without_gil([&] {
            // Whoever is the last to hold the scheduler frees the engine after it, so that Python may drop the two in any order.
            auto* made = new QwenBatchScheduler(*engine, max_batch_size);
            scheduler_ = std::shared_ptr<QwenBatchScheduler>(made, [engine](QwenBatchScheduler* scheduler) mutable {
                delete scheduler;
                engine.reset();  // and not with this function, which weak references keep
            });
        });
        Lifetime::get().add(scheduler_);
    }

    ~PythonScheduler() {
        // The thread that stop waits for may be in a callback, waiting for the GIL.
        const py::gil_scoped_release released;
        if (!scheduler_->is_in_callback()) {
            scheduler_.reset();
            return;
        }
        // A callback dropped the last reference: it can't wait for the thread that it is on.
        auto* kept = new std::shared_ptr<QwenBatchScheduler>(std::move(scheduler_));
        try {
            auto running = std::make_shared<Lifetime::Call>();
            std::thread([running, kept] { delete kept; }).detach();
        } catch (const std::exception&) {
            // Python is shutting down, which stops every scheduler, or the system has no thread to give: then it stays as it is.
        }
    }

    QwenBatchScheduler& operator*() const { return *scheduler_; }
    QwenBatchScheduler* operator->() const { return scheduler_.get(); }

private:
    std::shared_ptr<QwenBatchScheduler> scheduler_;         // shared with Lifetime while that stops it
};

// Call `callback` on the scheduler's thread; what it raises goes to stderr.
template <typename... Args>
void call(const PythonObject& callback, const char* what, RequestId request_id, Args&&... args) {
    const py::gil_scoped_acquire gil;
    try {
        (*callback)(std::forward<Args>(args)...);
    } catch (const py::error_already_set& error) {
        report(error, "Exception ignored in " + std::string(what) + " of request " + std::to_string(request_id) + ":");
    }
}

PythonObject kept_callback(const char* what, const py::object& callback) {
    if (callback.is_none()) return nullptr;
    if (PyCallable_Check(callback.ptr()) == 0) throw py::type_error("\"" + std::string(what) + "\" = " + std::string(py::repr(callback)) + " can't be called: send a function, or None.");
    return keep_object(callback);
}

RequestId submit(PythonScheduler& self, std::vector<std::int32_t> prompt_tokens, const QwenBatchSamplingParams& sampling, const py::object& callback,
                 const py::object& on_token, const py::object& on_step) {
    QwenBatchCallbacks callbacks;
    if (const PythonObject kept = kept_callback("callback", callback)) {
        callbacks.on_complete = [kept](const QwenBatchResult& result) { call(kept, "callback", result.request_id, result); };
    }
    if (const PythonObject kept = kept_callback("on_token", on_token)) {
        callbacks.on_token = [kept](RequestId request_id, std::int32_t token_id) { call(kept, "on_token", request_id, request_id, token_id); };
    }
    if (const PythonObject kept = kept_callback("on_step", on_step)) {
        callbacks.on_step = [kept](const StepOutput& output) { call(kept, "on_step", output.request_id, output); };
    }
    return without_gil([&] { return self->submit_request(std::move(prompt_tokens), sampling, std::move(callbacks)); });
}

std::optional<QwenBatchResult> poll(PythonScheduler& self, RequestId request_id, std::int64_t timeout_ms) {
    constexpr std::int64_t slice_ms = 100;  // between two looks for Ctrl-C
    for (std::int64_t left = timeout_ms;;) {
        const std::int64_t wait = timeout_ms < 0 ? slice_ms : std::min(slice_ms, left);
        std::optional<QwenBatchResult> result = without_gil([&] { return self->poll_result(request_id, wait); });
        left -= wait;
        if (result || (timeout_ms >= 0 && left <= 0)) return result;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

}  // namespace

void bind_scheduler(py::module_& module) {
    py::class_<PythonScheduler>(module, "QwenBatchScheduler",
                                "Requests from any thread onto one engine, batched as they come.\n\n"
                                "Callbacks run on the scheduler's thread and must not block; what they raise goes to stderr. Call stop() when done: an engine whose scheduler\n"
                                "runs has no session of its own.")
        .def(py::init<std::shared_ptr<QwenEngine>, int>(), py::arg("engine").none(false), py::arg("max_batch_size") = 4)
        .def("submit_request", &submit, py::arg("prompt_tokens"), py::arg("sampling") = QwenBatchSamplingParams(), py::arg("callback") = py::none(),
             py::arg("on_token") = py::none(), py::arg("on_step") = py::none(),
             "Queue a request and return its id. `callback(result)`, `on_token(request_id, token)` and `on_step(step)` may be called before it returns.\n\n"
             "Without `callback` the result waits for poll_result.")
        .def("poll_result", &poll, py::arg("request_id"), py::arg("timeout_ms") = 0,
             "Wait for a result and take it; None after `timeout_ms`. Below 0 it waits without end.")
        .def("cancel", [](PythonScheduler& self, RequestId request_id) { return without_gil([&] { return self->cancel(request_id); }); }, py::arg("request_id"),
             "End an active request between two steps. False if it is not active.")
        .def("stop", [](PythonScheduler& self) {
                 const py::gil_scoped_release released;
                 self->stop();
             },
             "End every request with \"cancelled\" and wait for the thread. The engine's session calls work again.")
        .def("engine_caps", [](PythonScheduler& self) { return self->engine_caps(); }, "what the engine does")
        .def("max_batch_size", [](PythonScheduler& self) { return self->max_batch_size(); }, "the effective batch size: at most engine_caps().max_slots")
        .def("set_prefill_token_budget", [](PythonScheduler& self, int tokens) { without_gil([&] { self->set_prefill_token_budget(tokens); }); }, py::arg("tokens"),
             "Most prompt tokens a step, from the next one on; 0 computes each prompt in one step.")
        .def("stats", [](PythonScheduler& self) { return without_gil([&] { return self->stats(); }); }, "gauges and running totals")
        .def_property_readonly("is_stopped", [](PythonScheduler& self) { return self->is_stopped(); }, "stop was called")
        .def_property_readonly("failure", [](PythonScheduler& self) -> std::optional<std::string> {
                 if (!self->is_dead()) return std::nullopt;
                 return self->death();
             },
             "why a step failed, after which every request is refused; None while all is well");
}

}  // namespace pocket::python
