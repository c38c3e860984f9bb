// The small operations of a layer that are no matrix product: each one launch and one pass.
#include "common.cuh"

constexpr int WARPS = 4;

struct NormRopeParams {
  const void *x;       // [rows, heads or more, head_dim], rows `x_stride` apart
  const float *weight; // [heads, head_dim]
  const float *cos;    // [rows, rotary_dim / 2]
  const float *sin;    // likewise
  void *out;           // [rows, heads, head_dim]
  int64_t x_stride;
  int32_t heads, head_dim, rotary_dim, interleaved;
  float eps;
};

// RMS norm over a head, its weights and RoPE, in f32; one warp a head of a row.
template <typename T> DEVICE void norm_rope(const NormRopeParams &p) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.x * WARPS + warp, D = p.head_dim;
  const int64_t row = blockIdx.y;
  let_next_start();
  wait_for_previous();
  if (head >= p.heads) return;
  float *const values = shared + warp * D;
  const T *const x = static_cast<const T *>(p.x) + row * p.x_stride + (int64_t)head * D;
  float squares = 0.f;
  for (int d = lane; d < D; d += 32) {
    const float value = Element<T>::load(x[d]);
    squares = fmaf(value, value, squares);
    values[d] = value;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  const float scale = 1.f / sqrtf(squares / (float)D + p.eps);
  const float *const weight = p.weight + (int64_t)head * D;
  for (int d = lane; d < D; d += 32) values[d] *= scale * weight[d];
  __syncwarp();
  const int half = p.rotary_dim / 2;
  const float *const cos = p.cos + row * half, *const sin = p.sin + row * half;
  T *const out = static_cast<T *>(p.out) + (row * p.heads + head) * D;
  for (int d = lane; d < D; d += 32) {
    if (d >= p.rotary_dim) {
      out[d] = Element<T>::store(values[d]);
      continue;
    }
    const int pair = p.interleaved ? d / 2 : (d < half ? d : d - half);
    const bool second = p.interleaved ? d & 1 : d >= half;
    const int partner = p.interleaved ? d ^ 1 : (second ? d - half : d + half);
    const float turned = second ? values[partner] : -values[partner];
    out[d] = Element<T>::store(values[d] * cos[pair] + turned * sin[pair]);
  }
}

struct SiluMulParams {
  const void *gate, *up; // [rows, width], rows `stride` apart
  void *out;             // [rows, width]
  int64_t stride;
  int32_t width, by_pieces;
};

template <typename T> DEVICE T silu_times(T gate, T up) {
  const float g = Element<T>::load(gate);
  // Rounded in between, as two operations would.
  const float activated = Element<T>::load(Element<T>::store(g / (1.f + expf(-g))));
  return Element<T>::store(activated * Element<T>::load(up));
}

template <typename T> DEVICE void silu_mul(const SiluMulParams &p) {
  constexpr int X = 16 / sizeof(T);
  const int64_t row = blockIdx.y;
  let_next_start();
  wait_for_previous();
  const T *const gate = static_cast<const T *>(p.gate) + row * p.stride;
  const T *const up = static_cast<const T *>(p.up) + row * p.stride;
  T *const out = static_cast<T *>(p.out) + row * p.width;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (p.by_pieces) {
    if (i >= p.width / X) return;
    const uint4 raw_gate = reinterpret_cast<const uint4 *>(gate)[i];
    const uint4 raw_up = reinterpret_cast<const uint4 *>(up)[i];
    uint4 raw;
#pragma unroll
    for (int j = 0; j < X; ++j)
      reinterpret_cast<T *>(&raw)[j] = silu_times(reinterpret_cast<const T *>(&raw_gate)[j],
                                                  reinterpret_cast<const T *>(&raw_up)[j]);
    reinterpret_cast<uint4 *>(out)[i] = raw;
  } else if (i < p.width) {
    out[i] = silu_times(gate[i], up[i]);
  }
}

struct RmsNormParams {
  const void *x;      // [rows, width], rows `x_stride` apart
  const void *added;  // [rows, width] that is added before, or null
  void *sum;          // then: [rows, width]
  const void *weight; // [width]; null if only the sum is wanted
  void *out;          // [rows, width]
  int64_t x_stride;
  int32_t width;
  float eps;
};

constexpr int NORM_THREADS = 512;
constexpr int NORM_PIECES = 4; // of 16 bytes, of a thread

// RMS norm of whole rows, or of the rounded sum of two, one thread block each.
template <typename T> DEVICE void rms_norm(const RmsNormParams &p) {
  constexpr int X = 16 / sizeof(T);
  __shared__ float parts[NORM_THREADS / 32];
  const int tid = threadIdx.x, pieces = p.width / X;
  const int64_t row = blockIdx.x;
  let_next_start();
  const uint4 *const weight = static_cast<const uint4 *>(p.weight);
  const uint4 *const x =
      reinterpret_cast<const uint4 *>(static_cast<const T *>(p.x) + row * p.x_stride);
  uint4 *const out = reinterpret_cast<uint4 *>(static_cast<T *>(p.out) + row * p.width);
  uint4 raw[NORM_PIECES], weights[NORM_PIECES];
#pragma unroll
  for (int i = 0; i < NORM_PIECES; ++i)
    if (weight != nullptr && i * NORM_THREADS + tid < pieces)
      weights[i] = __ldg(weight + i * NORM_THREADS + tid);
  wait_for_previous();
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < NORM_PIECES; ++i)
    if (i * NORM_THREADS + tid < pieces) raw[i] = x[i * NORM_THREADS + tid];
  if (p.added != nullptr) {
    const int64_t first = row * pieces;
    const uint4 *const added = static_cast<const uint4 *>(p.added) + first;
    uint4 *const sum = static_cast<uint4 *>(p.sum) + first;
#pragma unroll
    for (int i = 0; i < NORM_PIECES; ++i)
      if (i * NORM_THREADS + tid < pieces) {
        const uint4 other = added[i * NORM_THREADS + tid];
#pragma unroll
        for (int j = 0; j < X; ++j) {
          T &value = reinterpret_cast<T *>(&raw[i])[j];
          value = Element<T>::store(Element<T>::load(value) +
                                    Element<T>::load(reinterpret_cast<const T *>(&other)[j]));
        }
        sum[i * NORM_THREADS + tid] = raw[i];
      }
    if (weight == nullptr) return;
  }
#pragma unroll
  for (int i = 0; i < NORM_PIECES; ++i)
    if (i * NORM_THREADS + tid < pieces)
#pragma unroll
      for (int j = 0; j < X; ++j) {
        const float value = Element<T>::load(reinterpret_cast<const T *>(&raw[i])[j]);
        squares = fmaf(value, value, squares);
      }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if ((tid & 31) == 0) parts[tid >> 5] = squares;
  __syncthreads();
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < NORM_THREADS / 32; ++i) all += parts[i];
  const float scale = 1.f / sqrtf(all / (float)p.width + p.eps);
#pragma unroll
  for (int i = 0; i < NORM_PIECES; ++i)
    if (i * NORM_THREADS + tid < pieces) {
      uint4 result;
#pragma unroll
      for (int j = 0; j < X; ++j)
        reinterpret_cast<T *>(&result)[j] =
            Element<T>::store(Element<T>::load(reinterpret_cast<const T *>(&raw[i])[j]) * scale *
                              Element<T>::load(reinterpret_cast<const T *>(&weights[i])[j]));
      out[i * NORM_THREADS + tid] = result;
    }
}

struct RotateParams {
  const void *q, *k, *v;           // [rows, heads or kv_heads, head_dim], rows `strides` apart
  const void *bias[3];             // [heads or kv_heads, head_dim] of q, k and v, or null
  const void *q_weight, *k_weight; // [head_dim] of the norms over heads, or null
  const void *cos, *sin;           // [rows, rotary_dim / 2]
  const int64_t *slots;            // [rows]; negative: padding
  void *out;                       // q: [rows, heads, head_dim]
  void *k_cache;                   // [num_blocks, kv_heads, head_dim / x, block_size, x]
  void *v_cache;                   // [num_blocks, kv_heads, head_dim, block_size]
  int64_t strides[3];
  int64_t num_slots;
  int32_t heads, kv_heads, head_dim, rotary_dim, interleaved, block_size;
  float q_eps, k_eps;
};

// What lies between a decode row's q, k and v and its attention: bias, norms over heads, RoPE, and k and v to
// their slot of the paged cache. One warp a head of a row; rounded where separate operations would.
template <typename T> DEVICE void rotate_and_store(const RotateParams &p) {
  constexpr int X = 16 / sizeof(T);
  extern __shared__ float shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, D = p.head_dim;
  const int64_t row = blockIdx.y;
  let_next_start();
  int head = blockIdx.x * WARPS + warp;
  const bool is_q = head < p.heads;
  if (!is_q) head -= p.heads;
  const bool is_v = !is_q && head >= p.kv_heads;
  if (is_v) head -= p.kv_heads;
  wait_for_previous();
  if (is_v && head >= p.kv_heads) return;
  int64_t block = 0, place = 0;
  if (!is_q) {
    const int64_t slot = p.slots[row];
    if (slot < 0 || slot >= p.num_slots) return;
    block = slot / p.block_size;
    place = slot % p.block_size;
  }
  const int which = is_q ? 0 : is_v ? 2 : 1;
  const T *const x = static_cast<const T *>(is_q ? p.q : is_v ? p.v : p.k) +
                     row * p.strides[which] + (int64_t)head * D;
  const T *const bias = static_cast<const T *>(p.bias[which]);
  auto value_at = [&](int d) {
    return bias == nullptr ? x[d]
                           : Element<T>::store(Element<T>::load(x[d]) +
                                               Element<T>::load(bias[(int64_t)head * D + d]));
  };
  if (is_v) {
    T *const target = static_cast<T *>(p.v_cache) +
                      (block * p.kv_heads + head) * D * p.block_size + place;
    for (int d = lane; d < D; d += 32) target[(int64_t)d * p.block_size] = value_at(d);
    return;
  }
  float *const values = shared + warp * D;
  const T *const weight = static_cast<const T *>(is_q ? p.q_weight : p.k_weight);
  float squares = 0.f;
  for (int d = lane; d < D; d += 32) {
    const float value = Element<T>::load(value_at(d));
    squares = fmaf(value, value, squares);
    values[d] = value;
  }
  if (weight != nullptr) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    const float scale = 1.f / sqrtf(squares / (float)D + (is_q ? p.q_eps : p.k_eps));
    for (int d = lane; d < D; d += 32)
      values[d] = Element<T>::load(
          Element<T>::store(values[d] * scale * Element<T>::load(weight[d])));
  }
  __syncwarp();
  const int half = p.rotary_dim / 2;
  const T *const cos = static_cast<const T *>(p.cos) + row * half;
  const T *const sin = static_cast<const T *>(p.sin) + row * half;
  T *const q_out = static_cast<T *>(p.out) + (row * p.heads + head) * D;
  T *const k_out =
      static_cast<T *>(p.k_cache) + (block * p.kv_heads + head) * D * p.block_size + place * X;
  for (int d = lane; d < D; d += 32) {
    float value = values[d];
    if (d < p.rotary_dim) {
      const int pair = p.interleaved ? d / 2 : (d < half ? d : d - half);
      const bool second = p.interleaved ? d & 1 : d >= half;
      const int partner = p.interleaved ? d ^ 1 : (second ? d - half : d + half);
      const float turned = second ? values[partner] : -values[partner];
      value = value * Element<T>::load(cos[pair]) + turned * Element<T>::load(sin[pair]);
    }
    if (is_q)
      q_out[d] = Element<T>::store(value);
    else
      k_out[(int64_t)(d / X) * p.block_size * X + d % X] = Element<T>::store(value);
  }
}

#define KERNELS(TYPE, NAME)                                                                          \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                           \
      norm_rope_##NAME(const __grid_constant__ NormRopeParams p) {                                   \
    norm_rope<TYPE>(p);                                                                              \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                  \
      silu_mul_##NAME(const __grid_constant__ SiluMulParams p) {                                     \
    silu_mul<TYPE>(p);                                                                               \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS)                                         \
      rms_norm_##NAME(const __grid_constant__ RmsNormParams p) {                                     \
    rms_norm<TYPE>(p);                                                                               \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                           \
      rotate_and_store_##NAME(const __grid_constant__ RotateParams p) {                              \
    rotate_and_store<TYPE>(p);                                                                       \
  }

KERNELS(__nv_bfloat16, bf16)
KERNELS(__half, f16)
KERNELS(float, f32)
