// KeyQueryBlock: from P and dS of a block to the gradients.
#pragma once

#include "../score_gradients.h"
#include "block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// to (keys, dim) += left (keys, queries) . right (queries, dim), over the runs of live cells of every tile.
template <typename S>
void KeyQueryBlock<S>::add_key_side(const KeySide& side, Range keys, T* to, bool fresh) {
  const int64_t width = panel_width_of<S>(side.dim), out_stride = padded_dim<S>(side.dim);
  TileArgs<Product> args{};
  args.left_stride = s_.operand_stride;
  args.right_stride = side.right.row_stride;
  args.out_stride = out_stride;
  for (int64_t column = 0; column < out_stride; column += width) {
    const int64_t columns = round_up(smaller(width, side.dim - column), kColumnStep<T>);
    const Operand* panel_rows = side.right.data + column / width * side.right.panel_stride;
    const auto clear = [&](int64_t first, int64_t end) {
      for (int64_t r = first; r < end; ++r) {
        T* row = to + (r - keys.begin) * out_stride + column;
        fill_span(row, 0, smaller(width, out_stride - column), static_cast<T>(0));
      }
    };
    for (int64_t cell = keys.begin; cell < keys.end; cell += cell_size_) {
      const int64_t cell_end = cell + cell_rows(cell);
      bool begins = fresh;
      each_live_run(cell, [&](Range queries) {
        for (int64_t tile = cell, rows = 0; tile < cell_end; tile += rows) {
          rows = tile_rows(tile, cell_end, columns);
          const Range run = intersect(tile_span_[tile / S::kTileRows], queries);
          if (is_empty(run)) {
            if (begins) clear(tile, tile + rows);
            continue;
          }
          const int64_t begin = run.begin / S::kDepth;
          args.depth = depth_of<Product>(run.end) - begin;
          args.left = side.left + tile * s_.operand_stride + begin;
          args.right = panel_rows + begin * side.right.row_stride;
          args.out = to + (tile - keys.begin) * out_stride + column;
          begins ? tile_function<Product, false>(rows, columns)(args)
                 : tile_function<Product, true>(rows, columns)(args);
        }
        begins = false;
      });
      if (begins) clear(cell, cell_end);
    }
  }
  if (side.has_bad_rows) add_bad_rows(side, keys, to);
}

// Of a run of keys those from the first tile that some of the queries see to the last one, in whole steps
// along the depth.
template <typename S>
Range KeyQueryBlock<S>::seen_keys(Range keys, Range queries) const {
  const auto sees = [&](int64_t tile) {
    return !is_empty(intersect(tile_span_[tile / S::kTileRows], queries));
  };
  while (keys.begin < keys.end && !sees(keys.begin)) keys.begin += S::kTileRows;
  int64_t tile = round_down(keys.end - 1, S::kTileRows);
  for (; keys.begin < keys.end && !sees(tile); tile -= S::kTileRows) keys.end = tile;
  return {round_down(keys.begin, S::kDepth * S::kDepthStep), keys.end};
}

// Columns of a panel that one product of dQ takes: all, or the narrowest that run at full speed where these
// do not see the same keys.
template <typename S>
int64_t KeyQueryBlock<S>::even_columns(int64_t panel) {
  const int64_t width = panel_width(panel);
  if constexpr (!Product::kInRegisters || kTallTileVectors == 0) return width;
  constexpr int64_t kStep = larger(1, kTallTileVectors) * S::kLane;
  bool even = true;
  each_live_key_run(panel, [&](Range keys) {
    const Range first = seen_keys(keys, {panel, panel + kStep});
    for (int64_t i = kStep; i < width; i += kStep) {
      const Range other = seen_keys(keys, {panel + i, panel + smaller(i + kStep, width)});
      even &= other.begin == first.begin && other.end == first.end;
    }
  });
  return even ? width : kStep;
}

// dQ^T (D, queries) += K^T (D, keys) . dS^T (keys, queries), over the runs of live cells of every panel.
template <typename S>
void KeyQueryBlock<S>::add_grad_query(bool fresh) {
  const int64_t dim = params_.shape.head_dim;
  for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
    const int64_t width = panel_width(panel), step = even_columns(panel);
    for (int64_t column = 0; column < width; column += step) {
      const int64_t columns = smaller(step, width - column);
      bool begins = fresh;
      each_live_key_run(panel, [&](Range live_keys) {
        const Range keys = seen_keys(live_keys, {panel + column, panel + column + columns});
        if (is_empty(keys)) return;
        add_grad_query(panel, {column, column + columns}, keys, begins);
        begins = false;
      });
      T* sums = queries_.grad_query + panel * dim;
      for (int64_t d = 0; begins && d < dim; ++d) {
        fill_span(sums + d * width, column, column + columns, static_cast<T>(0));
      }
    }
  }
}

// columns: of the panel.
template <typename S>
void KeyQueryBlock<S>::add_grad_query(int64_t panel, Range columns, Range keys, bool fresh) {
  const Operands<Operand>& left = *keys_.key_depth;
  const int64_t dim = params_.shape.head_dim;
  const int64_t first = keys.begin / S::kDepth, width = columns.end - columns.begin;
  TileArgs<Product> args{};
  args.depth = depth_of<Product>(keys.end) - first;
  args.left_stride = Product::kInRegisters ? 1 : left.row_stride;
  args.left_step = Product::kInRegisters ? left.row_stride : 1;
  args.right_stride = S::kPaired ? S::kPanel : s_.operand_stride;
  args.right = S::kPaired ? grads_right_at(panel, keys.begin, columns.begin)
                          : s_.grads_left + first * s_.operand_stride + panel + columns.begin;
  args.out_stride = panel_width(panel);
  const int64_t height = tile_height<Product>(width);
  for (int64_t d = 0, rows = 0; d < dim; d += rows) {
    rows = dim - d >= height ? height : smaller(S::kTileRows, dim - d);
    args.left = left.data + first * args.left_step + d * args.left_stride;
    args.out = queries_.grad_query + panel * dim + d * args.out_stride + columns.begin;
    fresh ? tile_function<Product, false>(rows, width)(args)
          : tile_function<Product, true>(rows, width)(args);
  }
}

// What the queries' NaN and Inf, or those of their dO, give to the keys that they see.
template <typename S>
void KeyQueryBlock<S>::add_bad_rows(const KeySide& side, Range keys, T* to) const {
  const int64_t key = keys.begin, query = part_.queries.begin;
  const int64_t queries = smaller(part_.queries.end, query_count_) - query;
  add_nonfinite(
      rows_of<Element>(side.rows, batch_, head_, query_first_ + query, queries, side.dim), keys.end - key,
      [&](int64_t j, int64_t i) { return is_seen(key + j, query + i); },
      [&](int64_t j, int64_t i) { return operand_at(side.left, key + j, query + i); },
      [&](int64_t j, int64_t c, Vec<T> sum, int64_t count) {
        add_row(to + j * padded_dim<S>(side.dim) + c, 1, sum, count);
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
