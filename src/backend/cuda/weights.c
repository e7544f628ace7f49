#include "backend/cuda/weights.h"
#include "backend/cuda/repack.h"
#include "base/digest.h"
#include "base/mem.h"
#include <pthread.h>
#include <string.h>

/* Lanes lent: all but LANES_KEPT, so that puts and gets find one. */
enum { LANES = 48, LANES_KEPT = 16, ARENAS = 2, SLOT_ALIGN = 16 };
_Static_assert(MEMORY_ROWS % TILE_ROWS == 0, "puts come in whole panels");
#define LANE_BYTES ((size_t)4 << 20)

/* One caller's way to the device.  Its work may go on after the caller has left: whoever takes it next waits. */
struct lane {
    struct queue *q;
    void *host;   /* pinned, LANE_BYTES */
    devptr_t dev; /* canonical rows, LANE_BYTES */
    bool busy;
    bool lent;     /* its host buffer is; what is put from there goes its way */
    uint64_t left; /* when its last caller did */
};

struct weights {
    struct device *d;
    struct region *arenas[ARENAS];
    bool taken[ARENAS];
    struct repack repack;
    pthread_mutex_t lock; /* of lanes' busy, failed, error */
    pthread_cond_t freed;
    struct lane lanes[LANES];
    uint64_t leaves;
    int n_lent;
    err_t failed;
    struct err error;
};

/* Byte places in a slot. */
struct places {
    size_t scale, tensor, input, end;
};

static size_t align(size_t n)
{
    return (n + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
}

static bool place(struct places *p, const struct resident *r)
{
    size_t tiles, scales, rows = format_scale_rows(r->format, (size_t)r->rows);
    if (!layout_cuda_bytes(&tiles, r->format, r->rows, r->cols)) return false;
    p->scale = tiles; /* a multiple of 16 */
    scales = formats[r->format].scale == SCALE_F32
                 ? rows * format_scale_cols(r->format, (size_t)r->cols) * sizeof(float)
                 : 0;
    if (!add_size(&p->tensor, p->scale, align(scales))) return false;
    p->input = p->tensor + (formats[r->format].tensor ? SLOT_ALIGN : 0);
    p->end = p->input + (r->format != FORMAT_BF16 ? SLOT_ALIGN : 0);
    return true;
}

struct gemm_weight weights_matrix(const struct resident *r, const void *at)
{
    struct places p;
    CHECK(r->kind == RESIDENT_MATRIX && place(&p, r));
    const char *base = at;
    struct gemm_weight w = {.tiles = base};
    if (formats[r->format].tensor)
        w.scale = (const float *)(const void *)(base + p.tensor);
    else if (formats[r->format].scale == SCALE_F32)
        w.scale = (const float *)(const void *)(base + p.scale);
    return w;
}

static const size_t elem_bytes[] = {
    [RESIDENT_PLAIN] = sizeof(uint16_t), [RESIDENT_F32] = sizeof(float)};

static bool slot_bytes(size_t *out, const struct resident *r)
{
    struct places p;
    if (r->kind == RESIDENT_MATRIX) {
        if (!place(&p, r)) return false;
        *out = p.end;
        return true;
    }
    size_t len;
    return mul_size(&len, r->rows, r->cols) && mul_size(out, len, elem_bytes[r->kind]);
}

/* Bytes of a row of a part, and where the part lies in the slot (PART_DATA and small scales: in the
 * tiles). */
static size_t part_row(const struct resident *r, part_t part)
{
    if (part == PART_TENSOR || part == PART_INPUT) return sizeof(float);
    if (r->kind != RESIDENT_MATRIX) return (size_t)r->cols * elem_bytes[r->kind];
    if (part == PART_DATA) return format_row_bytes(r->format, (size_t)r->cols);
    return format_scale_cols(r->format, (size_t)r->cols) * (size_t)formats[r->format].scale_bytes;
}

static bool in_tiles(const struct resident *r, part_t part)
{
    if (r->kind != RESIDENT_MATRIX || part == PART_TENSOR || part == PART_INPUT) return false;
    return part == PART_DATA || formats[r->format].scale != SCALE_F32;
}

static size_t part_at(const struct resident *r, part_t part)
{
    struct places p;
    if (r->kind != RESIDENT_MATRIX) return 0;
    CHECK(place(&p, r));
    return part == PART_SCALE ? p.scale : part == PART_TENSOR ? p.tensor : p.input;
}

/* --- lanes */
static void lane_leave(struct weights *w, struct lane *l)
{
    pthread_mutex_lock(&w->lock);
    l->busy = false;
    l->left = ++w->leaves;
    pthread_cond_signal(&w->freed);
    pthread_mutex_unlock(&w->lock);
}

/* Waits for the lane's work and keeps its first failure. */
static void lane_settle(struct weights *w, struct lane *l)
{
    struct err e = {0};
    err_t rc = queue_sync(l->q, &e);
    if (rc == OK) return;
    pthread_mutex_lock(&w->lock);
    if (w->failed == OK) {
        w->failed = rc;
        w->error = e;
    }
    pthread_mutex_unlock(&w->lock);
}

static void lane_give(struct weights *w, struct lane *l)
{
    lane_settle(w, l);
    lane_leave(w, l);
}

/* The idle lane that was left first: its work has most likely ended.  NULL: all are busy. */
static struct lane *lane_idle(struct weights *w)
{
    struct lane *l = NULL;
    for (int i = 0; i < LANES; i++)
        if (!w->lanes[i].busy && (!l || w->lanes[i].left < l->left)) l = &w->lanes[i];
    return l;
}

static struct lane *lane_take(struct weights *w)
{
    struct lane *l;
    pthread_mutex_lock(&w->lock);
    while (!(l = lane_idle(w)))
        pthread_cond_wait(&w->freed, &w->lock);
    l->busy = true;
    pthread_mutex_unlock(&w->lock);
    device_use(w->d);
    lane_settle(w, l);
    return l;
}

/* All that puts have queued is done: lanes left before this began come first. */
static void settle(struct weights *w)
{
    for (int i = 0; i < LANES; i++)
        lane_leave(w, lane_take(w));
}

err_t weights_error(struct weights *w, struct err *e)
{
    pthread_mutex_lock(&w->lock);
    err_t rc = w->failed;
    if (rc != OK) err_set(e, rc, "%s", w->error.msg);
    pthread_mutex_unlock(&w->lock);
    return rc;
}

/* Rows [row0, row0 + n) between the lane's device buffer and tiles. */
static void convert(struct weights *w, struct lane *l, bool pack, char *at,
                    const struct resident *r, part_t part, size_t row0, size_t n)
{
    uint32_t blocks = tile_blocks((uint32_t)r->cols);
    CHECK(row0 % TILE_ROWS == 0 && (n % TILE_ROWS == 0 || row0 + n == r->rows));
    struct layout_args a = {
        .tiles = at + row0 / TILE_ROWS * blocks * tile_shape(r->format).bytes,
        .rows = (uint32_t)n,
        .cols = (uint32_t)r->cols,
    };
    void *dev = (void *)(uintptr_t)l->dev;
    if (part == PART_DATA)
        a.data = dev;
    else
        a.scale = dev;
    if (pack)
        repack_to_tiles(&w->repack, l->q, r->format, &a);
    else
        repack_from_tiles(&w->repack, l->q, r->format, &a);
}

/* Rows that fit a lane: whole panels. */
static size_t lane_rows(size_t row_bytes, size_t n)
{
    size_t fit = LANE_BYTES / (row_bytes ? row_bytes : 1) / TILE_ROWS * TILE_ROWS;
    CHECK(fit > 0);
    return n < fit ? n : fit;
}

static void *lend(void *ctx, size_t bytes)
{
    struct weights *w = ctx;
    if (bytes > LANE_BYTES) return NULL;
    pthread_mutex_lock(&w->lock);
    bool ok = w->n_lent < LANES - LANES_KEPT;
    w->n_lent += ok;
    pthread_mutex_unlock(&w->lock);
    if (!ok) return NULL;
    struct lane *l = lane_take(w);
    l->lent = true;
    return l->host;
}

/* The lane whose buffer p lies in and which was lent; NULL: none. */
static struct lane *lender(struct weights *w, const void *p)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t base = host_addr(w->lanes[i].host);
        if (host_addr(p) >= base && host_addr(p) - base < LANE_BYTES) return &w->lanes[i];
    }
    return NULL;
}

static void take_back(void *ctx, void *lent)
{
    struct weights *w = ctx;
    struct lane *l = lender(w, lent);
    CHECK(l && l->lent);
    l->lent = false;
    pthread_mutex_lock(&w->lock);
    w->n_lent--;
    pthread_mutex_unlock(&w->lock);
    lane_leave(w, l);
}

static void put(void *ctx, void *at, const struct resident *r, part_t part, size_t row0, size_t n,
                const void *canon)
{
    struct weights *w = ctx;
    struct lane *lent = lender(w, canon), *l = lent ? lent : lane_take(w);
    size_t row = part_row(r, part), step;
    for (size_t i = 0; i < n; i += step) {
        step = lane_rows(row, n - i);
        size_t bytes = step * row;
        const char *from = (const char *)canon + i * row;
        if (!lent) {
            if (i > 0) lane_settle(w, l); /* its buffers are free again */
            memcpy(l->host, from, bytes);
            from = l->host;
        }
        if (in_tiles(r, part)) {
            queue_copy(l->q, l->dev, host_addr(from), bytes);
            convert(w, l, true, at, r, part, row0 + i, step);
        } else {
            queue_copy(l->q, host_addr((char *)at + part_at(r, part) + (row0 + i) * row),
                       host_addr(from), bytes);
        }
    }
    if (!lent) lane_leave(w, l);
}

static void get(void *ctx, void *canon, const struct resident *r, part_t part, size_t row0,
                size_t n, const void *at)
{
    struct weights *w = ctx;
    struct lane *l = lane_take(w);
    size_t row = part_row(r, part), step;
    for (size_t i = 0; i < n; i += step) {
        step = lane_rows(row, n - i);
        size_t bytes = step * row;
        if (in_tiles(r, part)) {
            convert(w, l, false, (char *)(uintptr_t)at, r, part, row0 + i, step);
            queue_copy(l->q, host_addr(l->host), l->dev, bytes);
        } else {
            queue_copy(l->q, host_addr(l->host),
                       host_addr((const char *)at + part_at(r, part) + (row0 + i) * row), bytes);
        }
        if (queue_sync(l->q, NULL) == OK) memcpy((char *)canon + i * row, l->host, bytes);
    }
    lane_give(w, l);
}

/* --- arenas */
static void *arena_alloc(void *ctx, size_t bytes)
{
    struct weights *w = ctx;
    struct err e = {0};
    device_use(w->d);
    for (int i = 0; i < ARENAS; i++) {
        if (w->taken[i]) continue;
        err_t rc = w->arenas[i] ? OK : region_new(&w->arenas[i], w->d, bytes, &e);
        if (rc == OK) rc = region_map(w->arenas[i], bytes, &e);
        if (rc != OK) return NULL;
        struct lane *l = lane_take(w);
        queue_fill(l->q, region_base(w->arenas[i]), 0, bytes);
        lane_give(w, l);
        w->taken[i] = true;
        return (void *)(uintptr_t)region_base(w->arenas[i]);
    }
    return NULL;
}

/* The memory stays for the next update; weights_free gives it back. */
static void arena_free(void *ctx, void *arena, size_t bytes)
{
    struct weights *w = ctx;
    (void)bytes;
    settle(w); /* of an update that is dropped */
    for (int i = 0; i < ARENAS; i++)
        if (w->arenas[i] && region_base(w->arenas[i]) == host_addr(arena)) w->taken[i] = false;
}

static void copy(void *ctx, void *to, const void *from, size_t bytes)
{
    struct weights *w = ctx;
    struct lane *l = lane_take(w);
    queue_copy(l->q, host_addr(to), host_addr(from), bytes);
    lane_give(w, l);
}

static void *commit(void *ctx, void *now, void *next, size_t bytes, void **spare)
{
    struct weights *w = ctx;
    *spare = next;
    if (now == NULL) {
        *spare = NULL;
        return next;
    }
    struct lane *l = lane_take(w);
    queue_copy(l->q, host_addr(now), host_addr(next), bytes);
    lane_give(w, l);
    return now;
}

/* The spare arena goes with it: what is not taken is kept for the next update alone. */
static err_t release(void *ctx, void *arena, size_t bytes, struct err *e)
{
    struct weights *w = ctx;
    err_t rc = OK;
    (void)bytes;
    device_use(w->d);
    for (int i = 0; rc == OK && i < ARENAS; i++)
        if (w->arenas[i] && (!w->taken[i] || region_base(w->arenas[i]) == host_addr(arena)))
            rc = region_unmap(w->arenas[i], e);
    return rc;
}

static err_t resume(void *ctx, void *arena, size_t bytes, struct err *e)
{
    struct weights *w = ctx;
    device_use(w->d);
    for (int i = 0; i < ARENAS; i++)
        if (w->arenas[i] && region_base(w->arenas[i]) == host_addr(arena))
            return region_map(w->arenas[i], bytes, e);
    CHECK(!"an arena of this memory");
}

/* One piece is copied while the one before is summed. */
static uint64_t hash(void *ctx, const void *arena, size_t bytes)
{
    struct weights *w = ctx;
    struct lane *l[2] = {lane_take(w), lane_take(w)};
    struct digest d;
    unsigned char sum[DIGEST_BYTES];
    uint64_t h;
    digest_init(&d, DIGEST_XXH3_128);
    for (size_t i = 0, k = 0, before = 0, n; i < bytes || before; i += n, k ^= 1, before = n) {
        n = bytes - i < LANE_BYTES ? bytes - i : LANE_BYTES;
        if (n) queue_copy(l[k]->q, host_addr(l[k]->host), host_addr((const char *)arena + i), n);
        if (!before) continue;
        lane_settle(w, l[k ^ 1]);
        digest_add(&d, l[k ^ 1]->host, before);
    }
    digest_get(&d, sum);
    memcpy(&h, sum, sizeof h);
    lane_give(w, l[0]);
    lane_give(w, l[1]);
    return h;
}

static err_t check(void *ctx, struct err *e)
{
    settle(ctx);
    return weights_error(ctx, e);
}

static const struct memory_ops device_ops = {
    .bytes = slot_bytes,
    .alloc = arena_alloc,
    .free = arena_free,
    .put = put,
    .lend = lend,
    .take_back = take_back,
    .get = get,
    .copy = copy,
    .commit = commit,
    .release = release,
    .resume = resume,
    .hash = hash,
    .check = check,
};

struct memory weights_memory(struct weights *w)
{
    return (struct memory){.ops = &device_ops, .ctx = w};
}

size_t weights_device_bytes(size_t bytes, bool staging)
{
    return bytes * (staging ? ARENAS : 1) + LANES * LANE_BYTES;
}

static err_t open_lanes(struct weights *w, struct err *e)
{
    for (int i = 0; i < LANES; i++) {
        struct lane *l = &w->lanes[i];
        err_t rc = queue_new(&l->q, w->d, e);
        if (rc == OK) rc = host_alloc(&l->host, w->d, LANE_BYTES, e);
        if (rc == OK) rc = device_alloc(&l->dev, w->d, LANE_BYTES, e);
        if (rc != OK) return rc;
    }
    return OK;
}

err_t weights_new(struct weights **out, struct device *d, struct err *e)
{
    struct weights *w = mem_alloc(sizeof *w);
    w->d = d;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->freed, NULL);
    err_t rc = open_lanes(w, e);
    if (rc == OK) rc = repack_open(&w->repack, d, e);
    if (rc != OK) {
        weights_free(w);
        return rc;
    }
    *out = w;
    return OK;
}

void weights_free(struct weights *w)
{
    if (w == NULL) return;
    for (int i = 0; i < ARENAS; i++)
        region_free(w->arenas[i]);
    for (int i = 0; i < LANES; i++) {
        queue_free(w->lanes[i].q);
        host_free(w->d, w->lanes[i].host);
        device_free(w->d, w->lanes[i].dev);
    }
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->freed);
    mem_free(w);
}
