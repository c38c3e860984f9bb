// Block attention on tensor cores (mma.sync m16n8k16), bf16 and f16. Compiled once for each HEAD_DIM.
//
// A thread block has WARPS warps. Each takes 16 query rows and all keys of every tile, so all query
// rows of a kv head share one read of K and V. The cache's own layouts are
// what the matrix instructions want: K in pieces of 8 dims of one key, V in pieces of 8 keys of one
// dim. Shared memory keeps these 16-byte pieces, so nothing is transposed.
#include "attention.cuh"
#include "mma.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

// Four 8x8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// Within 8 consecutive dims the pieces of V are permuted by key group, so that copies of neighbouring
// key groups of one dim fall into different banks.
DEVICE int permuted(int dim, int key_group) {
  return dim ^ (((key_group & 1) << 2) | (key_group & 2) | ((key_group >> 2) & 1));
}

// Starts the copies of a tile's V. A thread takes one key group of every run of `1 << SHIFT`, and every
// `THREADS >> SHIFT`-th dim.
template <typename T, int D, int THREADS, int GROUPS, int SHIFT>
DEVICE void load_values(const AttentionParams &p, const T *v_cache, const KeyGroup *of_tile, T *sv) {
  constexpr int RUN = (1 << SHIFT) < GROUPS ? 1 << SHIFT : GROUPS;
  constexpr int DIMS = THREADS / RUN; // a multiple of 8, so `permuted` only moves along
  const int tid = threadIdx.x, first = tid / RUN;
#pragma unroll
  for (int i = 0; i < GROUPS / RUN; ++i) {
    const int kg = i * RUN + tid % RUN;
    const KeyGroup g = of_tile[kg];
    const int64_t stride = g.base < 0 ? 0 : p.block_size;
    const T *source = v_cache + (g.base < 0 ? 0 : g.base + g.offset) + first * stride;
    T *const target = sv + (kg * D + permuted(first, kg)) * 8;
#pragma unroll
    for (int j = 0; j < (D + DIMS - 1) / DIMS; ++j)
      if (D % DIMS == 0 || first + j * DIMS < D)
        copy16(target + j * DIMS * 8, source + j * DIMS * stride, g.base >= 0);
  }
}

template <typename T, int D, int WARPS, int TILE, int STAGES, bool Q_IN_REGISTERS>
DEVICE void attend(const AttentionParams &p) {
  constexpr int THREADS = WARPS * 32;
  constexpr int ROWS = WARPS * 16;
  constexpr int PIECES = D / 8; // pieces of 8 dims
  constexpr int GROUPS = TILE / 8;
  constexpr int STAGE = 2 * TILE * D;    // elements of K and V
  static_assert(D % 16 == 0 && TILE % 16 == 0 && THREADS % TILE == 0, "shape of the tiles");

  extern __shared__ __align__(128) unsigned char shared[];
  T *const sq = reinterpret_cast<T *>(shared); // [PIECES][ROWS][8]
  T *const stages = sq + ROWS * D;             // STAGES x (K [PIECES][TILE][8], V [GROUPS][D][8])
  // Of the tiles in the stages and the next one.
  constexpr int RING = STAGES + 1;
  KeyGroup *const groups = reinterpret_cast<KeyGroup *>(stages + STAGES * STAGE); // RING x GROUPS

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int split = blockIdx.x, sequence = blockIdx.z;
  const int kv_head = blockIdx.y % p.kv_heads, row_tile = blockIdx.y / p.kv_heads;
  const int group_size = p.heads / p.kv_heads;
  const int first_m = row_tile * ROWS;
  const int live_rows = min(ROWS, p.rows * group_size - first_m);

  // The reduction reads lengths before it waits: it may start when those are there.
  wait_for_previous();
  let_next_start();
  const int begin = split * p.chunk;
  // The first table entries are asked for before the lengths are there; a window needs them first.
  const int first_position = (begin + tid / GROUPS) * TILE + tid % GROUPS * 8;
  uint32_t first_block = 0xffffffffu;
  if (p.window == 0 && tid < STAGES * GROUPS) first_block = block_of(p, sequence, first_position);
  const Extent e = extent_of(p, sequence);
  const int needed_splits = splits_of(p, e);
  if (split > 0 && split >= needed_splits) return;
  const int end = end_of_split(p, e, split);

  const T *const k_cache = static_cast<const T *>(p.k_cache);
  const T *const v_cache = static_cast<const T *>(p.v_cache);

  auto find_group = [&](int t, int g) {
    KeyGroup found = {-1, 0};
    if (t < min(end, e.context_tiles))
      found = key_group(p, e, sequence, kv_head, position_of(p, e, t) + g * 8);
    return found;
  };

  // V's pieces are copied in the order in which they lie in a block: `1 << v_shift` key groups of one
  // dim, then the next dim.
  const int v_shift = min(31 - __clz((p.block_size >> 3) & -(p.block_size >> 3)), 31 - __clz(GROUPS));

  auto load_context_tile = [&](int t, T *stage) {
    const KeyGroup *const of_tile = groups + (t % RING) * GROUPS;
    {
      // THREADS is a multiple of TILE: a thread copies pieces of one key only.
      const int key = tid % TILE, first = tid / TILE;
      const KeyGroup g = of_tile[key >> 3];
      const int64_t stride = g.base < 0 ? 0 : (int64_t)p.block_size * 8;
      const T *source =
          k_cache + (g.base < 0 ? 0 : g.base + (g.offset + (key & 7)) * 8) + first * stride;
      T *const target = stage + (first * TILE + key) * 8;
#pragma unroll
      for (int i = 0; i < (PIECES * TILE + THREADS - 1) / THREADS; ++i)
        if (PIECES * TILE % THREADS == 0 || first + i * (THREADS / TILE) < PIECES)
          copy16(target + i * THREADS * 8, source + i * (THREADS / TILE) * stride, g.base >= 0);
    }
    T *const sv = stage + TILE * D;
    switch (v_shift) {
    case 0: load_values<T, D, THREADS, GROUPS, 0>(p, v_cache, of_tile, sv); break;
    case 1: load_values<T, D, THREADS, GROUPS, 1>(p, v_cache, of_tile, sv); break;
    case 2: load_values<T, D, THREADS, GROUPS, 2>(p, v_cache, of_tile, sv); break;
    default: load_values<T, D, THREADS, GROUPS, 3>(p, v_cache, of_tile, sv); break;
    }
  };

  auto load_own_tile = [&](int first, T *stage) {
    const T *const k = static_cast<const T *>(p.k_own) + sequence * p.k_batch_stride + kv_head * D;
    const T *const v = static_cast<const T *>(p.v_own) + sequence * p.v_batch_stride + kv_head * D;
    T *const sv = stage + TILE * D;
    for (int c = tid; c < TILE * PIECES; c += THREADS) {
      const int key = c / PIECES, piece = c % PIECES, row = first + key;
      const bool valid = row < p.rows;
      copy16(stage + (piece * TILE + key) * 8, k + (valid ? row * p.k_row_stride + piece * 8 : 0),
             valid);
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (valid) raw = *reinterpret_cast<const uint4 *>(v + row * p.v_row_stride + piece * 8);
      const T *const values = reinterpret_cast<const T *>(&raw);
      const int kg = key >> 3;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sv[(kg * D + permuted(piece * 8 + i, kg)) * 8 + (key & 7)] = values[i];
    }
  };

  // Keys behind the context's end may be anything, NaN too, and 0 * NaN would spoil the sum. A thread
  // clears what it copied itself, so this needs no barrier of its own.
  auto clear_tail = [&](int t, T *stage) {
    const int tail = e.context - position_of(p, e, t);
    if (tail >= TILE || (tail & 7) == 0) return;
    const int kg = tail >> 3, run = (1 << v_shift) - 1;
    if ((kg & run) != (tid & run)) return;
    T *const sv = stage + TILE * D;
    for (int dim = tid >> v_shift; dim < D; dim += THREADS >> v_shift) {
      T *const piece = sv + (kg * D + permuted(dim, kg)) * 8;
      for (int i = tail & 7; i < 8; ++i) piece[i] = Element<T>::store(0.f);
    }
  };

  auto load_tile = [&](int t, T *stage) {
    if (t < e.context_tiles)
      load_context_tile(t, stage);
    else
      load_own_tile((t - e.context_tiles) * TILE, stage);
  };

  // Q, first key groups, first tiles.
  for (int c = tid; c < ROWS * PIECES; c += THREADS) {
    const int m = c / PIECES, piece = c % PIECES;
    const bool valid = m < live_rows;
    const T *source = row_of(p, static_cast<const T *>(p.q), p.q_batch_stride, p.q_row_stride,
                             sequence, kv_head, first_m + (valid ? m : 0));
    copy16(sq + (piece * ROWS + m) * 8, source + piece * 8, valid);
  }
  static_assert(STAGES * GROUPS <= THREADS, "a thread for each of the first key groups");
  if (tid < STAGES * GROUPS) {
    const int t = begin + tid / GROUPS;
    KeyGroup first = {-1, 0};
    if (p.window != 0)
      first = find_group(t, tid % GROUPS);
    else if (t < min(end, e.context_tiles))
      first = key_group(p, e, kv_head, first_position, first_block);
    groups[(t % RING) * GROUPS + tid % GROUPS] = first;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (begin + i < end) load_tile(begin + i, stages + i * STAGE);
    copies_commit();
  }

  // The two rows of this thread in its warp's 16.
  const int m0 = warp * 16 + (lane >> 2);
  const Range seen0 = visible(p, e, m0 < live_rows ? (first_m + m0) / group_size : p.rows);
  const Range seen1 = visible(p, e, m0 + 8 < live_rows ? (first_m + m0 + 8) / group_size : p.rows);
  // What every existing row sees: visibility only moves forward with the row.
  const int all_low = visible(p, e, (first_m + live_rows - 1) / group_size).low;
  const int all_high = visible(p, e, first_m / group_size).high;

  float out[D / 8][4];
#pragma unroll
  for (int i = 0; i < D / 8; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  uint32_t q[Q_IN_REGISTERS ? D / 16 : 1][4];
  const T *const q_row = sq + ((lane >> 4) * ROWS + warp * 16 + (lane & 15)) * 8;

  for (int t = begin; t < end; ++t) {
    T *const stage = stages + (t - begin) % STAGES * STAGE;
    KeyGroup next = {-1, 0};
    if (tid < GROUPS) next = find_group(t + STAGES, tid);
    const int ahead = t + STAGES - 1;
    if (ahead < end) load_tile(ahead, stages + (ahead - begin) % STAGES * STAGE);
    copies_commit();
    copies_wait<STAGES - 1>();
    if (t < e.context_tiles) clear_tail(t, stage);
    __syncthreads();

    if (Q_IN_REGISTERS && t == begin) {
#pragma unroll
      for (int ks = 0; ks < D / 16; ++ks) load_matrices(q[Q_IN_REGISTERS ? ks : 0], q_row + ks * 2 * ROWS * 8);
    }

    // Scores of 16 rows and TILE keys.
    float s[TILE / 8][4];
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
    const T *const k_row =
        stage + ((lane >> 3 & 1) * TILE + (lane >> 4) * 8 + (lane & 7)) * 8;
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks) {
      if (!Q_IN_REGISTERS) load_matrices(q[0], q_row + ks * 2 * ROWS * 8);
#pragma unroll
      for (int n = 0; n < TILE / 8; n += 2) {
        uint32_t k[4];
        load_matrices(k, k_row + (ks * 2 * TILE + n * 8) * 8);
        multiply<T>(s[n], q[Q_IN_REGISTERS ? ks : 0], k[0], k[1]);
        multiply<T>(s[n + 1], q[Q_IN_REGISTERS ? ks : 0], k[2], k[3]);
      }
    }

    if (p.pre_scale > 0.f) {
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = tanhf(s[n][i] * p.pre_scale);
    }

    const int position = position_of(p, e, t);
    const int limit = t < e.context_tiles ? e.context : e.end;
    if (position < all_low || position + TILE > min(all_high, limit)) {
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = position + n * 8 + (lane & 3) * 2 + (i & 1);
          const Range &seen = i < 2 ? seen0 : seen1;
          if (key < seen.low || key >= min(seen.high, limit)) s[n][i] = -INFINITY;
        }
    }

    // Softmax, one pass.
    uint32_t probs[TILE / 16][4];
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = maximum[half];
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n) m = fmaxf(m, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      const float shift = m == -INFINITY ? 0.f : m * p.log2_scale;
      keep[half] = exp2_fast(maximum[half] * p.log2_scale - shift);
      maximum[half] = m;
      float added = 0.f;
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n) {
        const float p0 = exp2_fast(s[n][half * 2] * p.log2_scale - shift);
        const float p1 = exp2_fast(s[n][half * 2 + 1] * p.log2_scale - shift);
        added += p0 + p1;
        probs[n / 2][(n & 1) * 2 + half] = Element<T>::pack(p0, p1);
      }
      sum[half] = sum[half] * keep[half] + added;
    }
    // Maxima seldom change behind the first tiles.
    if (__any_sync(0xffffffffu, keep[0] != 1.f || keep[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        out[i][0] *= keep[0];
        out[i][1] *= keep[0];
        out[i][2] *= keep[1];
        out[i][3] *= keep[1];
      }
    }

    const T *const sv = stage + TILE * D;
#pragma unroll
    for (int j = 0; j < TILE / 16; ++j) {
      const int kg = j * 2 + (lane >> 3 & 1);
      const T *const v_row = sv + (kg * D + (lane >> 4) * 8 + permuted(lane & 7, kg)) * 8;
#pragma unroll
      for (int i = 0; i < D / 8; i += 2) {
        uint32_t v[4];
        load_matrices(v, v_row + i * 8 * 8);
        multiply<T>(out[i], probs[j], v[0], v[1]);
        multiply<T>(out[i + 1], probs[j], v[2], v[3]);
      }
    }

    if (tid < GROUPS) groups[((t + STAGES) % RING) * GROUPS + tid] = next;
    __syncthreads();
  }
  copies_wait<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    maximum[half] = sum[half] > 0.f ? maximum[half] * p.log2_scale : -INFINITY;
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = m0 + half * 8;
    if (m >= live_rows) continue;
    if (needed_splits <= 1) {
      const float scale = normalizer(p, kv_head, first_m + m, maximum[half], sum[half]);
      const int64_t row = (int64_t)p.heads * p.head_dim;
      T *const target = row_of(p, static_cast<T *>(p.out), row * p.rows, row, sequence, kv_head,
                               first_m + m) +
                        (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        *reinterpret_cast<uint32_t *>(target + i * 8) =
            Element<T>::pack(out[i][half * 2] * scale, out[i][half * 2 + 1] * scale);
    } else {
      const int64_t row = partial_row(p, sequence, kv_head, row_tile, split) + m;
      if ((lane & 3) == 0) p.partial_sums[row] = make_float2(maximum[half], sum[half]);
      float *const target = p.partial_out + row * D + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        *reinterpret_cast<float2 *>(target + i * 8) =
            make_float2(out[i][half * 2], out[i][half * 2 + 1]);
    }
  }
}

// Query rows, warps, tile, stages, Q in registers, thread blocks a multiprocessor. The Rust side has the
// same table. More stages, or more warps for the same rows, were slower on an H200, and so were fewer
// rows for plain decoding.
#define KERNELS(TYPE, NAME, ROWS, WARPS, TILE, STAGES, Q_IN_REGISTERS, BLOCKS)                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                   \
      block_attention_##NAME##_rows##ROWS(const __grid_constant__ AttentionParams p) {               \
    attend<TYPE, HEAD_DIM, WARPS, TILE, STAGES, Q_IN_REGISTERS>(p);                                  \
  }

#if HEAD_DIM <= 128
#define ALL_KERNELS(TYPE, NAME)                                                                      \
  KERNELS(TYPE, NAME, 64, 4, 64, 2, true, 2)                                                         \
  KERNELS(TYPE, NAME, 128, 8, 64, 2, true, 1)
#else
#define ALL_KERNELS(TYPE, NAME)                                                                      \
  KERNELS(TYPE, NAME, 64, 4, 32, 2, false, 2)
#endif

ALL_KERNELS(__nv_bfloat16, bf16)
ALL_KERNELS(__half, f16)
