// ForwardTasks: few query rows against many keys. A task lets the rows of all query heads of a group attend
// to one piece of their keys (packed first, unless they are decoded); the pieces' outputs, row maxima and
// sums are merged in order. Included by forward_tasks.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
typename S::Accum* ForwardTasks<S>::split_partial(const ForwardParams& params, const ForwardPlan& plan,
                                                  void* shared, int64_t batch, int64_t head, int64_t piece) {
  const AttentionShape& shape = params.shape;
  const int64_t unit = (batch * shape.query_heads + head) * plan.splits + piece;
  return static_cast<T*>(shared) + unit * shape.query_len * partial_row_size(shape);
}

template <typename S>
void ForwardTasks<S>::run_split(const ForwardParams& params, const ForwardPlan& plan, int64_t task,
                                void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t piece = task % plan.splits;
  const int64_t key_head = task / plan.splits % shape.key_heads;
  const int64_t batch = task / plan.splits / shape.key_heads;
  const int64_t group = group_size(shape);
  const KeyRange keys{piece * plan.split_keys, smaller((piece + 1) * plan.split_keys, shape.key_len)};
  Arena arena{static_cast<char*>(scratch), 0};
  const QueryScratch<S> query = take_query_scratch<S>(arena, shape, plan);
  PackedHead<S> packed{};
  if (plan.path == ForwardPath::kSplit) {
    packed = packed_head(params, plan, arena, batch, key_head, keys.begin);
    pack_keys(params, plan, packed, batch, key_head, keys);
  }
  const int64_t rows = group * shape.query_len;
  const int64_t size = partial_row_size(shape);
  QueryBlock<S> block(params, plan, query, packed, batch);
  for (int64_t first = 0; first < rows; first += plan.block_rows) {
    block.set_rows(key_head * group, first, smaller(plan.block_rows, rows - first));
    block.attend(keys);
    if (!block.output_is_finite()) block.attend_carefully(keys);
    for (int64_t r = 0; r < smaller(plan.block_rows, rows - first); ++r) {
      T* to =
          split_partial(params, plan, shared, batch, query.row_head[r], piece) + query.row_index[r] * size;
      memcpy(to, query.output + r * query.output_stride,
             static_cast<size_t>(query.output_stride) * sizeof(T));
      to[query.output_stride] = query.row_max[r];
      to[query.output_stride + 1] = query.row_sum[r];
    }
  }
}

// m = max m_i,  l = sum 2^(m_i - m) l_i,  O = sum 2^(m_i - m) O_i   over the pieces i, in their order
template <typename S>
void ForwardTasks<S>::merge_split(const ForwardParams& params, const ForwardPlan& plan, int64_t batch,
                                  int64_t head, void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
  Arena arena{static_cast<char*>(scratch), 0};
  const QueryScratch<S> query = take_query_scratch<S>(arena, shape, plan);
  const PackedHead<S> none{};
  const int64_t size = partial_row_size(shape);
  const int64_t width = query.output_stride;
  QueryBlock<S> block(params, plan, query, none, batch);
  for (int64_t first = 0; first < shape.query_len; first += plan.block_rows) {
    const int64_t rows = smaller(plan.block_rows, shape.query_len - first);
    block.set_rows(head, first, rows);
    for (int64_t r = 0; r < rows; ++r) {
      T* output = query.output + r * width;
      Vec<T> top = broadcast(-kInfinity<T>);
      for (int64_t piece = 0; piece < plan.splits; ++piece) {
        const T* from = split_partial(params, plan, shared, batch, head, piece) + (first + r) * size;
        top = maximum(top, broadcast(from[width]));
      }
      const Vec<T> origin = top == -kInfinity<T> ? Vec<T>{} : top;
      Vec<T> sum = {};
      fill_span(output, 0, width, static_cast<T>(0));
      for (int64_t piece = 0; piece < plan.splits; ++piece) {
        const T* from = split_partial(params, plan, shared, batch, head, piece) + (first + r) * size;
        const Vec<T> share = exp2<T>(broadcast(from[width]) - origin);
        sum = multiply_add(share, broadcast(from[width + 1]), sum);
        for (int64_t c = 0; c < width; c += S::kLane) {
          store(output + c, multiply_add(share, load(from + c), load(output + c)));
        }
      }
      query.row_max[r] = top[0];
      query.row_sum[r] = sum[0];
    }
    block.finish();
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
