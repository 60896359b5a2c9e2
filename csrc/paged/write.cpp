// `cache_write_`: new keys and values into their slots of a cache.

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <cstring>

#include "../checks.h"
#include "../integers.h"
#include "call.h"

namespace attn_ext {

namespace {

struct WriteCall {
  at::Tensor key_pages, value_pages;  // (P, page, Hkv, D), (P, page, Hkv, Dv)
  at::Tensor key, value;              // (T, Hkv, D), (T, Hkv, Dv)
  at::Tensor slot_mapping;            // (T,)
  at::Tensor key_scale, value_scale;  // as of PagedCall

  template <class Call>
  static auto fields_of(Call& c) {
    return fields(c.key_pages, c.value_pages, c.key, c.value, c.slot_mapping, or_none(c.key_scale),
                  or_none(c.value_scale));
  }
  auto arguments() { return fields_of(*this); }
  auto arguments() const { return fields_of(*this); }
};

void check_rows(const at::Tensor& rows, const char* name, const at::Tensor& pages, const char* pages_name) {
  TORCH_CHECK(at::isFloatingType(rows.scalar_type()), "attn_ext: expected ", name,
              " of a floating dtype, but got ", rows.scalar_type());
  TORCH_CHECK(
      rows.dim() == 3 && rows.sym_size(1) == pages.sym_size(2) && rows.sym_size(2) == pages.sym_size(3),
      "attn_ext: expected ", name, " of shape (rows, heads, features) with the heads and features of ",
      pages_name, " (", pages.sym_sizes(), "), but got shape ", rows.sym_sizes());
  TORCH_CHECK(rows.device() == pages.device(), "attn_ext: expected ", name, " on the device of ", pages_name,
              " (", pages.device(), "), but got ", rows.device());
  check_storage(rows, name);
}

void check_write(const WriteCall& call) {
  check_rows(call.key, "key", call.key_pages, "key_pages");
  check_rows(call.value, "value", call.value_pages, "value_pages");
  check_pages(call.key_pages, "key_pages", "key", call.key.scalar_type());
  check_pages(call.value_pages, "value_pages", "value", call.value.scalar_type());
  check_pages_alike(call.key_pages, call.value_pages);
  check_page_scale(call.key_scale, "key_scale", call.key_pages);
  check_page_scale(call.value_scale, "value_scale", call.value_pages);
  const at::Tensor& slots = call.slot_mapping;
  TORCH_CHECK((slots.scalar_type() == at::kInt || slots.scalar_type() == at::kLong) && slots.dim() == 1,
              "attn_ext: expected slot_mapping of dtype Int or Long and shape (rows,), but got ",
              slots.scalar_type(), " of shape ", slots.sym_sizes());
  check_storage(slots, "slot_mapping");
  TORCH_CHECK(call.key.sym_size(0) == slots.sym_size(0) && call.value.sym_size(0) == slots.sym_size(0),
              "attn_ext: expected key and value to have a row for each of the ", slots.sym_size(0),
              " slots of slot_mapping, but got ", call.key.sym_size(0), " and ", call.value.sym_size(0));
}

/// New rows as they are stored, (T, Hkv, D): what lies beyond an int8 or a float8 becomes its largest number.
at::Tensor as_stored(const at::Tensor& rows, const at::Tensor& factors, at::ScalarType stored) {
  if (!factors.defined() && rows.scalar_type() == stored) {
    return rows;
  }
  at::Tensor numbers = rows.to(rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (factors.defined()) {
    numbers = (numbers / factors).masked_fill(factors == 0, 0);  // which only rows of zeros have
  }
  if (stored == at::kChar) {
    numbers = numbers.nan_to_num(0).round().clamp(-127, 127);
  } else if (stored == at::kFloat8_e4m3fn) {
    numbers = numbers.clamp(-448, 448);
  }
  return numbers.to(stored);
}

/// The scale of each new row, (T or 1, Hkv or 1, 1).
at::Tensor factors_of(const at::Tensor& scale, const at::Tensor& page, const at::Tensor& row) {
  if (!scale.defined()) {
    return scale;
  }
  return scale.dim() == 4 ? scale.index({page, row}) : scale_of_pages(scale).flatten(0, 1);
}

/// Whether a row is not to be written: its slot is -1.
bool check_slots(const WriteCall& call, const Integers& slots) {
  at::assert_no_internal_overlap(call.key_pages);
  at::assert_no_internal_overlap(call.value_pages);
  const int64_t count = call.key_pages.size(0) * call.key_pages.size(1);
  bool skips = false;
  for (int64_t i = 0; i < call.slot_mapping.size(0); ++i) {
    TORCH_CHECK(slots[i] >= -1 && slots[i] < count, "attn_ext: expected slots below the ", count,
                " of the cache, or -1 for a row that is not written, but got ", slots[i], " at place ", i);
    skips = skips || slots[i] < 0;
  }
  return skips;
}

/// On other devices.
void write_aten(const WriteCall& call) {
  check_write(call);
  const bool skips = check_slots(call, Integers(call.slot_mapping));
  const int64_t page_rows = call.key_pages.size(1);
  const at::Tensor mapping = call.slot_mapping.to(at::kLong);
  const auto written = skips ? (mapping >= 0).nonzero().squeeze(1) : at::Tensor();
  const auto kept = [&](const at::Tensor& rows) { return skips ? rows.index_select(0, written) : rows; };
  const at::Tensor places = kept(mapping);
  const at::Tensor page = places.floor_divide(page_rows), row = places.remainder(page_rows);
  const auto new_rows = [&](const at::Tensor& pages, const at::Tensor& rows, const at::Tensor& scale) {
    return as_stored(kept(rows), factors_of(scale, page, row), pages.scalar_type());
  };
  const at::Tensor key = new_rows(call.key_pages, call.key, call.key_scale);
  const at::Tensor value = new_rows(call.value_pages, call.value, call.value_scale);
  at::Tensor key_pages = call.key_pages, value_pages = call.value_pages;
  key_pages.index_put_({page, row}, key);
  value_pages.index_put_({page, row}, value);
}

/// As factors_of, of the rows that have a slot; 1 for the others.
at::Tensor factors_of_slots(const at::Tensor& scale, const Integers& slots, int64_t count) {
  if (!scale.defined() || scale.dim() != 4) {
    return factors_of(scale, {}, {});
  }
  const int64_t page_rows = scale.size(1), heads = scale.size(2);
  at::Tensor factors = at::empty({count, heads, 1}, scale.options());
  const float* from = scale.const_data_ptr<float>();
  float* to = factors.mutable_data_ptr<float>();
  for (int64_t t = 0; t < count; ++t) {
    const int64_t page = slots[t] / page_rows, row = slots[t] % page_rows;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t place = page * scale.stride(0) + row * scale.stride(1) + h * scale.stride(2);
      *to++ = slots[t] < 0 ? 1.0f : from[place];
    }
  }
  return factors;
}

/// Row by row; `rows` are of the dtype of `pages`, the features of a head side by side.
void copy_rows(const at::Tensor& pages, const at::Tensor& rows, const Integers& slots) noexcept {
  const auto bytes = static_cast<int64_t>(pages.element_size());
  char* to_data = static_cast<char*>(pages.mutable_data_ptr());
  const char* from_data = static_cast<const char*>(rows.const_data_ptr());
  const int64_t page_rows = pages.size(1), heads = pages.size(2), width = pages.size(3) * bytes;
  for (int64_t t = 0; t < rows.size(0); ++t) {
    if (slots[t] < 0) {
      continue;
    }
    const int64_t page = slots[t] / page_rows, row = slots[t] % page_rows;
    char* to = to_data + (page * pages.stride(0) + row * pages.stride(1)) * bytes;
    for (int64_t h = 0; h < heads; ++h) {
      std::memmove(to + h * pages.stride(2) * bytes,
                   from_data + (t * rows.stride(0) + h * rows.stride(1)) * bytes, static_cast<size_t>(width));
    }
  }
}

/// All that may fail comes before the first row is written.
void write_cpu(const WriteCall& call) {
  check_write(call);
  const Integers slots(call.slot_mapping);
  check_slots(call, slots);
  const auto new_rows = [&](const at::Tensor& pages, const at::Tensor& rows, const at::Tensor& scale) {
    const at::Tensor factors = factors_of_slots(scale, slots, rows.size(0));
    const at::Tensor stored = as_stored(rows, factors, pages.scalar_type());
    return stored.stride(2) == 1 || stored.size(2) <= 1 ? stored : stored.contiguous();
  };
  const at::Tensor key = new_rows(call.key_pages, call.key, call.key_scale);
  const at::Tensor value = new_rows(call.value_pages, call.value, call.value_scale);
  for (const at::Tensor& pages : {call.key_pages, call.value_pages}) {
    pages.mutable_data_ptr();  // a lazy clone gets memory of its own
  }
  copy_rows(call.key_pages, key, slots);
  copy_rows(call.value_pages, value, slots);
}

/// Autograd counts who writes to a tensor that others may have saved.
void write_counted(const WriteCall& call) {
  static const auto op = find_op<WriteCall, void>("attn_ext::cache_write_");
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    call_op(op, call.arguments());
  }
  torch::autograd::increment_version(call.key_pages);
  torch::autograd::increment_version(call.value_pages);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, ADInplaceOrView, m) {
  m.impl("cache_write_", TORCH_FN((Unboxed<WriteCall>::kernel<&write_counted>)));
}
TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("cache_write_", TORCH_FN((Unboxed<WriteCall>::kernel<&write_cpu>)));
}
TORCH_LIBRARY_IMPL(attn_ext, Meta, m) {
  m.impl("cache_write_", TORCH_FN((Unboxed<WriteCall>::kernel<&check_write>)));
}
TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  m.impl("cache_write_", TORCH_FN((Unboxed<WriteCall>::kernel<&write_aten>)));
}

}  // namespace attn_ext
