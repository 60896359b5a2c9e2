// attn_ext._C: what Python needs beside the operators, which come with the library itself.

#include <torch/csrc/utils/pybind.h>

#include "../capability.h"
#include "../cpu/peak.h"
#include "../explain.h"
#include "calls.h"

namespace py = pybind11;

namespace {

std::optional<c10::SymInt> sym_int(std::optional<int64_t> value) {
  return value ? std::optional<c10::SymInt>(*value) : std::nullopt;
}

py::dict explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const attn_ext::OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                 std::optional<double> scale, bool enable_gqa, std::optional<int64_t> window_left,
                 std::optional<int64_t> window_right, int64_t query_offset, double softcap,
                 const attn_ext::OptionalTensor& sinks) {
  const attn_ext::Explanation explanation = attn_ext::public_kernel<&attn_ext::explain>(
      query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, sym_int(window_left),
      sym_int(window_right), query_offset, softcap, sinks);
  py::dict fields;
  fields["path"] = explanation.path;
  fields["capability"] = explanation.capability;
  fields["block_rows"] = explanation.block_rows;
  fields["block_keys"] = explanation.block_keys;
  fields["packed_bytes"] = explanation.packed_bytes;
  fields["scratch_bytes"] = explanation.scratch_bytes;
  fields["reason"] = explanation.reason;
  return fields;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  if (PyModule_AddFunctions(m.ptr(), attn_ext::kCalls) != 0) {
    throw py::error_already_set();
  }
  m.def("cpu_capability", &attn_ext::cpu_capability);
  m.def("available_cpu_capabilities", &attn_ext::available_cpu_capabilities);
  m.def("measure_multiply_add_peak", &attn_ext::measure_multiply_add_peak, py::arg("capability"),
        py::arg("bfloat16"), py::arg("threads"), py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
  m.def("measure_read_rate", &attn_ext::measure_read_rate, py::arg("threads"), py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
  m.def("explain", &explain, py::arg("query"), py::arg("key"), py::arg("value"),
        py::arg("attn_mask") = py::none(), py::arg("dropout_p") = 0.0, py::arg("is_causal") = false,
        py::kw_only(), py::arg("scale") = py::none(), py::arg("enable_gqa") = false,
        py::arg("window_left") = py::none(), py::arg("window_right") = py::none(),
        py::arg("query_offset") = 0, py::arg("softcap") = 0.0, py::arg("sinks") = py::none());
}
