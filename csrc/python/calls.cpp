// torch.ops turns arguments into a stack of boxes by the schema, which takes longer than a short call itself.

#include "calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <attn_ext/attn_ext.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>

#include "../args.h"

namespace attn_ext {

namespace {

/// Each reads one argument; false: it is of another type.
bool read(PyObject* object, at::Tensor& tensor) {
  if (!THPVariable_CheckExact(object)) {
    return false;
  }
  tensor = THPVariable_Unpack(object);
  return true;
}

bool read(PyObject* object, double& number) {
  if (!PyFloat_CheckExact(object)) {
    return false;
  }
  number = PyFloat_AS_DOUBLE(object);
  return true;
}

bool read(PyObject* object, int64_t& number) {
  int overflow = 0;
  if (!PyLong_CheckExact(object)) {
    return false;
  }
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool read(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

template <class T>
bool read(PyObject* object, std::optional<T>& value) {
  return object == Py_None || read(object, value.emplace());
}

PyObject* wrap(const at::Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}

PyObject* wrap(const std::tuple<at::Tensor, at::Tensor>& pair) {
  PyObject* first = wrap(std::get<0>(pair));
  PyObject* second = wrap(std::get<1>(pair));
  PyObject* both = first != nullptr && second != nullptr ? PyTuple_Pack(2, first, second) : nullptr;
  Py_XDECREF(first);
  Py_XDECREF(second);
  return both;
}

constexpr size_t kPositional = 6;  // query to is_causal; what follows is given by keyword
constexpr size_t kKeywords = Unboxed<PublicCall>::kArguments - kPositional;

/// Of the keywords in the schema's order. Interned, as names in Python's code are: the same name is the same
/// object.
std::array<PyObject*, kKeywords> keywords;

bool are_keywords(PyObject* names) {
  return names != nullptr && PyTuple_GET_SIZE(names) == std::ssize(keywords) &&
         std::equal(keywords.begin(), keywords.end(), PySequence_Fast_ITEMS(names));
}

/// `op_of_torch` takes over where an argument is not of the very type that the schema names, or a torch
/// function mode is active: it knows what to do or what to say.
template <auto op>
PyObject* call(PyObject* op_of_torch, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  HANDLE_TH_ERRORS
  at::Tensor query, key, value;
  SdpaOptions options;
  PyObject* const* next = arguments;
  const auto read_all = [&](auto&... argument) { return (read(*next++, argument) && ...); };
  const bool plain = positional == kPositional && are_keywords(names) &&
                     !at::impl::torch_function_mode_enabled() &&
                     std::apply(read_all, std::tuple_cat(fields(query, key, value), options_of(options)));
  if (!plain) {
    return PyObject_Vectorcall(op_of_torch, arguments, positional, names);
  }
  const auto result = [&] {
    const pybind11::gil_scoped_release no_gil;
    return op(query, key, value, options);
  }();
  return wrap(result);
  END_HANDLE_TH_ERRORS
}

template <auto op>
PyMethodDef method(const char* name) {
  const auto function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<op>));
  return {name, function, METH_FASTCALL | METH_KEYWORDS, nullptr};
}

PyMethodDef methods[] = {method<&sdpa>("sdpa"), method<&sdpa_with_weights>("sdpa_with_weights"),
                         method<&sdpa_with_lse>("sdpa_with_lse"),
                         method<&sdpa_with_key_mass>("sdpa_with_key_mass")};

}  // namespace

void add_calls(pybind11::module_& module) {
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow("attn_ext::sdpa", "").schema();
  for (size_t i = 0; i < kKeywords; ++i) {
    keywords[i] = PyUnicode_InternFromString(schema.arguments()[kPositional + i].name().c_str());
    if (keywords[i] == nullptr) {
      throw pybind11::error_already_set();
    }
  }
  const pybind11::object ops = pybind11::module_::import("torch").attr("ops").attr("attn_ext");
  for (PyMethodDef& method : methods) {
    const pybind11::object op_of_torch = ops.attr(method.ml_name);
    PyObject* function = PyCFunction_NewEx(&method, op_of_torch.ptr(), module.attr("__name__").ptr());
    if (function == nullptr) {
      throw pybind11::error_already_set();
    }
    module.attr(method.ml_name) = pybind11::reinterpret_steal<pybind11::object>(function);
  }
}

}  // namespace attn_ext
