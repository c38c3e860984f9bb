// Block attention: what the tensor-core kernel, the f32 kernel and the reduction share.
//
// Work is cut into tiles of `tile` keys. The context's tiles come first, then those of the block's own
// rows if they are given densely. `chunk` consecutive tiles make a split; a thread block computes
// one split for one kv head, one sequence and up to `row_tile` of the `rows * group` query rows that
// share that kv head. A sequence that needs one split only writes its result; otherwise partial results
// go to scratch memory and the reduction kernel puts them together.
#pragma once

#include "common.cuh"

struct AttentionParams {
  const void *q;                // [batch, rows, heads, head_dim]
  const void *k_cache;          // [num_blocks, kv_heads, head_dim/x, block_size, x]
  const void *v_cache;          // [num_blocks, kv_heads, head_dim, block_size]
  const void *k_own;            // [batch, rows, kv_heads, head_dim] or null
  const void *v_own;            // likewise
  const uint32_t *block_tables; // [batch, max_blocks]
  const uint32_t *context_lens; // [batch]
  const float *sinks;           // [heads] or null
  void *out;                    // [batch, rows, heads, head_dim]
  float *partial_out;           // [batch, kv_heads, row_tiles, splits, row_tile, head_dim]
  float2 *partial_sums;         // [batch, kv_heads, row_tiles, splits, row_tile]: max (log2), sum
  int64_t q_batch_stride, q_row_stride;
  int64_t k_batch_stride, k_row_stride; // of k_own
  int64_t v_batch_stride, v_row_stride; // of v_own
  int32_t batch, rows, heads, kv_heads, head_dim;
  int32_t block_size, max_blocks, num_blocks, table_stride;
  int32_t window; // 0: none
  int32_t causal;
  int32_t tile, row_tile, row_tiles;
  int32_t chunk, splits;
  float pre_scale;  // scores are multiplied with this before tanh (soft cap only, else 0)
  float log2_scale; // then with this, which brings them to base 2
};

// One sequence's keys.
struct Extent {
  int context;    // keys in the paged cache
  int first_row;  // position of query row 0; negative if there are fewer keys than rows
  int end;        // one past the last position of any key
  int tile_begin; // first context tile that any row sees
  int context_tiles;
  int tiles; // all, those of the block's own rows included
};

DEVICE Extent extent_of(const AttentionParams &p, int sequence) {
  const bool own = p.k_own != nullptr;
  Extent e;
  // A length beyond the table is the caller's fault; it must not become an access beyond the table.
  const long long limit = (long long)p.max_blocks * p.block_size;
  const uint32_t length = p.context_lens[sequence];
  e.context = (long long)length < limit ? (int)length : (int)limit;
  e.first_row = own ? e.context : e.context - p.rows;
  e.end = own ? e.context + p.rows : e.context;
  const int oldest = p.window > 0 ? max(0, e.first_row - p.window + 1) : 0;
  e.tile_begin = oldest / p.tile;
  e.context_tiles = max(0, (e.context + p.tile - 1) / p.tile - e.tile_begin);
  e.tiles = e.context_tiles + (own ? (p.rows + p.tile - 1) / p.tile : 0);
  return e;
}

// Position of the first key of a tile.
DEVICE int position_of(const AttentionParams &p, const Extent &e, int tile) {
  return tile < e.context_tiles ? (e.tile_begin + tile) * p.tile
                                : e.context + (tile - e.context_tiles) * p.tile;
}

// Splits that a sequence takes. Should it be longer than planned for, the last one takes the rest.
DEVICE int splits_of(const AttentionParams &p, const Extent &e) {
  return min(p.splits, (e.tiles + p.chunk - 1) / p.chunk);
}

DEVICE int end_of_split(const AttentionParams &p, const Extent &e, int split) {
  return split + 1 >= splits_of(p, e) ? e.tiles : (split + 1) * p.chunk;
}

// Positions [low, high) that a query row sees; empty for rows that do not exist.
struct Range {
  int low, high;
};

DEVICE Range visible(const AttentionParams &p, const Extent &e, int row) {
  const int position = e.first_row + row;
  Range r = {0, 0};
  if (row < p.rows && position >= 0) {
    r.low = p.window > 0 ? max(0, position - p.window + 1) : 0;
    r.high = p.causal ? position + 1 : e.end;
    if (p.window > 0 && p.window < e.end - position) r.high = min(r.high, position + p.window);
  }
  return r;
}

// Where 8 (or fewer) consecutive keys of the paged cache lie: element offset of the block's kv head,
// negative if there is nothing to read, and the place within the block.
struct KeyGroup {
  int64_t base;
  int64_t offset;
};

// `block` is the table's entry for this position.
DEVICE KeyGroup key_group(const AttentionParams &p, const Extent &e, int kv_head, int position,
                          uint32_t block) {
  KeyGroup g = {-1, 0};
  if (position < e.context && block < (uint32_t)p.num_blocks) {
    g.base = ((int64_t)block * p.kv_heads + kv_head) * p.head_dim * p.block_size;
    g.offset = position % p.block_size;
  }
  return g;
}

// The table's entry for a position, whether or not the context reaches so far; none behind the table.
DEVICE uint32_t block_of(const AttentionParams &p, int sequence, int position) {
  const int index = position / p.block_size;
  return index < p.max_blocks
             ? __ldg(p.block_tables + (int64_t)sequence * p.table_stride + index)
             : 0xffffffffu;
}

DEVICE KeyGroup key_group(const AttentionParams &p, const Extent &e, int sequence, int kv_head,
                          int position) {
  if (position >= e.context) return {-1, 0};
  return key_group(p, e, kv_head, position, block_of(p, sequence, position));
}

// The row of the scratch memory for one split's partial results.
DEVICE int64_t partial_row(const AttentionParams &p, int sequence, int kv_head, int row_tile,
                           int split) {
  const int64_t unit = ((int64_t)sequence * p.kv_heads + kv_head) * p.row_tiles + row_tile;
  return (unit * p.splits + split) * p.row_tile;
}

// Query rows that share a kv head are numbered row * group + head within the group.
template <typename T>
DEVICE T *row_of(const AttentionParams &p, T *base, int64_t batch_stride, int64_t row_stride,
                 int sequence, int kv_head, int m) {
  const int group = p.heads / p.kv_heads;
  const int row = m / group, head = kv_head * group + m % group;
  return base + sequence * batch_stride + row * row_stride + (int64_t)head * p.head_dim;
}

DEVICE float sink_of(const AttentionParams &p, int kv_head, int m) {
  const int group = p.heads / p.kv_heads;
  return p.sinks[kv_head * group + m % group] * 1.4426950408889634f;
}

// 1 / sum of a row's weights, the sink included; 0 for a row that sees nothing.
DEVICE float normalizer(const AttentionParams &p, int kv_head, int m, float maximum, float sum) {
  if (sum <= 0.f) return 0.f;
  if (p.sinks != nullptr) sum += exp2_fast(sink_of(p, kv_head, m) - maximum);
  return 1.f / sum;
}
