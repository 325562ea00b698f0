#include "errors.h"

#include "pocket/error.h"

namespace pocket::python {

namespace {

PyObject* error_type = nullptr;  // kept for the life of the process, as the module is

const char* name(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::configuration: return "configuration";
        case ErrorKind::unsupported: return "unsupported";
        case ErrorKind::unavailable: return "unavailable";
        case ErrorKind::device: return "device";
    }
    return "";
}

py::object make(const Error& error) {
    py::object made = py::handle(error_type)(error.what());
    made.attr("kind") = name(error.kind());
    if (error.field().empty()) {
        made.attr("field") = py::none();
    } else {
        made.attr("field") = error.field();
    }
    return made;
}

}  // namespace

PythonFault::PythonFault(const py::error_already_set& error) : exception_(keep_object(error.value())), text_(error.what()) {}

void bind_errors(py::module_& module) {
    py::dict defaults;
    defaults["kind"] = "";
    defaults["field"] = py::none();
    error_type = PyErr_NewExceptionWithDoc("pocketllm_cpp.Error",
                                           "What the native engine refuses or can't do, in one line that names the remedy.\n\n"
                                           "kind is \"configuration\", \"unsupported\", \"unavailable\" or \"device\"; field is the option or the field at fault, or None.",
                                           PyExc_RuntimeError, defaults.ptr());
    if (error_type == nullptr) throw py::error_already_set();
    module.attr("Error") = py::handle(error_type);
    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const Error& error) {
            PyErr_SetObject(error_type, make(error).ptr());
        } catch (const PythonFault& fault) {
            PyErr_SetObject(py::type::handle_of(fault.exception()).ptr(), fault.exception().ptr());
        }
    });
}

py::object to_python(const std::exception_ptr& error) {
    if (!error) return py::none();
    try {
        std::rethrow_exception(error);
    } catch (const PythonFault& fault) {
        return fault.exception();
    } catch (const Error& found) {
        return make(found);
    } catch (const std::exception& found) {
        return make(Error(ErrorKind::device, found.what()));
    } catch (...) {
        return make(Error(ErrorKind::device, "The engine failed without saying why."));
    }
}

void report(const py::error_already_set& error, const std::string& where) {
    try {
        py::print(where, py::arg("file") = py::module_::import("sys").attr("stderr"));
        py::module_::import("traceback").attr("print_exception")(error.type(), error.value(), error.trace());
    } catch (py::error_already_set& second) {  // such as a closed stderr
        second.discard_as_unraisable("pocketllm_cpp");
    }
}

}  // namespace pocket::python
