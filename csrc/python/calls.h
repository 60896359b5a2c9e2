// The public ops as functions that Python calls with every argument by position.
#pragma once

#include <torch/csrc/python_headers.h>

namespace attn_ext {

/// sdpa, sdpa_with_weights, sdpa_with_lse, sdpa_with_key_mass. They return NotImplemented where an argument
/// is not of the very type that the schema names, or a torch function mode is active: such calls are for
/// torch.ops, which knows what to do or what to say.
extern PyMethodDef kCalls[];

}  // namespace attn_ext
