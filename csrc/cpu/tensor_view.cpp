#include "tensor_view.h"

namespace attn_ext::cpu {

namespace {

int64_t number(const c10::SymInt& size) {
  return size.guard_int(__FILE__, __LINE__);
}

/// The stride of the dim `from_end` places before the end (1 = last); 0 where it is missing or broadcast.
int64_t stride_from_end(const at::Tensor& tensor, int64_t from_end) {
  const int64_t dim = tensor.dim() - from_end;
  return dim >= 0 && tensor.size(dim) != 1 ? tensor.stride(dim) : 0;
}

/// To read from. Asking for memory to write to would make a tensor that shares its memory until one of the
/// two is written to (copy on write) copy it.
void* readable_data(const at::Tensor& tensor) {
  return const_cast<void*>(tensor.const_data_ptr());
}

}  // namespace

ScalarKind kind_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ScalarKind::kFloat64;
    case at::kFloat:
      return ScalarKind::kFloat32;
    case at::kBFloat16:
      return ScalarKind::kBFloat16;
    case at::kHalf:
      return ScalarKind::kFloat16;
    case at::kBool:
      return ScalarKind::kBool;
    default:
      TORCH_INTERNAL_ASSERT(false, "dtype ", dtype, " has passed the checks");
  }
}

CallSizes::CallSizes(const SdpaSizes& sizes)
    : batch(1),
      heads(number(sizes.heads)),
      key_heads(number(sizes.key_heads)),
      query_len(number(sizes.query_len)),
      key_len(number(sizes.key_len)),
      head_dim(number(sizes.head_dim)),
      value_dim(number(sizes.value_dim)),
      has_heads(sizes.has_heads) {
  for (const c10::SymInt& size : sizes.batch) {
    batch_dims.push_back(number(size));
    batch *= batch_dims.back();
  }
}

c10::SmallVector<int64_t, 8> CallSizes::output_shape(std::initializer_list<int64_t> tail) const {
  c10::SmallVector<int64_t, 8> shape(batch_dims.begin(), batch_dims.end());
  if (has_heads) {
    shape.push_back(heads);
  }
  shape.append(tail.begin(), tail.end());
  return shape;
}

TensorView Views::matrix(const at::Tensor& tensor) {
  TensorView view;
  view.data = readable_data(tensor);
  view.column_stride = stride_from_end(tensor, 1);
  view.row_stride = stride_from_end(tensor, 2);
  view.head_stride = stride_from_end(tensor, 3);
  set_batch(view, tensor, 3);
  return view;
}

TensorView Views::writable(const at::Tensor& tensor) {
  TensorView view = matrix(tensor);
  view.data = tensor.mutable_data_ptr();
  return view;
}

TensorView Views::per_head(const at::Tensor& tensor) {
  TensorView view;
  view.data = readable_data(tensor);
  view.head_stride = stride_from_end(tensor, 1);
  set_batch(view, tensor, 1);
  return view;
}

void Views::set_batch(TensorView& view, const at::Tensor& tensor, int64_t tail) {
  // From the innermost batch dim outwards: do all of them collapse into one stride?
  bool collapses = true;
  int64_t inner = 1;  // flat index that one step of the dim stands for
  const auto dims = static_cast<int64_t>(sizes_.batch_dims.size());
  const auto stride_of = [&](int64_t dim) { return stride_from_end(tensor, tail + dims - dim); };
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    const int64_t size = sizes_.batch_dims[static_cast<size_t>(dim)];
    if (size == 1) {
      continue;
    }
    if (inner == 1) {
      view.batch_stride = stride_of(dim);
    }
    collapses = collapses && stride_of(dim) == view.batch_stride * inner;
    inner *= size;
  }
  if (collapses) {
    return;
  }
  std::vector<int64_t>& table = tables_.emplace_back(static_cast<size_t>(sizes_.batch));
  for (int64_t flat = 0; flat < sizes_.batch; ++flat) {
    int64_t rest = flat, offset = 0;
    for (int64_t dim = dims - 1; dim >= 0; --dim) {
      const int64_t size = sizes_.batch_dims[static_cast<size_t>(dim)];
      offset += rest % size * stride_of(dim);
      rest /= size;
    }
    table[static_cast<size_t>(flat)] = offset;
  }
  view.batch_offsets = table.data();
}

}  // namespace attn_ext::cpu
