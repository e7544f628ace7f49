/*
 * gemm_few.h - the launches of gemm_few.cu.
 */
#ifndef BACKEND_CUDA_GEMM_FEW_H
#define BACKEND_CUDA_GEMM_FEW_H

#include "backend/cuda/gemm.h"

enum {
    GEMM_FEW_ROWS = 8,          /* of x, at most: a power of two */
    GEMM_FEW_WARPS = 8,         /* of a block, at most */
    GEMM_FEW_CHUNKS = 4,        /* of a warp's ring: a power of two */
    GEMM_FEW_CHUNK_MAX = 8,     /* blocks of 64 k of a chunk */
    GEMM_FEW_SMEM = 106 * 1024, /* dynamic, of a block: two an SM */
    /* Of it, x: what is left holds the rings of four warps, a segment each. */
    GEMM_FEW_X = 40 * 1024
};

#ifdef __CUDACC__
#define FEW_BOTH __host__ __device__ __forceinline__
#else
#define FEW_BOTH static inline
#endif

/* Rows of x in shared memory, a power of two, by its logarithm. */
FEW_BOTH int gemm_few_log(int n_rows)
{
    return n_rows > 4 ? 3 : n_rows > 2 ? 2 : n_rows > 1;
}

FEW_BOTH int gemm_few_blocks(int k)
{
    return k / 64 + (k % 64 != 0);
}

FEW_BOTH int gemm_few_x_bytes(int k, int n_rows)
{
    return gemm_few_blocks(k) * 128 << gemm_few_log(n_rows);
}

/* Blocks of 64 k of a chunk, an even number: what shared memory holds of it, but no more than a
 * segment needs.  `block_bytes`: a quarter of a tile. */
FEW_BOTH int gemm_few_chunk(int k, int segment, int n_rows, int warps, int block_bytes)
{
    int room = (GEMM_FEW_SMEM - gemm_few_x_bytes(k, n_rows)) / (GEMM_FEW_CHUNKS * 2) /
               (warps * block_bytes);
    int need = (gemm_few_blocks(segment < k ? segment : k) + 2 * GEMM_FEW_CHUNKS - 1) /
               (2 * GEMM_FEW_CHUNKS);
    int most = GEMM_FEW_CHUNK_MAX / 2;
    return (room < need ? room < most ? room : most : need < most ? need : most) * 2;
}

#ifndef __CUDACC__
/* Whether these kernels compute it: a dense linear of few rows that fit. */
bool gemm_few_takes(const struct gemm_args *a);
/* Grid, threads and shared memory; `segment` and `part` are set. */
struct launch gemm_few_launch(const struct gemm_args *a, format_t f, int n_sms);
#endif

#endif
