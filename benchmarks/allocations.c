/* Counts what malloc has given and not had back, for memory_allocated.py. Preload it. Blocks below
   LEAST bytes, which are Python's rather than tensors, do not count. Linux with glibc. */

#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define LEAST 2048

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long used, peak;

static void *given(void *block) {
  const long size = block ? (long)malloc_usable_size(block) : 0;
  if (size < LEAST) return block;
  const long now = atomic_fetch_add(&used, size) + size;
  long before = atomic_load(&peak);
  while (now > before && !atomic_compare_exchange_weak(&peak, &before, now)) {
  }
  return block;
}

static void taken(void *block) {
  const long size = block ? (long)malloc_usable_size(block) : 0;
  if (size >= LEAST) atomic_fetch_sub(&used, size);
}

void *malloc(size_t size) { return given(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return given(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return given(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
  *block = memalign(alignment, size);
  return *block || !size ? 0 : 12; /* ENOMEM */
}

void *realloc(void *block, size_t size) {
  const long before = block ? (long)malloc_usable_size(block) : 0;
  void *moved = __libc_realloc(block, size);
  if (before >= LEAST && (moved || !size)) atomic_fetch_sub(&used, before);
  return given(moved);
}

void free(void *block) {
  taken(block);
  __libc_free(block);
}

long allocated_bytes(void) { return used; }
long peak_bytes(void) { return peak; }
void reset_peak(void) { peak = atomic_load(&used); }
