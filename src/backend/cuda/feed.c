#include "backend/cuda/feed.h"
#include "base/mem.h"
#include <pthread.h>
#include <string.h>

enum { LANES = 40, ALIGN = 16 };
#define TABLE_BYTES ((FEED_PIECES * sizeof(struct feed_piece) + 255) / 256 * 256)
#define LANE_BYTES  (TABLE_BYTES + FEED_BYTES)

/* A batch: filled by its owner, or on its way, or free. */
struct lane {
    struct queue *q;
    char *host; /* pinned */
    devptr_t dev;
    bool open;
    pthread_t owner; /* while open */
    size_t used;     /* of the room behind the table */
    uint32_t n, blocks;
    uint64_t sent; /* when it was */
    void *lent;
};

struct feed {
    struct device *d;
    struct kernel kernel;
    pthread_mutex_t lock; /* of lanes' open, owner and sent, sends, failed, error */
    pthread_cond_t freed;
    struct lane lanes[LANES];
    uint64_t sends;
    err_t failed;
    struct err error;
};

static void wait_for(struct feed *f, struct lane *l)
{
    struct err e = {0};
    err_t rc = queue_sync(l->q, &e);
    if (rc == OK) return;
    pthread_mutex_lock(&f->lock);
    if (f->failed == OK) {
        f->failed = rc;
        f->error = e;
    }
    pthread_mutex_unlock(&f->lock);
}

/* The caller's open batch, NULL if it has none. */
static struct lane *own(struct feed *f)
{
    struct lane *l = NULL;
    pthread_mutex_lock(&f->lock);
    for (int i = 0; !l && i < LANES; i++)
        if (f->lanes[i].open && pthread_equal(f->lanes[i].owner, pthread_self())) l = &f->lanes[i];
    pthread_mutex_unlock(&f->lock);
    return l;
}

/* The one that was sent first: it has most likely arrived. */
static struct lane *oldest(struct feed *f)
{
    struct lane *l = NULL;
    for (int i = 0; i < LANES; i++)
        if (!f->lanes[i].open && (!l || f->lanes[i].sent < l->sent)) l = &f->lanes[i];
    return l;
}

static struct lane *open_lane(struct feed *f)
{
    struct lane *l;
    pthread_mutex_lock(&f->lock);
    while (!(l = oldest(f)))
        pthread_cond_wait(&f->freed, &f->lock);
    l->open = true;
    l->owner = pthread_self();
    pthread_mutex_unlock(&f->lock);
    device_use(f->d);
    wait_for(f, l);
    l->used = l->n = l->blocks = 0;
    return l;
}

static void send(struct feed *f, struct lane *l)
{
    CHECK(!l->lent);
    if (l->n) {
        const struct feed_args a = {.batch = (const char *)(uintptr_t)l->dev, .n = l->n};
        queue_copy(l->q, l->dev, host_addr(l->host), TABLE_BYTES + l->used);
        queue_launch(l->q, &f->kernel,
                     (struct launch){.grid = {l->blocks, 1, 1}, .threads = LAYOUT_THREADS}, &a);
    }
    pthread_mutex_lock(&f->lock);
    l->open = false;
    l->sent = ++f->sends;
    pthread_cond_signal(&f->freed);
    pthread_mutex_unlock(&f->lock);
}

static size_t align(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

/* The caller's batch with room for a piece of so many bytes. */
static struct lane *with_room(struct feed *f, size_t bytes, uint32_t pieces)
{
    struct lane *l = own(f);
    CHECK(bytes <= FEED_BYTES);
    if (l && (l->used + bytes > FEED_BYTES || l->n + pieces > FEED_PIECES)) {
        send(f, l);
        l = NULL;
    }
    return l ? l : open_lane(f);
}

static char *room_of(struct lane *l)
{
    return l->host + TABLE_BYTES;
}

static bool within(struct lane *l, const void *p)
{
    uint64_t at = host_addr(p), base = host_addr(room_of(l));
    return at >= base && at - base < FEED_BYTES;
}

/* Appends a piece of `blocks` blocks whose bytes are at `from`. */
static void add(struct feed *f, struct feed_piece piece, const void *from, size_t bytes,
                uint32_t blocks)
{
    struct lane *l = own(f);
    if (l && l->lent && within(l, from)) {
        CHECK(l->n < FEED_PIECES); /* feed_lend has left room */
        piece.from = (uint32_t)((const char *)from - l->host);
    } else {
        l = with_room(f, bytes, 1);
        piece.from = (uint32_t)(TABLE_BYTES + l->used);
        memcpy(l->host + piece.from, from, bytes);
        l->used = align(l->used + bytes);
    }
    piece.first = l->blocks;
    l->blocks += blocks;
    memcpy(l->host + l->n++ * sizeof piece, &piece, sizeof piece);
}

static uint32_t kind_of(struct tile_shape t)
{
    static const struct {
        uint32_t bits, group, kind;
    } kinds[] = {{16, 0, FEED_16},
                 {8, 0, FEED_8},
                 {8, 32, FEED_8_G32},
                 {4, 16, FEED_4_G16},
                 {4, 32, FEED_4_G32}};
    size_t i = 0, n = sizeof kinds / sizeof *kinds;
    while (i < n && (kinds[i].bits != t.elem_bits || kinds[i].group != t.group))
        i++;
    CHECK(i < n);
    return kinds[i].kind;
}

void feed_tiles(struct feed *f, void *tiles, format_t format, bool scales, uint32_t rows,
                uint32_t cols, const void *canon, size_t bytes)
{
    struct tile_shape t = tile_shape(format);
    CHECK(rows >= 1 && cols >= 1 && (!scales || t.group));
    const struct feed_piece p = {
        .to = tiles, .rows = rows, .cols = cols, .kind = kind_of(t), .scales = scales};
    add(f, p, canon, bytes, tile_panels(rows) * tile_blocks(cols));
}

void feed_bytes(struct feed *f, void *to, const void *from, size_t bytes)
{
    for (size_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < FEED_BYTES ? bytes - i : FEED_BYTES;
        const struct feed_piece p = {.to = (char *)to + i, .kind = FEED_PLAIN, .bytes = n};
        add(f, p, (const char *)from + i, n, (uint32_t)((n + FEED_CHUNK - 1) / FEED_CHUNK));
    }
}

void *feed_lend(struct feed *f, size_t bytes)
{
    enum { PIECES_OF_A_LOAN = 16 };
    if (bytes > FEED_BYTES) return NULL;
    struct lane *l = with_room(f, bytes, PIECES_OF_A_LOAN);
    CHECK(!l->lent);
    l->lent = room_of(l) + l->used;
    l->used = align(l->used + bytes);
    return l->lent;
}

void feed_take_back(struct feed *f, void *lent)
{
    struct lane *l = own(f);
    CHECK(l && l->lent == lent);
    l->lent = NULL;
}

void feed_flush(struct feed *f)
{
    struct lane *l = own(f);
    if (l) send(f, l);
}

err_t feed_settle(struct feed *f, struct err *e)
{
    device_use(f->d);
    for (int i = 0; i < LANES; i++)
        if (f->lanes[i].open) send(f, &f->lanes[i]);
    for (int i = 0; i < LANES; i++)
        wait_for(f, &f->lanes[i]);
    err_t rc = f->failed;
    if (rc != OK) err_set(e, rc, "%s", f->error.msg);
    f->failed = OK;
    return rc;
}

size_t feed_device_bytes(void)
{
    return LANES * LANE_BYTES;
}

err_t feed_new(struct feed **out, struct device *d, struct err *e)
{
    struct feed *f = mem_alloc(sizeof *f);
    f->d = d;
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->freed, NULL);
    err_t rc = device_kernel(&f->kernel, d, "feed_batch", sizeof(struct feed_args), 0, e);
    for (int i = 0; rc == OK && i < LANES; i++) {
        struct lane *l = &f->lanes[i];
        void *host = NULL;
        rc = queue_new(&l->q, d, e);
        if (rc == OK) rc = host_alloc(&host, d, LANE_BYTES, e);
        l->host = host;
        if (rc == OK) rc = device_alloc(&l->dev, d, LANE_BYTES, e);
    }
    if (rc != OK) {
        feed_free(f);
        return rc;
    }
    *out = f;
    return OK;
}

void feed_free(struct feed *f)
{
    if (f == NULL) return;
    for (int i = 0; i < LANES; i++) {
        queue_free(f->lanes[i].q);
        host_free(f->d, f->lanes[i].host);
        device_free(f->d, f->lanes[i].dev);
    }
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->freed);
    mem_free(f);
}
