// The weights, from lse; after tile.cu.
//
//   W = P dropout
//
// A block makes those of the rows it holds and of kKeysOfBlock keys, which pass by.

/// Of four threads with two columns of each of four blocks, each gets the eight columns of one block.
DEVICE void exchange(u32 (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    const bool is_upper = lane & apart;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & apart) == 0) {
        const u32 other = __shfl_xor_sync(0xffffffffu, is_upper ? words[i] : words[i | apart], apart);
        words[i] = is_upper ? other : words[i];
        words[i | apart] = is_upper ? words[i | apart] : other;
      }
    }
  }
}

/// To where they belong in (heads, rows, Lk) of a launch.
DEVICE void store_weights(const TileParams& p, int head, const Numbers<kPassing>& weights, int row, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = row + line_at(half * 2);
    u16* const out = p.weights + ((i64)head * p.rows + line - p.row_begin) * p.key_len;
#pragma unroll
    for (int four = 0; four < kPassing / 32; ++four) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&numbers)[4] = weights.at[four * 4 + i];
        words[i] = pack(numbers[half * 2], numbers[half * 2 + 1]);
      }
      exchange(words);
      const int first = key + (four * 4 + threadIdx.x % 4) * 8;
      if (line >= p.row_begin + p.rows || first >= p.key_len) {
        continue;
      }
      if (p.key_len % 8 == 0) {
        *(uint4*)(out + first) = {words[0], words[1], words[2], words[3]};
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (first + i < p.key_len) {
            out[first + i] = (u16)(words[i / 2] >> (i % 2 * 16));
          }
        }
      }
    }
  }
}

KERNEL(3) weights(const TileParams p) {
  constexpr int kKeys = tile_size(kPassing, HEAD_DIM);
  u16* const queries = shared_memory();
  u16* const keys = queries + tile_size(kHeld, HEAD_DIM);
  const int head = blockIdx.z, row = p.row_begin + blockIdx.y * kHeld, begin = blockIdx.x * kKeysOfBlock;
  const int end = min(begin + kKeysOfBlock, p.key_len);
  const Place place = place_of(p, p.first_head + head);
  const u16* const key_head = of_head(p.key, p.key_strides, place.n, place.kv);
  load_tile<kHeld, HEAD_DIM>(queries, of_head(p.query, p.query_strides, place.n, place.h), p.query_strides[2],
                             row, p.query_len);
  load_tile<kPassing, HEAD_DIM>(keys, key_head, p.key_strides[2], begin, p.key_len);
  float subtrahend[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    subtrahend[half] = subtrahend_of(p.lse[line_of(p, place, min(row + line_at(half * 2), p.query_len - 1))]);
  }
  const Range seen = keys_seen(p, row);
  const Scorer scorer(p);
  const u32* const bits = has_dropout(p) ? bits_of_rows(p, head, row) : nullptr;
  const float factor = has_dropout(p) ? p.kept : 1.0f;
  int turn = 0;
  for (int key = begin; key < end; key += kPassing, turn ^= 1) {
    wait_for_tiles();
    if (key + kPassing < end) {
      load_tile<kPassing, HEAD_DIM>(keys + (turn ^ 1) * kKeys, key_head, p.key_strides[2], key + kPassing,
                                    p.key_len);
    }
    const u32 kept = has_dropout(p) ? bits[key / kPassing * kTileWords] : 0;
    Numbers<kPassing> weights;
    if (key < seen.begin || key >= seen.end) {
      clear(weights);
      store_weights(p, head, weights, row, key);
      continue;
    }
    start_product<HEAD_DIM>(weights, queries, keys + turn * kKeys);
    finish(weights);
    by_kind(p, is_whole(p, row, kHeld, key, kPassing), [&](auto kind) {
      each_element<kPassing>([&](int block, int i) {
        float slope, &weight = weights.at[block][i];
        weight = scorer.score(kind, place, weight, row + line_at(i), key + column_at(block, i), slope);
        // Of what is hidden it is 0, though lse be NaN.
        weight = !kind.is_whole && weight == -kInfinity
                     ? 0.0f
                     : scorer.weight(kind, weight, subtrahend[i / 2]) * factor;
        if (has_dropout(p)) {
          weight = if_kept(kept, block, i, weight);
        }
      });
    });
    store_weights(p, head, weights, row, key);
  }
}
