// From the one matrix product over all draft layers to paged K and V: RMS norm of K, RoPE, scatter.
//
// A thread block takes 16 tokens of one kv head of one layer, one warp a token. K leaves in 16-byte
// pieces. V is turned in shared memory, so that neighbouring slots of one dim leave together.
#include "common.cuh"

constexpr int TOKENS = 16;
constexpr int MAX_LAYERS = 32; // of one launch; the Rust side keeps to it

struct MaterializeParams {
  const void *kv;            // [tokens, layers * 2 * kv_heads * head_dim], rows `kv_stride` apart
  const float *k_norm;       // [layers, head_dim]
  const float *cos;          // [positions, rotary_dim / 2]
  const float *sin;          // likewise
  const uint32_t *positions; // [tokens]
  const int64_t *slots;      // [tokens], -1: skip
  const uint32_t *kept;      // rows kept of each sequence, or null: all
  int64_t kept_stride, kept_extra;
  int64_t kv_stride;
  int64_t k_offset, v_offset, layer_stride; // elements within a row of kv
  int64_t num_slots;
  int32_t tokens, rows; // rows: tokens of one sequence, for `kept`
  int32_t kv_heads, head_dim, rotary_dim, block_size, table_positions;
  int32_t interleaved, first_layer;
  float eps;
  void *k_caches[MAX_LAYERS]; // [num_blocks, kv_heads, head_dim/x, block_size, x]
  void *v_caches[MAX_LAYERS]; // [num_blocks, kv_heads, head_dim, block_size]
};

template <typename T> DEVICE void materialize(const MaterializeParams &p) {
  constexpr int X = 16 / sizeof(T);
  extern __shared__ __align__(16) unsigned char shared[];
  const int D = p.head_dim;
  const int v_stride = D + 4 / sizeof(T); // padded: 16 tokens of one dim fall into 16 banks
  float *const sk = reinterpret_cast<float *>(shared);    // [TOKENS][D]
  T *const sv = reinterpret_cast<T *>(sk + TOKENS * D);   // [TOKENS][v_stride]
  __shared__ int64_t place_of[TOKENS]; // of the token's V at dim 0, -1: not written

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int layer = blockIdx.y / p.kv_heads, head = blockIdx.y % p.kv_heads;
  const int token = blockIdx.x * TOKENS + warp;

  int64_t slot = -1;
  int position = 0;
  if (token < p.tokens) {
    slot = p.slots[token];
    const uint32_t at = p.positions[token];
    position = (int)at;
    if (slot >= p.num_slots || at >= (uint32_t)p.table_positions) slot = -1;
    if (p.kept != nullptr) {
      const int sequence = token / p.rows, row = token % p.rows;
      if (row >= (int64_t)p.kept[sequence * p.kept_stride] + p.kept_extra) slot = -1;
    }
  }
  // Element of dim 0 in the value cache; of the key cache, but for the offset within the block.
  const int64_t block = slot < 0 ? 0 : (uint64_t)slot / (uint32_t)p.block_size;
  const int offset = slot < 0 ? 0 : (int)(slot - block * p.block_size);
  const int64_t base = (block * p.kv_heads + head) * D * p.block_size;
  if (lane == 0) place_of[warp] = slot < 0 ? -1 : base + offset;

  if (slot >= 0) {
    const T *const row = static_cast<const T *>(p.kv) + token * p.kv_stride +
                         (p.first_layer + layer) * p.layer_stride + (int64_t)head * D;
    float *const k = sk + warp * D;
    float squares = 0.f;
    for (int piece = lane; piece * X < D; piece += 32) {
      const uint4 raw_k = *reinterpret_cast<const uint4 *>(row + p.k_offset + piece * X);
      const uint4 raw_v = *reinterpret_cast<const uint4 *>(row + p.v_offset + piece * X);
      const T *const ks = reinterpret_cast<const T *>(&raw_k);
      const T *const vs = reinterpret_cast<const T *>(&raw_v);
#pragma unroll
      for (int i = 0; i < X; ++i) {
        const float value = Element<T>::load(ks[i]);
        squares = fmaf(value, value, squares);
        k[piece * X + i] = value;
        sv[warp * v_stride + piece * X + i] = vs[i];
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      squares += __shfl_xor_sync(0xffffffffu, squares, step);
    const float scale = 1.f / sqrtf(squares / (float)D + p.eps);
    const float *const weight = p.k_norm + (int64_t)(p.first_layer + layer) * D;
    for (int d = lane; d < D; d += 32) k[d] *= scale * weight[d];
    __syncwarp();

    const int half = p.rotary_dim / 2;
    const float *const cos = p.cos + (int64_t)position * half;
    const float *const sin = p.sin + (int64_t)position * half;
    T *const target = static_cast<T *>(p.k_caches[layer]) + base;
    for (int piece = lane; piece * X < D; piece += 32) {
      uint4 raw;
      T *const values = reinterpret_cast<T *>(&raw);
#pragma unroll
      for (int i = 0; i < X; ++i) {
        const int d = piece * X + i;
        float value = k[d];
        if (d < p.rotary_dim) {
          const int pair = p.interleaved ? d / 2 : (d < half ? d : d - half);
          const bool second = p.interleaved ? d & 1 : d >= half;
          const int partner = p.interleaved ? d ^ 1 : (second ? d - half : d + half);
          const float other = k[partner];
          value = second ? value * cos[pair] + other * sin[pair] : value * cos[pair] - other * sin[pair];
        }
        values[i] = Element<T>::store(value);
      }
      *reinterpret_cast<uint4 *>(target + (piece * p.block_size + offset) * X) = raw;
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < TOKENS * D; i += TOKENS * 32) {
    const int t = i % TOKENS, d = i / TOKENS;
    const int64_t place = place_of[t];
    if (place < 0) continue;
    static_cast<T *>(p.v_caches[layer])[place + (int64_t)d * p.block_size] = sv[t * v_stride + d];
  }
}

#define KERNEL(TYPE, NAME)                                                                           \
  extern "C" __global__ void __launch_bounds__(TOKENS * 32)                                          \
      materialize_##NAME(const __grid_constant__ MaterializeParams p) {                              \
    materialize<TYPE>(p);                                                                            \
  }

KERNEL(__nv_bfloat16, bf16)
KERNEL(__half, f16)
KERNEL(float, f32)
