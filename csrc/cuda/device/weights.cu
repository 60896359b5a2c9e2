// Weights and their gradients, a tile of scores at a time, on the matrix units of an NVIDIA GPU; compiled
// when it is first needed, by the compiler that comes with PyTorch, after weights_params.h and primitives.cu.
// Defined from outside: HEAD_DIM and VALUE_DIM, multiples of 16, IS_BFLOAT16 and WITH_GRADIENTS.
//
//   S = softcap(scale · Q Kᵀ) + bias over what is visible       P = exp(S - lse)
//   lse = log sum_j exp S                                        (row_sums)
//   Pd = P ∘ dropout                                             (weights)
//   dS = P ∘ ((dO Vᵀ) ∘ dropout - delta) ∘ softcap'              (weights, WITH_GRADIENTS)
//
// A block of 256 threads has a tile of 128 rows and 128 keys; each of its eight warps 16 rows of it.

constexpr int kTile = 128, kThreads = 256, kPad = 8;  // pads keep rows of a tile in different banks

struct Place {  // of a launch's head
  int n, h, kv;
};

__device__ Place place_of(const WeightsParams& p, int head) {
  const int all = p.first_head + head, n = all / p.heads, h = all % p.heads;
  return {n, h, h / p.group};
}

/// kTile rows of `columns` numbers into shared memory; zeros from row `len` on.
template <int columns>
__device__ void load_tile(u16* tile, const u16* from, i64 stride, int row, int len) {
  constexpr int kChunks = columns / 8;
  for (int i = threadIdx.x; i < kTile * kChunks; i += kThreads) {
    const int r = i / kChunks, c = i % kChunks;
    const int there = row + r < len;
    const u16* source = from + (there ? (row + r) * stride + c * 8 : 0);
    copy_16_bytes(tile + r * (columns + kPad) + c * 8, source, there);
  }
}

__device__ void wait_for_tiles() {
  wait_for_copies();
  __syncthreads();
}

/// Of a warp's 16 rows: 16 blocks of 8 keys; a thread has two columns of each in rows g and g + 8.
typedef float Scores[16][4];

__device__ void clear(Scores& scores) {
#pragma unroll
  for (int block = 0; block < 16; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[block][i] = 0.0f;
    }
  }
}

/// left (16 rows of the warp, columns) · rightᵀ (kTile rows, columns).
template <int columns>
__device__ void product(Scores& sum, const u16* left, const u16* right) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kPitch = columns + kPad;
  const u16* a_place = left + (warp * 16 + lane % 16) * kPitch + lane / 16 * 8;
  const u16* b_place = right + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
  clear(sum);
#pragma unroll 4
  for (int k = 0; k < columns; k += 16) {
    u32 a[4];
    load_matrices(a, a_place + k);
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      u32 b[4];
      load_matrices(b, b_place + pair * 16 * kPitch + k);
      multiply_add(sum[2 * pair], a, b[0], b[1]);
      multiply_add(sum[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

/// Row and key of element i of a block.
__device__ int row_of(int i) {
  return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
}
__device__ int key_of(int block, int i) {
  return block * 8 + threadIdx.x % 4 * 2 + i % 2;
}

__device__ float bias_at(const WeightsParams& p, const Place& place, int row, int key) {
  const i64 at = place.n * p.bias_strides[0] + place.h * p.bias_strides[1] + row * p.bias_strides[2] +
                 key * p.bias_strides[3];
  return p.bias_kind == 1   ? (((const u8*)p.bias)[at] ? 0.0f : -kInfinity)
         : p.bias_kind == 2 ? unpack(((const u16*)p.bias)[at])
                            : ((const float*)p.bias)[at];
}

/// Whether all of a tile is there and visible, and nothing is done to its scores but by softcap.
__device__ bool is_whole(const WeightsParams& p, int row, int key) {
  return p.bias_kind == 0 && row + kTile <= p.query_len && key + kTile <= p.key_len &&
         key - (row + kTile - 1) >= p.low && key + kTile - 1 - row <= p.high;
}

/// score_of, in such a tile.
__device__ float score_of_whole(const WeightsParams& p, float product, float& slope) {
  slope = 1.0f;
  if (p.softcap > 0.0f) {
    const float twice = product * p.capped_scale, x = 0.5f * twice, square = x * x;
    const float tanh = fabsf(x) < 0.1f ? x * (1.0f + square * (square * (2.0f / 15.0f) - 1.0f / 3.0f))
                                       : 1.0f - __fdividef(2.0f, __expf(twice) + 1.0f);
    slope = 1.0f - tanh * tanh;
    return p.softcap * tanh;
  }
  return product * p.scale;
}

/// A score of the product: -inf where it is not visible. `slope` is that of softcap.
__device__ float score_of(const WeightsParams& p, const Place& place, float product, int row, int key,
                          float& slope) {
  slope = 1.0f;
  const int distance = key - row;
  if (row >= p.query_len || key >= p.key_len || distance < p.low || distance > p.high) {
    return -kInfinity;
  }
  const float score = score_of_whole(p, product, slope);
  return p.bias_kind == 0 ? score : score + bias_at(p, place, row, key);
}

/// Whether the band lets any row of a tile see any of its keys.
__device__ bool meets(const WeightsParams& p, int row, int key) {
  const int last_row = min(row + kTile, p.query_len) - 1, last_key = min(key + kTile, p.key_len) - 1;
  return last_key - row >= p.low && key - last_row <= p.high;
}

KERNEL(2) row_sums(const WeightsParams p) {
  u16* const shared = shared_memory();
  u16 *queries = shared, *keys = shared + kTile * (HEAD_DIM + kPad);
  const Place place = place_of(p, blockIdx.z);
  const int row = blockIdx.y * kTile;
  load_tile<HEAD_DIM>(queries, p.query + place.n * p.query_strides[0] + place.h * p.query_strides[1],
                      p.query_strides[2], row, p.query_len);
  float largest[2] = {-kInfinity, -kInfinity}, sum[2] = {0.0f, 0.0f};
  for (int key = 0; key < p.key_len; key += kTile) {
    if (!meets(p, row, key)) {
      continue;
    }
    load_tile<HEAD_DIM>(keys, p.key + place.n * p.key_strides[0] + place.kv * p.key_strides[1],
                        p.key_strides[2], key, p.key_len);
    wait_for_tiles();
    Scores scores;
    product<HEAD_DIM>(scores, queries, keys);
    const bool whole = is_whole(p, row, key);
    float most[2] = {largest[0], largest[1]}, slope;
#pragma unroll
    for (int block = 0; block < 16; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[block][i] =
            whole ? score_of_whole(p, scores[block][i], slope)
                  : score_of(p, place, scores[block][i], row + row_of(i), key + key_of(block, i), slope);
        most[i / 2] = fmaxf(most[i / 2], scores[block][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (most[half] != -kInfinity) {
        sum[half] *= __expf(largest[half] - most[half]);
        largest[half] = most[half];
      }
    }
#pragma unroll
    for (int block = 0; block < 16; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A NaN, which is not the largest of anything, shows in the sum.
        const float from = largest[i / 2] == -kInfinity ? 0.0f : largest[i / 2];
        sum[i / 2] += scores[block][i] == -kInfinity ? 0.0f : __expf(scores[block][i] - from);
      }
    }
    __syncthreads();
  }
  wait_for_copies();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = largest[half];
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    float total = most == -kInfinity ? sum[half] : sum[half] * __expf(largest[half] - most);
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int at = row + row_of(half * 2);
    if (threadIdx.x % 4 == 0 && at < p.query_len) {
      p.row_sums[((i64)place.n * p.heads + place.h) * p.query_len + at] =
          most == kInfinity ? most : (most == -kInfinity ? 0.0f : most) + logf(total);
    }
  }
}

/// Philox4x32-10: the draws of four columns, 16 apart.
__device__ void draw(u32 (&words)[4], u32 c0, u32 row, u32 head, u32 batch, u64 seed) {
  u32 c[4] = {c0, row, head, batch}, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)c[0] * 0xD2511F53u, b = (u64)c[2] * 0xCD9E8D57u;
    const u32 next[4] = {(u32)(b >> 32) ^ c[1] ^ k0, (u32)b, (u32)(a >> 32) ^ c[3] ^ k1, (u32)a};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[i] = next[i];
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = c[i];
  }
}

/// A bit for each element of Scores that dropout keeps.
__device__ u64 kept_of(const WeightsParams& p, const Place& place, int row, int key) {
  u64 bits = 0;
  for (int part = 0; part < 16; ++part) {  // 64 columns, block within 16 of them, element
    const int columns = part / 8 * 64, odd = part / 4 % 2, i = part % 4;
    const int first = key + columns + odd * 8 + threadIdx.x % 4 * 2 + i % 2;
    u32 words[4];
    draw(words, 16 * (first / 64) + first % 16, row + row_of(i), place.h, place.n, (u64)*p.seed);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int block = columns / 8 + word * 2 + odd;
      bits |= (u64)(words[word] >= p.threshold) << (block * 4 + i);
    }
  }
  return bits;
}

/// A tile of numbers of half precision to where it belongs in (heads, rows, Lk) of a launch.
__device__ void store_tile(const WeightsParams& p, u16* to, u16* stage, const Scores& numbers, int row,
                           int key) {
  constexpr int kPitch = kTile + kPad;
  __syncthreads();
#pragma unroll
  for (int block = 0; block < 16; ++block) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      *(u32*)(stage + row_of(i) * kPitch + key_of(block, 0)) = pack(numbers[block][i], numbers[block][i + 1]);
    }
  }
  __syncthreads();
  const int rows = min(kTile, p.row_begin + p.rows - row), keys = min(kTile, p.key_len - key);
  u16* out = to + ((i64)blockIdx.z * p.rows + row - p.row_begin) * p.key_len + key;
  if (p.key_len % 8 == 0) {
    for (int i = threadIdx.x; i < rows * (kTile / 8); i += kThreads) {
      const int r = i / (kTile / 8), c = i % (kTile / 8) * 8;
      if (c < keys) {
        *(uint4*)(out + (i64)r * p.key_len + c) = *(const uint4*)(stage + r * kPitch + c);
      }
    }
  } else {
    for (int i = threadIdx.x; i < rows * kTile; i += kThreads) {
      const int r = i / kTile, c = i % kTile;
      if (c < keys) {
        out[(i64)r * p.key_len + c] = stage[r * kPitch + c];
      }
    }
  }
}

KERNEL(WITH_GRADIENTS ? 1 : 2) weights(const WeightsParams p) {
  u16* const shared = shared_memory();
  u16 *queries = shared, *keys = queries + kTile * (HEAD_DIM + kPad);
  u16* const stage = shared;  // when the tiles have been multiplied
  const Place place = place_of(p, blockIdx.z);
  const int row = p.row_begin + blockIdx.y * kTile, key = blockIdx.x * kTile;
  Scores weights;
  if (!meets(p, row, key)) {
    clear(weights);
    store_tile(p, p.weights, stage, weights, row, key);
#if WITH_GRADIENTS
    store_tile(p, p.grad_scores, stage, weights, row, key);
#endif
    return;
  }
  load_tile<HEAD_DIM>(queries, p.query + place.n * p.query_strides[0] + place.h * p.query_strides[1],
                      p.query_strides[2], row, p.query_len);
  load_tile<HEAD_DIM>(keys, p.key + place.n * p.key_strides[0] + place.kv * p.key_strides[1],
                      p.key_strides[2], key, p.key_len);
#if WITH_GRADIENTS
  u16 *grad_rows = keys + kTile * (HEAD_DIM + kPad), *values = grad_rows + kTile * (VALUE_DIM + kPad);
  load_tile<VALUE_DIM>(
      grad_rows, p.grad_output + place.n * p.grad_output_strides[0] + place.h * p.grad_output_strides[1],
      p.grad_output_strides[2], row, p.query_len);
  load_tile<VALUE_DIM>(values, p.value + place.n * p.value_strides[0] + place.kv * p.value_strides[1],
                       p.value_strides[2], key, p.key_len);
#endif
  wait_for_tiles();
  product<HEAD_DIM>(weights, queries, keys);
#if WITH_GRADIENTS
  Scores grads;
  product<VALUE_DIM>(grads, grad_rows, values);
#endif
  float lse[2];
#if WITH_GRADIENTS
  float delta[2];
#endif
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = min(row + row_of(half * 2), p.query_len - 1);
    const i64 place_of_row = ((i64)place.n * p.heads + place.h) * p.query_len + at;
    lse[half] = p.lse[place_of_row];
#if WITH_GRADIENTS
    delta[half] = p.delta[place_of_row];
#endif
  }
  if (p.seed == nullptr && is_whole(p, row, key)) {
#pragma unroll
    for (int block = 0; block < 16; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float slope;
        const float score = score_of_whole(p, weights[block][i], slope);
        weights[block][i] = lse[i / 2] == -kInfinity ? 0.0f : __expf(score - lse[i / 2]);
#if WITH_GRADIENTS
        grads[block][i] = weights[block][i] * (grads[block][i] - delta[i / 2]) * slope;
#endif
      }
    }
  } else {
    const u64 kept = p.seed != nullptr ? kept_of(p, place, row, key) : ~0ull;
    const float factor = p.seed != nullptr ? p.kept : 1.0f;
#pragma unroll
    for (int block = 0; block < 16; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float slope;
        const float score =
            score_of(p, place, weights[block][i], row + row_of(i), key + key_of(block, i), slope);
        const bool is_seen = score != -kInfinity && lse[i / 2] != -kInfinity;
        const float weight = is_seen ? __expf(score - lse[i / 2]) : 0.0f;
        const float multiplier = kept >> (block * 4 + i) & 1 ? factor : 0.0f;
        weights[block][i] = weight * multiplier;
#if WITH_GRADIENTS
        grads[block][i] = is_seen ? weight * (grads[block][i] * multiplier - delta[i / 2]) * slope : 0.0f;
#endif
      }
    }
  }
  store_tile(p, p.weights, stage, weights, row, key);
#if WITH_GRADIENTS
  store_tile(p, p.grad_scores, stage, grads, row, key);
#endif
}
