// torch.ops turns arguments into a stack of boxes by the schema, which takes longer than a short call itself.

#include "calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "../composite/sdpa_packed_composite.h"
#include "../paged/call.h"

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

bool read(PyObject* object, c10::SymInt& number) {
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

bool read(PyObject* object, OrNone<at::Tensor> field) {
  return object == Py_None || read(object, field.tensor);
}

template <class T>
constexpr bool kIsTensor = std::is_same_v<T, at::Tensor> || std::is_same_v<T, OrNone<at::Tensor>>;

/// torch.ops takes whatever it can make a number or a flag of; as torch's own functions do, refuses a tensor
/// whose gradient would be lost so, and flags that are none.
template <class T>
void check_scalar(const c10::Argument& argument, PyObject* object) {
  if constexpr (std::is_same_v<T, bool>) {
    const bool is_number = PyLong_Check(object) != 0 && PyBool_Check(object) == 0;
    TORCH_CHECK_TYPE(object != Py_None && !is_number && !THPVariable_Check(object), "attn_ext: expected ",
                     argument.name(), " to be a bool, but got ", Py_TYPE(object)->tp_name);
  } else if constexpr (!kIsTensor<T>) {
    TORCH_CHECK_TYPE(!THPVariable_Check(object) || !THPVariable_Unpack(object).requires_grad(),
                     "attn_ext: expected ", argument.name(),
                     " to be a number, but got a tensor that requires grad, which it would not get");
  }
}

template <class Arguments>
void check_scalars(const char* name, PyObject* const* objects, Arguments arguments) {
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").schema();
  std::apply(
      [&](auto&... argument) {
        size_t i = 0;
        ((check_scalar<std::remove_cvref_t<decltype(argument)>>(schema.arguments()[i], objects[i]), ++i),
         ...);
      },
      arguments);
}

PyObject* wrap(const at::Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}

PyObject* wrap(const TensorPair& pair) {
  PyObject* first = wrap(std::get<0>(pair));
  PyObject* second = wrap(std::get<1>(pair));
  PyObject* both = first != nullptr && second != nullptr ? PyTuple_Pack(2, first, second) : nullptr;
  Py_XDECREF(first);
  Py_XDECREF(second);
  return both;
}

/// How many arguments, from the first on, come by position; what follows is given by keyword.
template <class Call>
constexpr size_t kPositional = 7;
template <>
constexpr size_t kPositional<PublicCall> = 6;

/// In the schema's order. Interned, as names in Python's code are: the same name is the same object.
template <class Call>
std::array<PyObject*, Unboxed<Call>::kArguments - kPositional<Call>> keywords;

template <class Call>
bool are_keywords(PyObject* names) {
  return names != nullptr && PyTuple_GET_SIZE(names) == std::ssize(keywords<Call>) &&
         std::equal(keywords<Call>.begin(), keywords<Call>.end(), PySequence_Fast_ITEMS(names));
}

/// A jagged tensor, which is packed sequences: the function of that name in attn_ext._nested takes it.
PyObject* nested_function(PyObject* query, PyObject* op_of_torch) {
  if (!THPVariable_Check(query) || !THPVariable_Unpack(query).is_nested()) {
    return nullptr;
  }
  const pybind11::handle op = op_of_torch;
  const auto functions = pybind11::module_::import("attn_ext._nested").attr("FUNCTIONS");
  return functions.attr("get")(op.attr("__name__"), op).ptr();  // the dict holds it, or the caller
}

/// A call that is over in microseconds keeps the interpreter's lock: to give it up and to take it again would
/// be a twentieth of it.
bool is_short(const at::Tensor& query, const at::Tensor& key) {
  constexpr int64_t kFew = 4096;
  return query.is_cpu() && query.numel() <= kFew && key.is_cpu() && key.numel() <= kFew;
}

/// `op_of_torch` takes over where an argument is not of the very type that the schema names, or a torch
/// function mode is active: it knows what to do or what to say.
template <class Call, class Result, const char* name>
PyObject* call(PyObject* op_of_torch, PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  HANDLE_TH_ERRORS
  static const auto op = find_op<Call, Result>(name);
  Call call;
  PyObject* const* next = arguments;
  const auto read_all = [&](auto&&... argument) { return (read(*next++, argument) && ...); };
  const bool in_order =
      positional == std::ssize(std::array<char, kPositional<Call>>{}) && are_keywords<Call>(names);
  const bool plain =
      in_order && !at::impl::torch_function_mode_enabled() && std::apply(read_all, call.arguments());
  if (!plain) {
    if (in_order) {
      check_scalars(name, arguments, call.arguments());
    }
    PyObject* const nested = positional > 0 ? nested_function(arguments[0], op_of_torch) : nullptr;
    return PyObject_Vectorcall(nested != nullptr ? nested : op_of_torch, arguments, positional, names);
  }
  const auto result = [&] {
    std::optional<pybind11::gil_scoped_release> no_lock;
    if (!is_short(std::get<0>(call.arguments()), std::get<1>(call.arguments()))) {
      no_lock.emplace();
    }
    return call_op(op, call.arguments());
  }();
  return wrap(result);
  END_HANDLE_TH_ERRORS
}

constexpr char kSdpa[] = "attn_ext::sdpa";
constexpr char kWithWeights[] = "attn_ext::sdpa_with_weights";
constexpr char kWithLse[] = "attn_ext::sdpa_with_lse";
constexpr char kWithKeyMass[] = "attn_ext::sdpa_with_key_mass";
constexpr char kPacked[] = "attn_ext::sdpa_packed";
constexpr char kPackedWithLse[] = "attn_ext::sdpa_packed_with_lse";
constexpr char kPaged[] = "attn_ext::sdpa_paged";
constexpr char kPagedWithLse[] = "attn_ext::sdpa_paged_with_lse";

template <class Call, class Result, const char* name>
PyMethodDef method() {
  const auto function =
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<Call, Result, name>));
  return {name + sizeof("attn_ext::") - 1, function, METH_FASTCALL | METH_KEYWORDS, nullptr};
}

PyMethodDef methods[] = {
    method<PublicCall, at::Tensor, kSdpa>(),    method<PublicCall, TensorPair, kWithWeights>(),
    method<PublicCall, TensorPair, kWithLse>(), method<PublicCall, TensorPair, kWithKeyMass>(),
    method<PackedCall, at::Tensor, kPacked>(),  method<PackedCall, TensorPair, kPackedWithLse>(),
    method<PagedCall, at::Tensor, kPaged>(),    method<PagedCall, TensorPair, kPagedWithLse>()};

template <class Call>
void intern_keywords(const char* op) {
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow(op, "").schema();
  for (size_t i = 0; i < keywords<Call>.size(); ++i) {
    keywords<Call>[i] = PyUnicode_InternFromString(schema.arguments()[kPositional<Call> + i].name().c_str());
    if (keywords<Call>[i] == nullptr) {
      throw pybind11::error_already_set();
    }
  }
}

}  // namespace

void add_calls(pybind11::module_& module) {
  intern_keywords<PublicCall>(kSdpa);
  intern_keywords<PackedCall>(kPacked);
  intern_keywords<PagedCall>(kPaged);
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
