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

// Behind the partial rows: the weights (query rows, keys) of a head, each piece relative to its own row max.
template <typename S>
typename S::Accum* ForwardTasks<S>::split_weights(const ForwardParams& params, const ForwardPlan& plan,
                                                  void* shared, int64_t batch, int64_t head) {
  const AttentionShape& shape = params.shape;
  T* weights = split_partial(params, plan, shared, shape.batch, 0, 0);
  return weights + (batch * shape.query_heads + head) * shape.query_len * padded_key_len(shape);
}

template <typename S>
void ForwardTasks<S>::run_split(const ForwardParams& params, const ForwardPlan& plan, int64_t task,
                                void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t tasks = ceil_div(plan.splits, plan.task_splits);
  const int64_t key_head = task / tasks % shape.key_heads;
  const int64_t batch = task / tasks / shape.key_heads;
  const int64_t first = task % tasks * plan.task_splits;
  for (int64_t piece = first; piece < smaller(first + plan.task_splits, plan.splits); ++piece) {
    run_piece(params, plan, batch, key_head, piece, shared, scratch);
  }
}

template <typename S>
void ForwardTasks<S>::run_piece(const ForwardParams& params, const ForwardPlan& plan, int64_t batch,
                                int64_t key_head, int64_t piece, void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
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
  if (has_weights(params)) {
    block.set_kept_weights(split_weights(params, plan, shared, 0, 0), padded_key_len(shape));
  }
  for (int64_t first = 0; first < rows; first += plan.block_rows) {
    block.set_rows(key_head * group, first, smaller(plan.block_rows, rows - first));
    block.attend(keys);
    if (!block.output_is_finite()) block.attend_carefully(keys);
    if (plan.finish_tasks == 0) {  // the piece is all there is
      block.finish();
      continue;
    }
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

// weights = factor 2^(m_i - m) P_i of one row, key mass += weights
template <typename S>
void ForwardTasks<S>::merge_weights(const ForwardParams& params, const ForwardPlan& plan,
                                    const QueryScratch<S>& query, int64_t batch, int64_t row, void* shared) {
  const AttentionShape& shape = params.shape;
  const int64_t head = query.row_head[row], index = query.row_index[row];
  const T* kept = split_weights(params, plan, shared, batch, head) + index * padded_key_len(shape);
  Element* weights =
      params.weights.data == nullptr ? nullptr : row_pointer<Element>(params.weights, batch, head, index);
  T* mass = params.key_mass == nullptr
                ? nullptr
                : static_cast<T*>(params.key_mass) + (batch * shape.query_heads + head) * shape.key_len;
  const T top = query.row_max[row];
  const T origin = top == -kInfinity<T> ? 0 : top;
  for (int64_t piece = 0; piece < plan.splits; ++piece) {
    const T* part = split_partial(params, plan, shared, batch, head, piece) + index * partial_row_size(shape);
    const Vec<T> share = exp2<T>(broadcast(part[query.output_stride] - origin));
    const Vec<T> factor = broadcast(query.factor[row]) * share;
    const int64_t end = smaller((piece + 1) * plan.split_keys, shape.key_len);
    for (int64_t j = piece * plan.split_keys; j < end; j += S::kLane) {
      const int64_t count = smaller(S::kLane, end - j);
      const Vec<T> p = load(kept + j);
      const Vec<T> w = p == Vec<T>{} ? p : p * factor;  // the factor of a row with a visible NaN is NaN
      if (weights != nullptr) {
        count == S::kLane ? store_element(weights + j, w) : store_element_partial(weights + j, w, count);
      }
      if (mass != nullptr) store_partial(mass + j, load_partial(mass + j, count) + w, count);
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
  if (params.key_mass != nullptr) {
    T* mass = static_cast<T*>(params.key_mass) + (batch * shape.query_heads + head) * shape.key_len;
    fill_span(mass, 0, shape.key_len, static_cast<T>(0));
  }
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
    for (int64_t r = 0; r < rows && has_weights(params); ++r) {
      merge_weights(params, plan, query, batch, r, shared);
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
