/*
 * attn.cuh - what decode and prefill attention share: chunks, scores to P, folding.
 */
#ifndef BACKEND_CUDA_ATTN_CUH
#define BACKEND_CUDA_ATTN_CUH

#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"

#define ATTN_NONE MINUS_INF /* the maximum over no key */

__device__ __forceinline__ void bar_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts `n` in; what this block's threads wrote before their last barrier is seen by who reads after
 * the last count. */
__device__ __forceinline__ uint32_t count_in(uint32_t *counter, uint32_t n)
{
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(counter), "r"(n)
                 : "memory");
    return old;
}

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

/* How a chunk joins those before it: o = chunk * fresh + o * old; the first one is o, and one in
 * which this query sees no key leaves o as it is. */
struct fold {
    float old, fresh;
};

/* A column's sum, the same in every kernel: of the four that each of four neighbouring lanes has, keys of
 * one parity in l[0] and l[2], of the other in l[1] and l[3]. */
__device__ __forceinline__ float sum_lanes(const float l[4])
{
    float even = __fadd_rn(l[0], l[2]), odd = __fadd_rn(l[1], l[3]);
#pragma unroll
    for (int w = 2; w; w /= 2) {
        even = __fadd_rn(even, __shfl_xor_sync(FULL_WARP, even, w));
        odd = __fadd_rn(odd, __shfl_xor_sync(FULL_WARP, odd, w));
    }
    return __fadd_rn(even, odd);
}

/* The row sum of a chunk whose maximum is NaN is NaN, since exp_weight does not tell. */
__device__ __forceinline__ float sum_of_chunk(float l, float mc)
{
    return mc == mc ? l : mc;
}

/* m: the maximum so far, updated; mc: the chunk's, ATTN_NONE if this query sees none of its
 * keys. */
__device__ __forceinline__ struct fold fold_begin(float *m, float mc, bool first)
{
    float top = first || *m < mc ? mc : *m;
    struct fold f = {exp_cpu<true>(__fsub_rn(*m, top)), exp_cpu<true>(__fsub_rn(mc, top))};
    *m = top;
    return f;
}

__device__ __forceinline__ float fold_apply(float so_far, float chunk, struct fold f, float mc,
                                            bool first)
{
    float sum = __fmaf_rn(chunk, f.fresh, __fmul_rn(so_far, f.old));
    return first ? chunk : mc == ATTN_NONE ? so_far : sum;
}

#endif
