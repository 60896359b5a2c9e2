// The dropout draw: Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", 2011), written with integer tensor ops so that any device makes the same draw.
#pragma once

#include "problem.h"

namespace attn_ext {

/// (lead, rows, keys) of the chunk: 0 where the weight is dropped, 1 / (1 - p) where it is kept.
at::Tensor dropout_multiplier(const Problem& problem, const ChunkBounds& bounds);

}  // namespace attn_ext
