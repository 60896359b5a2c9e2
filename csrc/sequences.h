// Packed tensors: the rows of several sequences one after the other, in one query and one key.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "args.h"

namespace attn_ext {

/// Which rows of query and key are one sequence, and the place of its first query among its keys.
struct Sequence {
  int64_t query_begin, query_len;
  int64_t key_begin, key_len;
  int64_t query_offset;
};

/// A row of the table for each field of a Sequence.
inline constexpr int64_t kSequenceFields = 5;

/// The rows of a table (SdpaArgs::sequences). Throws where they do not rise, or leave query or key.
std::vector<Sequence> sequences_of(const SdpaArgs& args);

/// The arguments of a call over one of `count` sequences, `number` among them: views of its rows.
SdpaArgs one_sequence(const SdpaArgs& args, const Sequence& sequence, int64_t number, int64_t count);

/// The table, through the dispatcher. An absent cu_seqlens_k is cu_seqlens_q; absent lengths reach to the
/// next sequence; absent offsets align the last query with the last key.
at::Tensor packed_sequences(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            const at::Tensor& seqlens_q, const at::Tensor& seqlens_k,
                            const at::Tensor& query_offsets, const c10::SymInt& query_rows,
                            const c10::SymInt& key_rows);

/// The same for tensors of the CPU, through no dispatcher.
at::Tensor packed_sequences_cpu(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                const at::Tensor& seqlens_q, const at::Tensor& seqlens_k,
                                const at::Tensor& query_offsets, const c10::SymInt& query_rows,
                                const c10::SymInt& key_rows);

}  // namespace attn_ext
