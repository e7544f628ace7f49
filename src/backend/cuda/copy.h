/*
 * copy.h - many copies inside device memory by one launch (the commit of staged weights).
 *
 *     copy_pieces   one block of COPY_THREADS a piece, at most COPY_PIECE bytes; addresses and
 *                   sizes of any alignment, 16-byte ones are fast.  Pieces must not overlap.
 */
#ifndef BACKEND_CUDA_COPY_H
#define BACKEND_CUDA_COPY_H

#include <stdint.h>

#define COPY_THREADS 1024
#define COPY_PIECE   65536

struct copy_piece {
    uint64_t dst, src;
    uint32_t bytes, unused;
};

struct copy_args {
    const struct copy_piece *pieces; /* device memory, [grid] */
};

#endif
