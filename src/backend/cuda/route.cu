/*
 * route.cu - router logits to experts, weights and rows.
 *
 *   route_4, _8, _16   one warp a token, that many experts a thread (e = lane + 32 i); the last
 *                      block to finish makes the plan
 *   route_plan         the plan alone, from packed ids; one block
 *
 *   plan     a counting sort by one block: each warp counts its equal share of the entries by
 *            expert (match_any: a leader a value, so no atomics), one thread an expert adds up the
 *            warps and a scan the experts, then the warps walk their share again and give out rows
 *            in order
 *   memory   [warps][n_local] counts, dynamic
 *   bound    none that matters: 4 n_experts bytes a token; 65,536 entries are 64 turns of each
 *            warp, twice
 */
#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"

enum { ROUTE_WARPS = 32, ROUTE_THREADS = ROUTE_WARPS * 32 };

/* kernels.inc, exp_sum: elements of lane l of a sum lie in threads l and l + 16, in turns. */
template <int N>
__device__ __forceinline__ float sum_of(const float p[N])
{
    bool high = threadIdx.x & 16;
    float acc = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float other = __shfl_xor_sync(FULL_WARP, p[i], 16);
        acc = __fadd_rn(__fadd_rn(acc, high ? other : p[i]), high ? p[i] : other);
    }
    return lanes_sum(acc);
}

/* p = exp(logit - max), NaN where the CPU has one; returns their sum. */
template <int N>
__device__ __forceinline__ float softmax(float p[N], const float *logits, int n)
{
    int lane = threadIdx.x & 31;
    float max = MINUS_INF;
#pragma unroll
    for (int i = 0; i < N; i++) {
        p[i] = lane + 32 * i < n ? logits[lane + 32 * i] : MINUS_INF;
        max = fmaxf(max, p[i]);
    }
    for (int w = 1; w < 32; w *= 2)
        max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, w));
    float first = __shfl_sync(FULL_WARP, p[0], 0);
    if (isnan(first)) max = first;
#pragma unroll
    for (int i = 0; i < N; i++)
        p[i] = lane + 32 * i < n ? exp_cpu<true>(__fsub_rn(p[i], max)) : 0.0f;
    return sum_of<N>(p);
}

template <int N>
__device__ __forceinline__ void top_k(const struct route_args &a, int token)
{
    int lane = threadIdx.x & 31;
    float p[N];
    float sum = softmax<N>(p, a.logits + (size_t)token * a.n_experts, a.n_experts);
    uint32_t key[N]; /* 0: no candidate; else bits of p + 1 */
#pragma unroll
    for (int i = 0; i < N; i++)
        key[i] = lane + 32 * i < a.n_experts && p[i] >= 0.0f ? __float_as_uint(p[i]) + 1 : 0;
    int32_t id[2] = {0, 0}; /* of places lane and lane + 32 */
    float w[2] = {0.0f, 0.0f}, total = 0.0f;
    for (int j = 0; j < a.top_k; j++) {
        uint32_t best = 0, at = 0;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (key[i] > best) {
                best = key[i];
                at = lane + 32 * i;
            }
        uint32_t top = __reduce_max_sync(FULL_WARP, best);
        at = __reduce_min_sync(FULL_WARP, best == top && top ? at : 0xffffffffu);
        float weight = top ? __fdiv_rn(__uint_as_float(top - 1), sum) : __int_as_float(0x7fffffff);
        total = __fadd_rn(total, weight);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (lane + 32 * i == (int)at) key[i] = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool here = lane + 32 * h == j;
            id[h] = !here ? id[h] : top ? (int32_t)at : j;
            w[h] = here ? weight : w[h];
        }
    }
    bool nowhere = a.seq && a.seq[token] < 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int j = lane + 32 * h;
        float weight = a.normalise ? __fdiv_rn(w[h], total) : w[h];
        if (j < a.top_k)
            a.packed[(size_t)token * a.top_k + j] =
                (uint32_t)(nowhere ? -1 : id[h]) << 16 | f32_bf16(weight);
    }
}

/* The entry's expert in this slice, or -1. */
__device__ __forceinline__ int local_expert(const struct route_args &a, int i, int n)
{
    if (i >= n) return -1;
    int e = ((int32_t)__ldcg(a.packed + i) >> 16) - a.first;
    return e >= 0 && e < a.n_local ? e : -1;
}

/* counts[w][e] = the first row of warp w's entries of expert e.  Threads above n_local help to
 * scan. */
__device__ __forceinline__ void scan_counts(const struct route_args &a, uint32_t *counts,
                                            int n_warps)
{
    __shared__ uint32_t warp_sum[ROUTE_WARPS];
    int e = threadIdx.x, lane = e & 31;
    uint32_t mine = 0;
    if (e < a.n_local)
        for (int w = 0; w < n_warps; w++)
            mine += counts[w * a.n_local + e];
    uint32_t sum = mine;
    for (int w = 1; w < 32; w *= 2) {
        uint32_t x = __shfl_up_sync(FULL_WARP, sum, w);
        if (lane >= w) sum += x;
    }
    if (lane == 31) warp_sum[e / 32] = sum;
    __syncthreads();
    uint32_t at = sum - mine;
    for (int w = 0; w < e / 32; w++)
        at += warp_sum[w];
    if (e < a.n_local) a.offsets[e] = (int32_t)at;
    if (e == a.n_local - 1) a.offsets[e + 1] = (int32_t)(at + mine);
    if (e < a.n_local)
        for (int w = 0; w < n_warps; w++) {
            uint32_t n = counts[w * a.n_local + e];
            counts[w * a.n_local + e] = at;
            at += n;
        }
}

/* By all of a block. */
__device__ __forceinline__ void plan(const struct route_args &a)
{
    extern __shared__ uint32_t counts[];
    int n = a.n_tokens * a.top_k, share = (n + ROUTE_THREADS - 1) / ROUTE_THREADS * 32;
    int n_warps = share ? (n + share - 1) / share : 0, warp = threadIdx.x / 32,
        lane = threadIdx.x & 31;
    int begin = warp * share, end = begin + share < n ? begin + share : n;
    uint32_t *mine = counts + warp * a.n_local, below = (1u << lane) - 1;
    for (int i = threadIdx.x; i < n_warps * a.n_local; i += ROUTE_THREADS)
        counts[i] = 0;
    __syncthreads();
    for (int i = begin + lane; i - lane < end; i += 32) {
        int e = local_expert(a, i, end);
        uint32_t same = __match_any_sync(FULL_WARP, e);
        if (e >= 0 && (same & below) == 0) mine[e] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    scan_counts(a, counts, n_warps);
    __syncthreads();
    for (int i = begin + lane; i - lane < end; i += 32) {
        int e = local_expert(a, i, end);
        uint32_t same = __match_any_sync(FULL_WARP, e);
        int32_t row = e < 0 ? -1 : (int32_t)(mine[e] + __popc(same & below));
        __syncwarp();
        if (e >= 0 && (same & below) == 0) mine[e] += __popc(same);
        __syncwarp();
        if (i < end) a.row_of[i] = row;
        if (row >= 0) a.token_of[row] = i / a.top_k;
    }
}

template <int N>
__device__ __forceinline__ void route(const struct route_args &a)
{
    __shared__ bool is_last;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int token = blockIdx.x * ROUTE_WARPS + threadIdx.x / 32;
    if (token < a.n_tokens) top_k<N>(a, token);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(a.ticket, 1) == gridDim.x - 1;
        if (is_last) *a.ticket = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    plan(a);
}

#define ROUTE(n)                                                \
    extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) \
        route_##n(const __grid_constant__ struct route_args a)  \
    {                                                           \
        route<n>(a);                                            \
    }
ROUTE(4)
ROUTE(8)
ROUTE(16)

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)
    route_plan(const __grid_constant__ struct route_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    plan(a);
}
