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

/// What a table is made of, by the names that the caller knows. An absent cu_seqlens_k is cu_seqlens_q;
/// absent lengths reach to the next sequence; absent offsets align the last query with the last key.
struct PackedLengths {
  at::Tensor cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, query_offsets;
  c10::SymInt query_rows, key_rows;

  template <class Lengths>
  static auto fields_of(Lengths& l) {
    return fields(l.cu_seqlens_q, or_none(l.cu_seqlens_k), or_none(l.seqlens_q), or_none(l.seqlens_k),
                  or_none(l.query_offsets), l.query_rows, l.key_rows);
  }

  auto arguments() { return fields_of(*this); }
  auto arguments() const { return fields_of(*this); }
};

/// The table, through the dispatcher.
at::Tensor packed_sequences(const PackedLengths& lengths);

/// Its rows, of tensors of the CPU.
std::vector<Sequence> sequences_of(const PackedLengths& lengths);

}  // namespace attn_ext
