// The draws of dropout, a bit each, which is 1 where the draw keeps an element; after tile.cu.
//
// Bits of 64 rows and 64 keys are a tile: a word for each of 128 threads, of the elements that it has where
// the rows are held, (block, i) at 4 block + i; and where that is wanted another one, of those that it has
// where the keys are. A block makes those of the rows it holds and of kKeysOfBlock keys, as far as they are
// seen.

/// Philox4x32-10: the draws of four columns, 16 apart.
DEVICE void draw(u32 (&words)[4], u32 c0, u32 row, u32 head, u32 batch, u64 seed) {
  u32 c[4] = {c0, row, head, batch}, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = wide_product(c[0], 0xD2511F53u), b = wide_product(c[2], 0xCD9E8D57u);
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

/// The word of a thread that has keys, of the words of those that have rows: row r of 16 and key k of 8 are
/// in lane 4 (r % 8) + k / 2, at 2 (r / 8) + k % 2 of the block of k.
DEVICE u32 turned_around(const u32* words) {
  const int lane = threadIdx.x % 32, key = lane / 4;
  const int shift = threadIdx.x / 32 % 4 * 8 + key % 2;  // of blocks 2 w and 2 w + 1 in warp w
  u32 turned = 0;
#pragma unroll
  for (int sixteen = 0; sixteen < 4; ++sixteen) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      // Keys 8 apart are 4 bits apart, rows 8 apart 2: the other way around where keys are held.
      const u32 four = words[sixteen * 32 + (lane % 4 * 2 + odd) * 4 + key / 2] >> shift;
      turned |= ((four & 0x41) | (four & 0x04) << 2 | (four & 0x10) >> 2) << (sixteen * 8 + odd);
    }
  }
  return turned;
}

/// Of row, and of the keys from `key` on, one thread's elements.
DEVICE u32 draw_word(const TileParams& p, const Place& place, int row, int key, u32 batch, u64 seed) {
  u32 kept = 0;
#pragma unroll
  for (int part = 0; part < 8; ++part) {  // block within 16 columns, element
    const int odd = part / 4, i = part % 4;
    u32 words[4];
    draw(words, key / 4 + column_at(odd, i), row + line_at(i), place.h, batch, seed);  // 16 (key / 64) + ...
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      kept |= (u32)(words[word] >= p.threshold) << ((word * 2 + odd) * 4 + i);
    }
  }
  return kept;
}

KERNEL(4) draws(const TileParams p) {
  u32* const words_of_block = (u32*)shared_memory();
  const int head = blockIdx.z, row = p.row_begin + blockIdx.y * kHeld;
  const int begin = p.key_begin + blockIdx.x * kKeysOfBlock;
  const Place place = place_of(p, p.first_head + head);
  const Range seen = keys_seen(p, row);
  const int end = min(min(begin + kKeysOfBlock, p.key_begin + p.keys), seen.end);
  const u64 seed = (u64)*p.seed;
  const u32 batch = (u32)(place.n * p.batch_step + p.first_batch);
  u32* const bits = bits_of_rows(p, head, row);
  const int row_tile = (row - p.row_begin) / 64 + threadIdx.x / kTileWords;
  for (int key = max(begin, seen.begin); key < end; key += kPassing) {
    const int key_tile = (key - p.key_begin) / kPassing;
    u32& word = bits[key_tile * kTileWords];
    if (!p.are_drawn) {
      word = draw_word(p, place, row, key, batch, seed);
    }
    if (p.draws_of_keys != nullptr) {
      __syncthreads();  // the tile before has been read
      words_of_block[threadIdx.x] = word;
      __syncthreads();
      const i64 tile = head * tiles_of(p.keys) + key_tile;
      p.draws_of_keys[(tile * tiles_of(p.rows) + row_tile) * kTileWords + threadIdx.x % kTileWords] =
          turned_around(words_of_block + threadIdx.x / kTileWords * kTileWords);
    }
  }
}
