// The gradients of key and value; after tile.cu. Keys are held and rows pass by, of one head of a group after
// the other, so that each number is summed by one thread, in one order. P and dS, which grad_query.cu makes
// as well, are made again and not stored.
//
//   dK = scale sum_h dS^T Q       dV = sum_h (P dropout)^T dO       over the heads of a group

/// Which of the 128 keys is a line: a warp has four keys, and those 16, 32 and 48 further, whose draws come
/// together.
DEVICE int key_of_line(int line) {
  return line / 64 * 64 + line / 4 % 4 * 16 + line / 16 % 4 * 4 + line % 4;
}

DEVICE int key_at(int i) {
  return key_of_line(line_at(i));
}

/// Of keys that are held, beside 64 rows: 0 for each element of both that dropout leaves out. Lanes 16 apart
/// have keys of the same draws: each draws for half of the rows, and hands on what is the other's.
DEVICE void drop(const TileParams& p, const Place& place, int row, int key, u64 seed,
                 Numbers<kPassing>& weights, Numbers<kPassing>& grads) {
  const int lane = threadIdx.x % 32, first = key + key_of_line(threadIdx.x / 32 * 16 + lane / 4 % 4);
  const bool is_later = lane >= 16;  // has keys 16 and 48 further, and draws for the later rows
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    u32 words[4];
    draw(words, first / 64 * 16 + first % 16, row + (is_later ? 32 : 0) + column_at(part / 2, part % 2),
         place.h, place.n, seed);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 near = words[2 * half], far = words[2 * half + 1];
      const u32 mine = is_later ? far : near;
      const u32 other = __shfl_xor_sync(0xffffffffu, is_later ? near : far, 16);
      const int i = half * 2 + part % 2;
      const bool keeps_early = (is_later ? other : mine) >= p.threshold;
      const bool keeps_late = (is_later ? mine : other) >= p.threshold;
      float &early = weights.at[part / 2][i], &late = weights.at[4 + part / 2][i];
      float &early_grad = grads.at[part / 2][i], &late_grad = grads.at[4 + part / 2][i];
      early = keeps_early ? early : 0.0f;
      early_grad = keeps_early ? early_grad : 0.0f;
      late = keeps_late ? late : 0.0f;
      late_grad = keeps_late ? late_grad : 0.0f;
    }
  }
}

KERNEL(HELD == 64 ? 2 : 1) grad_keys(const TileParams p) {
  constexpr int kQueries = tile_size(kPassing, HEAD_DIM), kGrads = tile_size(kPassing, VALUE_DIM);
  u16* const keys = shared_memory();
  u16* const values = keys + tile_size(kHeld, HEAD_DIM);
  u16* const queries = values + tile_size(kHeld, VALUE_DIM);
  u16* const grads = queries + 2 * kQueries;
  float* const stats = (float*)(grads + 2 * kGrads);  // lse and delta of the rows, twice
  const int key_heads = p.heads / p.group;
  const int blocks = (p.key_len + kHeld - 1) / kHeld;
  const Turn mine = turn_of(p, p.batches * key_heads, blocks);
  const int n = mine.head / key_heads, kv = mine.head % key_heads, key = mine.block * kHeld;
  load_lines<kHeld, HEAD_DIM>(keys, of_head(p.key, p.key_strides, n, kv), p.key_strides[2], key, p.key_len,
                              key_of_line);
  load_lines<kHeld, VALUE_DIM>(values, of_head(p.value, p.value_strides, n, kv), p.value_strides[2], key,
                               p.key_len, key_of_line);
  const Range range = rows_seeing(p, key);
  const auto load = [&](int h, int row, int turn) {
    load_tile<kPassing, HEAD_DIM>(queries + turn * kQueries, of_head(p.query, p.query_strides, n, h),
                                  p.query_strides[2], row, p.query_len);
    load_tile<kPassing, VALUE_DIM>(grads + turn * kGrads, of_head(p.grad_output, p.grad_output_strides, n, h),
                                   p.grad_output_strides[2], row, p.query_len);
    if (threadIdx.x < 2 * kPassing) {
      const int column = threadIdx.x % kPassing, there = row + column < p.query_len;
      const float* from = threadIdx.x < kPassing ? p.lse : p.delta;
      copy_4_bytes(stats + turn * 2 * kPassing + threadIdx.x,
                   from + line_of(p, {n, h, kv}, there ? row + column : 0), there);
    }
  };
  const int end = range.begin < range.end ? p.group : 0;
  if (end > 0) {
    load(kv * p.group, range.begin, 0);
  }
  const Scorer scorer(p);
  const u64 seed = has_dropout(p) ? (u64)*p.seed : 0;
  const float factor = has_dropout(p) ? p.kept : 1.0f;
  Numbers<HEAD_DIM> key_sum;
  Numbers<VALUE_DIM> value_sum;
  clear(key_sum);
  clear(value_sum);
  int turn = 0;
  for (int head = 0; head < end; ++head) {
    const Place place = {n, kv * p.group + head, kv};
    for (int row = range.begin; row < range.end; row += kPassing, turn ^= 1) {
      wait_for_tiles();
      if (row + kPassing < range.end) {
        load(place.h, row + kPassing, turn ^ 1);
      } else if (head + 1 < end) {
        load(place.h + 1, range.begin, turn ^ 1);
      }
      const float* const lse = stats + turn * 2 * kPassing;
      const float* const delta = lse + kPassing;
      Numbers<kPassing> scores, grad_weights;
      start_product<HEAD_DIM>(scores, keys, queries + turn * kQueries);
      start_product<VALUE_DIM>(grad_weights, values, grads + turn * kGrads);
      finish<1>(scores);
      Numbers<kPassing> weights;
      u32 hidden = 0;
      by_kind(p, is_whole(p, row, kPassing, key, kHeld), [&](auto kind) {
        each_element<kPassing>([&](int block, int i) {
          const int column = column_at(block, i);
          float slope, &score = scores.at[block][i];
          const float made = scorer.score(kind, place, score, row + column, key + key_at(i), slope);
          const float weight = __expf(made - subtrahend(lse[column]));
          weights.at[block][i] = weight * factor;
          score = weight * slope;
          if (!kind.is_whole) {
            hidden |= (u32)(made == -kInfinity) << (block * 4 + i);
          }
        });
      });
      clear_hidden(weights, hidden);
      if (has_dropout(p)) {
        finish<0>(grad_weights);
        drop(p, place, row, key, seed, weights, grad_weights);
      }
      start_adding_product(value_sum, rounded(weights), grads + turn * kGrads);
      finish<1>(grad_weights);
      make_grad_scores(scores, grad_weights, factor, hidden,
                       [&](int block, int i) { return delta[column_at(block, i)]; });
      start_adding_product(key_sum, rounded(scores), queries + turn * kQueries);
      finish<0>(value_sum);
      finish<0>(key_sum);
    }
  }
  wait_for_copies();
  const i64 first = ((i64)n * key_heads + kv) * p.key_len;
  const auto key_line = [](int i) { return key_at(i); };
  store_lines(p.grad_key + first * HEAD_DIM, key_sum, p.scale, key, p.key_len, key_line);
  store_lines(p.grad_value + first * VALUE_DIM, value_sum, 1.0f, key, p.key_len, key_line);
}
