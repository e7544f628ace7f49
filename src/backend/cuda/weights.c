#include "backend/cuda/weights.h"
#include "backend/cuda/copy.h"
#include "backend/cuda/feed.h"
#include "backend/cuda/pinned.h"
#include "backend/cuda/repack.h"
#include "backend/cuda/slot.h"
#include "base/digest.h"
#include "base/mem.h"
#include <pthread.h>
#include <string.h>

enum { LANES = 8, ARENAS = 2 };
_Static_assert(MEMORY_ROWS % TILE_ROWS == 0, "puts come in whole panels");
#define LANE_BYTES ((size_t)8 << 20)

/* One caller's way to the device. */
struct lane {
    struct queue *q;
    void *host;     /* pinned, LANE_BYTES */
    devptr_t dev;   /* canonical rows, LANE_BYTES */
    devptr_t tiles; /* on their way to the host, LANE_BYTES; 0: updates are not staged there */
    bool busy;
};

struct weights {
    struct device *d;
    struct region *arenas[ARENAS];
    struct pinned *staged; /* the second arena, where it is the host's */
    bool taken[ARENAS];
    struct repack repack;
    struct feed *feed; /* of puts to the device */
    struct kernel copy_rows;
    pthread_mutex_t lock; /* of lanes' busy, failed, pin_failed and the errors */
    pthread_cond_t freed;
    struct lane lanes[LANES];
    err_t failed, pin_failed; /* the device's, for good; of pinning, until the arena is freed */
    struct err error, pin_error;
};

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

/* --- the staged arena on the host */

/* Where in it an address lies; SIZE_MAX: nowhere. */
static size_t host_offset(const struct weights *w, uint64_t at)
{
    uint64_t base = w->staged ? host_addr(pinned_base(w->staged)) : 0;
    return base && at >= base && at - base < pinned_bytes(w->staged) ? (size_t)(at - base)
                                                                     : SIZE_MAX;
}

static bool on_host(const struct weights *w, const void *at)
{
    return host_offset(w, host_addr(at)) != SIZE_MAX;
}

/* False: the update fails (check), nothing may be put there. */
static bool pin(struct weights *w, const void *at, size_t n)
{
    struct err e = {0};
    err_t rc = pinned_need(w->staged, host_offset(w, host_addr(at)), n, &e);
    if (rc == OK) return true;
    pthread_mutex_lock(&w->lock);
    if (w->pin_failed == OK) {
        w->pin_failed = rc;
        w->pin_error = e;
    }
    pthread_mutex_unlock(&w->lock);
    return false;
}

static void forget_pinning(struct weights *w)
{
    pthread_mutex_lock(&w->lock);
    w->pin_failed = OK;
    pthread_mutex_unlock(&w->lock);
}

/* A copy, of which either side may be the staged arena. */
static void copy_cut(const struct weights *w, struct queue *q, uint64_t to, uint64_t from, size_t n)
{
    size_t a = host_offset(w, to), b = host_offset(w, from), offset = a != SIZE_MAX ? a : b;
    for (size_t i = 0, run; i < n; i += run) {
        run = offset == SIZE_MAX ? n : pinned_run(offset + i, n - i);
        queue_copy(q, to + i, from + i, run);
    }
}

/* The bytes of a part in tiles, which lie between those of the other, from tiles to tiles. */
static void copy_part(const struct weights *w, struct queue *q, uint64_t to, uint64_t from,
                      format_t f, part_t part, size_t n_tiles)
{
    struct tile_shape t = tile_shape(f);
    uint32_t first = part == PART_DATA ? 0 : t.data_bytes;
    struct copy_rows_args a = {.dst = to + first,
                               .src = from + first,
                               .pitch = t.bytes,
                               .width = part == PART_DATA ? t.data_bytes : t.bytes - t.data_bytes,
                               .n = (uint32_t)n_tiles};
    if (a.width == a.pitch) {
        copy_cut(w, q, to, from, n_tiles * t.bytes);
        return;
    }
    struct launch l = {.grid = {COPY_ROWS_BLOCKS}, .threads = COPY_ROWS_THREADS};
    queue_launch(q, &w->copy_rows, l, &a);
}

/* --- rows */

/* Rows [row0, row0 + n) between the lane's device buffer and tiles. */
static void convert(struct weights *w, struct lane *l, bool pack, char *at,
                    const struct resident *r, part_t part, size_t row0, size_t n)
{
    uint32_t blocks = tile_blocks((uint32_t)r->cols);
    CHECK(row0 % TILE_ROWS == 0 && (n % TILE_ROWS == 0 || row0 + n == r->rows));
    char *tiles = at + row0 / TILE_ROWS * blocks * tile_shape(r->format).bytes;
    bool host = on_host(w, at);
    size_t n_tiles = (size_t)tile_panels((uint32_t)n) * blocks;
    struct layout_args a = {
        .tiles = host ? (void *)(uintptr_t)l->tiles : tiles,
        .rows = (uint32_t)n,
        .cols = (uint32_t)r->cols,
    };
    void *dev = (void *)(uintptr_t)l->dev;
    if (part == PART_DATA)
        a.data = dev;
    else
        a.scale = dev;
    if (host && !pack) copy_part(w, l->q, l->tiles, host_addr(tiles), r->format, part, n_tiles);
    if (pack)
        repack_to_tiles(&w->repack, l->q, r->format, &a);
    else
        repack_from_tiles(&w->repack, l->q, r->format, &a);
    if (host && pack) copy_part(w, l->q, host_addr(tiles), l->tiles, r->format, part, n_tiles);
}

/* Rows that fit a lane: whole panels, as rows and, if these need room, as tiles. */
static size_t lane_rows(const struct resident *r, part_t part, size_t n)
{
    size_t row = slot_row(r, part), fit = LANE_BYTES / (row ? row : 1) / TILE_ROWS * TILE_ROWS;
    if (slot_tiled(r, part)) {
        size_t tiles = LANE_BYTES / slot_panel(r) * TILE_ROWS;
        if (tiles < fit) fit = tiles;
    }
    CHECK(fit > 0);
    return n < fit ? n : fit;
}

/* Into the staged arena of the host. */
static void put_host(struct weights *w, char *at, const struct resident *r, part_t part,
                     size_t row0, size_t n, const void *canon)
{
    size_t offset, bytes, row = slot_row(r, part), step;
    slot_rows(&offset, &bytes, r, part, row0, n);
    if (!pin(w, at + offset, bytes)) return;
    if (!slot_tiled(r, part)) {
        memcpy(at + offset, canon, bytes);
        return;
    }
    struct lane *l = lane_take(w);
    for (size_t i = 0; i < n; i += step) {
        step = lane_rows(r, part, n - i);
        if (i > 0 && queue_sync(l->q, NULL) != OK) break; /* its buffers are free again */
        memcpy(l->host, (const char *)canon + i * row, step * row);
        queue_copy(l->q, l->dev, host_addr(l->host), step * row);
        convert(w, l, true, at, r, part, row0 + i, step);
    }
    lane_give(w, l);
}

static void put(void *ctx, void *at, const struct resident *r, part_t part, size_t row0, size_t n,
                const void *canon)
{
    struct weights *w = ctx;
    size_t row = slot_row(r, part), step;
    if (on_host(w, at)) {
        put_host(w, at, r, part, row0, n, canon);
        return;
    }
    if (!slot_tiled(r, part)) {
        feed_bytes(w->feed, (char *)at + slot_part(r, part) + row0 * row, canon, n * row);
        return;
    }
    CHECK(row0 % TILE_ROWS == 0 && (n % TILE_ROWS == 0 || row0 + n == r->rows));
    size_t fit = FEED_BYTES / row / TILE_ROWS * TILE_ROWS;
    CHECK(fit > 0);
    for (size_t i = 0; i < n; i += step) {
        char *tiles = (char *)at + (row0 + i) / TILE_ROWS * slot_panel(r);
        step = n - i < fit ? n - i : fit;
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

/* All puts are done; their failure is the device's from then on. */
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
    if (on_host(w, at)) {
        size_t offset, bytes;
        slot_rows(&offset, &bytes, r, part, row0, n);
        if (!pin(w, (const char *)at + offset, bytes)) return;
        if (!slot_tiled(r, part)) {
            memcpy(canon, (const char *)at + offset, bytes);
            return;
        }
    }
    struct lane *l = lane_take(w);
    size_t row = slot_row(r, part), step;
    for (size_t i = 0; i < n; i += step) {
        step = lane_rows(r, part, n - i);
        size_t bytes = step * row;
        if (slot_tiled(r, part)) {
            convert(w, l, false, (char *)(uintptr_t)at, r, part, row0 + i, step);
            queue_copy(l->q, host_addr(l->host), l->dev, bytes);
        } else {
            queue_copy(l->q, host_addr(l->host),
                       host_addr((const char *)at + slot_part(r, part) + (row0 + i) * row), bytes);
        }
        if (queue_sync(l->q, NULL) == OK) memcpy((char *)canon + i * row, l->host, bytes);
    }
    lane_give(w, l);
}

/* --- arenas: the first is the resident one */

static void *device_arena(struct weights *w, int i, size_t bytes)
{
    struct err e = {0};
    err_t rc = w->arenas[i] ? OK : region_new(&w->arenas[i], w->d, bytes, &e);
    if (rc == OK) rc = region_map(w->arenas[i], bytes, &e);
    if (rc != OK) return NULL;
    struct lane *l = lane_take(w);
    queue_fill(l->q, region_base(w->arenas[i]), 0, bytes);
    lane_give(w, l);
    return (void *)(uintptr_t)region_base(w->arenas[i]);
}

static void *host_arena(struct weights *w, size_t bytes)
{
    forget_pinning(w);
    CHECK(bytes == pinned_bytes(w->staged));
    return pinned_fits(w->staged) ? pinned_base(w->staged) : NULL;
}

static void *arena_alloc(void *ctx, size_t bytes)
{
    struct weights *w = ctx;
    device_use(w->d);
    for (int i = 0; i < ARENAS; i++) {
        if (w->taken[i]) continue;
        void *at = i > 0 && w->staged ? host_arena(w, bytes) : device_arena(w, i, bytes);
        w->taken[i] = at != NULL;
        return at;
    }
    return NULL;
}

#define READY_BYTES ((size_t)64 << 20) /* some 10 ms */

/* The staged arena on the host is pinned; one of the device has its memory when it is taken. */
static err_t ready(void *ctx, void *arena, size_t offset, size_t n, struct err *e)
{
    struct weights *w = ctx;
    size_t at = host_offset(w, host_addr(arena));
    return at == SIZE_MAX ? OK : pinned_need(w->staged, at + offset, n, e);
}

/* The memory stays for the next update; weights_free gives it back. */
static void arena_free(void *ctx, void *arena, size_t bytes)
{
    struct weights *w = ctx;
    (void)bytes;
    if (on_host(w, arena)) {
        w->taken[1] = false;
        forget_pinning(w);
        return;
    }
    settle(w); /* of an update that is dropped */
    for (int i = 0; i < ARENAS; i++)
        if (w->arenas[i] && region_base(w->arenas[i]) == host_addr(arena)) w->taken[i] = false;
}

static void copy(void *ctx, void *to, const void *from, size_t bytes)
{
    struct weights *w = ctx;
    if (on_host(w, to) && !pin(w, to, bytes)) return;
    struct lane *l = lane_take(w);
    copy_cut(w, l->q, host_addr(to), host_addr(from), bytes);
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
    copy_cut(w, l->q, host_addr(now), host_addr(next), bytes);
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
        if (before && queue_sync(l[k ^ 1]->q, NULL) == OK) digest_add(&d, l[k ^ 1]->host, before);
    }
    digest_get(&d, sum);
    memcpy(&h, sum, sizeof h);
    lane_give(w, l[0]);
    lane_give(w, l[1]);
    return h;
}

static err_t check(void *ctx, struct err *e)
{
    struct weights *w = ctx;
    settle(w);
    err_t rc = weights_error(w, e);
    if (rc != OK) return rc;
    pthread_mutex_lock(&w->lock);
    rc = w->pin_failed;
    if (rc != OK) err_set(e, rc, "%s", w->pin_error.msg);
    pthread_mutex_unlock(&w->lock);
    return rc;
}

static const struct memory_ops device_ops = {
    .bytes = slot_bytes,
    .alloc = arena_alloc,
    .free = arena_free,
    .ready_bytes = READY_BYTES,
    .ready = ready,
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

size_t weights_device_bytes(size_t bytes, enum staging_mode staging)
{
    return bytes * (staging == STAGING_DEVICE ? ARENAS : 1) +
           (staging == STAGING_HOST ? LANES * LANE_BYTES : 0);
}

err_t weights_stage_on_host(struct weights *w, size_t bytes, struct err *e)
{
    CHECK(!w->taken[1] && !w->staged);
    err_t rc = device_kernel(&w->copy_rows, w->d, "copy_rows", sizeof(struct copy_rows_args), 0, e);
    for (int i = 0; rc == OK && i < LANES; i++)
        if (!w->lanes[i].tiles) rc = device_alloc(&w->lanes[i].tiles, w->d, LANE_BYTES, e);
    return rc == OK ? pinned_new(&w->staged, w->d, bytes, e) : rc;
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
        device_free(w->d, w->lanes[i].tiles);
    }
    pinned_free(w->staged);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->freed);
    mem_free(w);
}
