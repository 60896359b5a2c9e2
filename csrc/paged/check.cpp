#include "call.h"

#include <ATen/ops/empty.h>

#include "../checks.h"
#include "../integers.h"

namespace attn_ext {

namespace {

bool is_float8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn;
}

/// All numbers of `stored` are numbers of `dtype`.
bool holds_in(at::ScalarType stored, at::ScalarType dtype) {
  const bool narrow = stored == at::kChar || is_float8(stored);
  const bool half = stored == at::kBFloat16 || stored == at::kHalf;
  return stored == dtype || narrow || (half && (dtype == at::kFloat || dtype == at::kDouble)) ||
         (stored == at::kFloat && dtype == at::kDouble);
}

void check_on_device(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  TORCH_CHECK(tensor.device() == query.device(), "attn_ext: expected ", name, " on the device of query (",
              query.device(), "), but got ", tensor.device());
}

void check_integers(const at::Tensor& tensor, const char* name, int64_t dims, const char* shape) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, "attn_ext: expected ",
              name, " of dtype Int or Long, but got ", tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == dims, "attn_ext: expected ", name, " of shape ", shape, ", but got shape ",
              tensor.sym_sizes());
  check_storage(tensor, name);
}

void check_tables(const PagedCall& call) {
  check_integers(call.block_table, "block_table", 2, "(sequences, pages of a sequence)");
  check_integers(call.seqlens_k, "seqlens_k", 1, "(sequences,)");
  const c10::SymInt count = call.block_table.sym_size(0);
  TORCH_CHECK(call.seqlens_k.sym_size(0) == count, "attn_ext: expected seqlens_k to have ", count,
              " elements, as block_table has rows, but got ", call.seqlens_k.sym_size(0));
  if (!call.cu_seqlens_q.defined()) {
    TORCH_CHECK(call.query.sym_size(0) == count, "attn_ext: expected query to have a row for each of the ",
                count, " sequences of block_table, or cu_seqlens_q, but got shape ", call.query.sym_sizes());
    return;
  }
  check_integers(call.cu_seqlens_q, "cu_seqlens_q", 1, "(sequences + 1,)");
  TORCH_CHECK(call.cu_seqlens_q.sym_size(0) == count + 1, "attn_ext: expected cu_seqlens_q to have ",
              count + 1, " elements, one more than block_table has rows, but got ",
              call.cu_seqlens_q.sym_size(0));
}

/// One number in the shape of a page, (heads, rows, features).
at::Tensor stand_in(const at::Tensor& query, const at::Tensor& pages) {
  return at::empty({1}, query.options())
      .expand_symint({pages.sym_size(2), pages.sym_size(1), pages.sym_size(3)});
}

/// Where a sequence's query rows begin and end.
class QueryRows {
 public:
  explicit QueryRows(const PagedCall& call) : rows_(call.query.size(0)) {
    if (call.cu_seqlens_q.defined()) {
      starts_.emplace(call.cu_seqlens_q);
    }
  }
  int64_t begin(int64_t i) const { return starts_ ? (*starts_)[i] : i; }
  int64_t length(int64_t i) const {
    const int64_t from = begin(i), to = begin(i + 1);
    TORCH_CHECK(
        from >= 0 && from <= to && to <= rows_,
        "attn_ext: expected cu_seqlens_q to begin at 0 or later, never to fall, and to end within the ",
        rows_, " rows of query, but got ", from, " and ", to, " at places ", i, " and ", i + 1);
    return to - from;
  }

 private:
  int64_t rows_;
  std::optional<Integers> starts_;
};

}  // namespace

void check_pages(const at::Tensor& pages, const char* name, const char* like, at::ScalarType dtype) {
  TORCH_CHECK(pages.layout() == at::kStrided && !pages.is_nested(), "attn_ext: expected ", name,
              " to be a dense (strided) tensor, but got layout ", pages.layout());
  TORCH_CHECK(pages.dim() == 4, "attn_ext: expected ", name,
              " of shape (pages, rows of a page, heads, features), but got shape ", pages.sym_sizes());
  TORCH_CHECK(pages.sym_size(1) > 0, "attn_ext: expected pages of at least 1 row in ", name,
              ", but got shape ", pages.sym_sizes());
  TORCH_CHECK(holds_in(pages.scalar_type(), dtype), "attn_ext: expected ", name, " of the dtype of ", like,
              " (", dtype, "), of a narrower one that it holds, Char (int8) or Float8_e4m3fn, but got ",
              pages.scalar_type());
  TORCH_CHECK(pages.sym_size(3) <= 1 || pages.sym_stride(3) == 1, "attn_ext: expected ", name,
              " with a contiguous last dimension, but got strides ", pages.sym_strides());
  check_storage(pages, name);
}

void check_pages_alike(const at::Tensor& key_pages, const at::Tensor& value_pages) {
  TORCH_CHECK(key_pages.sym_sizes().slice(0, 3) == value_pages.sym_sizes().slice(0, 3),
              "attn_ext: expected value_pages to have the pages, rows and heads of key_pages (",
              key_pages.sym_sizes(), "), but got shape ", value_pages.sym_sizes());
  TORCH_CHECK(key_pages.scalar_type() == value_pages.scalar_type(),
              "attn_ext: expected value_pages of the dtype of key_pages (", key_pages.scalar_type(),
              "), but got ", value_pages.scalar_type());
  check_on_device(value_pages, "value_pages", key_pages);
}

void check_page_scale(const at::Tensor& scale, const char* name, const at::Tensor& pages) {
  if (!scale.defined()) {
    return;
  }
  check_on_device(scale, name, pages);
  TORCH_CHECK(scale.scalar_type() == at::kFloat, "attn_ext: expected ", name, " of dtype Float, but got ",
              scale.scalar_type());
  const auto heads = pages.sym_size(2);
  const bool one = scale.dim() == 0 || (scale.dim() == 1 && scale.sym_size(0) == 1);
  const bool by_head = scale.dim() == 1 && scale.sym_size(0) == heads;
  const bool by_row = scale.dim() == 4 && scale.sym_sizes().slice(0, 3) == pages.sym_sizes().slice(0, 3) &&
                      scale.sym_size(3) == 1;
  TORCH_CHECK(one || by_head || by_row, "attn_ext: expected ", name, " of shape (), (heads,) = [", heads,
              "] or (pages, rows, heads, 1) of pages of shape ", pages.sym_sizes(), ", but got shape ",
              scale.sym_sizes());
  check_storage(scale, name);
}

SdpaArgs check_paged(const PagedCall& call) {
  TORCH_CHECK(call.query.dim() == 3,
              "attn_ext: expected query to have 3 dimensions (query rows, heads, head dim), but got shape ",
              call.query.sym_sizes());
  check_storage(call.query, "query");
  const auto dtype = call.query.scalar_type();
  check_pages(call.key_pages, "key_pages", "query", dtype);
  check_pages(call.value_pages, "value_pages", "query", dtype);
  check_pages_alike(call.key_pages, call.value_pages);
  check_on_device(call.key_pages, "key_pages", call.query);
  check_page_scale(call.key_scale, "key_scale", call.key_pages);
  check_page_scale(call.value_scale, "value_scale", call.value_pages);
  check_tables(call);
  SdpaArgs args;
  args.query = call.query.transpose(0, 1);
  args.key = stand_in(call.query, call.key_pages);
  args.value = stand_in(call.query, call.value_pages);
  args.sinks = call.sinks;
  args.is_causal = call.is_causal;
  args.scale = call.scale;
  args.enable_gqa = call.enable_gqa;
  args.window_left = call.window_left;
  args.window_right = call.window_right;
  args.softcap = call.softcap;
  return args;
}

PagedSequences sequences_of(const PagedCall& call) {
  const at::Tensor table = call.block_table.cpu().contiguous();
  const Integers entries(table), lengths(call.seqlens_k);
  const QueryRows query(call);
  const int64_t count = table.size(0), most = table.size(1);
  const int64_t pages = call.key_pages.size(0), page_rows = call.key_pages.size(1);
  PagedSequences result;
  result.pages.reserve(static_cast<size_t>(count * most));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t keys = lengths[i], used = (keys + page_rows - 1) / page_rows;
    TORCH_CHECK(keys >= 0 && used <= most, "attn_ext: expected seqlens_k between 0 and what the ", most,
                " pages of a row of block_table hold (", most * page_rows, "), but got ", keys,
                " for sequence ", i);
    const int64_t rows = query.length(i);
    result.sequences.push_back({query.begin(i), rows, 0, keys, keys - rows});
    result.first_pages.push_back(result.pages.size());
    for (int64_t page = 0; page < used; ++page) {
      const int64_t entry = entries[i * most + page];
      TORCH_CHECK(entry >= 0 && entry < pages, "attn_ext: expected the first ", used, " entries of row ", i,
                  " of block_table to be pages, 0 to ", pages - 1, ", but got ", entry, " at place ", page);
      result.pages.push_back(entry);
    }
  }
  return result;
}

at::Tensor scale_of_pages(const at::Tensor& scale) {
  if (!scale.defined() || scale.dim() == 4) {
    return scale;
  }
  return scale.dim() == 0 ? scale.view({1, 1, 1, 1}) : scale.view({1, 1, -1, 1});
}

}  // namespace attn_ext
