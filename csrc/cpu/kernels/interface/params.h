// What a call is, in plain types: filled by the tensor side, read by kernels of every instruction
// set. Nothing here has code, so that no function is shared between instruction sets at link time.
#pragma once

#include <cstdint>

namespace attn_ext::cpu {

enum class ScalarKind : int8_t { kNone, kFloat64, kFloat32, kBFloat16, kFloat16, kBool, kInt8, kFloat8E4m3 };

// Element (b, h, r, c) lies at data + batch(b) + h * head_stride + r * row_stride + c * column_stride,
// counted in elements. A stride of 0 broadcasts. batch(b), b flat over all batch dims, is batch_offsets[b],
// or b * batch_stride where there is no such table (one is needed only where the batch dims do not collapse
// into one stride).
struct TensorView {
  void* data = nullptr;
  const int64_t* batch_offsets = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// How rows of keys or values are stored where the strides of their view do not say all: a cache. Rows may be
// of a narrower type than the query, from which all their numbers are copied as they are.
struct Storage {
  ScalarKind kind = ScalarKind::kNone;  // none: the query's dtype
  // Row r is row r % page_rows of page pages[r / page_rows], which begins page_stride elements further than
  // the page before it. Null: there are no pages.
  const int64_t* pages = nullptr;
  int64_t page_rows = 1, page_stride = 0;
  // A factor of each row, float: of a key's score, or of a value's share in the output. batch_stride is from
  // page to page, head_stride from key head to key head. data null: none.
  TensorView scale;
};

// Shapes: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), output (B, Hq, Lq, Dv).
// Query head h reads key and value head h / (query_heads / key_heads).
struct AttentionShape {
  ScalarKind dtype = ScalarKind::kFloat32;
  int64_t batch = 0;
  int64_t query_heads = 0;
  int64_t key_heads = 0;
  int64_t query_len = 0;
  int64_t key_len = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
};

// Which keys a query row sees, and how its scores are made:
//   S = softcap * tanh(scale * q.k / softcap)  (scale * q.k where softcap is 0) + bias,  -inf where not
//   visible.
// Key j is visible to row i iff i + query_offset - window_left <= j <= i + query_offset + window_right and
// the mask lets it through: true for a bool mask, not -inf for a floating one. Causality is window_right = 0.
struct ScoreRule {
  double scale = 1.0;
  double softcap = 0.0;
  int64_t query_offset = 0;  // the sum of this, a row and a window must not overflow
  int64_t window_left = -1;  // -1: open
  int64_t window_right = -1;
  ScalarKind mask_kind = ScalarKind::kNone;   // none, bool, the query's dtype or float32
  TensorView mask;                            // (B, Hq, Lq, Lk), any stride may be 0
  ScalarKind sinks_kind = ScalarKind::kNone;  // none, the query's dtype or float32
  TensorView sinks;                           // (B, Hq): batch and head strides only
};

// Where rows of an output or of a gradient are written; column_stride 1, but for the sums of a mask's
// gradient. Wide: in float (double for float64) whatever the query's dtype, because they are to be added to
// others.
struct ResultView : TensorView {
  bool wide = false;
};

// Philox4x32-10 draws, keyed by a seed; the batch b of the whole call has seed seeds[b / batches_per_seed]
// and counts as batch b % batches_per_seed in the counter. Column j of a row is word (j >> 4) & 3 of counter
// (16 * (j >> 6) + (j & 15), row, head, batch); it is kept iff that word >= threshold.
struct DropoutRule {
  bool enabled = false;
  uint32_t threshold = 0;   // floor(p * 2^32), for p = 1 anything
  double keep_scale = 1.0;  // 1 / (1 - p), 0 for p = 1
  const int64_t* seeds = nullptr;
  int64_t batches_per_seed = 1;
  // Batch b of these parameters is batch b * batch_step + first_batch of the whole call.
  int64_t first_batch = 0;
  int64_t batch_step = 1;
  // Where the first element of the whole call lies in the draws: added to the counter's words, the columns
  // in chunks of 64.
  int64_t batch_origin = 0, head_origin = 0, row_origin = 0, chunk_origin = 0;
};

// What both passes read.
struct CallParams {
  AttentionShape shape;
  ScoreRule rule;
  DropoutRule dropout;
  TensorView query, key, value;
};

struct ForwardParams : CallParams {
  Storage key_storage, value_storage;
  ResultView output;
  void* lse = nullptr;           // (B, Hq, Lq), float (double for float64); null: not wanted
  double* double_lse = nullptr;  // the same in double whatever the dtype
  int64_t lse_stride = 0;        // from a head's rows in them to those of the next
  TensorView weights;        // (B, Hq, Lq, Lk) in the query's dtype, column_stride 1; data null: not wanted
  void* key_mass = nullptr;  // (B, Hq, Lk) contiguous, float (double for float64); null: not wanted
  int64_t most_bytes_head_by_head = INT64_MAX;  // memory_ahead.h
};

// Every incoming gradient may be absent (data null) and have any strides, 0 included; a gradient that is not
// wanted has data null. T is float, double for float64.
struct BackwardParams : CallParams {
  TensorView output;  // not read where delta is given
  // P (B, Hq, Lq, Lk) as the forward pass has written it, in the query's dtype, column_stride 1; data null:
  // it is made again, as it is wherever it does not tell enough.
  TensorView weights;
  const void* lse = nullptr;  // (B, Hq, Lq), T
  int64_t lse_stride = 0;     // from a head's rows in it, and in the next two, to those of the next
  // rowsum(P dP) over all keys, of which these are a part, as lse is then; null: these are all. lse may be
  // given in double beside T (null: it is not), for rows far from 0.
  const void* delta = nullptr;  // T
  const double* double_lse = nullptr;
  TensorView grad_output;                       // (B, Hq, Lq, Dv)
  TensorView grad_lse;                          // (B, Hq, Lq, 1), T
  TensorView grad_weights;                      // (B, Hq, Lq, Lk)
  TensorView grad_key_mass;                     // (B, Hq, 1, Lk), T
  ResultView grad_query, grad_key, grad_value;  // as query, key, value with all of B
  // Zeroed by the caller, but where the plan fills it. Wide: sums to be added to, strides of 0 where the mask
  // broadcasts; else each number is written once at most, in the query's dtype, which takes a mask that
  // broadcasts over nothing, and more than one key.
  ResultView grad_mask;
  bool adds_to_mask_grad = false;  // other calls have added to it: no plan fills it
  int64_t grad_mask_size = 0;      // elements from grad_mask.data on
  void* grad_sinks = nullptr;      // (B, Hq) contiguous, T; written
};

}  // namespace attn_ext::cpu
