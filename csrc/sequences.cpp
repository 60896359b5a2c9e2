#include "sequences.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <cstring>

#include "checks.h"
#include "integers.h"

namespace attn_ext {

namespace {

void check_integers(const at::Tensor& tensor, const char* name, const c10::SymInt& size, const char* meaning,
                    const at::Tensor& first) {
  if (!tensor.defined()) {
    return;
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, "attn_ext: expected ", name,
              " to be a dense (strided) tensor, but got layout ", tensor.layout());
  check_storage(tensor, name);
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kInt || dtype == at::kLong, "attn_ext: expected ", name,
              " of dtype Int or Long, but got ", dtype);
  TORCH_CHECK(tensor.dim() == 1, "attn_ext: expected ", name, " to have one dimension, but got shape ",
              tensor.sym_sizes());
  TORCH_CHECK(tensor.sym_size(0) == size, "attn_ext: expected ", name, " to have ", size, " elements (",
              meaning, "), but got ", tensor.sym_size(0));
  TORCH_CHECK(tensor.device() == first.device(), "attn_ext: expected ", name,
              " on the same device as cu_seqlens_q (", first.device(), "), but got ", tensor.device());
}

/// Of what is no question of numbers; the number of sequences.
c10::SymInt check_lengths(const PackedLengths& lengths) {
  const at::Tensor& first = lengths.cu_seqlens_q;
  TORCH_CHECK(first.dim() != 1 || first.sym_size(0) >= 1,
              "attn_ext: expected cu_seqlens_q to have at least 1 element, the start of the first sequence, "
              "but got none");
  check_integers(first, "cu_seqlens_q", first.dim() == 1 ? first.sym_size(0) : 0, "sequences + 1", first);
  const c10::SymInt ends = first.sym_size(0), count = ends - 1;
  check_integers(lengths.cu_seqlens_k, "cu_seqlens_k", ends, "sequences + 1, as cu_seqlens_q", first);
  check_integers(lengths.seqlens_q, "seqlens_q", count, "a sequence each", first);
  check_integers(lengths.seqlens_k, "seqlens_k", count, "a sequence each", first);
  check_integers(lengths.query_offsets, "query_offsets", count, "a sequence each", first);
  return count;
}

/// Where the sequences begin and how long they are.
struct Side {
  Integers starts;
  std::optional<Integers> lengths;
  const char *starts_name, *lengths_name, *rows_name;
  int64_t rows;

  int64_t begin(int64_t i) const {
    const int64_t at = starts[i];
    TORCH_CHECK(at >= (i == 0 ? 0 : starts[i - 1]), "attn_ext: expected ", starts_name,
                " to begin at 0 or later and never to fall, but got ", at, " at place ", i,
                i == 0 ? std::string() : " after " + std::to_string(starts[i - 1]));
    return at;
  }
  int64_t length(int64_t i) const {
    const int64_t room = begin(i + 1) - starts[i];
    if (!lengths) {
      return room;
    }
    const int64_t length = (*lengths)[i];
    TORCH_CHECK(length >= 0 && length <= room, "attn_ext: expected ", lengths_name,
                " between 0 and the room for the sequence, but got ", length, " where sequence ", i, " has ",
                room, " rows");
    return length;
  }
  void check_end(int64_t count) const {
    TORCH_CHECK(begin(count) <= rows, "attn_ext: expected ", starts_name, " to end within the ", rows,
                " rows of ", rows_name, ", but got ", starts[count]);
  }
};

Side side_of(const at::Tensor& starts, const at::Tensor& lengths, bool of_query, const c10::SymInt& rows) {
  Side side{Integers(starts),
            std::nullopt,
            of_query ? "cu_seqlens_q" : "cu_seqlens_k",
            of_query ? "seqlens_q" : "seqlens_k",
            of_query ? "query" : "key",
            rows.guard_int(__FILE__, __LINE__)};
  if (lengths.defined()) {
    side.lengths.emplace(lengths);
  }
  return side;
}

at::Tensor key_starts(const PackedLengths& lengths) {
  return lengths.cu_seqlens_k.defined() ? lengths.cu_seqlens_k : lengths.cu_seqlens_q;
}

at::Tensor table_cpu(const PackedLengths& lengths) {
  const std::vector<Sequence> sequences = sequences_of(lengths);
  static_assert(sizeof(Sequence) == kSequenceFields * sizeof(int64_t));
  const at::Tensor table =
      at::empty({static_cast<int64_t>(sequences.size()), kSequenceFields}, at::TensorOptions(at::kLong));
  if (!sequences.empty()) {
    std::memcpy(table.mutable_data_ptr(), sequences.data(), sequences.size() * sizeof(Sequence));
  }
  return table;
}

at::Tensor table_meta(const PackedLengths& lengths) {
  return at::empty_symint({check_lengths(lengths), kSequenceFields},
                          lengths.cu_seqlens_q.options().dtype(at::kLong));
}

/// On a device whose numbers are not read before they are used.
at::Tensor table_aten(const PackedLengths& lengths) {
  check_lengths(lengths);
  const auto begins = [](const at::Tensor& starts) { return starts.to(at::kLong).slice(0, 0, -1); };
  const auto spans = [&](const at::Tensor& starts, const at::Tensor& given) {
    return given.defined() ? given.to(at::kLong) : starts.to(at::kLong).slice(0, 1) - begins(starts);
  };
  const at::Tensor query_len = spans(lengths.cu_seqlens_q, lengths.seqlens_q);
  const at::Tensor key_len = spans(key_starts(lengths), lengths.seqlens_k);
  return at::stack(
      {begins(lengths.cu_seqlens_q), query_len, begins(key_starts(lengths)), key_len,
       lengths.query_offsets.defined() ? lengths.query_offsets.to(at::kLong) : key_len - query_len},
      1);
}

}  // namespace

std::vector<Sequence> sequences_of(const PackedLengths& lengths) {
  const int64_t count = check_lengths(lengths).guard_int(__FILE__, __LINE__);
  const Side query = side_of(lengths.cu_seqlens_q, lengths.seqlens_q, true, lengths.query_rows);
  const Side key = side_of(key_starts(lengths), lengths.seqlens_k, false, lengths.key_rows);
  query.check_end(count);
  key.check_end(count);
  std::optional<Integers> offsets;
  if (lengths.query_offsets.defined()) {
    offsets.emplace(lengths.query_offsets);
  }
  std::vector<Sequence> sequences;
  sequences.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rows = query.length(i), keys = key.length(i);
    sequences.push_back({query.begin(i), rows, key.begin(i), keys, offsets ? (*offsets)[i] : keys - rows});
  }
  return sequences;
}

at::Tensor packed_sequences(const PackedLengths& lengths) {
  static const auto op = find_op<PackedLengths, at::Tensor>("attn_ext::_packed_sequences");
  return call_op(op, lengths.arguments());
}

namespace {

std::vector<int64_t> numbers_of(const at::Tensor& table) {
  const at::Tensor plain = table.cpu().contiguous();
  const auto* numbers = plain.const_data_ptr<int64_t>();
  return {numbers, numbers + plain.numel()};
}

/// Transforms of functions wrap the table, as they do everything that is made inside of them: the dispatcher
/// knows how to unwrap it.
std::vector<int64_t> numbers_of_any(const at::Tensor& table) {
  if (table.unsafeGetTensorImpl()->has_storage()) {
    return numbers_of(table);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attn_ext::_sequence_numbers", "")
                             .typed<decltype(numbers_of)>();
  return op.call(table);
}

}  // namespace

std::vector<Sequence> sequences_of(const SdpaArgs& args) {
  const std::vector<int64_t> numbers = numbers_of_any(args.sequences);
  const int64_t query_rows = args.query.size(-2), key_rows = args.key.size(-2);
  std::vector<Sequence> sequences;
  int64_t query_end = 0, key_end = 0;
  const auto follows = [](int64_t begin, int64_t len, int64_t rows, int64_t& end) {
    const bool fits = begin >= end && len >= 0 && begin <= rows && len <= rows - begin;
    end = begin + len;
    return fits;
  };
  for (size_t i = 0; i < numbers.size() / kSequenceFields; ++i) {
    const int64_t* row = numbers.data() + i * kSequenceFields;
    const Sequence sequence{row[0], row[1], row[2], row[3], row[4]};
    TORCH_CHECK(follows(sequence.query_begin, sequence.query_len, query_rows, query_end) &&
                    follows(sequence.key_begin, sequence.key_len, key_rows, key_end),
                "attn_ext: expected sequences one after the other within the ", query_rows,
                " rows of query and the ", key_rows, " rows of key, but got query rows ",
                sequence.query_begin, " to ", sequence.query_begin + sequence.query_len, " and key rows ",
                sequence.key_begin, " to ", sequence.key_begin + sequence.key_len, " for sequence ", i);
    sequences.push_back(sequence);
  }
  return sequences;
}

SdpaArgs one_sequence(const SdpaArgs& args, const Sequence& sequence, int64_t number, int64_t count) {
  SdpaArgs one = args;
  one.sequences = at::Tensor();
  one.query = args.query.narrow(-2, sequence.query_begin, sequence.query_len);
  one.key = args.key.narrow(-2, sequence.key_begin, sequence.key_len);
  one.value = args.value.narrow(-2, sequence.key_begin, sequence.key_len);
  one.query_offset = sequence.query_offset;
  one.first_batch = number;
  one.batch_step = count;
  return one;
}

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("_packed_sequences", TORCH_FN((Unboxed<PackedLengths>::kernel<&table_cpu>)));
}
TORCH_LIBRARY_IMPL(attn_ext, Meta, m) {
  m.impl("_packed_sequences", TORCH_FN((Unboxed<PackedLengths>::kernel<&table_meta>)));
}
TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  m.impl("_sequence_numbers", TORCH_FN(numbers_of));
  m.impl("_packed_sequences", TORCH_FN((Unboxed<PackedLengths>::kernel<&table_aten>)));
}

}  // namespace attn_ext
