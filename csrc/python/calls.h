// The public ops as functions that Python calls with less to unpack than torch.ops has.
#pragma once

#include <pybind11/pybind11.h>

namespace attn_ext {

/// Adds sdpa, sdpa_with_weights, sdpa_with_lse, sdpa_with_key_mass. Each is the op of its name in torch.ops,
/// and quick where the six first arguments are given by position, and all others by keyword in the schema's
/// order.
void add_calls(pybind11::module_& module);

}  // namespace attn_ext
