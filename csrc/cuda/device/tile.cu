// What the kernels of attention share, a tile of scores at a time on the matrix units of an NVIDIA GPU.
// Compiled with one of them when that is first needed, by the compiler that comes with PyTorch, between
// tile_params.h, primitives.cu and numbers.cu, mma.cu or wgmma.cu, and the kernel. Defined from outside:
// HEAD_DIM and VALUE_DIM, multiples of 16, IS_BFLOAT16, and WITH_DROPOUT: 0 without, 1 with it, 2 either.
//
//   S = softcap(scale Q K^T) + bias over what is visible       P = exp(S - lse)

struct Place {  // of a head
  int n, h, kv;
};

DEVICE Place place_of(const TileParams& p, int head) {
  const int n = head / p.heads, h = head % p.heads;
  return {n, h, h / p.group};
}

DEVICE i64 line_of(const TileParams& p, const Place& place, int row) {
  return ((i64)place.n * p.heads + place.h) * p.query_len + row;
}

DEVICE const u16* of_head(const u16* from, const i64 (&strides)[3], int n, int h) {
  return from + n * strides[0] + h * strides[1];
}

/// `lines` lines of `columns` numbers into shared memory; zeros from line `len` on.
template <int lines, int columns>
DEVICE void load_tile(u16* tile, const u16* from, i64 stride, int first, int len) {
  constexpr int kChunks = columns / 8,
                kStep = kThreads / kChunks;  // a thread has a chunk of each kStep lines
  const int line = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  u16* to = tile + chunk_place<lines, columns>(line, chunk);
  const u16* source = from + (first + line) * stride + chunk * 8;
#pragma unroll
  for (int step = 0; step < lines; step += kStep) {
    if ((kStep * kChunks < kThreads && line >= kStep) || (step + kStep > lines && step + line >= lines)) {
      break;
    }
    copy_16_bytes(to + step * line_distance<columns>(), source, first + line + step < len);
    source += kStep * stride;
  }
}

/// Sums of lines that are held, rounded, to (lines, columns) from line `first` on.
template <int columns>
DEVICE void store_lines(u16* to, const Numbers<columns>& sums, float factor, int first, int len) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = first + line_at(half * 2);
    if (at < len) {
#pragma unroll
      for (int block = 0; block < columns / 8; ++block) {
        const float(&numbers)[4] = sums.at[block];
        *(u32*)(to + (i64)at * columns + column_at(block, 0)) =
            pack(numbers[2 * half] * factor, numbers[2 * half + 1] * factor);
      }
    }
  }
}

/// Lines of the kind that passes: from `begin`, in steps of kPassing, to before `end`.
struct Range {
  int begin, end;
};

DEVICE Range steps(i64 first, i64 last, int len) {
  const i64 begin = max(first, (i64)0) / kPassing * kPassing, end = min(last + 1, (i64)len);
  return {(int)min(begin, (i64)len), (int)max(end, (i64)0)};
}

/// Keys that some of the rows held from `row` on see.
DEVICE Range keys_seen(const TileParams& p, int row) {
  const i64 last = min(row + kHeld, p.query_len) - 1;
  return steps((i64)row + p.low, last + p.high, p.key_len);
}

/// Rows that see some of the keys held from `key` on.
DEVICE Range rows_seeing(const TileParams& p, int key) {
  const i64 last = min(key + kHeld, p.key_len) - 1;
  return steps((i64)key - p.high, last - p.low, p.query_len);
}

/// Whether all rows and keys of a tile are there and visible, and nothing is done to scores but by softcap.
DEVICE bool is_whole(const TileParams& p, int row, int rows, int key, int keys) {
  return p.bias_kind == 0 && row + rows <= p.query_len && key + keys <= p.key_len &&
         (i64)key - (row + rows - 1) >= p.low && (i64)key + keys - 1 - row <= p.high;
}

DEVICE float bias_at(const TileParams& p, const Place& place, int row, int key) {
  const i64 at = place.n * p.bias_strides[0] + place.h * p.bias_strides[1] + row * p.bias_strides[2] +
                 key * p.bias_strides[3];
  return p.bias_kind == 1   ? (((const u8*)p.bias)[at] ? 0.0f : -kInfinity)
         : p.bias_kind == 2 ? unpack(((const u16*)p.bias)[at])
                            : ((const float*)p.bias)[at];
}

constexpr float kLog2E = 1.44269504f;

/// From here on softcap is made the slower way, by which scores keep their last digits.
constexpr float kWideSoftcap = 256.0f;

/// A kind of tile, for the compiler.
template <bool is_whole_, bool is_capped_>
struct TileKind {
  static constexpr bool is_whole = is_whole_, is_capped = is_capped_;
};

/// Calls `function` with the kind of a tile that is whole or not.
template <class Function>
DEVICE void by_kind(const TileParams& p, bool whole, Function function) {
  if (whole && p.softcap == 0.0f && p.scale >= 0.0f) {
    function(TileKind<true, false>());
  } else if (whole && p.softcap > 0.0f && p.softcap < kWideSoftcap) {
    function(TileKind<true, true>());
  } else {
    function(TileKind<false, false>());
  }
}

/// Scores of products, and the slope of softcap there. Scores of whole tiles are left without a factor that
/// all have in common.
struct Scorer {
  const TileParams& p;
  float argument;  // of tanh: x for a product of 1

  DEVICE explicit Scorer(const TileParams& params)
      : p(params), argument(params.softcap > 0.0f ? params.scale / params.softcap : 0.0f) {}

  /// That factor, not negative.
  template <class Kind>
  DEVICE float unit(Kind) const {
    return !Kind::is_whole ? 1.0f : Kind::is_capped ? p.softcap : p.scale;
  }

  /// exp(S - subtrahend).
  template <class Kind>
  DEVICE float weight(Kind kind, float score, float subtrahend) const {
    if constexpr (Kind::is_whole) {
      return power_of_two(score * (unit(kind) * kLog2E) - subtrahend * kLog2E);
    }
    return power_of_two((score - subtrahend) * kLog2E);  // a large bias loses no digits, and is no infinity
  }

  template <class Kind>
  DEVICE float score(Kind, const Place& place, float product, int row, int key, float& slope) const {
    slope = 1.0f;
    if constexpr (Kind::is_whole) {
      if constexpr (!Kind::is_capped) {
        return product;
      }
      const float tanh =
          fmaf(-2.0f, reciprocal(power_of_two(2.0f * kLog2E * argument * product) + 1.0f), 1.0f);
      slope = 1.0f - tanh * tanh;
      return tanh;
    }
    const int distance = key - row;
    const bool is_visible =
        (row < p.query_len) & (key < p.key_len) & (distance >= p.low) & (distance <= p.high);
    float made = product * p.scale;
    if (p.softcap > 0.0f) {
      const float tanh = tanhf(product * argument);
      slope = 1.0f - tanh * tanh;
      made = p.softcap * tanh;
    }
    if (p.bias_kind != 0 && is_visible) {
      made += bias_at(p, place, row, key);
    }
    return is_visible ? made : -kInfinity;
  }
};

/// Of the four threads that have columns of a row, in each of them.
DEVICE float sum_of_row(float sum) {
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

/// Of the largest score and the sum of exp(S - largest). A NaN, which is not the largest of anything, shows
/// in the sum.
DEVICE float lse_of(float largest, float sum) {
  return largest == kInfinity ? largest : (largest == -kInfinity ? 0.0f : largest) + logf(sum);
}

/// What is subtracted from the scores of a row: of one that sees nothing, +inf.
DEVICE float subtrahend_of(float lse) {
  return lse == -kInfinity ? kInfinity : lse;
}

/// Whether there is dropout; for the compiler, wherever it is not both.
DEVICE bool has_dropout(const TileParams& p) {
  return WITH_DROPOUT == 1 || (WITH_DROPOUT == 2 && p.seed != nullptr);
}

constexpr int kTileWords = 128;             // of the bits of 64 rows and 64 keys
constexpr int kKeysOfBlock = 8 * kPassing;  // of draws.cu and weights.cu

/// In pairs, as blocks hold lines.
DEVICE i64 tiles_of(int lines) {
  return (lines + 127) / 128 * 2;
}

/// Of all words a thread's first one, and the next ones kTileWords apart, of the lines that its block holds
/// from the `line`th of a launch on, beside `passing` of the other kind; heads count from the first of the
/// launch. draws.cu says what their bits are.
DEVICE i64 first_word(int head, int line, int lines, int passing) {
  const i64 tile = head * tiles_of(lines) + line / 64 + threadIdx.x / kTileWords;
  return tile * tiles_of(passing) * kTileWords + threadIdx.x % kTileWords;
}
DEVICE u32* bits_of_rows(const TileParams& p, int head, int row) {
  return p.draws + first_word(head, row - p.row_begin, p.rows, p.keys);
}
DEVICE u32* bits_of_keys(const TileParams& p, int head, int key) {
  return p.draws_of_keys + first_word(head, key - p.key_begin, p.keys, p.rows);
}

/// A number that dropout may leave out: 0 then. `kept` has a bit for each element.
DEVICE float if_kept(u32 kept, int block, int i, float number) {
  return kept >> (block * 4 + i) & 1 ? number : 0.0f;
}

/// Of a launch over blocks of lines of `heads` heads: heads whose other lines fit into a cache together take
/// turns, and of theirs the blocks go first that have most to do.
struct Turn {
  int head, block;
};

DEVICE Turn turn_of(const TileParams& p, int heads, int blocks) {
  const int section = blockIdx.x / (p.heads_together * blocks), first = section * p.heads_together;
  const int rest = blockIdx.x - first * blocks, beside = min(p.heads_together, heads - first);
  return {first + rest % beside, rest / beside};
}

/// Of a launch over rows what a block holds: the last rows first, which see most if there is a causal mask.
struct HeldRows {
  int head;  // of the launch
  Place place;
  int row;
};

DEVICE HeldRows rows_of_block(const TileParams& p) {
  const int blocks = (p.rows + kHeld - 1) / kHeld;
  const Turn mine = turn_of(p, p.launch_heads, blocks);
  return {mine.head, place_of(p, p.first_head + mine.head), p.row_begin + (blocks - 1 - mine.block) * kHeld};
}

/// Loads keys and values of a head that pass by, into tiles that each of so many turns has of its own.
struct KeysAndValues {
  const TileParams& p;
  const u16 *key_head, *value_head;
  u16 *keys, *values;

  DEVICE KeysAndValues(const TileParams& params, const Place& place, u16* tiles, int turns)
      : p(params),
        key_head(of_head(p.key, p.key_strides, place.n, place.kv)),
        value_head(of_head(p.value, p.value_strides, place.n, place.kv)),
        keys(tiles),
        values(tiles + turns * tile_size(kPassing, HEAD_DIM)) {}

  DEVICE u16* keys_of(int turn) const { return keys + turn * tile_size(kPassing, HEAD_DIM); }
  DEVICE u16* values_of(int turn) const { return values + turn * tile_size(kPassing, VALUE_DIM); }

  DEVICE void load(int key, int turn) const {
    load_tile<kPassing, HEAD_DIM>(keys_of(turn), key_head, p.key_strides[2], key, p.key_len);
    load_tile<kPassing, VALUE_DIM>(values_of(turn), value_head, p.value_strides[2], key, p.key_len);
  }
};
