/*
 * mem.h - every byte of the heap.
 *
 * mem_alloc is for small sizes fixed by the program: it aborts when the machine has none left.
 * mem_try is for every size that comes from outside (a client, a checkpoint, KV): it returns NULL
 * and the caller fails that request or update.  Both return zeroed memory, 64-byte aligned.
 * mem_fault_at(n) makes the n-th mem_try from now fail, once (tests); it gives what was left of the last order: 0
 * if that has failed or there was none.
 * mul_size and add_size are checked: false means overflow, and *out is left alone.
 */
#ifndef BASE_MEM_H
#define BASE_MEM_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>

void *mem_alloc(size_t bytes);
void *mem_try(size_t bytes) MUST_USE;
void *mem_try_array(size_t n, size_t elem_bytes) MUST_USE; /* overflow gives NULL */
/* Grow or shrink; new bytes are not zeroed; NULL leaves `p` valid. */
void *mem_retry(void *p, size_t old_bytes, size_t new_bytes) MUST_USE;
char *mem_dup(const char *s);             /* aborts */
char *mem_dup_n(const char *s, size_t n); /* NULL when out of memory */
void mem_free(void *p);
long mem_fault_at(long n);
bool mem_fault_now(void); /* for other allocators: is it this one? */

static inline bool mul_size(size_t *out, size_t a, size_t b)
{
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

static inline bool add_size(size_t *out, size_t a, size_t b)
{
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

#endif
