/*
 * gemm_shape.h - sizes that the GEMM kernels and their launcher must agree on.
 */
#ifndef BACKEND_CUDA_GEMM_SHAPE_H
#define BACKEND_CUDA_GEMM_SHAPE_H

#include "backend/cuda/gemm.h"

/* Kernels by size of tile. */
typedef enum {
    GEMM_STRIP,
    GEMM_SMALL,
    GEMM_MEDIUM,
    GEMM_LARGE,
    GEMM_PANEL, /* of one panel, and of two: dense linears alone */
    GEMM_PANELS,
    GEMM_FEW, /* gemm_few.h */
    GEMM_SIZES
} gemm_size_t;

enum {
    GEMM_STRIP_THREADS = 128, /* a warp a segment, at least */
    GEMM_STRIP_BLOCKS = 2,    /* an SM */
    GEMM_STRIP_COLUMNS = 8,   /* rows of x */
    GEMM_STAGES_MAX = 16,
    GEMM_TABLE_BYTES =
        2 * GEMM_STAGES_MAX * 8 + 2 * (GEMM_GROUPS_MAX + 1) * 4 + GEMM_GROUPS_MAX * 3 + 32 * 4 + 8,
    GEMM_SMEM = 228 * 1024 /* of an SM; each block also takes 1 KiB of it */
};

#ifdef __CUDACC__
#define GEMM_BOTH __host__ __device__ constexpr
#else
#define GEMM_BOTH static inline
#endif

/* `chains`, here and below: FP8 with block scales, which has twice the accumulators. */

/* Rows of x in a tile, at most. */
GEMM_BOTH int gemm_columns(int size, bool chains)
{
    return size == GEMM_STRIP    ? 8
           : size == GEMM_SMALL  ? 32
           : size == GEMM_MEDIUM ? (chains ? 80 : 96)
                                 : 128;
}

/* Panels of weights in a tile of SMALL, MEDIUM and LARGE. */
GEMM_BOTH int gemm_tile_panels(int size, bool chains)
{
    return size == GEMM_SMALL || (chains && size == GEMM_LARGE) ? 2 : 4;
}

/* Warpgroups that multiply.  Four leave each fewer registers, but decoding 4 bits takes warps. */
GEMM_BOTH int gemm_consumers(int size, int elem_bits)
{
    return size == GEMM_MEDIUM && elem_bits <= 4 ? 4 : 2;
}

/* And a warp that copies weights, and these that gather rows of x. */
GEMM_BOTH int gemm_gatherers(int size)
{
    return size == GEMM_SMALL ? 1 : 3;
}

GEMM_BOTH int gemm_threads(int size, int elem_bits)
{
    return gemm_consumers(size, elem_bits) * 128 + 32 + gemm_gatherers(size) * 32;
}

/* Blocks an SM. */
GEMM_BOTH int gemm_blocks(int size)
{
    return size == GEMM_SMALL ? 2 : 1;
}

/* k blocks of 64 a stage: two where a block is small, or little time. */
GEMM_BOTH int gemm_stage_blocks(int size, int elem_bits)
{
    return (size == GEMM_SMALL && elem_bits <= 8) || (size == GEMM_MEDIUM && elem_bits <= 4) ? 2
                                                                                             : 1;
}

GEMM_BOTH int gemm_stage_bytes(int panels, int blocks, int tile_bytes, int columns)
{
    return (blocks * (panels * tile_bytes + columns * 128) + 1023) / 1024 * 1024;
}

/* Room where the bf16 results of a tile are put in rows: of a pair of panels for two warpgroups. */
GEMM_BOTH int gemm_out_bytes(int size, int elem_bits, int columns)
{
    return size == GEMM_SMALL ? 0 : gemm_consumers(size, elem_bits) * columns * 128;
}

GEMM_BOTH int gemm_stages(int size, int stage_bytes, int out_bytes)
{
    return (GEMM_SMEM / gemm_blocks(size) - 1024 - GEMM_TABLE_BYTES - out_bytes) / stage_bytes <
                   GEMM_STAGES_MAX
               ? (GEMM_SMEM / gemm_blocks(size) - 1024 - GEMM_TABLE_BYTES - out_bytes) / stage_bytes
               : GEMM_STAGES_MAX;
}

/* gemm_panel.cu: panels of a tile, rows of x in it at most, threads, and bytes of the ring. */
GEMM_BOTH int gemm_panels(int size)
{
    return size == GEMM_PANEL ? 1 : 2;
}

GEMM_BOTH int gemm_panel_columns(bool chains)
{
    return chains ? 64 : 128;
}

GEMM_BOTH int gemm_panel_threads(int size)
{
    return gemm_panels(size) * 128 + 128;
}

GEMM_BOTH int gemm_panel_ring(int size)
{
    return (size == GEMM_PANEL ? 112 : 226) * 1024;
}

#endif
