/*
 * feed.h - canonical rows on their way to an arena of the device, many small pieces at once.
 *
 *     struct feed *f;
 *     if (feed_new(&f, device, e) != OK) ...
 *     feed_tiles(f, tiles, FORMAT_NVFP4, false, rows, cols, data, bytes);      // any thread
 *     feed_bytes(f, to, &tensor_scale, 4);
 *     ...
 *     feed_flush(f);                       // at the end of each of these threads
 *     if (feed_settle(f, e) != OK) ...     // all of it lies in the arena
 *
 * A checkpoint of 18 GB has 73,000 pieces.  A call of the driver for each, from many threads, takes longer than the
 * bytes: so each thread fills a batch in pinned memory, and a full one goes to the device with one copy and one kernel,
 * which puts every piece in its place (tiles as layout_cuda.h says).  Then the thread fills another, while the
 * copy runs.
 *
 * feed_lend gives room in the thread's batch for the caller to fill (a file is read right into it) and to feed from
 * without a copy; the same thread takes it back before it borrows again.
 *
 * Errors: nothing fails by itself; the first failure of the device comes from feed_settle, once.
 */
#ifndef BACKEND_CUDA_FEED_H
#define BACKEND_CUDA_FEED_H

#include "backend/cuda/layout_cuda.h"

#define FEED_BYTES  ((size_t)5 << 20) /* of a batch, but for its table */
#define FEED_PIECES 256
#define FEED_CHUNK  16384 /* bytes that a block copies */

enum { FEED_PLAIN, FEED_16, FEED_8, FEED_8_G32, FEED_4_G16, FEED_4_G32 }; /* kinds: by tile_shape */

/* One piece; a batch begins with its table. */
struct feed_piece {
    void *to;
    uint32_t from;  /* offset in the batch */
    uint32_t first; /* its first block in the launch */
    uint32_t rows, cols;
    uint32_t kind;
    uint32_t scales; /* of a tile: the small scales, not the elements */
    uint64_t bytes;  /* FEED_PLAIN */
};

struct feed_args {
    const char *batch;
    uint32_t n;
};

#ifndef __CUDACC__
#include "backend/cuda/device.h"

struct feed;

err_t feed_new(struct feed **out, struct device *d, struct err *e) MUST_USE;
void feed_free(struct feed *f); /* waits; NULL is fine */
size_t feed_device_bytes(void);
/* Rows of elements or of small scales, from the first row of a panel on, to the tiles of these panels. */
void feed_tiles(struct feed *f, void *tiles, format_t format, bool scales, uint32_t rows,
                uint32_t cols, const void *canon, size_t bytes); /* at most FEED_BYTES */
void feed_bytes(struct feed *f, void *to, const void *from, size_t bytes);
void *feed_lend(struct feed *f, size_t bytes); /* NULL: more than FEED_BYTES */
void feed_take_back(struct feed *f, void *lent);
void feed_flush(struct feed *f);
/* While no other thread feeds. */
err_t feed_settle(struct feed *f, struct err *e) MUST_USE;
#endif

#endif
