// The gradients of key and value; after tile.cu. Keys are held and rows pass by, of one head of a group after
// the other, so that each number is summed by one thread, in one order. P and dS, which grad_query.cu makes
// as well, are made again and not stored.
//
//   dK = scale sum_h dS^T Q       dV = sum_h (P dropout)^T dO       over the heads of a group

/// Of keys that are held, beside 64 rows: 0 for each element of both that dropout leaves out. `bits`, of the
/// tile of these keys, are those of threads that have rows (draws.cu): row r of 16 and key k of 8 are in lane
/// 4 (r % 8) + k / 2, at 2 (r / 8) + k % 2 of the block of k.
DEVICE void drop(Numbers<kPassing>& weights, Numbers<kPassing>& grads, const u32* bits) {
  const int lane = threadIdx.x % 32, key = lane / 4;
  const int shift = threadIdx.x / 32 % 4 * 8 + key % 2;  // of blocks 2 w and 2 w + 1 in warp w
#pragma unroll
  for (int sixteen = 0; sixteen < 4; ++sixteen) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const u32 kept = bits[sixteen * 32 + (lane % 4 * 2 + odd) * 4 + key / 2] >> shift;
#pragma unroll
      for (int later = 0; later < 2; ++later) {  // rows
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // keys
          const bool keeps = kept >> (half * 4 + later * 2) & 1;
          float &weight = weights.at[sixteen * 2 + later][half * 2 + odd],
                &grad = grads.at[sixteen * 2 + later][half * 2 + odd];
          weight = keeps ? weight : 0.0f;
          grad = keeps ? grad : 0.0f;
        }
      }
    }
  }
}

KERNEL(HELD == 64 ? 2 : 1) grad_keys(const TileParams p) {
  constexpr int kQueries = tile_size(kPassing, HEAD_DIM), kGrads = tile_size(kPassing, VALUE_DIM);
  u16* const keys = shared_memory();
  u16* const values = keys + tile_size(kHeld, HEAD_DIM);
  u16* const queries = values + tile_size(kHeld, VALUE_DIM);
  u16* const grads = queries + 2 * kQueries;
  float* const stats = (float*)(grads + 2 * kGrads);  // subtrahend and delta of the rows, twice
  u32* const bits = (u32*)(stats + 4 * kPassing);     // of draws, twice
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
    if (has_dropout(p)) {
      const int key_tile = (key - p.key_begin) / 64 + threadIdx.x / kTileWords;
      const i64 head = (mine.head - kv) * p.group + h,
                row_tile = head * row_tiles_of(p) + (row - p.row_begin) / 64;  // of the launch
      copy_4_bytes(bits + turn * kThreads + threadIdx.x,
                   p.draws + (row_tile * key_tiles_of(p) + key_tile) * kTileWords + threadIdx.x % kTileWords,
                   key_tile < key_tiles_of(p));
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
    for (int row = range.begin; row < range.end; row += kPassing, turn ^= 1) {
      wait_for_tiles();
      if (row + kPassing < range.end) {
        load(place.h, row + kPassing, turn ^ 1);
      } else if (head + 1 < end) {
        load(place.h + 1, range.begin, turn ^ 1);
      }
      const float* const subtrahend = stats + turn * 2 * kPassing;
      const float* const delta = subtrahend + kPassing;
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
          const float made = scorer.score(kind, place, score, row + column, key + line_at(i), slope);
          const float weight = scorer.weight(kind, made, subtrahend[column]);
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
        drop(weights, grad_weights, bits + turn * kThreads + threadIdx.x / kTileWords * kTileWords);
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
  store_lines(p.grad_key + first * HEAD_DIM, key_sum, p.scale, key, p.key_len);
  store_lines(p.grad_value + first * VALUE_DIM, value_sum, 1.0f, key, p.key_len);
}
