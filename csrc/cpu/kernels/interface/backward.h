// The backward kernels as the tensor side sees them.
#pragma once

#include "params.h"
#include "ways.h"

namespace attn_ext::cpu {

enum class BackwardPath : int8_t {
  kTiles,        // blocks of keys against blocks of queries, packed
  kFewRows,      // a handful of query rows: keys and values read once, unpacked, in pieces
  kFewKeys,      // so few keys that whole rows of weights stay in the nearest cache
  kSmallHeads,   // few rows and few keys: as few keys, in floats whatever the elements are
  kJoinedHeads,  // tiles, the rows of a group's heads side by side as if they were one head's
};
constexpr int kBackwardPaths = 5;

// Batches and key heads are the units of work. Units whose gradients meet in the same mask gradient are a
// family; a chain is what of a family adds to one copy of that gradient, unit after unit.
struct ChainsPlan {
  int64_t count;
  int64_t family_units;
  int64_t mask_copies;  // of the mask gradient, the caller's own the first
  bool heads_share_mask, batches_share_mask;
};

// Where there are few chains, keys and queries are cut into `segments` segments, and for each query head of a
// group key segment i meets query segment (i + t) mod segments in phase t. That order of the sums follows
// from the shapes alone. Who works is up to the threads: a task takes a whole chain with packs of its own,
// or, where the chains would leave threads idle, a part of one key block against a part of one query block,
// and adds to each gradient when its turn has come.
struct TilesPlan {
  int64_t block_keys, block_queries;  // of a block
  int64_t key_blocks, query_blocks;   // of a head
  int64_t segments;                   // of keys and of queries
  bool blocks_apart;                  // dQ of each key block by itself, then their sum
  int64_t chain_tasks;                // that share the blocks of a chain then; 1: it is a task
  int64_t sum_tasks;                  // of all chains, that add up their dQ after that
  bool in_turn;                       // parts of blocks are tasks of their own; packs are shared
  int64_t key_parts, query_parts;     // of a block, a task each
  int64_t order_tasks, pack_tasks, row_tasks, meeting_tasks, store_tasks;  // of a chain, in this order
  int64_t lanes;
  int64_t chain_threads;  // as many at a time as work at a chain without much waiting
  int64_t order_threads;  // that its meetings are put in order for
};

// A task takes several short chains, whole; or, where the chains would leave threads idle, a block of rows of
// each unit of a chain, and adds to the gradients of its keys when its turn has come.
struct FewKeysPlan {
  int64_t task_chains;
  bool in_turn;
  int64_t row_blocks;              // of a head
  int64_t key_parts;               // each with its own turns
  int64_t pack_tasks, turn_tasks;  // in this order
};

struct FewRowsPlan {
  int64_t pieces;       // of the keys
  bool whole;           // a task has all keys of its units: their terms and dQ are its own
  int64_t task_chains;  // of such a task
  bool heads_together;  // a piece of all chains, then the next: rows of heads lie between each other
  int64_t term_tasks, piece_tasks, merge_tasks, mask_tasks;
};

// Rows that cannot be read, or written, as one head's where they lie go by way of copies in shared memory.
struct JoinedHeadsPlan {
  int64_t copy_tasks, store_tasks;
  int64_t copied_bytes;
};

struct BackwardPlan {
  BackwardPath path;
  bool exact_delta;      // delta from P dP rather than from the output
  bool streamed;         // the gradients of key and value are written past the caches
  bool fills_mask_grad;  // every number of the mask's gradient is written: nobody has to clear it
  ChainsPlan chains;
  TilesPlan tiles;
  FewKeysPlan few_keys;
  FewRowsPlan few_rows;
  JoinedHeadsPlan joined_heads;
  int64_t rounds;
  int64_t shared_bytes, thread_bytes;
};

using BackwardWays = Ways<BackwardParams, BackwardPlan, BackwardPath, kBackwardPaths>;

}  // namespace attn_ext::cpu
