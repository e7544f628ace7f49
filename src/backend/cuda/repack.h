/*
 * repack.h - matrices to tiles and back on the device; layout_cuda.h says what a tile is.
 *
 *     struct repack r;
 *     if (repack_open(&r, device, e) != OK) ...
 *     queue_copy(q, data, host_addr(canonical), bytes);           // staging: any place on the device
 *     repack_to_tiles(&r, q, FORMAT_NVFP4, &(struct layout_args){tiles, data, scale, rows, cols});
 *
 * The resident place of a matrix has layout_cuda_bytes for the tiles; f32 scales and tensor scales
 * are copied as they are, apart.
 */
#ifndef BACKEND_CUDA_REPACK_H
#define BACKEND_CUDA_REPACK_H

#include "backend/cuda/device.h"
#include "backend/cuda/layout_cuda.h"

struct repack {
    struct kernel to_tiles[FORMAT_COUNT], from_tiles[FORMAT_COUNT];
};

err_t repack_open(struct repack *r, struct device *d, struct err *e) MUST_USE;
/* Queued; failures come from queue_sync.  Every byte of the tiles is written, padding as zeros. */
void repack_to_tiles(const struct repack *r, struct queue *q, format_t f,
                     const struct layout_args *a);
/* Data and small scales; padding is dropped. */
void repack_from_tiles(const struct repack *r, struct queue *q, format_t f,
                       const struct layout_args *a);

#endif
