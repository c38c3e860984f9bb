// Block attention in f32 with plain multiply-adds: exact enough for comparisons with a CPU, not meant to
// be fast. Compiled once for each HEAD_DIM. 256 threads take 32 query rows, 8 threads a row.
#include "attention.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

constexpr int D = HEAD_DIM;
constexpr int TILE = D <= 128 ? 32 : 16;
constexpr int ROWS = 32;
constexpr int PIECES = D / 4;       // of 4 dims
constexpr int GROUPS = TILE / 4;    // of 4 keys
constexpr int Q_STRIDE = D + 4;     // padded against bank conflicts
constexpr int V_STRIDE = TILE + 4;  // likewise
constexpr int P_STRIDE = TILE + 4;

DEVICE float dot(float4 a, float4 b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

extern "C" __global__ void __launch_bounds__(256)
    block_attention_f32(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  float *const sq = reinterpret_cast<float *>(shared); // [ROWS][Q_STRIDE]
  float *const sk = sq + ROWS * Q_STRIDE;              // [PIECES][TILE][4]
  float *const sv = sk + TILE * D;                     // [D][V_STRIDE]
  float *const sp = sv + D * V_STRIDE;                 // [ROWS][P_STRIDE]

  const int tid = threadIdx.x;
  const int split = blockIdx.x, sequence = blockIdx.z;
  const int kv_head = blockIdx.y % p.kv_heads, row_tile = blockIdx.y / p.kv_heads;
  const int group_size = p.heads / p.kv_heads;
  const int first_m = row_tile * ROWS;
  const int live_rows = min(ROWS, p.rows * group_size - first_m);

  wait_for_previous();
  let_next_start();
  const Extent e = extent_of(p, sequence);
  const int needed_splits = splits_of(p, e);
  if (split > 0 && split >= needed_splits) return;
  const int begin = split * p.chunk, end = end_of_split(p, e, split);

  const float *const k_cache = static_cast<const float *>(p.k_cache);
  const float *const v_cache = static_cast<const float *>(p.v_cache);

  for (int c = tid; c < ROWS * PIECES; c += 256) {
    const int m = c / PIECES, piece = c % PIECES;
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    if (m < live_rows)
      value = reinterpret_cast<const float4 *>(row_of(p, static_cast<const float *>(p.q),
                                                      p.q_batch_stride, p.q_row_stride, sequence,
                                                      kv_head, first_m + m))[piece];
    *reinterpret_cast<float4 *>(sq + m * Q_STRIDE + piece * 4) = value;
  }

  const int m = tid / 8, sub = tid % 8;
  const Range seen = visible(p, e, m < live_rows ? (first_m + m) / group_size : p.rows);
  float out[D / 8];
#pragma unroll
  for (int i = 0; i < D / 8; ++i) out[i] = 0.f;
  float maximum = -INFINITY, sum = 0.f;

  for (int t = begin; t < end; ++t) {
    const bool in_context = t < e.context_tiles;
    const int position = position_of(p, e, t);
    const int first_own = (t - e.context_tiles) * TILE;
    const int limit = in_context ? e.context : e.end;
    __syncthreads();
    for (int c = tid; c < GROUPS * D; c += 256) {
      // K: 4 dims of one key. V: 4 keys of one dim.
      const int key = c % TILE, piece = c / TILE;
      float4 k = make_float4(0.f, 0.f, 0.f, 0.f);
      const int kg = c % GROUPS, dim = c / GROUPS;
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      if (in_context) {
        const KeyGroup gk = key_group(p, e, sequence, kv_head, position + key);
        if (gk.base >= 0)
          k = *reinterpret_cast<const float4 *>(k_cache + gk.base +
                                                ((int64_t)piece * p.block_size + gk.offset) * 4);
        const KeyGroup gv = key_group(p, e, sequence, kv_head, position + kg * 4);
        if (gv.base >= 0) {
          const float4 four = *reinterpret_cast<const float4 *>(
              v_cache + gv.base + (int64_t)dim * p.block_size + gv.offset);
          v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
          // Behind the end there may be anything, NaN too.
#pragma unroll
          for (int i = 1; i < 4; ++i)
            if (position + kg * 4 + i >= limit) v[i] = 0.f;
        }
      } else {
        if (first_own + key < p.rows)
          k = reinterpret_cast<const float4 *>(
              static_cast<const float *>(p.k_own) + sequence * p.k_batch_stride +
              (first_own + key) * p.k_row_stride + kv_head * D)[piece];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_own + kg * 4 + i;
          if (row < p.rows)
            v[i] = static_cast<const float *>(
                p.v_own)[sequence * p.v_batch_stride + row * p.v_row_stride + kv_head * D + dim];
        }
      }
      *reinterpret_cast<float4 *>(sk + (piece * TILE + key) * 4) = k;
      *reinterpret_cast<float4 *>(sv + dim * V_STRIDE + kg * 4) = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();

    float s[TILE / 8];
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) s[j] = 0.f;
    for (int piece = 0; piece < PIECES; ++piece) {
      const float4 q = *reinterpret_cast<const float4 *>(sq + m * Q_STRIDE + piece * 4);
#pragma unroll
      for (int j = 0; j < TILE / 8; ++j)
        s[j] = dot(q, *reinterpret_cast<const float4 *>(sk + (piece * TILE + sub + j * 8) * 4), s[j]);
    }
    float m_new = maximum;
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
      const int key = position + sub + j * 8;
      if (p.pre_scale > 0.f) s[j] = tanhf(s[j] * p.pre_scale);
      s[j] *= p.log2_scale;
      if (key < seen.low || key >= min(seen.high, limit)) s[j] = -INFINITY;
      m_new = fmaxf(m_new, s[j]);
    }
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2)
      m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, lane));
    const float shift = m_new == -INFINITY ? 0.f : m_new;
    const float keep = exp2f(maximum - shift);
    maximum = m_new;
    sum *= keep;
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
      const float weight = exp2f(s[j] - shift);
      sum += weight;
      sp[m * P_STRIDE + sub + j * 8] = weight;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 8; ++i) out[i] *= keep;
    for (int kg = 0; kg < GROUPS; ++kg) {
      const float4 weight = *reinterpret_cast<const float4 *>(sp + m * P_STRIDE + kg * 4);
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        out[i] = dot(weight,
                     *reinterpret_cast<const float4 *>(sv + (sub + i * 8) * V_STRIDE + kg * 4),
                     out[i]);
    }
    __syncwarp();
  }

#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (m >= live_rows) return;
  if (needed_splits <= 1) {
    const float scale = normalizer(p, kv_head, first_m + m, maximum, sum);
    const int64_t row = (int64_t)p.heads * D;
    float *const target =
        row_of(p, static_cast<float *>(p.out), row * p.rows, row, sequence, kv_head, first_m + m);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) target[sub + i * 8] = out[i] * scale;
  } else {
    const int64_t row = partial_row(p, sequence, kv_head, row_tile, split) + m;
    if (sub == 0) p.partial_sums[row] = make_float2(maximum, sum);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) p.partial_out[row * D + sub + i * 8] = out[i];
  }
}
