// KeyQueryBlock: from P and dS of a block to the gradients.
#pragma once

#include "../score_gradients.h"
#include "block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// out (keys, dim) += left (keys, queries) . right (queries, dim), over the runs of live cells of every tile.
template <typename S>
void KeyQueryBlock<S>::add_key_side(const Operand* left, const Operands<Operand>& right, int64_t dim,
                                    T* out) {
  const int64_t width = panel_width_of<S>(dim), out_stride = padded_dim<S>(dim);
  TileArgs<Product> args{};
  args.left_stride = s_.operand_stride;
  args.right_stride = right.row_stride;
  args.out_stride = out_stride;
  for (int64_t column = 0; column < out_stride; column += width) {
    const int64_t columns = round_up(smaller(width, dim - column), kColumnStep<T>);
    const Operand* panel_rows = right.data + column / width * right.panel_stride;
    for (int64_t cell = part_.keys.begin; cell < part_.keys.end; cell += cell_size_) {
      each_live_run(cell, [&](Range queries) {
        for (int64_t tile = cell; tile < cell + cell_rows(cell); tile += S::kTileRows) {
          const Range run = intersect(tile_span_[tile / S::kTileRows], queries);
          if (is_empty(run)) continue;
          const int64_t begin = run.begin / S::kDepth;
          args.depth = depth_of<Product>(run.end) - begin;
          args.left = left + tile * s_.operand_stride + begin;
          args.right = panel_rows + begin * right.row_stride;
          args.out = out + tile * out_stride + column;
          tile_function<Product, true>(tile_rows(tile), columns)(args);
        }
      });
    }
  }
}

// dQ^T (D, queries) += K^T (D, keys) . dS^T (keys, queries), over the runs of live cells of every panel.
template <typename S>
void KeyQueryBlock<S>::add_grad_query() {
  const int64_t dim = params_.shape.head_dim;
  const Operands<Operand>& left = *keys_.key_depth;
  const int64_t block_depth = depth_of<Product>(plan_.block_keys);
  for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
    const int64_t width = panel_width(panel);
    for (int64_t cell = part_.keys.begin; cell < part_.keys.end;) {
      int64_t end = cell;
      while (end < part_.keys.end && live(end, panel)) end += cell_size_;
      const Range run{cell / S::kDepth, depth_of<Product>(smaller(end, key_count_))};
      cell = end + cell_size_;
      if (is_empty(run)) continue;
      TileArgs<Product> args{};
      args.depth = run.end - run.begin;
      args.left_stride = Product::kInRegisters ? 1 : left.row_stride;
      args.left_step = Product::kInRegisters ? left.row_stride : 1;
      args.right_stride = S::kPaired ? S::kPanel : s_.operand_stride;
      args.right = S::kPaired ? s_.grads_right + (panel / S::kPanel * block_depth + run.begin) * S::kPanel
                              : s_.grads_left + run.begin * s_.operand_stride + panel;
      args.out_stride = width;
      for (int64_t d = 0; d < dim; d += S::kTileRows) {
        args.left = left.data + run.begin * args.left_step + d * args.left_stride;
        args.out = queries_.grad_query + panel * dim + d * width;
        tile_function<Product, true>(smaller(S::kTileRows, dim - d), width)(args);
      }
    }
  }
}

// What the queries' NaN and Inf, or those of their dO, give to the keys that they see.
template <typename S>
void KeyQueryBlock<S>::add_bad_rows(const TensorView& view, int64_t dim, const Operand* left, T* out) const {
  const int64_t key = part_.keys.begin, query = part_.queries.begin;
  const int64_t queries = smaller(part_.queries.end, query_count_) - query;
  add_nonfinite(
      rows_of<Element>(view, batch_, head_, query_first_ + query, queries, dim), part_.keys.end - key,
      [&](int64_t j, int64_t i) { return is_seen(key + j, query + i); },
      [&](int64_t j, int64_t i) { return operand_at(left, key + j, query + i); },
      [&](int64_t j, int64_t c, Vec<T> sum, int64_t count) {
        add_row(out + (key + j) * padded_dim<S>(dim) + c, 1, sum, count);
      });
}

// What the keys' NaN and Inf, which key_depth leaves out, give to the queries that see them.
template <typename S>
void KeyQueryBlock<S>::add_bad_keys() const {
  const int64_t dim = params_.shape.head_dim;
  const int64_t key = part_.keys.begin, query = part_.queries.begin;
  add_nonfinite(
      rows_of<Element>(params_.key, batch_, key_head_, key_first_ + key, part_.keys.end - key, dim),
      smaller(part_.queries.end, query_count_) - query,
      [&](int64_t i, int64_t j) { return is_seen(key + j, query + i); },
      [&](int64_t i, int64_t j) { return operand_at(s_.grads_left, key + j, query + i); },
      [&](int64_t i, int64_t c, Vec<T> sum, int64_t count) {
        const int64_t panel = round_down(query + i, S::kPanel);
        add_row(queries_.grad_query + panel * dim + c * panel_width(panel) + query + i - panel,
                panel_width(panel), sum, count);
      });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
