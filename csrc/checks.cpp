#include "checks.h"

#include "sequences.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace attn_ext {

namespace {

constexpr int64_t kDropoutColumns = 64;  // that are drawn together

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

/// Bytes from the start of the storage to the end of the last element.
int64_t bytes_reached(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = tensor.storage_offset();
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    last += (sizes[dim] - 1) * strides[dim];
  }
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

/// False only for a tensor with elements and memory of its own that holds fewer of them: its storage was
/// freed, as by `untyped_storage().resize_(0)`. Meta tensors, zero tensors of autograd and wrappers have
/// none.
bool storage_holds(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::Storage& storage = impl->unsafe_storage();
  if (!storage || storage.device_type() == c10::DeviceType::Meta || impl->has_symbolic_sizes_strides() ||
      tensor._is_zerotensor() || tensor.numel() == 0) {
    return true;
  }
  const std::optional<int64_t> held = storage.sym_nbytes().maybe_as_int();
  return !held.has_value() || *held >= bytes_reached(tensor);
}

void check_tensor(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), "attn_ext: expected ", name,
              " to be a dense (strided) tensor, but got layout ", tensor.layout(),
              tensor.is_nested() ? " of a nested tensor" : "");
  TORCH_CHECK(tensor.device() == query.device(), "attn_ext: expected ", name,
              " on the same device as query (", query.device(), "), but got ", tensor.device());
  check_storage(tensor, name);
}

void check_attention_operand(const at::Tensor& tensor, const char* name, const char* shape,
                             const at::Tensor& query) {
  TORCH_CHECK(tensor.defined(), "attn_ext: expected ", name, " to be a tensor, but got None");
  check_tensor(tensor, name, query);
  TORCH_CHECK(tensor.dim() >= 2, "attn_ext: expected ", name, " to have at least 2 dimensions ", shape,
              ", but got shape ", tensor.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == query.scalar_type(), "attn_ext: expected ", name,
              " to have the same dtype as query (", query.scalar_type(), "), but got ", tensor.scalar_type());
}

c10::SymInt heads_of(const at::Tensor& tensor) {
  return tensor.dim() >= 3 ? tensor.sym_size(-3) : 1;
}

/// The size of batch dim `from_heads` places before the head dim; 1 where the tensor has no such dim.
c10::SymInt batch_size(const at::Tensor& tensor, int64_t from_heads) {
  const int64_t dim = tensor.dim() - 3 - from_heads;
  return dim >= 0 ? tensor.sym_size(dim) : 1;
}

bool broadcasts(const c10::SymInt& size, const c10::SymInt& to) {
  return size == 1 || size == to;
}

void check_batch_dims(const SdpaArgs& args, SdpaSizes& sizes) {
  const int64_t batch_dims =
      std::max({args.query.dim(), args.key.dim(), args.value.dim(), static_cast<int64_t>(3)}) - 3;
  for (int64_t from_heads = batch_dims; from_heads >= 1; --from_heads) {
    c10::SymInt size = batch_size(args.query, from_heads);
    for (const at::Tensor* tensor : {&args.key, &args.value}) {
      const c10::SymInt other = batch_size(*tensor, from_heads);
      if (size == 1) {
        size = other;
      }
      TORCH_CHECK(
          broadcasts(other, size),
          "attn_ext: expected the batch dimensions of query, key and value to broadcast, but got shapes ",
          args.query.sym_sizes(), ", ", args.key.sym_sizes(), " and ", args.value.sym_sizes());
    }
    sizes.batch.push_back(std::move(size));
  }
}

void check_grouped_heads(const SdpaArgs& args, SdpaSizes& sizes) {
  const auto query_heads = heads_of(args.query), key_heads = heads_of(args.key);
  TORCH_CHECK(
      args.query.dim() >= 3 && args.key.dim() >= 3 && args.value.dim() >= 3,
      "attn_ext: expected query, key and value to have a head dimension (..., heads, length, dim) with "
      "enable_gqa=True, but got shapes ",
      args.query.sym_sizes(), ", ", args.key.sym_sizes(), " and ", args.value.sym_sizes());
  TORCH_CHECK(key_heads == heads_of(args.value), "attn_ext: expected value to have as many heads as key (",
              key_heads, "), but got ", heads_of(args.value));
  TORCH_CHECK(
      key_heads > 0 && query_heads % key_heads == 0,
      "attn_ext: expected the heads of query to be a multiple of the heads of key with enable_gqa=True, "
      "but got ",
      query_heads, " and ", key_heads);
  sizes.heads = query_heads;
  sizes.key_heads = key_heads;
}

void check_heads(const SdpaArgs& args, SdpaSizes& sizes) {
  if (args.enable_gqa) {
    return check_grouped_heads(args, sizes);
  }
  c10::SymInt heads = heads_of(args.query);
  for (const at::Tensor* tensor : {&args.key, &args.value}) {
    const char* name = tensor == &args.key ? "key" : "value";
    const c10::SymInt other = heads_of(*tensor);
    if (heads == 1) {
      heads = other;
    }
    if (broadcasts(other, heads)) {
      continue;
    }
    const bool groups = other > 0 && heads % other == 0;
    TORCH_CHECK(false, "attn_ext: expected ", name, " to have as many heads as query (", heads,
                "), or 1, but got ", other,
                groups ? ": pass enable_gqa=True if groups of query heads share a key head" : "");
  }
  sizes.heads = heads;
  sizes.key_heads = heads;
}

void check_shapes(const SdpaArgs& args, SdpaSizes& sizes) {
  sizes.query_len = args.query.sym_size(-2);
  sizes.head_dim = args.query.sym_size(-1);
  sizes.key_len = args.key.sym_size(-2);
  sizes.value_dim = args.value.sym_size(-1);
  sizes.has_heads = args.query.dim() >= 3 || args.key.dim() >= 3 || args.value.dim() >= 3;
  TORCH_CHECK(args.key.sym_size(-1) == sizes.head_dim,
              "attn_ext: expected key to have the head dim of query (", sizes.head_dim, "), but got ",
              args.key.sym_size(-1));
  TORCH_CHECK(args.value.sym_size(-2) == sizes.key_len,
              "attn_ext: expected value to have the length of key (", sizes.key_len, "), but got ",
              args.value.sym_size(-2));
  check_heads(args, sizes);
  check_batch_dims(args, sizes);
}

void check_mask(const at::Tensor& mask, const at::Tensor& query, const SdpaSizes& sizes) {
  check_tensor(mask, "attn_mask", query);
  const auto dtype = mask.scalar_type();
  TORCH_CHECK(
      dtype == at::kBool || dtype == query.scalar_type() || dtype == at::kFloat,
      "attn_ext: expected attn_mask to be of dtype Bool (True = takes part), Float or that of query (",
      query.scalar_type(), "), but got ", dtype);
  const SymDimVector weights = sizes.with_tail({sizes.query_len, sizes.key_len});
  bool fits = static_cast<size_t>(mask.dim()) <= weights.size();
  for (int64_t dim = 1; fits && dim <= mask.dim(); ++dim) {
    fits = broadcasts(mask.sym_size(-dim), weights[weights.size() - dim]);
  }
  TORCH_CHECK(fits,
              "attn_ext: expected attn_mask to broadcast to (batch..., heads, query length, key length) = ",
              c10::SymIntArrayRef(weights), ", but got shape ", mask.sym_sizes());
}

void check_sinks(const at::Tensor& sinks, const at::Tensor& query, const SdpaSizes& sizes) {
  check_tensor(sinks, "sinks", query);
  const auto dtype = sinks.scalar_type();
  TORCH_CHECK(dtype == query.scalar_type() || dtype == at::kFloat,
              "attn_ext: expected sinks to have dtype Float or that of query (", query.scalar_type(),
              "), but got ", dtype);
  bool fits = sinks.dim() >= 1 && sinks.dim() <= static_cast<int64_t>(sizes.batch.size()) + 1 &&
              sinks.sym_size(-1) == sizes.heads;
  for (int64_t dim = 2; fits && dim <= sinks.dim(); ++dim) {
    fits = broadcasts(sinks.sym_size(-dim), sizes.batch[sizes.batch.size() + 1 - dim]);
  }
  TORCH_CHECK(fits, "attn_ext: expected sinks to have shape (heads,) = [", sizes.heads, "], but got shape ",
              sinks.sym_sizes());
}

void check_sequences(const SdpaArgs& args) {
  const at::Tensor& table = args.sequences;
  TORCH_CHECK(table.scalar_type() == at::kLong && table.dim() == 2 && table.sym_size(1) == kSequenceFields,
              "attn_ext: expected sequences of dtype Long and shape (sequences, ", kSequenceFields,
              "), but got dtype ", table.scalar_type(), " and shape ", table.sym_sizes());
  check_tensor(table, "sequences", args.query);
  TORCH_CHECK(!args.attn_mask.defined(), "attn_ext: expected no attn_mask with packed sequences");
}

void check_seed(const SdpaArgs& args, const SdpaSizes& sizes, Seed expected) {
  if (!args.dropout_seed.defined()) {
    TORCH_CHECK(args.dropout_p == 0.0 || expected == Seed::kNotYetDrawn,
                "attn_ext: expected a dropout_seed with dropout_p > 0, but got None");
    return;
  }
  const at::Tensor& seed = args.dropout_seed;
  check_tensor(seed, "dropout_seed", args.query);
  bool fits = seed.scalar_type() == at::kLong && seed.dim() <= static_cast<int64_t>(sizes.batch.size());
  for (int64_t dim = 0; fits && dim < seed.dim(); ++dim) {
    fits = broadcasts(seed.sym_size(dim), sizes.batch[dim]);
  }
  TORCH_CHECK(fits, "attn_ext: expected dropout_seed of dtype Long with the leading batch dimensions ",
              c10::SymIntArrayRef(sizes.batch), " or 1, but got dtype ", seed.scalar_type(), " and shape ",
              seed.sym_sizes());
}

/// The counters of the draws have 32 bits, and a column is one of 64 that are drawn together.
void check_origin(const std::vector<c10::SymInt>& origin) {
  constexpr int64_t kMost = int64_t{1} << 31;
  TORCH_CHECK(origin.size() == Origin().size(),
              "attn_ext: expected dropout_origin to be (batch, head, row, column), but got ", origin.size(),
              " numbers");
  for (const c10::SymInt& place : origin) {
    TORCH_CHECK(place >= 0 && place <= kMost,
                "attn_ext: expected dropout_origin between 0 and 2^31, but got ", place);
  }
  TORCH_CHECK(origin.back() % kDropoutColumns == 0,
              "attn_ext: expected the column of dropout_origin to be a multiple of ", kDropoutColumns,
              ", but got ", origin.back());
}

void check_scalars(const SdpaArgs& args) {
  TORCH_CHECK(args.dropout_p >= 0.0 && args.dropout_p <= 1.0,  // NaN fails too
              "attn_ext: expected dropout_p between 0 and 1, but got ", args.dropout_p);
  TORCH_CHECK(std::isfinite(args.softcap) && args.softcap >= 0.0,
              "attn_ext: expected softcap to be finite and at least 0 (0 = none), but got ", args.softcap);
  TORCH_CHECK(!args.scale.has_value() || std::isfinite(*args.scale),
              "attn_ext: expected scale to be finite, or None for 1/sqrt(head dim), but got ",
              args.scale.value_or(0.0));
  TORCH_CHECK(!args.window_left.has_value() || *args.window_left >= 0,
              "attn_ext: expected window_left to be at least 0, or None for an open window, but got ",
              *args.window_left);
  TORCH_CHECK(!args.window_right.has_value() || *args.window_right >= 0,
              "attn_ext: expected window_right to be at least 0, or None for an open window, but got ",
              *args.window_right);
  if (args.dropout_origin.has_value()) {
    check_origin(*args.dropout_origin);
  }
}

/// What a forward pass gives, or the gradient of that.
void check_like_output(const at::Tensor& tensor, const char* name, const SymDimVector& shape,
                       at::ScalarType dtype, const at::Tensor& query) {
  check_tensor(tensor, name, query);
  TORCH_CHECK(tensor.scalar_type() == dtype, "attn_ext: expected ", name, " of dtype ", dtype,
              " where query is of ", query.scalar_type(), ", but got ", tensor.scalar_type());
  TORCH_CHECK(tensor.sym_sizes() == c10::SymIntArrayRef(shape), "attn_ext: expected ", name,
              " to have shape ", c10::SymIntArrayRef(shape), ", but got ", tensor.sym_sizes());
}

void check_wanted(const SdpaArgs& args, InputMask wanted) {
  TORCH_CHECK(!wanted.attn_mask || (args.attn_mask.defined() && args.attn_mask.is_floating_point()),
              "attn_ext: expected output_mask to ask for a gradient of attn_mask only where that is a "
              "floating tensor, but got ",
              args.attn_mask.defined() ? "a bool mask" : "None");
  TORCH_CHECK(!wanted.sinks || args.sinks.defined(),
              "attn_ext: expected output_mask to ask for a gradient of sinks only where there are sinks, "
              "but got None");
}

}  // namespace

void check_storage(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(storage_holds(tensor), "attn_ext: expected the storage of ", name,
              " to hold all of its elements of shape ", tensor.sym_sizes(), " (", bytes_reached(tensor),
              " bytes), but got ", tensor.storage().nbytes(), " bytes: was its memory freed?");
}

SymDimVector SdpaSizes::with_tail(std::initializer_list<c10::SymInt> tail) const {
  SymDimVector shape(batch.begin(), batch.end());
  if (has_heads) {
    shape.push_back(heads);
  }
  shape.append(tail.begin(), tail.end());
  return shape;
}

SdpaSizes check_args(const SdpaArgs& args, Seed seed) {
  TORCH_CHECK(is_supported(args.query.scalar_type()),
              "attn_ext: expected query of dtype Float, Double, BFloat16 or Half, but got ",
              args.query.scalar_type());
  check_attention_operand(args.query, "query", "(..., heads, query length, head dim)", args.query);
  check_attention_operand(args.key, "key", "(..., heads, key length, head dim)", args.query);
  check_attention_operand(args.value, "value", "(..., heads, key length, value dim)", args.query);
  check_scalars(args);
  SdpaSizes sizes;
  check_shapes(args, sizes);
  if (args.attn_mask.defined()) {
    check_mask(args.attn_mask, args.query, sizes);
  }
  if (args.sinks.defined()) {
    check_sinks(args.sinks, args.query, sizes);
  }
  check_seed(args, sizes, seed);
  if (args.sequences.defined()) {
    check_sequences(args);
  }
  return sizes;
}

void check_packed(const SdpaArgs& args, SideOutputs wanted) {
  TORCH_CHECK(!args.sequences.defined() || !(wanted.weights || wanted.key_mass),
              "attn_ext: expected neither weights nor key mass of packed sequences");
}

void check_grads(const SdpaOutputs& grads, const at::Tensor& query, const SdpaSizes& sizes) {
  const auto dtype = query.scalar_type();
  const auto check = [&](const at::Tensor& grad, const char* name, at::ScalarType grad_dtype,
                         std::initializer_list<c10::SymInt> tail) {
    if (grad.defined()) {
      check_like_output(grad, name, sizes.with_tail(tail), grad_dtype, query);
    }
  };
  check(grads.output, "grad_output", dtype, {sizes.query_len, sizes.value_dim});
  check(grads.lse, "grad_lse", accumulation_dtype(dtype), {sizes.query_len});
  check(grads.weights, "grad_weights", dtype, {sizes.query_len, sizes.key_len});
  check(grads.key_mass, "grad_key_mass", dtype, {sizes.key_len});
}

SdpaSizes check_backward(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted) {
  const SdpaSizes sizes = check_args(args);
  const auto dtype = args.query.scalar_type(), accumulated = accumulation_dtype(dtype);
  const SymDimVector rows = sizes.with_tail({sizes.query_len});
  if (saved.delta.defined()) {
    check_like_output(saved.delta, "delta", rows, accumulated, args.query);
  } else {
    TORCH_CHECK(saved.output.defined(), "attn_ext: expected output without a delta, but got None");
    check_like_output(saved.output, "output", sizes.with_tail({sizes.query_len, sizes.value_dim}), dtype,
                      args.query);
  }
  // That of all keys, merged of unrounded calls', is float64.
  const bool is_double =
      saved.delta.defined() && saved.lse.defined() && saved.lse.scalar_type() == at::kDouble;
  check_like_output(saved.lse, "lse", rows, is_double ? at::kDouble : accumulated, args.query);
  if (saved.has_draws()) {
    TORCH_CHECK(
        args.dropout_p > 0.0 && !saved.delta.defined() && !args.sequences.defined() &&
            saved.weights.dim() == 1 && saved.weights.is_contiguous() &&
            saved.weights.device() == args.query.device(),
        "attn_ext: expected draws as _sdpa_forward_saving_draws gives them, with dropout and with neither "
        "a delta nor packed sequences");
  } else if (saved.weights.defined()) {
    check_like_output(saved.weights, "weights", sizes.with_tail({sizes.query_len, sizes.key_len}), dtype,
                      args.query);
    TORCH_CHECK(args.dropout_p == 0.0 && !saved.delta.defined() && !args.sequences.defined(),
                "attn_ext: expected weights with neither dropout nor a delta nor packed sequences");
  }
  check_grads(grads, args.query, sizes);
  check_wanted(args, wanted);
  return sizes;
}

double scale_of(const SdpaArgs& args, int64_t head_dim) {
  return args.scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(head_dim, 1))));
}

double softcap_of(const SdpaArgs& args) {
  const double largest = args.query.scalar_type() == at::kDouble ? 1e290 : 1e30;
  return args.softcap == 0.0 ? 0.0 : std::clamp(args.softcap, 1.0 / largest, largest);
}

int64_t clamp_distance(const c10::SymInt& distance) {
  return std::clamp(distance.guard_int(__FILE__, __LINE__), -kFar, kFar);
}

at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::ScalarType output_dtype(const SdpaArgs& args) {
  const auto dtype = args.query.scalar_type();
  return args.unrounded ? accumulation_dtype(dtype) : dtype;
}

at::ScalarType lse_dtype(const SdpaArgs& args) {
  return args.unrounded ? at::kDouble : accumulation_dtype(args.query.scalar_type());
}

at::ScalarType gradient_dtype(const SdpaArgs& args, const at::Tensor& input) {
  return args.unrounded ? accumulation_dtype(args.query.scalar_type()) : input.scalar_type();
}

Origin origin_of(const SdpaArgs& args) {
  Origin origin{};
  for (size_t i = 0; args.dropout_origin.has_value() && i < origin.size(); ++i) {
    origin[i] = (*args.dropout_origin)[i].guard_int(__FILE__, __LINE__);
  }
  return origin;
}

}  // namespace attn_ext
