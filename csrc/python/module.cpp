// attn_ext._C: what Python needs beside the operators, which come with the library itself.

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../capability.h"
#include "../explain.h"
#include "../task_times.h"
#include "calls.h"
#include "linear.h"

namespace py = pybind11;

namespace {

template <auto explained>
py::dict explain(const attn_ext::SdpaArgs& args) {
  const attn_ext::Explanation explanation = explained(args);
  py::dict fields;
  fields["path"] = explanation.path;
  fields["capability"] = explanation.capability;
  fields["block_rows"] = explanation.block_rows;
  fields["block_keys"] = explanation.block_keys;
  fields["packed_bytes"] = explanation.packed_bytes;
  fields["scratch_bytes"] = explanation.scratch_bytes;
  fields["saved_bytes"] = explanation.saved_bytes;
  fields["reason"] = explanation.reason;
  return fields;
}

/// explain with the arguments of `sdpa`, by position; errors call them by their names.
template <auto explained, size_t... argument>
void add_explain(py::module_& m, const char* name, std::index_sequence<argument...>) {
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow("attn_ext::sdpa", "").schema();
  m.def(name, attn_ext::public_kernel<&explain<explained>>,
        py::arg(schema.arguments()[argument].name().c_str())...);
}

}  // namespace

// Without a GIL nothing here is in danger: what the module holds (the interned keywords and the ops in
// calls.cpp) is written while it is imported, and read only from then on.
PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  attn_ext::add_calls(m);
  m.def("linear", &attn_ext::linear, py::arg("input"), py::arg("weight"), py::arg("bias") = py::none(),
        py::call_guard<py::gil_scoped_release>());
  m.def("cpu_capability", &attn_ext::cpu_capability);
  m.def("available_cpu_capabilities", &attn_ext::available_cpu_capabilities);
  m.def("save_weights_for_backward", &attn_ext::save_weights_for_backward);
  m.def("set_save_weights_for_backward", &attn_ext::set_save_weights_for_backward);
  m.def("task_times", &attn_ext::task_times);
  m.def("time_of_rounds", &attn_ext::time_of_rounds);
  constexpr auto arguments = std::make_index_sequence<attn_ext::Unboxed<attn_ext::PublicCall>::kArguments>();
  add_explain<&attn_ext::explain>(m, "explain", arguments);
  add_explain<&attn_ext::explain_gpu>(m, "explain_gpu", arguments);
}
