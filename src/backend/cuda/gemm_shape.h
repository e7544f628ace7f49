/*
 * gemm_shape.h - sizes that the GEMM kernels and their launcher must agree on.
 */
#ifndef BACKEND_CUDA_GEMM_SHAPE_H
#define BACKEND_CUDA_GEMM_SHAPE_H

#include "backend/cuda/gemm.h"

enum {
    GEMM_THREADS = 384,
    GEMM_SMALL_N = 32,   /* rows of x in a tile, at most */
    GEMM_LARGE_N = 128,
    GEMM_PITCH = 36,     /* floats from row to row of staged results: no bank conflicts */
    GEMM_STAGING = 2 * 32 * GEMM_PITCH * 4, /* bytes, a consumer warpgroup */
    GEMM_STAGES_MAX = 16,
    GEMM_TABLE_BYTES = 2 * GEMM_STAGES_MAX * 8 + 2 * (GEMM_GROUPS_MAX + 1) * 4 + 8,
    GEMM_SMEM_SMALL = 113 * 1024 - 512, /* two blocks an SM */
    GEMM_SMEM_LARGE = 227 * 1024
};

#ifdef __CUDACC__
#define GEMM_BOTH __host__ __device__ constexpr
#else
#define GEMM_BOTH static inline
#endif

/* k blocks of 64 a stage: two where a block is small. */
GEMM_BOTH int gemm_stage_blocks(bool large, int elem_bits)
{
    return !large && elem_bits <= 8 ? 2 : 1;
}

GEMM_BOTH int gemm_stage_bytes(int panels, int blocks, int tile_bytes, int columns)
{
    return (blocks * (panels * tile_bytes + columns * 128) + 1023) / 1024 * 1024;
}

GEMM_BOTH int gemm_stages(bool large, int stage_bytes)
{
    return ((large ? GEMM_SMEM_LARGE : GEMM_SMEM_SMALL) - 2 * GEMM_STAGING - GEMM_TABLE_BYTES) / stage_bytes < GEMM_STAGES_MAX
               ? ((large ? GEMM_SMEM_LARGE : GEMM_SMEM_SMALL) - 2 * GEMM_STAGING - GEMM_TABLE_BYTES) / stage_bytes
               : GEMM_STAGES_MAX;
}

#endif
