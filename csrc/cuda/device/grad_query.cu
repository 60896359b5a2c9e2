// The gradient of the query; after tile.cu.
//
//   dS = P ((dO V^T) dropout - delta) softcap'       delta = rowsum(dO O) - dLse
//   dQ = scale dS K

/// rowsum(dO O) - dLse of a row, in all four threads that have columns of it. What comes in where O is 0, at
/// a row that sees nothing, does not reach it, NaN neither.
DEVICE float delta_of(const TileParams& p, const Place& place, int row) {
  const u16* const grads =
      of_head(p.grad_output, p.grad_output_strides, place.n, place.h) + row * p.grad_output_strides[2];
  const u16* const outputs =
      of_head(p.saved_output, p.saved_output_strides, place.n, place.h) + row * p.saved_output_strides[2];
  float sum = 0.0f;
  for (int chunk = threadIdx.x % 4; chunk < VALUE_DIM / 8; chunk += 4) {
    const uint4 grad = ((const uint4*)grads)[chunk], output = ((const uint4*)outputs)[chunk];
    const u32 grad_words[4] = {grad.x, grad.y, grad.z, grad.w};
    const u32 output_words[4] = {output.x, output.y, output.z, output.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
#pragma unroll
      for (int shift = 0; shift < 32; shift += 16) {
        const float number = unpack((u16)(output_words[word] >> shift));
        sum += number == 0.0f ? 0.0f : number * unpack((u16)(grad_words[word] >> shift));
      }
    }
  }
  sum = sum_of_row(sum);
  return p.grad_lse == nullptr ? sum : sum - p.grad_lse[line_of(p, place, row)];
}

KERNEL(HELD == 64 ? 2 : 1) grad_query(const TileParams p) {
  u16* const queries = shared_memory();
  u16* const grads = queries + tile_size(kHeld, HEAD_DIM);
  const HeldRows held = rows_of_block(p);
  const Place place = held.place;
  const int row = held.row;
  const KeysAndValues passing(p, place, grads + tile_size(kHeld, VALUE_DIM), 2);
  const Range range = keys_seen(p, row);
  load_tile<kHeld, HEAD_DIM>(queries, of_head(p.query, p.query_strides, place.n, place.h), p.query_strides[2],
                             row, p.query_len);
  load_tile<kHeld, VALUE_DIM>(grads, of_head(p.grad_output, p.grad_output_strides, place.n, place.h),
                              p.grad_output_strides[2], row, p.query_len);
  if (range.begin < range.end) {
    passing.load(range.begin, 0);
  }
  float subtrahend[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = min(row + line_at(half * 2), p.query_len - 1);
    const i64 line = line_of(p, place, at);
    subtrahend[half] = subtrahend_of(p.lse[line]);
    delta[half] = delta_of(p, place, at);
    if (threadIdx.x % 4 == 0) {
      p.delta[line] = delta[half];
      p.subtrahend[line] = subtrahend[half];
    }
  }
  const Scorer scorer(p);
  const u32* const bits = has_dropout(p) ? bits_of_rows(p, held.head, row) : nullptr;
  const float factor = has_dropout(p) ? p.kept : 1.0f;
  Numbers<HEAD_DIM> sum;
  clear(sum);
  int turn = 0;
  for (int key = range.begin; key < range.end; key += kPassing, turn ^= 1) {
    wait_for_tiles();
    Numbers<kPassing> scores, grad_weights;
    start_product<HEAD_DIM>(scores, queries, passing.keys_of(turn));
    start_product<VALUE_DIM>(grad_weights, grads, passing.values_of(turn));
    if (key + kPassing < range.end) {
      passing.load(key + kPassing, turn ^ 1);
    }
    const u32 kept = has_dropout(p) ? bits[key / kPassing * kTileWords] : 0;
    finish(scores);
    finish(grad_weights);
    by_kind(p, is_whole(p, row, kHeld, key, kPassing), [&](auto kind) {
      each_element<kPassing>([&](int block, int i) {
        float slope, &score = scores.at[block][i], incoming = grad_weights.at[block][i];
        const float made =
            scorer.score(kind, place, score, row + line_at(i), key + column_at(block, i), slope);
        if (has_dropout(p)) {
          incoming = if_kept(kept, block, i, incoming);
        }
        // Nothing of what is hidden reaches anything, NaN neither.
        score = !kind.is_whole && made == -kInfinity ? 0.0f
                                                     : scorer.weight(kind, made, subtrahend[i / 2]) * slope *
                                                           (incoming * factor - delta[i / 2]);
      });
    });
    start_adding_product(sum, rounded(scores), passing.keys_of(turn));
    finish(sum);
  }
  wait_for_copies();
  store_lines(p.grad_query + line_of(p, place, 0) * HEAD_DIM, sum, p.scale, row, p.query_len);
}
