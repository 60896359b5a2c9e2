// The gradients of key and value; after tile.cu. Keys are held and rows pass by, of one head of a group after
// the other, so that each number is summed by one thread, in one order. P and dS, which grad_query.cu makes
// as well, are made again and not stored.
//
//   dK = scale sum_h dS^T Q       dV = sum_h (P dropout)^T dO       over the heads of a group

KERNEL(HELD == 64 ? 2 : 1) grad_keys(const TileParams p) {
  constexpr int kQueries = tile_size(kPassing, HEAD_DIM), kGrads = tile_size(kPassing, VALUE_DIM);
  u16* const keys = shared_memory();
  u16* const values = keys + tile_size(kHeld, HEAD_DIM);
  u16* const queries = values + tile_size(kHeld, VALUE_DIM);
  u16* const grads = queries + 2 * kQueries;
  float* const stats = (float*)(grads + 2 * kGrads);  // subtrahend and delta of the rows, twice
  const int key_heads = p.heads / p.group;
  const int blocks = (p.keys + kHeld - 1) / kHeld;
  const Turn mine = turn_of(p, p.launch_heads / p.group, blocks);
  const int head_of_keys = p.first_head / p.group + mine.head;
  const int n = head_of_keys / key_heads, kv = head_of_keys % key_heads,
            key = p.key_begin + mine.block * kHeld;
  load_tile<kHeld, HEAD_DIM>(keys, of_head(p.key, p.key_strides, n, kv), p.key_strides[2], key, p.key_len);
  load_tile<kHeld, VALUE_DIM>(values, of_head(p.value, p.value_strides, n, kv), p.value_strides[2], key,
                              p.key_len);
  const Range range = rows_seeing(p, key);
  const auto load = [&](int h, int row, int turn) {
    load_tile<kPassing, HEAD_DIM>(queries + turn * kQueries, of_head(p.query, p.query_strides, n, h),
                                  p.query_strides[2], row, p.query_len);
    load_tile<kPassing, VALUE_DIM>(grads + turn * kGrads, of_head(p.grad_output, p.grad_output_strides, n, h),
                                   p.grad_output_strides[2], row, p.query_len);
    if (threadIdx.x < 2 * kPassing) {
      const int column = threadIdx.x % kPassing, there = row + column < p.query_len;
      const float* from = threadIdx.x < kPassing ? p.subtrahend : p.delta;
      copy_4_bytes(stats + turn * 2 * kPassing + threadIdx.x,
                   from + line_of(p, {n, h, kv}, there ? row + column : 0), there);
    }
  };
  const int end = range.begin < range.end ? p.group : 0;
  if (end > 0) {
    load(kv * p.group, range.begin, 0);
  }
  const Scorer scorer(p);
  const float factor = has_dropout(p) ? p.kept : 1.0f;
  Numbers<HEAD_DIM> key_sum;
  Numbers<VALUE_DIM> value_sum;
  clear(key_sum);
  clear(value_sum);
  int turn = 0;
  for (int head = 0; head < end; ++head) {
    const Place place = {n, kv * p.group + head, kv};
    const u32* const bits =
        has_dropout(p) ? bits_of_keys(p, (mine.head - kv) * p.group + place.h, key) : nullptr;
    for (int row = range.begin; row < range.end; row += kPassing, turn ^= 1) {
      wait_for_tiles();
      const u16 *const rows = queries + turn * kQueries, *const their_grads = grads + turn * kGrads;
      Numbers<kPassing> scores, grad_weights;
      start_product<HEAD_DIM>(scores, keys, rows);
      start_product<VALUE_DIM>(grad_weights, values, their_grads);
      if (row + kPassing < range.end) {
        load(place.h, row + kPassing, turn ^ 1);
      } else if (head + 1 < end) {
        load(place.h + 1, range.begin, turn ^ 1);
      }
      const u32 kept = has_dropout(p) ? bits[(row - p.row_begin) / kPassing * kTileWords] : 0;
      const float* const subtrahend = stats + turn * 2 * kPassing;
      const float* const delta = subtrahend + kPassing;
      finish(scores);
      finish(grad_weights);
      Rounded<kPassing> applied, grad_scores;
      by_kind(p, is_whole(p, row, kPassing, key, kHeld), [&](auto kind) {
        each_element<kPassing>([&](int block, int i) {
          const int column = column_at(block, i);
          float slope, &score = scores.at[block][i], &incoming = grad_weights.at[block][i];
          const float made = scorer.score(kind, place, score, row + column, key + line_at(i), slope);
          // Nothing of what is hidden reaches anything, NaN neither.
          const bool is_hidden = !kind.is_whole && made == -kInfinity;
          const float weight = is_hidden ? 0.0f : scorer.weight(kind, made, subtrahend[column]);
          score = weight;
          if (has_dropout(p)) {
            score = if_kept(kept, block, i, score);
            incoming = if_kept(kept, block, i, incoming);
          }
          incoming = is_hidden ? 0.0f : weight * slope * (incoming * factor - delta[column]);
        });
        applied = rounded(scores);
        grad_scores = rounded(grad_weights);
      });
      start_adding_product(value_sum, applied, their_grads);
      start_adding_product(key_sum, grad_scores, rows);
      finish(value_sum);
      finish(key_sum);
    }
  }
  wait_for_copies();
  const i64 first = ((i64)n * key_heads + kv) * p.key_len;
  store_lines(p.grad_key + first * HEAD_DIM, key_sum, p.scale, key, p.key_len);
  store_lines(p.grad_value + first * VALUE_DIM, value_sum, factor, key, p.key_len);
}
