// Products of few rows with up to three weights: y = x W^T (+ bias) (+ residual), or silu(x G^T) * (x U^T).
//
// A step reads every weight once, so the time is that of reading them. A thread block takes tiles of
// 32 outputs, one after another. Its eight warps share the sums' terms: k is cut into units of 64, and
// warp w takes units w, w + 8, ... of the tile's outputs. Each thread copies its own pieces of 16 bytes
// through a ring in shared memory and reads them back itself, so the ring needs no barrier; a tensor
// core does not mind which k a register holds, as long as weights and x agree.
//
// How the terms of an output are added up depends on k alone: not on the number of rows, the tile or
// the length of the ring. So a row comes out bit by bit the same alone and among others.
#include "mma.cuh"

constexpr int MAX_WEIGHTS = 3;
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int TILE = 32;  // outputs of a thread block at a time
constexpr int UNIT = 2;   // chunks of a warp in a row
constexpr int CHUNK = 32; // of k: one step of a warp
constexpr int WEIGHT_PIECES = TILE / 8; // of a thread in a step
constexpr int PITCH = TILE + 4; // floats; keeps the warps' sums in different banks

struct ProductParams {
  const void *x;                   // [rows, width], rows `x_stride` apart
  const void *residual;            // [rows, outputs[0]] or null
  const void *weight[MAX_WEIGHTS]; // [outputs[i], width]
  const void *bias[MAX_WEIGHTS];   // [outputs[i]] or null
  void *out[MAX_WEIGHTS];          // [rows, outputs[i]]
  int64_t x_stride;
  int32_t outputs[MAX_WEIGHTS];
  int32_t first_tile[MAX_WEIGHTS]; // the first one of each weight
  int32_t weights, rows, width;
  int32_t steps; // of each warp for a tile
  int32_t tiles; // of all weights
  int32_t gated; // weights 0 and 1 share tiles: half gate, half up
};

// Of weights, which are read once: the whole line of 128 bytes comes with the first piece.
DEVICE void copy_weight(void *shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// NT: groups of 8 rows.
template <typename T, int NT, int STAGES> DEVICE void product(const ProductParams &p) {
  constexpr int PIECES = WEIGHT_PIECES + NT;
  constexpr int HALF = TILE / 2;
  constexpr int ROWS = 8 * NT;
  extern __shared__ uint4 ring[]; // [STAGES][PIECES][THREADS], then f32 sums [WARPS][ROWS][PITCH]
  float *const sums = reinterpret_cast<float *>(ring + STAGES * PIECES * THREADS);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  let_next_start();

  struct Place {
    int weight, output;
  };
  auto place_of = [&](int tile) {
    int weight = 0;
    if (!p.gated)
      for (int i = 1; i < p.weights; ++i) weight += tile >= p.first_tile[i];
    return Place{weight, (tile - p.first_tile[weight]) * (p.gated ? HALF : TILE)};
  };

  // What is copied next: it runs STAGES - 1 steps before what is used, into the next tile as well.
  const T *source[WEIGHT_PIECES];
  int next_tile = blockIdx.x, next_step = 0;
  auto aim = [&]() {
    if (next_tile >= p.tiles) return;
    const Place at = place_of(next_tile);
#pragma unroll
    for (int i = 0; i < WEIGHT_PIECES; ++i) {
      const bool up = p.gated && i >= WEIGHT_PIECES / 2;
      const int weight = up ? 1 : at.weight;
      const int output = at.output + i * 8 + g - (up ? HALF : 0);
      source[i] = static_cast<const T *>(p.weight[weight]) +
                  (int64_t)min(output, p.outputs[weight] - 1) * p.width;
    }
  };
  auto advance = [&]() {
    if (++next_step < p.steps) return;
    next_step = 0;
    next_tile += gridDim.x;
    aim();
  };
  auto k_of = [&](int step) {
    return ((step / UNIT * WARPS + warp) * UNIT + step % UNIT) * CHUNK + t * 8;
  };
  auto copy_weights = [&](int slot) {
    const int k = k_of(next_step);
    const bool inside = next_tile < p.tiles && k < p.width;
#pragma unroll
    for (int i = 0; i < WEIGHT_PIECES; ++i)
      copy_weight(ring + (slot * PIECES + i) * THREADS + tid, source[i] + (inside ? k : 0), inside);
  };
  auto copy_x = [&](int slot, int step, bool is_needed) {
    const int k = k_of(step);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int row = j * 8 + g;
      const bool inside = is_needed && k < p.width && row < p.rows;
      copy16(ring + (slot * PIECES + WEIGHT_PIECES + j) * THREADS + tid,
             static_cast<const T *>(p.x) + (inside ? row * p.x_stride + k : 0), inside);
    }
  };

#pragma unroll
  for (int i = 0; i < WEIGHT_PIECES; ++i) source[i] = static_cast<const T *>(p.weight[0]);
  aim();
  {
    // Weights do not come from the kernel before.
    int steps[STAGES - 1];
    bool needed[STAGES - 1];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      steps[i] = next_step;
      needed[i] = next_tile < p.tiles;
      copy_weights(i);
      advance();
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      copy_x(i, steps[i], needed[i]);
      copies_commit();
    }
  }

  int slot = 0, free_slot = STAGES - 1;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    float sum[2][NT][4] = {};
#pragma unroll 2
    for (int step = 0; step < p.steps; ++step) {
      copies_wait<STAGES - 2>();
      copy_weights(free_slot);
      copy_x(free_slot, next_step, next_tile < p.tiles);
      copies_commit();
      advance();
      free_slot = free_slot + 1 == STAGES ? 0 : free_slot + 1;
      const uint4 *const pieces = ring + slot * PIECES * THREADS + tid;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      uint4 x[NT];
#pragma unroll
      for (int j = 0; j < NT; ++j) x[j] = pieces[(WEIGHT_PIECES + j) * THREADS];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 low = pieces[2 * i * THREADS], high = pieces[(2 * i + 1) * THREADS];
        const uint32_t one[4] = {low.x, high.x, low.y, high.y};
        const uint32_t two[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          multiply<T>(sum[i][j], one, x[j].x, x[j].y);
          multiply<T>(sum[i][j], two, x[j].z, x[j].w);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = j * 8 + 2 * t + (c & 1), output = i * 16 + g + (c >> 1) * 8;
          sums[(warp * ROWS + row) * PITCH + output] = sum[i][j][c];
        }
    __syncthreads();
    const Place at = place_of(tile);
    const int outputs = p.gated ? HALF : TILE;
    for (int i = tid; i < outputs * p.rows; i += THREADS) {
      const int row = i / outputs, local = i % outputs, output = at.output + local;
      if (output >= p.outputs[at.weight]) continue;
      // Rounded where separate operations would round.
      auto total = [&](int column, int weight) {
        float all = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all += sums[(w * ROWS + row) * PITCH + column];
        if (p.bias[weight] != nullptr)
          all += Element<T>::load(static_cast<const T *>(p.bias[weight])[output]);
        return Element<T>::load(Element<T>::store(all));
      };
      float value = total(local, at.weight);
      if (p.gated) {
        const float active = Element<T>::load(Element<T>::store(value / (1.f + expf(-value))));
        value = active * total(local + HALF, 1);
      }
      const int64_t place = (int64_t)row * p.outputs[at.weight] + output;
      if (p.residual != nullptr)
        value += Element<T>::load(static_cast<const T *>(p.residual)[place]);
      static_cast<T *>(p.out[at.weight])[place] = Element<T>::store(value);
    }
    __syncthreads();
  }
  copies_wait<0>();
}

// Most rows, stages. The Rust side has the same table; the ring takes STAGES * (4 + ROWS / 8) * 4 KiB
// of shared memory.
#define KERNEL(TYPE, NAME, ROWS, STAGES)                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                           \
      product_##NAME##_rows##ROWS##_stages##STAGES(const __grid_constant__ ProductParams p) {        \
    product<TYPE, ROWS / 8, STAGES>(p);                                                              \
  }

#define KERNELS(TYPE, NAME)                                                                          \
  KERNEL(TYPE, NAME, 8, 10)                                                                          \
  KERNEL(TYPE, NAME, 8, 7)                                                                           \
  KERNEL(TYPE, NAME, 8, 4)                                                                           \
  KERNEL(TYPE, NAME, 16, 8)                                                                          \
  KERNEL(TYPE, NAME, 16, 6)                                                                          \
  KERNEL(TYPE, NAME, 16, 3)

KERNELS(__nv_bfloat16, bf16)
KERNELS(__half, f16)
