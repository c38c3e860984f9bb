// Writes down every kernel and copy of a CUDA program: kind, start, duration (ns) and name, a line each.
//
//   gcc -shared -fPIC -O2 -I$CUDA/include -o kernel_times.so kernel_times.c $CUDA/lib/libcupti.so
//   CUDA_INJECTION64_PATH=$PWD/kernel_times.so KERNEL_TIMES=out.txt dflash-bench shape ...
//   python3 kernel_times.py out.txt 200 100      (the 200 ms that end 100 ms before the end)
//
// With KERNEL_TIMES_CALLS=1 driver calls as well. Times of the whole program grow by a tenth or so.
#include <cuda.h>
#include <cupti.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define BUFFER (8 << 20)
static FILE *out;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void give(uint8_t **buffer, size_t *size, size_t *records) {
  void *memory = NULL;
  *size = posix_memalign(&memory, 8, BUFFER) == 0 ? BUFFER : 0;
  *buffer = memory;
  *records = 0;
}

static void line(char kind, uint64_t start, uint64_t end, const char *name) {
  fprintf(out, "%c %llu %llu %s\n", kind, (unsigned long long)start, (unsigned long long)(end - start), name);
}

static void take(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  CUpti_Activity *record = NULL;
  char name[64];
  pthread_mutex_lock(&lock);
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      CUpti_ActivityKernel9 *kernel = (CUpti_ActivityKernel9 *)record;
      line('K', kernel->start, kernel->end, kernel->name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      CUpti_ActivityMemcpy5 *copy = (CUpti_ActivityMemcpy5 *)record;
      snprintf(name, sizeof name, "copy%d_%llu", copy->copyKind, (unsigned long long)copy->bytes);
      line('M', copy->start, copy->end, name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      CUpti_ActivityMemset4 *set = (CUpti_ActivityMemset4 *)record;
      line('S', set->start, set->end, "memset");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_DRIVER) {
      CUpti_ActivityAPI *call = (CUpti_ActivityAPI *)record;
      const char *called = "?";
      cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, call->cbid, &called);
      line('A', call->start, call->end, called);
    }
  }
  pthread_mutex_unlock(&lock);
  free(buffer);
}

static void finish(void) {
  cuptiActivityFlushAll(1);
  fflush(out);
}

int InitializeInjection(void) {
  const char *path = getenv("KERNEL_TIMES");
  out = fopen(path ? path : "kernel_times.txt", "w");
  if (out == NULL) return 0;
  setvbuf(out, NULL, _IOFBF, 1 << 20);
  cuptiActivityRegisterCallbacks(give, take);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  if (getenv("KERNEL_TIMES_CALLS")) cuptiActivityEnable(CUPTI_ACTIVITY_KIND_DRIVER);
  atexit(finish);
  return 1;
}
