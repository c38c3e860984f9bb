// Puts the splits of block attention together: one warp for each query row of each head.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int MAX_SPLITS = 128; // the Rust side keeps to it

template <typename T> DEVICE void reduce(const AttentionParams &p) {
  __shared__ float weights[WARPS][MAX_SPLITS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int sequence = blockIdx.z, kv_head = blockIdx.y;
  const int m = blockIdx.x * WARPS + warp;
  const int group = p.heads / p.kv_heads;
  let_next_start();
  const Extent e = extent_of(p, sequence);
  const int splits = splits_of(p, e);
  // Also by who has nothing to do: what comes next waits for this kernel, and so for the one before.
  wait_for_previous();
  if (m >= p.rows * group || splits <= 1) return; // written already

  const int64_t first =
      partial_row(p, sequence, kv_head, m / p.row_tile, 0) + m % p.row_tile; // of split 0
  float2 mine[MAX_SPLITS / 32];
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < MAX_SPLITS / 32; ++i) {
    const int split = i * 32 + lane;
    mine[i] = split < splits ? p.partial_sums[first + (int64_t)split * p.row_tile]
                             : make_float2(-INFINITY, 0.f);
    maximum = fmaxf(maximum, mine[i].x);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
  const float shift = maximum == -INFINITY ? 0.f : maximum;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < MAX_SPLITS / 32; ++i) {
    const float weight = exp2_fast(mine[i].x - shift);
    sum += weight * mine[i].y;
    weights[warp][i * 32 + lane] = weight;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  __syncwarp();
  const float scale = normalizer(p, kv_head, m, maximum, sum);

  const int64_t row = (int64_t)p.heads * p.head_dim;
  T *const target = row_of(p, static_cast<T *>(p.out), row * p.rows, row, sequence, kv_head, m);
  for (int d = lane * 4; d < p.head_dim; d += 128) {
    const float *const source = p.partial_out + first * p.head_dim + d;
    const int64_t stride = (int64_t)p.row_tile * p.head_dim;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const float4 part = *reinterpret_cast<const float4 *>(source + split * stride);
      const float weight = weights[warp][split];
      total.x = fmaf(part.x, weight, total.x);
      total.y = fmaf(part.y, weight, total.y);
      total.z = fmaf(part.z, weight, total.z);
      total.w = fmaf(part.w, weight, total.w);
    }
    target[d] = Element<T>::store(total.x * scale);
    target[d + 1] = Element<T>::store(total.y * scale);
    target[d + 2] = Element<T>::store(total.z * scale);
    target[d + 3] = Element<T>::store(total.w * scale);
  }
}

#define KERNEL(TYPE, NAME)                                                                           \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                           \
      block_attention_reduce_##NAME(const __grid_constant__ AttentionParams p) {                     \
    reduce<TYPE>(p);                                                                                 \
  }

KERNEL(__nv_bfloat16, bf16)
KERNEL(__half, f16)
KERNEL(float, f32)
