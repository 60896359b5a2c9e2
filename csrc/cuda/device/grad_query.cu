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
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return p.grad_lse == nullptr ? sum : sum - p.grad_lse[line_of(p, place, row)];
}

KERNEL(1) grad_query(const TileParams p) {
  constexpr int kKeys = tile_size(kPassing, HEAD_DIM), kValues = tile_size(kPassing, VALUE_DIM);
  u16* const queries = shared_memory();
  u16* const grads = queries + tile_size(kHeld, HEAD_DIM);
  u16* const keys = grads + tile_size(kHeld, VALUE_DIM);
  u16* const values = keys + 2 * kKeys;
  const int blocks = (p.query_len + kHeld - 1) / kHeld;
  const Turn mine = turn_of(p, p.batches * p.heads, blocks);
  const Place place = place_of(p, mine.head);
  const int row = (blocks - 1 - mine.block) * kHeld;
  const Range range = keys_seen(p, row);
  const u16* const key_head = of_head(p.key, p.key_strides, place.n, place.kv);
  const u16* const value_head = of_head(p.value, p.value_strides, place.n, place.kv);
  const auto load = [&](int key, int turn) {
    load_tile<kPassing, HEAD_DIM>(keys + turn * kKeys, key_head, p.key_strides[2], key, p.key_len);
    load_tile<kPassing, VALUE_DIM>(values + turn * kValues, value_head, p.value_strides[2], key, p.key_len);
  };
  load_tile<kHeld, HEAD_DIM>(queries, of_head(p.query, p.query_strides, place.n, place.h), p.query_strides[2],
                             row, p.query_len);
  load_tile<kHeld, VALUE_DIM>(grads, of_head(p.grad_output, p.grad_output_strides, place.n, place.h),
                              p.grad_output_strides[2], row, p.query_len);
  if (range.begin < range.end) {
    load(range.begin, 0);
  }
  float from[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = min(row + line_at(half * 2), p.query_len - 1);
    const i64 line = line_of(p, place, at);
    from[half] = subtrahend(p.lse[line]);
    delta[half] = delta_of(p, place, at);
    if (threadIdx.x % 4 == 0) {
      p.delta[line] = delta[half];
    }
  }
  const Scorer scorer(p);
  const u64 seed = has_dropout(p) ? (u64)*p.seed : 0;
  const float factor = has_dropout(p) ? p.kept : 1.0f;
  Numbers<HEAD_DIM> sum;
  clear(sum);
  int turn = 0;
  for (int key = range.begin; key < range.end; key += kPassing, turn ^= 1) {
    wait_for_tiles();
    if (key + kPassing < range.end) {
      load(key + kPassing, turn ^ 1);
    }
    Numbers<kPassing> scores, grad_weights;
    start_product<HEAD_DIM>(scores, queries, keys + turn * kKeys);
    start_product<VALUE_DIM>(grad_weights, grads, values + turn * kValues);
    finish<1>(scores);
    u32 hidden = 0;
    by_kind(p, is_whole(p, row, kHeld, key, kPassing), [&](auto kind) {
#pragma unroll
      for (int block = 0; block < kPassing / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float slope, &score = scores.at[block][i];
          const float made =
              scorer.score(kind, place, score, row + line_at(i), key + column_at(block, i), slope);
          score = __expf(made - from[i / 2]) * slope;
          if (!kind.is_whole) {
            hidden |= (u32)(made == -kInfinity) << (block * 4 + i);
          }
        }
      }
    });
    finish<0>(grad_weights);
    if (has_dropout(p)) {
      drop(p, place, row, key, seed, grad_weights);
    }
    make_grad_scores(scores, grad_weights, factor, hidden, [&](int, int i) { return delta[i / 2]; });
    start_adding_product(sum, rounded(scores), keys + turn * kKeys);
    finish<0>(sum);
  }
  wait_for_copies();
  store_lines(p.grad_query + line_of(p, place, 0) * HEAD_DIM, sum, p.scale, row, p.query_len,
              [](int i) { return line_at(i); });
}
