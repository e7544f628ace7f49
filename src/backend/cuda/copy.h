/*
 * copy.h - one part of tiles whose parts lie side by side, between the device and pinned host
 * memory, by one launch.
 *
 *     copy_rows     n rows of `width` bytes, `pitch` apart on both sides, all multiples of 16.
 *                   Few blocks: enough for the link, and little in the way of others.
 */
#ifndef BACKEND_CUDA_COPY_H
#define BACKEND_CUDA_COPY_H

#include <stdint.h>

#define COPY_ROWS_BLOCKS  32
#define COPY_ROWS_THREADS 512

struct copy_rows_args {
    uint64_t dst, src;
    uint32_t pitch, width, n, unused;
};

#endif
