#include "backend/memory.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/pages.h"
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

static const size_t elem_bytes[] = {
    [RESIDENT_PLAIN] = sizeof(uint16_t), [RESIDENT_F32] = sizeof(float)};

static bool slot_bytes(size_t *out, const struct resident *r)
{
    if (r->kind == RESIDENT_MATRIX) return layout_bytes(out, r->format, r->rows, r->cols);
    size_t len;
    return mul_size(&len, r->rows, r->cols) && mul_size(out, len, elem_bytes[r->kind]);
}

static void *arena_alloc(void *ctx, size_t bytes)
{
    (void)ctx;
    return pages_try(bytes);
}

static void arena_free(void *ctx, void *arena, size_t bytes)
{
    (void)ctx;
    pages_release(arena, bytes);
}

static void rest(void *ctx, void *arena, size_t bytes)
{
    (void)ctx;
    pages_lend(arena, bytes);
}

/* A huge page: half a millisecond, for which whoever changes the address space waits. */
#define READY_BYTES ((size_t)2 << 20)

static err_t ready(void *ctx, void *arena, size_t offset, size_t n, struct err *e)
{
    (void)ctx;
    if (pages_fill((char *)arena + offset, n)) return OK;
    return err_set(e, ERR_NOMEM, "filling %zu bytes with pages: refused by the system", n);
}

static void put(void *ctx, void *at, const struct resident *r, part_t part, size_t row0, size_t n,
                const void *canon)
{
    (void)ctx;
    if (r->kind == RESIDENT_MATRIX) {
        layout_put(at, r->format, (size_t)r->rows, (size_t)r->cols, part, row0, n, canon);
        return;
    }
    size_t row = (size_t)r->cols * elem_bytes[r->kind];
    CHECK(part == PART_DATA && row0 <= r->rows && n <= r->rows - row0);
    if (n > 0 && row > 0) memcpy((char *)at + row0 * row, canon, n * row);
}

static void get(void *ctx, void *canon, const struct resident *r, part_t part, size_t row0,
                size_t n, const void *at)
{
    (void)ctx;
    if (r->kind == RESIDENT_MATRIX) {
        layout_get(canon, r->format, (size_t)r->rows, (size_t)r->cols, part, row0, n, at);
        return;
    }
    size_t row = (size_t)r->cols * elem_bytes[r->kind];
    CHECK(part == PART_DATA && row0 <= r->rows && n <= r->rows - row0);
    if (n > 0 && row > 0) memcpy(canon, (const char *)at + row0 * row, n * row);
}

static void copy(void *ctx, void *to, const void *from, size_t bytes)
{
    (void)ctx;
    memcpy(to, from, bytes);
}

static void *commit(void *ctx, void *now, void *next, size_t bytes, void **spare)
{
    (void)ctx;
    (void)bytes;
    *spare = now;
    return next;
}

static err_t release(void *ctx, void *arena, size_t bytes, struct err *e)
{
    (void)ctx;
    (void)e;
    pages_drop(arena, bytes);
    return OK;
}

static err_t resume(void *ctx, void *arena, size_t bytes, struct err *e)
{
    (void)ctx; /* it has memory where it is touched */
    (void)arena;
    (void)bytes;
    (void)e;
    return OK;
}

static uint64_t hash(void *ctx, const void *arena, size_t bytes)
{
    (void)ctx;
    return XXH3_64bits(arena, bytes);
}

static err_t check(void *ctx, struct err *e)
{
    (void)ctx; /* copies in memory do not fail */
    (void)e;
    return OK;
}

static const struct memory_ops host_ops = {
    .bytes = slot_bytes,
    .alloc = arena_alloc,
    .free = arena_free,
    .rest = rest,
    .ready_bytes = READY_BYTES,
    .ready = ready,
    .put = put,
    .get = get,
    .copy = copy,
    .commit = commit,
    .release = release,
    .resume = resume,
    .hash = hash,
    .check = check,
};

const struct memory memory_host = {.ops = &host_ops};
