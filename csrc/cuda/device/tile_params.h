// What a launch of a kernel of this folder takes: read by the C++ compiler inside a namespace, and by the
// GPU's before tile.cu.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/// Strides are in elements, of N, heads, rows. Numbers of half precision are u16. What is made is dense.
struct TileParams {
  const u16 *query, *key, *value, *grad_output, *saved_output;
  i64 query_strides[3], key_strides[3], value_strides[3], grad_output_strides[3], saved_output_strides[3];
  const void* bias;
  i64 bias_strides[4];                      // of N, heads, rows, keys
  int bias_kind;                            // 0: none, 1: bool, 2: of the query's dtype, 3: float
  const float *lse, *grad_lse;              // (N, heads, Lq); grad_lse null: none
  float* delta;                             // (N, heads, Lq), of grad_query.cu for grad_keys.cu
  float* made_lse;                          // (N, heads, Lq)
  u16* output;                              // (N, heads, Lq, Dv)
  u16* weights;                             // (heads, rows, Lk) of this launch
  u16 *grad_query, *grad_key, *grad_value;  // (N, heads, Lq, D), (N, key heads, Lk, D or Dv)
  int batches, heads, group, query_len, key_len;
  int heads_together;             // of a launch over blocks of lines: those that take turns
  int low, high;                  // row i sees keys from i + low to i + high
  float scale, softcap;           // softcap 0: none
  const i64* seed;                // of draws.cu; null: no dropout
  u32 threshold;                  // draws from here on are kept
  float kept;                     // what they are multiplied by
  float *part_output, *part_lse;  // (parts, N, heads, Lq, Dv), (parts, N, heads, Lq)
  int parts;                      // of the keys, which attend.cu makes apart and merge.cu puts together
  float* subtrahend;              // (N, heads, Lq), lse as grad_keys.cu takes it, of grad_query.cu
  int first_head, launch_heads, row_begin, rows, key_begin,
      keys;                     // of a launch, heads counted over N as well
  u32* draws;                   // bits, of draws.cu for a launch, as rows are held
  int first_batch, batch_step;  // n counts as n batch_step + first_batch in the draws
  u32* draws_of_keys;           // the same bits as keys are held; null: of draws.cu not wanted
  int are_drawn;                // 1: of draws.cu these alone are wanted, `draws` are there
};
