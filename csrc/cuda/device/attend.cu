// The output and lse in one pass over the keys; after tile.cu.
//
//   O = sum_j (P_j dropout_j) V_j        lse = log sum_j exp S_j
//
// Sums are of exp(S - largest so far). They are scaled when a larger score comes. Defined from outside:
// BUFFERS, 2 where there is room for the next keys and values beside those that are read, else 1.
//
// Where there are fewer blocks of rows than processors, blocks have parts of the keys, and merge.cu the rest.

struct RowSums {  // of rows g and g + 8, of this thread's columns
  float largest[2] = {-kInfinity, -kInfinity}, sum[2] = {0.0f, 0.0f};
};

/// exp(S - largest), S = unit score, without those that dropout leaves out; what was added before has to be
/// multiplied by `factor`. Of tiles that are not whole the unit is 1, and what is subtracted goes first: so a
/// bias of any size stays finite.
template <class Kind>
DEVICE Rounded<kPassing> take_scores(const TileParams& p, Kind, Numbers<kPassing>& scores, float unit,
                                     u32 kept, RowSums& rows, float (&factor)[2]) {
  float largest[2] = {-kInfinity, -kInfinity};
  each_element<kPassing>(
      [&](int block, int i) { largest[i / 2] = fmaxf(largest[i / 2], scores.at[block][i]); });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
    largest[half] = fmaxf(largest[half] * unit, rows.largest[half]);
    factor[half] = largest[half] == rows.largest[half]
                       ? 1.0f
                       : power_of_two((rows.largest[half] - largest[half]) * kLog2E);
    rows.largest[half] = largest[half];
    rows.sum[half] *= factor[half];
    if (largest[half] == -kInfinity) {
      largest[half] = 0.0f;  // -inf - 0, of which the exponential is 0; NaN stays
    }
  }
  each_element<kPassing>([&](int block, int i) {
    float& score = scores.at[block][i];
    score = power_of_two(Kind::is_whole ? score * (unit * kLog2E) - largest[i / 2] * kLog2E
                                        : (score - largest[i / 2]) * kLog2E);
    if (i % 2 == 1) {  // in pairs, so that fewer wait for each other
      rows.sum[i / 2] += scores.at[block][i - 1] + score;
    }
  });
  if (has_dropout(p)) {
    each_element<kPassing>(
        [&](int block, int i) { scores.at[block][i] = if_kept(kept, block, i, scores.at[block][i]); });
  }
  return rounded(scores);
}

DEVICE void scale_rows(Numbers<VALUE_DIM>& output, const float (&factor)[2]) {
  if (factor[0] != 1.0f || factor[1] != 1.0f) {
    each_element<VALUE_DIM>([&](int block, int i) { output.at[block][i] *= factor[i / 2]; });
  }
}

DEVICE void store_rows(const TileParams& p, const Place& place, int row, RowSums& rows,
                       const Numbers<VALUE_DIM>& output) {
  const float kept = has_dropout(p) ? p.kept : 1.0f;
  const i64 before = (i64)blockIdx.y * p.batches * p.heads * p.query_len;  // lines of the parts before
  float* const made_lse = p.parts > 1 ? p.part_lse + before : p.made_lse;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_row(rows.sum[half]);
    const int at = row + line_at(half * 2);
    if (at >= p.query_len) {
      continue;
    }
    const i64 line = line_of(p, place, at);
    if (threadIdx.x % 4 == 0) {
      made_lse[line] = lse_of(rows.largest[half], sum);
    }
    const float factor = sum == 0.0f ? 0.0f : kept / sum;
#pragma unroll
    for (int block = 0; block < VALUE_DIM / 8; ++block) {
      const float first = output.at[block][2 * half] * factor,
                  second = output.at[block][2 * half + 1] * factor;
      const i64 place_of_first = line * VALUE_DIM + column_at(block, 0);
      if (p.parts > 1) {
        float* const part = p.part_output + before * VALUE_DIM + place_of_first;
        part[0] = first;
        part[1] = second;
      } else {
        *(u32*)(p.output + place_of_first) = pack(first, second);
      }
    }
  }
}

/// Those of this block's part.
DEVICE Range part_of(const TileParams& p, const Range& range) {
  const int steps = (range.end - range.begin + kPassing - 1) / kPassing;
  const int steps_of_part = (steps + p.parts - 1) / p.parts;
  const i64 begin = range.begin + (i64)blockIdx.y * steps_of_part * kPassing;
  return {(int)min(begin, (i64)range.end), (int)min(begin + (i64)steps_of_part * kPassing, (i64)range.end)};
}

KERNEL(2) attend(const TileParams p) {
  u16* const queries = shared_memory();
  const HeldRows held = rows_of_block(p);
  const Place place = held.place;
  const int row = held.row;
  const KeysAndValues passing(p, place, queries + tile_size(kHeld, HEAD_DIM), BUFFERS);
  const Range range = part_of(p, keys_seen(p, row));
  load_tile<kHeld, HEAD_DIM>(queries, of_head(p.query, p.query_strides, place.n, place.h), p.query_strides[2],
                             row, p.query_len);
  if (BUFFERS == 2 && range.begin < range.end) {
    passing.load(range.begin, 0);
  }
  const Scorer scorer(p);
  const u32* const bits = has_dropout(p) ? bits_of_rows(p, held.head, row) : nullptr;
  RowSums rows;
  Numbers<VALUE_DIM> output;
  clear(output);
  int turn = 0;
  for (int key = range.begin; key < range.end; key += kPassing, turn ^= BUFFERS - 1) {
    if (BUFFERS == 1) {
      __syncthreads();  // what is there has been read
      passing.load(key, 0);
    }
    wait_for_tiles();
    Numbers<kPassing> scores;
    start_product<HEAD_DIM>(scores, queries, passing.keys_of(turn));
    if (BUFFERS == 2 && key + kPassing < range.end) {
      passing.load(key + kPassing, turn ^ 1);
    }
    const u32 kept = has_dropout(p) ? bits[key / kPassing * kTileWords] : 0;
    finish(scores);
    float factor[2];
    Rounded<kPassing> weights;
    by_kind(p, is_whole(p, row, kHeld, key, kPassing), [&](auto kind) {
      each_element<kPassing>([&](int block, int i) {
        float slope, &score = scores.at[block][i];
        score = scorer.score(kind, place, score, row + line_at(i), key + column_at(block, i), slope);
      });
      weights = take_scores(p, kind, scores, scorer.unit(kind), kept, rows, factor);
    });
    scale_rows(output, factor);
    start_adding_product(output, weights, passing.values_of(turn));
    finish(output);
  }
  wait_for_copies();
  store_rows(p, place, row, rows, output);
}
