/*
 * slot.h - byte places in a slot on the GPU.
 *
 *     matrix        [tiles][f32 scales][f32 tensor scale][f32 input scale], each on 16 bytes; small
 *                   scales lie in the tiles (layout_cuda.h)
 *     plain, f32    [rows][cols]
 */
#ifndef BACKEND_CUDA_SLOT_H
#define BACKEND_CUDA_SLOT_H

#include "backend/cuda/gemm.h"
#include "backend/memory.h"
#include <stddef.h>

/* Byte places in the slot of a matrix. */
struct slot_places {
    size_t scale, tensor, input, end;
};

bool slot_place(struct slot_places *p, const struct resident *r); /* false: they overflow */
bool slot_bytes(size_t *out, const struct resident *r);           /* likewise */
/* Does a part lie in tiles? */
bool slot_tiled(const struct resident *r, part_t part);
/* Bytes of a canonical row of a part, and where a part that is not in tiles begins. */
size_t slot_row(const struct resident *r, part_t part);
size_t slot_part(const struct resident *r, part_t part);
/* Bytes of a panel of tiles. */
size_t slot_panel(const struct resident *r);
/* Where rows [row0, row0 + n) of a part lie: with tiles, all of the panels. */
void slot_rows(size_t *offset, size_t *bytes, const struct resident *r, part_t part, size_t row0,
               size_t n);

/* What a GEMM reads of a matrix that lies at `at`. */
struct gemm_weight slot_matrix(const struct resident *r, const void *at);
/* Where its input scale lies; not BF16. */
const float *slot_input(const struct resident *r, const void *at);

#endif
