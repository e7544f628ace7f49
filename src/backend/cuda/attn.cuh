/*
 * attn.cuh - what decode and prefill attention share: chunks, scores to P, folding.
 */
#ifndef BACKEND_CUDA_ATTN_CUH
#define BACKEND_CUDA_ATTN_CUH

#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"

#define ATTN_NONE MINUS_INF /* the maximum over no key */

struct chunk {
    int key0, n; /* keys [key0, key0 + n) */
};

/* Chunk c of n_keys keys, where the first one has first_chunk keys. */
__device__ __forceinline__ struct chunk chunk_at(int c, int n_keys, int first_chunk)
{
    int end = first_chunk + c * ATTN_CHUNK, key0 = c == 0 ? 0 : end - ATTN_CHUNK;
    return {key0, (end < n_keys ? end : n_keys) - key0};
}

__device__ __forceinline__ int chunk_count(int n_keys, int first_chunk)
{
    int rest = n_keys - first_chunk;
    return n_keys <= 0 ? 0 : rest <= 0 ? 1 : 1 + (rest + ATTN_CHUNK - 1) / ATTN_CHUNK;
}

/* How a chunk joins those before it: o = chunk * fresh + o * old, with exceptions in `kind`. */
enum { FOLD_FIRST, FOLD_ADD, FOLD_SKIP };

struct fold {
    float old, fresh;
    int kind;
};

/* m: the maximum so far, updated; mc: the chunk's, ATTN_NONE if this query sees none of its keys. */
__device__ __forceinline__ struct fold fold_begin(float *m, float mc, bool first)
{
    struct fold f = {0.0f, 1.0f, FOLD_FIRST};
    if (first) {
        *m = mc;
        return f;
    }
    if (mc == ATTN_NONE) return {1.0f, 0.0f, FOLD_SKIP};
    float top = *m > mc ? *m : mc;
    f = {exp_cpu<true>(__fsub_rn(*m, top)), exp_cpu<true>(__fsub_rn(mc, top)), FOLD_ADD};
    *m = top;
    return f;
}

__device__ __forceinline__ float fold_apply(float so_far, float chunk, float old, float fresh, int kind)
{
    float sum = __fmaf_rn(chunk, fresh, __fmul_rn(so_far, old));
    return kind == FOLD_FIRST ? chunk : kind == FOLD_SKIP ? so_far : sum;
}

#endif
