// Argmax of logit rows, and the accepted prefix of a block.
//
// A row is cut into `splits` parts, one thread block each. The last thread block of a sequence to
// finish puts the parts together, compares with the drafts and sets the sequence's counter back to 0.
//
// Order: the last of several equal maxima wins, +0 equals -0. A NaN compares equal to everything, as in
// the host's scan, so the scan starts anew behind the last NaN; if nothing is behind it, it wins itself.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MAX_ROWS = 64; // of one sequence; the Rust side keeps to it

struct AcceptParams {
  const void *logits;     // [sequences, rows, vocab]
  const uint32_t *drafts; // [sequences, rows - 1], rows `drafts_stride` apart, or null: argmax only
  uint32_t *out;          // [sequences, rows + 1]: tokens, accept length; argmax only: [sequences, rows]
  int4 *parts;            // [sequences, rows, splits]: value, index, last NaN
  uint32_t *counters;     // [sequences], all 0
  int64_t drafts_stride;
  int32_t rows, vocab, splits, part; // part: entries of a row for one thread block
};

struct Best {
  float value;
  int index; // -1: none
  int nan;   // index of the last NaN, -1: none
};

DEVICE void take(Best &best, const Best &other) {
  if (other.index >= 0 && (best.index < 0 || other.value > best.value ||
                           (other.value == best.value && other.index > best.index))) {
    best.value = other.value;
    best.index = other.index;
  }
  best.nan = max(best.nan, other.nan);
}

// `index` must grow from call to call.
DEVICE void visit(Best &best, float value, int index) {
  if (value != value)
    best.nan = index;
  else if (best.index < 0 || value >= best.value) {
    best.value = value;
    best.index = index;
  }
}

// The largest of a 16-byte piece; NaN if there is one.
DEVICE float largest(const float (&values)[4]) {
  float m = values[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(m) : "f"(values[i]));
  return m;
}

DEVICE float largest(const __nv_bfloat162 (&values)[4]) {
  const __nv_bfloat162 m =
      __hmax2_nan(__hmax2_nan(values[0], values[1]), __hmax2_nan(values[2], values[3]));
  return __bfloat162float(__hmax_nan(m.x, m.y));
}

DEVICE float largest(const __half2 (&values)[4]) {
  const __half2 m =
      __hmax2_nan(__hmax2_nan(values[0], values[1]), __hmax2_nan(values[2], values[3]));
  return __half2float(__hmax_nan(__low2half(m), __high2half(m)));
}

template <typename T> struct Pair;
template <> struct Pair<float> { using type = float; };
template <> struct Pair<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct Pair<__half> { using type = __half2; };

DEVICE Best over_warp(Best best) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    Best other;
    other.value = __shfl_xor_sync(0xffffffffu, best.value, step);
    other.index = __shfl_xor_sync(0xffffffffu, best.index, step);
    other.nan = __shfl_xor_sync(0xffffffffu, best.nan, step);
    take(best, other);
  }
  return best;
}

// Best of entries [begin, end) as seen by this thread of `count` threads.
template <typename T>
DEVICE Best scan(const T *row, int begin, int end, int thread, int count) {
  constexpr int X = 16 / sizeof(T);
  Best best = {-INFINITY, -1, -1};
  if ((reinterpret_cast<uintptr_t>(row + begin) & 15) == 0) {
    const uint4 *const pieces = reinterpret_cast<const uint4 *>(row + begin);
    const int whole = (end - begin) / X;
#pragma unroll 4
    for (int piece = thread; piece < whole; piece += count) {
      const uint4 raw = __ldg(pieces + piece);
      // Most pieces hold nothing that is large enough.
      using Four = typename Pair<T>::type[4];
      if (largest(reinterpret_cast<const Four &>(raw)) < best.value) continue;
      const T *const values = reinterpret_cast<const T *>(&raw);
#pragma unroll
      for (int i = 0; i < X; ++i) visit(best, Element<T>::load(values[i]), begin + piece * X + i);
    }
    begin += whole * X;
  }
  for (int i = begin + thread; i < end; i += count) visit(best, Element<T>::load(row[i]), i);
  return best;
}

template <typename T> DEVICE void accept(const AcceptParams &p) {
  __shared__ Best of_warp[WARPS];
  __shared__ uint32_t tokens[MAX_ROWS];
  __shared__ int accepted;
  __shared__ bool last;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int split = blockIdx.x, row = blockIdx.y, sequence = blockIdx.z;
  const T *const sequence_logits =
      static_cast<const T *>(p.logits) + (int64_t)sequence * p.rows * p.vocab;

  const int begin = min(p.vocab, split * p.part), end = min(p.vocab, begin + p.part);
  Best best = over_warp(
      scan(sequence_logits + (int64_t)row * p.vocab, begin, end, threadIdx.x, THREADS));
  if (lane == 0) of_warp[warp] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) take(best, of_warp[w]);
    p.parts[((int64_t)sequence * p.rows + row) * p.splits + split] =
        make_int4(__float_as_int(best.value), best.index, best.nan, 0);
    __threadfence();
    last = atomicAdd(p.counters + sequence, 1u) == (uint32_t)(p.rows * p.splits - 1);
  }
  __syncthreads();
  if (!last) return;
  __threadfence();

  const int width = p.drafts != nullptr ? p.rows + 1 : p.rows;
  for (int r = warp; r < p.rows; r += WARPS) {
    Best total = {-INFINITY, -1, -1};
    for (int s = lane; s < p.splits; s += 32) {
      const int4 part = __ldcg(p.parts + ((int64_t)sequence * p.rows + r) * p.splits + s);
      take(total, {__int_as_float(part.x), part.y, part.z});
    }
    total = over_warp(total);
    if (total.nan >= 0) {
      const int nan = total.nan;
      total = over_warp(
          scan(sequence_logits + (int64_t)r * p.vocab, nan + 1, p.vocab, lane, 32));
      if (total.index < 0) total.index = nan;
    }
    if (lane == 0) {
      tokens[r] = (uint32_t)total.index;
      p.out[(int64_t)sequence * width + r] = (uint32_t)total.index;
    }
  }
  if (threadIdx.x == 0) {
    p.counters[sequence] = 0;
    accepted = p.rows - 1;
  }
  if (p.drafts == nullptr) return;
  __syncthreads();
  const int r = threadIdx.x;
  if (r < p.rows - 1 && p.drafts[sequence * p.drafts_stride + r] != tokens[r])
    atomicMin(&accepted, r);
  __syncthreads();
  if (threadIdx.x == 0) p.out[(int64_t)sequence * width + p.rows] = (uint32_t)accepted;
}

#define KERNEL(TYPE, NAME)                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS)                                              \
      accept_##NAME(const __grid_constant__ AcceptParams p) {                                        \
    accept<TYPE>(p);                                                                                 \
  }

KERNEL(__nv_bfloat16, bf16)
KERNEL(__half, f16)
KERNEL(float, f32)
