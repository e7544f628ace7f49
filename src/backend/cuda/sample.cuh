/*
 * sample.cuh - what the sampling kernels share: noise, the better of two draws, what a row asks
 * for.
 */
#ifndef BACKEND_CUDA_SAMPLE_CUH
#define BACKEND_CUDA_SAMPLE_CUH

#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"

enum { PART = SAMPLE_PART, ROW_THREADS = 512, FINISH_THREADS = 1024 };

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

/* What noise_bits mixes for an id; NOISE_STEP further for the next one. */
#define NOISE_STEP 0x9e3779b97f4a7c15u

__device__ __forceinline__ uint64_t noise_place(uint64_t key, int32_t id)
{
    return key + ((uint64_t)id + 1) * NOISE_STEP;
}

__device__ __forceinline__ uint32_t noise_bits(uint64_t key, int32_t id)
{
    return (uint32_t)(mix(noise_place(key, id)) >> 32);
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

/* Its token is drawn from all ids. */
__device__ __forceinline__ bool drawn_from_all(const struct sample_spec &s, int vocab)
{
    return !scored(s) && !greedy(s) && s.top_k != 1 && !filtered(s, vocab);
}

/* Its token is drawn from the first ones in order, until a filter ends them. */
__device__ __forceinline__ bool drawn_in_order(const struct sample_spec &s, int vocab)
{
    return !scored(s) && !greedy(s) && s.top_k != 1 && filtered(s, vocab);
}

/* sample_finish has work with the row. */
__device__ __forceinline__ bool wants_order(const struct sample_spec &s, int vocab)
{
    return s.n_top > 0 || drawn_in_order(s, vocab);
}

__device__ __forceinline__ bool scaled(const struct sample_spec &s)
{
    return !scored(s) && s.temperature > 0.0f;
}

/* The logit of an id, as the row's token is drawn from it. */
__device__ __forceinline__ float logit(const struct sample_spec &s, const float *x, int32_t id)
{
    return scaled(s) ? __fdiv_rn(x[id], s.temperature) : x[id];
}

__device__ __forceinline__ float logprob_of(float x, float max, double sum)
{
    if (!isfinite(x) || !(sum > 0.0)) return -3.0e38f;
    float lp = (float)__dsub_rn(__dsub_rn((double)x, (double)max), log(sum));
    return isfinite(lp) ? lp : -3.0e38f;
}

/* --- order: falling x, ties to the lower id, as one 64-bit key: distance below the maximum in 1/64
 * nat (11 bits: so that the first histogram spreads what matters), x (32), id (18) */

enum { ORDER_BINS = 2048, ORDER_SHIFT = 50 };

__device__ __forceinline__ uint64_t order_key(float logit_, float max, int32_t id)
{
    float x = __fadd_rn(logit_, 0.0f); /* -0 is 0 */
    uint32_t bin = (uint32_t)fminf((max - x) * 64.0f, (float)(ORDER_BINS - 1));
    uint32_t bits = __float_as_uint(x);
    bits = bits & 0x80000000u ? bits : ~(bits | 0x80000000u); /* falling */
    return (uint64_t)bin << ORDER_SHIFT | (uint64_t)bits << 18 | (uint32_t)id;
}

__device__ __forceinline__ int32_t key_id(uint64_t key)
{
    return (int32_t)(key & (SAMPLE_VOCAB_MAX - 1));
}

#endif
