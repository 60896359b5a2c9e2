// The forward kernels as the tensor side sees them.
#pragma once

#include "params.h"
#include "ways.h"

namespace attn_ext::cpu {

enum class ForwardPath : int8_t {
  kWholeRows,  // all keys in one block: whole-row softmax
  kOnline,     // softmax over key blocks with a running maximum and sum
  kSplit,      // few query rows, many keys: pieces of the keys apart, then merged
  kFewRows,    // a handful of query rows: keys and values read once, in pieces, and packed for many heads
  kUnitRows,   // the same in the order in which a matrix unit adds, which makes the scores, or all
};
constexpr int kForwardPaths = 5;

// Of the paths whose tasks are blocks of query rows against all keys (kWholeRows, kOnline).
struct AllKeysPlan {
  bool pack_once;      // keys and values packed by a round of its own, or by each task for itself
  int64_t pack_keys;   // by a task of that round
  int64_t segments;    // runs of query blocks that a task takes
  bool heads_in_turn;  // the last blocks of all heads come first; else all blocks of a head
};

// Of the paths whose tasks are pieces of the keys against all query rows of a group (kSplit, kFewRows,
// kUnitRows).
struct KeyPiecesPlan {
  int64_t count;
  int64_t keys;          // of a piece
  int64_t first;         // of the pieces that are visited: those before are outside of every row's window
  int64_t per_task;      // pieces that a task takes
  bool heads_together;   // a piece of all heads, then the next; else all pieces of a head
  int64_t heads_beside;  // key heads that a piece is of, and of these
  int64_t keys_beside;   // so many keys at a time, if it is of several
  bool packs_keys, packs_values;  // before they are multiplied
  bool merged;                    // by a round of its own; else a piece is all there is
};

// What decides bits (path, block_keys, pieces.keys) follows from Lq, Lk, D, Dv, the dtypes and the side
// outputs alone.
struct ForwardPlan {
  ForwardPath path;
  bool value_in_place;  // values are multiplied where they lie
  int64_t block_rows;   // query rows of a block
  int64_t block_keys;   // keys of a block
  AllKeysPlan all_keys;
  KeyPiecesPlan pieces;
  int64_t rounds;
  int64_t round_tasks[3];
  int64_t packed_bytes;  // of shared_bytes: keys and values packed for all tasks
  int64_t shared_bytes, thread_bytes;
};

using ForwardWays = Ways<ForwardParams, ForwardPlan, ForwardPath, kForwardPaths>;

}  // namespace attn_ext::cpu
