/*
 * sample.cuh - what the sampling kernels share: noise, the better of two draws, what a row asks
 * for.
 */
#ifndef BACKEND_CUDA_SAMPLE_CUH
#define BACKEND_CUDA_SAMPLE_CUH

#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"

enum { PART = SAMPLE_PART, THREADS = 256, EACH = PART / THREADS, FINISH_THREADS = 1024 };

/* --- noise: sample.c, mix, noise_key, gumbel */

__device__ __forceinline__ uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

__device__ __forceinline__ uint64_t noise_key(const struct sample_spec &s)
{
    uint64_t k = mix(s.seed + 0x9e3779b97f4a7c15u);
    k = mix(k ^ (s.sample_index + 0xd1b54a32d192ed03u));
    return mix(k ^ (s.position + 0x8cb92ba72f3d8dd7u));
}

__device__ __forceinline__ uint32_t noise_bits(uint64_t key, int32_t id)
{
    return (uint32_t)(mix(key + ((uint64_t)id + 1) * 0x9e3779b97f4a7c15u) >> 32);
}

__device__ __forceinline__ float gumbel(uint32_t bits)
{
    double u = __dmul_rn(__dadd_rn((double)bits, 0.5), 0x1p-32);
    return (float)-log(-log(u));
}

struct draw {
    float score;
    int32_t id; /* -1: none */
};

__device__ __forceinline__ struct draw better(struct draw a, struct draw b)
{
    if (a.id < 0) return b;
    if (b.id < 0) return a;
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

__device__ __forceinline__ struct draw warp_best(struct draw d)
{
    for (int w = 1; w < 32; w *= 2)
        d = better(d,
                   {__shfl_xor_sync(FULL_WARP, d.score, w), __shfl_xor_sync(FULL_WARP, d.id, w)});
    return d;
}

/* Of a block of N threads; every thread gets it.  `room`: N / 32 of shared memory. */
template <int N>
__device__ __forceinline__ struct draw block_best(struct draw d, struct draw *room)
{
    d = warp_best(d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x / 32] = d;
    __syncthreads();
    d = {0.0f, -1};
    if ((threadIdx.x & 31) < N / 32) d = room[threadIdx.x & 31];
    return warp_best(d);
}

/* --- what a row is */

__device__ __forceinline__ bool scored(const struct sample_spec &s)
{
    return s.target >= 0;
}

__device__ __forceinline__ bool greedy(const struct sample_spec &s)
{
    return !scored(s) && !(s.temperature > 0.0f);
}

__device__ __forceinline__ bool filtered(const struct sample_spec &s, int vocab)
{
    return (s.top_k > 0 && s.top_k < vocab) || s.top_p < 1.0f;
}

/* Its token is drawn from all ids, by sample_measure. */
__device__ __forceinline__ bool drawn_from_all(const struct sample_spec &s, int vocab)
{
    return !scored(s) && !greedy(s) && s.top_k != 1 && !filtered(s, vocab);
}

/* The row's maximum and its first place. */
__device__ __forceinline__ struct draw row_max(const struct sample_part *parts, int n_parts)
{
    struct draw best = {0.0f, -1};
    for (int i = threadIdx.x & 31; i < n_parts; i += 32)
        best = better(best, {parts[i].max, parts[i].arg});
    return warp_best(best);
}

#endif
