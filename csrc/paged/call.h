// Keys and values in pages of a cache: the public ops over them, their arguments and what is checked of them.
#pragma once

#include "../args.h"
#include "../composite/sdpa_composite.h"
#include "../sequences.h"

namespace attn_ext {

/// What the public ops take after query, pages, table and lengths; of PagedCall, or of the C++ API's options.
template <class Options>
auto paged_options_of(Options& o) {
  return fields(or_none(o.cu_seqlens_q), o.is_causal, o.scale, o.enable_gqa, o.window_left, o.window_right,
                o.softcap, or_none(o.sinks), or_none(o.key_scale), or_none(o.value_scale));
}

/// The arguments as the schema has them.
struct PagedCall {
  at::Tensor query;                   // (Tq, Hq, D)
  at::Tensor key_pages, value_pages;  // (P, page, Hkv, D), (P, page, Hkv, Dv)
  at::Tensor block_table, seqlens_k;  // (N, most pages), (N,)
  at::Tensor cu_seqlens_q;            // (N + 1,); undefined: a row a sequence
  bool is_causal = true;
  std::optional<double> scale;
  bool enable_gqa = false;
  std::optional<c10::SymInt> window_left, window_right;
  double softcap = 0.0;
  at::Tensor sinks;
  at::Tensor key_scale, value_scale;  // (), (Hkv,) or (P, page, Hkv, 1)

  auto arguments() {
    return std::tuple_cat(fields(query, key_pages, value_pages, block_table, seqlens_k),
                          paged_options_of(*this));
  }
};

/// Rows of query as of a packed call; the keys of each begin at 0. And the pages of all, one sequence's after
/// the other's.
struct PagedSequences {
  std::vector<Sequence> sequences;
  std::vector<size_t> first_pages;  // of each, among `pages`
  std::vector<int64_t> pages;

  const int64_t* pages_of(size_t sequence) const { return pages.data() + first_pages[sequence]; }
};

/// Shapes, dtypes and devices of what is paged. Returns a call over (heads, rows, features), yet to be
/// checked, that has everything but the keys: those are one number, expanded to a page.
SdpaArgs check_paged(const PagedCall& call);

/// Reads and checks the numbers of lengths and table.
PagedSequences sequences_of(const PagedCall& call);

/// A scale in four dims, (P or 1, page or 1, Hkv or 1, 1).
at::Tensor scale_of_pages(const at::Tensor& scale);

/// (P, page, Hkv, D) with a dtype that a cache can have, where queries or new keys are of `dtype`.
void check_pages(const at::Tensor& pages, const char* name, const char* like, at::ScalarType dtype);
void check_pages_alike(const at::Tensor& key_pages, const at::Tensor& value_pages);
void check_page_scale(const at::Tensor& scale, const char* name, const at::Tensor& pages);

/// By gathering pages, on any device.
SdpaOutputs paged_aten(const PagedCall& call);

}  // namespace attn_ext
