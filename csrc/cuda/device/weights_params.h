// What a launch of weights.cu takes: read by the C++ compiler inside a namespace, and by the GPU's before
// weights.cu.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/// Strides are in elements. Numbers of half precision are u16.
struct WeightsParams {
  const u16 *query, *key, *value, *grad_output;
  i64 query_strides[3], key_strides[3], value_strides[3], grad_output_strides[3];  // of N, heads, rows
  const void* bias;
  i64 bias_strides[4];         // of N, heads, rows, keys
  int bias_kind;               // 0: none, 1: bool, 2: of the query's dtype, 3: float
  const float *lse, *delta;    // (N, heads, Lq)
  float* row_sums;             // (N, heads, Lq)
  u16 *weights, *grad_scores;  // (heads, rows, Lk) of this launch
  int heads, group, query_len, key_len;
  int first_head, row_begin, rows;  // of this launch; heads are counted over N as well
  int low, high;                    // row i sees keys from i + low to i + high
  float scale, softcap;             // softcap 0: none
  float capped_scale;               // 2 scale / softcap
  const i64* seed;                  // null: no dropout
  u64 threshold;                    // draws from here on are kept
  float kept;                       // the factor of what is kept
};
