/*
 * carve.h - arrays laid out one after another in one block of memory.
 *
 *     struct carve c = carve_at(0);               sizes alone
 *     CARVE(c, a->ids, tokens, 1);                a->ids = room for tokens * 1 elements of its type
 *     CARVE(c, a->table, rows, pages);
 *     if (!c.ok) ...                              the sizes overflow
 *     block = ... c.bytes ...
 *     c = carve_at(address of block)              and the same lines again: the pointers are true now
 *
 * Every array starts at a multiple of CARVE_ALIGN of the block.  The addresses may be a device's.
 */
#ifndef BASE_CARVE_H
#define BASE_CARVE_H

#include "base/mem.h"
#include <stdint.h>

enum { CARVE_ALIGN = 256 };

struct carve {
    uintptr_t base;
    size_t bytes; /* so far */
    bool ok;
};

static inline struct carve carve_at(uintptr_t base)
{
    return (struct carve){.base = base, .ok = true};
}

/* Room for a * b elements of elem bytes. */
static inline void *carve(struct carve *c, size_t a, size_t b, size_t elem)
{
    size_t at = c->bytes, n, bytes, end;
    c->ok = c->ok && mul_size(&n, a, b) && mul_size(&bytes, n, elem) && add_size(&end, at, bytes) &&
            add_size(&end, end, CARVE_ALIGN - 1);
    if (c->ok) c->bytes = end / CARVE_ALIGN * CARVE_ALIGN;
    return (void *)(c->base + at);
}

#define CARVE(c, field, a, b) ((field) = carve(&(c), a, b, sizeof *(field)))

#endif
