// What every kernel file shares: element types, small memory helpers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

// Conversions and packing of the three element types.
template <typename T> struct Element;

template <> struct Element<float> {
  static DEVICE float load(float x) { return x; }
  static DEVICE float store(float x) { return x; }
};

template <> struct Element<__half> {
  static DEVICE float load(__half x) { return __half2float(x); }
  static DEVICE __half store(float x) { return __float2half_rn(x); }
  // Two values in one register, the first in the low half.
  static DEVICE uint32_t pack(float low, float high) {
    __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&both);
  }
};

template <> struct Element<__nv_bfloat16> {
  static DEVICE float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  static DEVICE __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
  static DEVICE uint32_t pack(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&both);
  }
};

// 2^x; 0 for -inf.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory in the background, or fills with zeros.
DEVICE void copy16(void *shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `PENDING` committed groups of this thread are still under way.
template <int PENDING> DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Programmatic dependent launch, where the GPU has it: a kernel may let the next one start early, and
// that one must wait before it reads what this one writes.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
