// The small operations of a draft layer that are no matrix product: each one launch and one pass.
#include "common.cuh"

constexpr int WARPS = 4;

struct NormRopeParams {
  const void *x;       // [rows, heads or more, head_dim], rows `x_stride` apart
  const float *weight; // [heads, head_dim]
  const float *cos;    // [rows, head_dim / 2]
  const float *sin;    // likewise
  void *out;           // [rows, heads, head_dim]
  int64_t x_stride;
  int32_t heads, head_dim, interleaved;
  float eps;
};

// RMS norm over a head, its weights and RoPE, in f32; one warp a head of a row.
template <typename T> DEVICE void norm_rope(const NormRopeParams &p) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.x * WARPS + warp, D = p.head_dim;
  const int64_t row = blockIdx.y;
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
  const int half = D / 2;
  const float *const cos = p.cos + row * half, *const sin = p.sin + row * half;
  T *const out = static_cast<T *>(p.out) + (row * p.heads + head) * D;
  for (int d = lane; d < D; d += 32) {
    const int pair = p.interleaved ? d / 2 : (d < half ? d : d - half);
    const bool second = p.interleaved ? d & 1 : d >= half;
    const int partner = p.interleaved ? d ^ 1 : (second ? d - half : d + half);
    const float turned = second ? values[partner] : -values[partner];
    out[d] = Element<T>::store(values[d] * cos[pair] + turned * sin[pair]);
  }
}

struct SiluMulParams {
  const void *x; // [rows, 2 * width], rows `x_stride` apart: gate, then up
  void *out;     // [rows, width]
  int64_t x_stride;
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
  const T *const gate = static_cast<const T *>(p.x) + row * p.x_stride, *const up = gate + p.width;
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

#define KERNELS(TYPE, NAME)                                                                          \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                           \
      norm_rope_##NAME(const __grid_constant__ NormRopeParams p) {                                   \
    norm_rope<TYPE>(p);                                                                              \
  }                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                  \
      silu_mul_##NAME(const __grid_constant__ SiluMulParams p) {                                     \
    silu_mul<TYPE>(p);                                                                               \
  }

KERNELS(__nv_bfloat16, bf16)
KERNELS(__half, f16)
KERNELS(float, f32)
