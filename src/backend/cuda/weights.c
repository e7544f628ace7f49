#include "backend/cuda/weights.h"
#include "backend/cuda/feed.h"
#include "backend/cuda/repack.h"
#include "base/mem.h"
#include <pthread.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LANES = 8, ARENAS = 2, SLOT_ALIGN = 16 };
_Static_assert(MEMORY_ROWS % TILE_ROWS == 0, "puts come in whole panels");
#define LANE_BYTES ((size_t)8 << 20)

/* One caller's way to the device. */
struct lane {
    struct queue *q;
    void *host;   /* pinned, LANE_BYTES */
    devptr_t dev; /* canonical rows, LANE_BYTES */
    bool busy;
};

struct weights {
    struct device *d;
    struct region *arenas[ARENAS];
    bool taken[ARENAS];
    struct repack repack;
    struct feed *feed; /* of puts to the device */
    pthread_mutex_t lock; /* of lanes' busy, failed, error */
    pthread_cond_t freed;
    struct lane lanes[LANES];
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
static struct lane *lane_take(struct weights *w)
{
    pthread_mutex_lock(&w->lock);
    for (;;) {
        for (int i = 0; i < LANES; i++) {
            if (w->lanes[i].busy) continue;
            w->lanes[i].busy = true;
            pthread_mutex_unlock(&w->lock);
            device_use(w->d);
            return &w->lanes[i];
        }
        pthread_cond_wait(&w->freed, &w->lock);
    }
}

/* Waits for the lane's work and keeps its first failure. */
static void lane_give(struct weights *w, struct lane *l)
{
    struct err e = {0};
    err_t rc = queue_sync(l->q, &e);
    pthread_mutex_lock(&w->lock);
    if (rc != OK && w->failed == OK) {
        w->failed = rc;
        w->error = e;
    }
    l->busy = false;
    pthread_cond_signal(&w->freed);
    pthread_mutex_unlock(&w->lock);
}

err_t weights_error(struct weights *w, struct err *e)
{
    pthread_mutex_lock(&w->lock);
    err_t rc = w->failed;
    if (rc != OK) err_set(e, rc, "%s", w->error.msg);
    pthread_mutex_unlock(&w->lock);
    return rc;
}

/* Rows [row0, row0 + n) of tiles to the lane's device buffer. */
static void unpack(struct weights *w, struct lane *l, char *at, const struct resident *r, part_t part,
                   size_t row0, size_t n)
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
    repack_from_tiles(&w->repack, l->q, r->format, &a);
}

/* Rows that fit: whole panels. */
static size_t rows_in(size_t room, size_t row_bytes, size_t n)
{
    size_t fit = room / (row_bytes ? row_bytes : 1) / TILE_ROWS * TILE_ROWS;
    CHECK(fit > 0);
    return n < fit ? n : fit;
}

static void put(void *ctx, void *at, const struct resident *r, part_t part, size_t row0, size_t n,
                const void *canon)
{
    struct weights *w = ctx;
    size_t row = part_row(r, part), step;
    uint32_t blocks = tile_blocks((uint32_t)r->cols);
    if (!in_tiles(r, part)) {
        feed_bytes(w->feed, (char *)at + part_at(r, part) + row0 * row, canon, n * row);
        return;
    }
    CHECK(row0 % TILE_ROWS == 0 && (n % TILE_ROWS == 0 || row0 + n == r->rows));
    for (size_t i = 0; i < n; i += step) {
        char *tiles = (char *)at + (row0 + i) / TILE_ROWS * blocks * tile_shape(r->format).bytes;
        step = rows_in(FEED_BYTES, row, n - i);
        feed_tiles(w->feed, tiles, r->format, part == PART_SCALE, (uint32_t)step, (uint32_t)r->cols,
                   (const char *)canon + i * row, step * row);
    }
}

static void *lend(void *ctx, size_t bytes)
{
    return feed_lend(((struct weights *)ctx)->feed, bytes);
}

static void take_back(void *ctx, void *lent)
{
    feed_take_back(((struct weights *)ctx)->feed, lent);
}

static void flush(void *ctx)
{
    feed_flush(((struct weights *)ctx)->feed);
}

/* All puts are done; their failure is the memory's from then on. */
static void settle(struct weights *w)
{
    struct err e = {0};
    err_t rc = feed_settle(w->feed, &e);
    pthread_mutex_lock(&w->lock);
    if (rc != OK && w->failed == OK) {
        w->failed = rc;
        w->error = e;
    }
    pthread_mutex_unlock(&w->lock);
}

static void get(void *ctx, void *canon, const struct resident *r, part_t part, size_t row0,
                size_t n, const void *at)
{
    struct weights *w = ctx;
    struct lane *l = lane_take(w);
    size_t row = part_row(r, part), step;
    for (size_t i = 0; i < n; i += step) {
        step = rows_in(LANE_BYTES, row, n - i);
        size_t bytes = step * row;
        if (in_tiles(r, part)) {
            unpack(w, l, (char *)(uintptr_t)at, r, part, row0 + i, step);
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

static uint64_t hash(void *ctx, const void *arena, size_t bytes)
{
    struct weights *w = ctx;
    struct lane *l = lane_take(w);
    XXH3_state_t *s = XXH3_createState();
    CHECK(s);
    XXH3_64bits_reset(s);
    for (size_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < LANE_BYTES ? bytes - i : LANE_BYTES;
        queue_copy(l->q, host_addr(l->host), host_addr((const char *)arena + i), n);
        if (queue_sync(l->q, NULL) == OK) XXH3_64bits_update(s, l->host, n);
    }
    uint64_t h = XXH3_64bits_digest(s);
    XXH3_freeState(s);
    lane_give(w, l);
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
    .flush = flush,
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
    return bytes * (staging ? ARENAS : 1) + LANES * LANE_BYTES + feed_device_bytes();
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
    if (rc == OK) rc = feed_new(&w->feed, d, e);
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
    feed_free(w->feed);
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
