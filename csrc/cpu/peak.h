// What this machine can do at best: the limits that a measured time is held against.
#pragma once

#include <attn_ext/attn_ext.h>

#include <string>

namespace attn_ext {

/// Floating-point operations a second of multiply-adds from registers, the best of `seconds` of trying on so
/// many threads. With `bfloat16` the dot products of the instruction set, or its float32 multiply-adds where
/// it has none. `capability` is a name of capability.h; "aten" stands for the best of the machine.
ATTN_EXT_API double measure_multiply_add_peak(const std::string& capability, bool bfloat16, int threads,
                                              double seconds);

/// Bytes a second that so many threads together read from memory, the best of `seconds` of trying.
ATTN_EXT_API double measure_read_rate(int threads, double seconds);

}  // namespace attn_ext
