/*
 * memory.h - where resident weights live, and how bytes get there and back.
 *
 * The store (weight/store.h) asks this table for memory and never touches the bytes itself, so that
 * weights may lie in host memory (cpu/memory.c) or on a device.  An arena is one generation of all
 * slots; a slot lies at an offset that the store chose from `bytes`.
 *
 * Threads: `put`, `get`, `copy`, `lend`, `take_back` and `flush` from any, several at once on ranges that do not overlap; the
 * others from one.
 */
#ifndef BACKEND_MEMORY_H
#define BACKEND_MEMORY_H

#include "backend/layout.h"
#include "base/err.h"

/* Rows of a matrix are put in multiples of this from a multiple of it, but for its last ones. */
#define MEMORY_ROWS 64

typedef enum {
    RESIDENT_PLAIN, /* BF16 [rows][cols], row-major */
    RESIDENT_F32,   /* f32 [rows][cols], row-major */
    RESIDENT_MATRIX /* a matrix of any format, as GEMMs read it */
} resident_t;

struct resident {
    resident_t kind;
    format_t format; /* of a matrix */
    uint64_t rows, cols;
};

/* Where an update's weights wait for their commit; off: nowhere, it is read again into place. */
enum staging_mode { STAGING_DEVICE, STAGING_HOST, STAGING_OFF };

struct memory {
    const struct memory_ops *ops;
    void *ctx;
};

struct memory_ops {
    /* Bytes of a slot; false when they overflow. */
    bool (*bytes)(size_t *out, const struct resident *r);
    /* An arena; what no put of a slot writes is zero in it (also in one that rested, since all generations have the same
     * slots).  NULL without memory. */
    void *(*alloc)(void *ctx, size_t bytes);
    void (*free)(void *ctx, void *arena, size_t bytes);
    /* Instead of `free`: the arena waits for the next update, which spares it new memory; meanwhile the system may have
     * the memory.  NULL: arenas do not wait. */
    void (*rest)(void *ctx, void *arena, size_t bytes);
    /* Of an arena, before it is needed: memory for [offset, offset + n), as far as it is not there already; `offset` is a
     * multiple of ready_bytes and n is ready_bytes, but at the end.  Any thread, also while others put.  NULL: there is nothing to do. */
    err_t (*ready)(void *ctx, void *arena, size_t offset, size_t n, struct err *e);
    size_t ready_bytes; /* no more than others may have to wait for */
    /* Canonical rows of a part into, or out of, a slot at address `at` of an arena.  Plain and f32
     * slots have PART_DATA alone. */
    void (*put)(void *ctx, void *at, const struct resident *r, part_t part, size_t row0, size_t n,
                const void *canon);
    void (*get)(void *ctx, void *canon, const struct resident *r, part_t part, size_t row0,
                size_t n, const void *at);
    /* Any of these three may be NULL.  Host memory from which a put needs no copy of its own, for the calling
     * thread to fill, put from, and give back before it borrows again; NULL: none, any other will do. */
    void *(*lend)(void *ctx, size_t bytes);
    void (*take_back)(void *ctx, void *lent);
    /* The calling thread puts no more for now. */
    void (*flush)(void *ctx);
    /* Bytes from one arena, or host memory, to another. */
    void (*copy)(void *ctx, void *to, const void *from, size_t bytes);
    /* Makes `next` the resident generation, between two steps; `now` is NULL the first time.
     * Returns the arena that serves from here on and stores the one to free in *spare (a flip gives
     * (next, now); a copy into place (now, next)). */
    void *(*commit)(void *ctx, void *now, void *next, size_t bytes, void **spare);
    /* The resident arena's memory back to the system, its address kept and its content lost; and memory for it
     * again, of undefined content.  Between two steps. */
    err_t (*release)(void *ctx, void *arena, size_t bytes, struct err *e);
    err_t (*resume)(void *ctx, void *arena, size_t bytes, struct err *e);
    uint64_t (*hash)(void *ctx, const void *arena, size_t bytes);
    /* Waits until all puts are done.  OK, or the first failure of a put, get or alloc so far: puts report none
     * themselves.  An update asks before it calls itself prepared. */
    err_t (*check)(void *ctx, struct err *e);
};

extern const struct memory memory_host;

#endif
