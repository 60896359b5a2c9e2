// torch.ops turns arguments into a stack of boxes by the schema, which takes longer than a short call itself.

#include "calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <attn_ext/attn_ext.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

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

template <auto op>
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  at::Tensor query, key, value;
  SdpaOptions options;
  const bool plain = count == 13 && !at::impl::torch_function_mode_enabled() && read(arguments[0], query) &&
                     read(arguments[1], key) && read(arguments[2], value) &&
                     read(arguments[3], options.attn_mask) && read(arguments[4], options.dropout_p) &&
                     read(arguments[5], options.is_causal) && read(arguments[6], options.scale) &&
                     read(arguments[7], options.enable_gqa) && read(arguments[8], options.window_left) &&
                     read(arguments[9], options.window_right) && read(arguments[10], options.query_offset) &&
                     read(arguments[11], options.softcap) && read(arguments[12], options.sinks);
  if (!plain) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const auto result = [&] {
    const pybind11::gil_scoped_release no_gil;
    return op(query, key, value, options);
  }();
  return wrap(result);
  END_HANDLE_TH_ERRORS
}

template <auto op>
PyCFunction fast_call() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<op>));
}

}  // namespace

PyMethodDef kCalls[] = {{"sdpa", fast_call<&sdpa>(), METH_FASTCALL, nullptr},
                        {"sdpa_with_weights", fast_call<&sdpa_with_weights>(), METH_FASTCALL, nullptr},
                        {"sdpa_with_lse", fast_call<&sdpa_with_lse>(), METH_FASTCALL, nullptr},
                        {"sdpa_with_key_mass", fast_call<&sdpa_with_key_mass>(), METH_FASTCALL, nullptr},
                        {nullptr, nullptr, 0, nullptr}};

}  // namespace attn_ext
