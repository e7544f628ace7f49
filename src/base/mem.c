#include "base/mem.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static atomic_long fault_in; /* 0: off; n: the n-th mem_try fails */

long mem_fault_at(long n)
{
    return atomic_exchange(&fault_in, n);
}

bool mem_fault_now(void)
{
    long n = atomic_load(&fault_in);
    if (n <= 0) return false;
    return atomic_fetch_sub(&fault_in, 1) == 1; /* it is 0 then: off */
}

static void *aligned_zero(size_t bytes)
{
    if (bytes > PTRDIFF_MAX - 64) return NULL;
    size_t room = (bytes + 63) / 64 * 64;
    void *p = aligned_alloc(64, room ? room : 64);
    if (p) memset(p, 0, bytes);
    return p;
}

void *mem_alloc(size_t bytes)
{
    void *p = aligned_zero(bytes);
    CHECK(p);
    return p;
}

void *mem_try(size_t bytes)
{
    return mem_fault_now() ? NULL : aligned_zero(bytes);
}

void *mem_try_array(size_t n, size_t elem_bytes)
{
    size_t bytes;
    return mul_size(&bytes, n, elem_bytes) ? mem_try(bytes) : NULL;
}

void *mem_retry(void *p, size_t old_bytes, size_t new_bytes)
{
    if (mem_fault_now() || new_bytes > PTRDIFF_MAX - 64) return NULL;
    void *q = aligned_alloc(64, (new_bytes + 64) / 64 * 64);
    if (!q) return NULL;
    if (p) memcpy(q, p, old_bytes < new_bytes ? old_bytes : new_bytes);
    free(p);
    return q;
}

char *mem_dup_n(const char *s, size_t n)
{
    if (n > PTRDIFF_MAX - 64) return NULL;
    char *p = mem_try(n + 1);
    if (p) memcpy(p, s, n);
    return p;
}

char *mem_dup(const char *s)
{
    size_t n = strlen(s);
    char *p = mem_alloc(n + 1);
    memcpy(p, s, n);
    return p;
}

void mem_free(void *p)
{
    free(p);
}
