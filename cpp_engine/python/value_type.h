// Binds a struct as a Python value type: keyword construction, attributes that name themselves when they are wrong, and a repr.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pocket::python {

namespace py = pybind11;

template <typename T>
inline std::vector<std::string> field_names;  // in the order of their binding

template <typename Field>
std::string wanted() {
    if constexpr (std::is_same_v<Field, bool>) return "True or False";
    else if constexpr (std::unsigned_integral<Field>) return "a whole number of at least 0";
    else if constexpr (std::integral<Field>) return "a whole number";
    else if constexpr (std::floating_point<Field>) return "a number";
    else if constexpr (std::is_same_v<Field, std::string>) return "a string";
    else if constexpr (requires { typename Field::value_type; Field().has_value(); }) return wanted<typename Field::value_type>() + ", or None";
    else if constexpr (std::is_same_v<Field, std::vector<std::pair<std::int32_t, float>>>) return "a list of pairs of a token id and a number";
    else if constexpr (std::is_same_v<Field, std::vector<std::vector<std::int32_t>>>) return "a list of lists of token ids";
    else return "a list of token ids";
}

// `value` as a field of T. TypeError in one line otherwise; True is no number.
template <typename Field>
Field read_field(const std::string& name, const py::object& value) {
    constexpr bool is_number = !std::is_same_v<Field, bool> && (std::is_arithmetic_v<Field> || requires { requires std::is_arithmetic_v<typename Field::value_type>; Field().has_value(); });
    try {
        if (is_number && PyBool_Check(value.ptr())) throw py::cast_error();
        return value.template cast<Field>();
    } catch (const py::cast_error&) {
        throw py::type_error("\"" + name + "\" = " + std::string(py::repr(value)) + " is not valid: send " + wanted<Field>() + ".");
    }
}

inline std::string joined(const std::vector<std::string>& names) {
    std::string all;
    for (const std::string& one : names) all += (all.empty() ? "" : ", ") + one;
    return all;
}

template <typename T, typename... Bases>
class ValueType {
public:
    // `is_made` also gives it a constructor and writable attributes; without it only the engine makes such values.
    ValueType(py::module_& module, const char* name, const char* doc, bool is_made) : name_(name), type_(module, name, doc), is_made_(is_made) {
        (..., field_names<T>.insert(field_names<T>.end(), field_names<Bases>.begin(), field_names<Bases>.end()));
        if (!is_made) {
            type_.def("__repr__", &ValueType::repr);
            return;
        }
        type_.def(py::init([name](const py::args& positional, const py::kwargs& fields) {
            if (!positional.empty()) throw py::type_error(std::string(name) + " takes keyword arguments only: " + joined(field_names<T>) + ".");
            const py::object made = py::cast(T());
            for (const auto& [key, value] : fields) {
                const auto field = py::cast<std::string>(key);
                if (!has(field)) throw py::type_error(std::string(name) + " has no field \"" + field + "\": it has " + joined(field_names<T>) + ".");
                py::setattr(made, key, value);
            }
            return made.template cast<T>();
        }));
        type_.def("__setattr__", [name](const py::object& self, const py::str& key, const py::object& value) {
            const std::string field = key;
            if (!has(field)) throw py::attribute_error(std::string(name) + " has no field \"" + field + "\": it has " + joined(field_names<T>) + ".");
            if (PyObject_GenericSetAttr(self.ptr(), key.ptr(), value.ptr()) != 0) throw py::error_already_set();
        });
        type_.def("__repr__", &ValueType::repr);
    }

    template <typename Owner, typename Field>
    ValueType& field(const char* name, Field Owner::* member, const char* doc) {
        field_names<T>.push_back(name);
        if (is_made_) {
            type_.def_property(
                name, [member](const T& self) -> Field { return self.*member; },
                [member, name](T& self, const py::object& value) { self.*member = read_field<Field>(name, value); }, doc);
        } else {
            type_.def_property_readonly(name, [member](const T& self) -> Field { return self.*member; }, doc);
        }
        return *this;
    }

    template <typename Get>
    ValueType& computed(const char* name, Get&& get, const char* doc) {
        field_names<T>.push_back(name);
        type_.def_property_readonly(name, std::forward<Get>(get), doc);
        return *this;
    }

    template <typename Get, typename Set>
    ValueType& property(const char* name, Get&& get, Set&& set, const char* doc) {
        field_names<T>.push_back(name);
        type_.def_property(name, std::forward<Get>(get), std::forward<Set>(set), doc);
        return *this;
    }

private:
    static bool has(const std::string& name) { return std::find(field_names<T>.begin(), field_names<T>.end(), name) != field_names<T>.end(); }

    static std::string repr(const py::object& self) {
        std::string text = std::string(py::str(py::type::handle_of(self).attr("__name__"))) + "(";
        const char* separator = "";
        for (const std::string& name : field_names<T>) {
            text += separator + name + "=" + std::string(py::repr(self.attr(name.c_str())));
            separator = ", ";
        }
        return text + ")";
    }

    const char* name_;
    py::class_<T, Bases...> type_;
    bool is_made_;
};

}  // namespace pocket::python
