/*
 * route.cuh - a warp's choice of experts from logits, a block's plan of rows (route.cu says how).
 */
#ifndef BACKEND_CUDA_ROUTE_CUH
#define BACKEND_CUDA_ROUTE_CUH

#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"

enum { ROUTE_WARPS = 32, ROUTE_THREADS = ROUTE_WARPS * 32 /* of a block, at most */ };

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

/* A whole number in the order of x, NaN before all. */
__device__ __forceinline__ int32_t order_of(float x)
{
    int32_t i = __float_as_int(x);
    return isnan(x) ? INT32_MIN : i ^ (i >> 31 & 0x7fffffff);
}

/* p = exp(logit - max), NaN where the CPU has one; returns their sum. */
template <int N>
__device__ __forceinline__ float softmax(float p[N], const float *logits, int n)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < N; i++)
        p[i] = lane + 32 * i < n ? logits[lane + 32 * i] : MINUS_INF;
    int32_t most = INT32_MIN;
#pragma unroll
    for (int i = 0; i < N; i++)
        most = max(most, order_of(p[i]));
    most = __reduce_max_sync(FULL_WARP, most);
    float top = __int_as_float(most ^ (most >> 31 & 0x7fffffff));
    float first = __shfl_sync(FULL_WARP, p[0], 0);
    if (isnan(first)) top = first;
#pragma unroll
    for (int i = 0; i < N; i++)
        p[i] = lane + 32 * i < n ? exp_cpu<true>(__fsub_rn(p[i], top)) : 0.0f;
    return sum_of<N>(p);
}

/* id[h]: the expert of place lane + 32 h, -1: none.  False: one may be named twice, since NaN left
 * too few to choose from. */
template <int N>
__device__ __forceinline__ bool top_k(const struct route_args &a, const float *logits, int token,
                                      int32_t id[2])
{
    int lane = threadIdx.x & 31;
    bool distinct = true;
    float p[N];
    bool nowhere = a.seq && a.seq[token] < 0;
    float sum = softmax<N>(p, logits + (size_t)token * a.n_experts, a.n_experts);
    uint32_t key[N]; /* 0: no candidate; else bits of p + 1 */
#pragma unroll
    for (int i = 0; i < N; i++)
        key[i] = lane + 32 * i < a.n_experts && p[i] >= 0.0f ? __float_as_uint(p[i]) + 1 : 0;
    id[0] = id[1] = -1;
    float w[2] = {0.0f, 0.0f}, total = 0.0f;
    for (int j = 0; j < a.top_k; j++) {
        uint32_t best[N], at[N]; /* [0]: of this thread, ties to the lower index */
#pragma unroll
        for (int i = 0; i < N; i++) {
            best[i] = key[i];
            at[i] = lane + 32 * i;
        }
#pragma unroll
        for (int step = 1; step < N; step *= 2)
#pragma unroll
            for (int i = 0; i < N; i += 2 * step)
                if (best[i + step] > best[i]) {
                    best[i] = best[i + step];
                    at[i] = at[i + step];
                }
        uint32_t top = __reduce_max_sync(FULL_WARP, best[0]), first;
        uint32_t who = __ballot_sync(FULL_WARP, best[0] == top);
        bool mine = top && best[0] == top, one = (who & (who - 1)) == 0;
        if (one) {
            first = __shfl_sync(FULL_WARP, at[0], __ffs(who) - 1);
        } else {
            first = __reduce_min_sync(FULL_WARP, mine ? at[0] : 0xffffffffu);
            mine &= at[0] == first;
        }
        float weight = top ? __fdiv_rn(__uint_as_float(top - 1), sum) : __int_as_float(0x7fffffff);
        total = __fadd_rn(total, weight);
        distinct &= top != 0;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (mine && at[0] == lane + 32 * i) key[i] = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool here = lane + 32 * h == j;
            id[h] = !here ? id[h] : top ? (int32_t)first : j;
            w[h] = here ? weight : w[h];
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int j = lane + 32 * h;
        float weight = a.normalise ? __fdiv_rn(w[h], total) : w[h];
        if (nowhere) id[h] = -1;
        if (j < a.top_k)
            a.packed[(size_t)token * a.top_k + j] = (uint32_t)id[h] << 16 | f32_bf16(weight);
    }
    return distinct || nowhere;
}

/* The entry's expert in this slice, or -1. */
__device__ __forceinline__ int local_expert(const struct route_args &a, int i, int n)
{
    if (i >= n) return -1;
    int e = ((int32_t)__ldcg(a.packed + i) >> 16) - a.first;
    return e >= 0 && e < a.n_local ? e : -1;
}

/* The rows of experts before this thread's: offsets, and the sum itself.  Threads above n_local
 * help to scan; the block comes here once. */
__device__ __forceinline__ uint32_t scan_experts(const struct route_args &a, uint32_t mine)
{
    __shared__ uint32_t warp_sum[ROUTE_WARPS];
    int e = threadIdx.x, lane = e & 31;
    uint32_t sum = mine;
    for (int w = 1; w < 32; w *= 2) {
        uint32_t x = __shfl_up_sync(FULL_WARP, sum, w);
        if (lane >= w) sum += x;
    }
    if (lane == 31) warp_sum[e / 32] = sum;
    __syncthreads();
    uint32_t at = sum - mine;
    if (e >= a.n_local) return 0;
    for (int w = 0; w < e / 32; w++)
        at += warp_sum[w];
    a.offsets[e] = (int32_t)at;
    if (e == a.n_local - 1) a.offsets[e + 1] = (int32_t)(at + mine);
    return at;
}

/* --- plan of sets */

struct sets {
    uint32_t *words;  /* [room][n_local] */
    uint32_t *before; /* [room][n_local]: the row of the word's first bit */
    int room;         /* words of tokens */
};

__device__ __forceinline__ struct sets sets_at(const struct route_args &a, uint32_t *smem)
{
    return {smem, smem + (size_t)a.set_words * a.n_local, a.set_words};
}

__device__ __forceinline__ void clear_words(const struct route_args &a, const struct sets &s)
{
    for (int i = threadIdx.x; i < s.room * a.n_local; i += blockDim.x)
        s.words[i] = 0;
}

/* Bits of the tokens from `first` on, as many as there is room for. */
__device__ __forceinline__ void fill_words(const struct route_args &a, const struct sets &s,
                                           int first)
{
    int end = min(a.n_tokens, first + s.room * 32) * a.top_k;
    clear_words(a, s);
    __syncthreads();
#pragma unroll 4
    for (int i = first * a.top_k + threadIdx.x; i < end; i += blockDim.x) {
        int e = local_expert(a, i, end), t = i / a.top_k - first;
        if (e >= 0) atomicOr(s.words + t / 32 * a.n_local + e, 1u << t % 32);
    }
    __syncthreads();
}

/* This thread's expert in these words: before[] from `at` on; returns the row behind them. */
__device__ __forceinline__ uint32_t count_words(const struct route_args &a, const struct sets &s,
                                                uint32_t at)
{
    if (threadIdx.x >= a.n_local) return 0;
#pragma unroll 8
    for (int w = 0; w < s.room; w++) {
        s.before[w * a.n_local + threadIdx.x] = at;
        at += __popc(s.words[w * a.n_local + threadIdx.x]);
    }
    return at;
}

/* The row of entry i, whose expert is e, of token t of these words. */
__device__ __forceinline__ void give_row(const struct route_args &a, const struct sets &s, int i,
                                         int e, int t, int first)
{
    int at = t / 32 * a.n_local + e;
    int32_t row = -1;
    if (e >= 0) {
        row = (int32_t)(s.before[at] + __popc(s.words[at] & ((1u << t % 32) - 1)));
        a.token_of[row] = first + t;
    }
    a.row_of[i] = row;
}

/* By all of a block, from packed choices. */
__device__ __forceinline__ void plan_sets(const struct route_args &a, const struct sets &s)
{
    int step = s.room * 32;
    uint32_t n = 0;
    for (int first = 0; first < a.n_tokens; first += step) {
        if (first) __syncthreads(); /* the words before are counted */
        fill_words(a, s, first);
        n = count_words(a, s, n);
    }
    uint32_t at = scan_experts(a, n);
    for (int first = 0; first < a.n_tokens; first += step) {
        if (a.n_tokens > step) {
            __syncthreads();
            fill_words(a, s, first);
        }
        at = count_words(a, s, at);
        __syncthreads();
        int end = min(a.n_tokens, first + step) * a.top_k;
#pragma unroll 4
        for (int i = first * a.top_k + threadIdx.x; i < end; i += blockDim.x)
            give_row(a, s, i, local_expert(a, i, end), i / a.top_k - first, first);
    }
}

/* --- plan of any ids */

/* counts[w][e] = the first row of warp w's entries of expert e. */
__device__ __forceinline__ void scan_counts(const struct route_args &a, uint32_t *counts,
                                            int n_warps)
{
    int e = threadIdx.x;
    uint32_t mine = 0;
    if (e < a.n_local)
        for (int w = 0; w < n_warps; w++)
            mine += counts[w * a.n_local + e];
    uint32_t at = scan_experts(a, mine);
    if (e < a.n_local)
        for (int w = 0; w < n_warps; w++) {
            uint32_t n = counts[w * a.n_local + e];
            counts[w * a.n_local + e] = at;
            at += n;
        }
}

/* By all of a block; counts: [warps][n_local]. */
__device__ __forceinline__ void plan(const struct route_args &a, uint32_t *counts)
{
    int n = a.n_tokens * a.top_k, share = (n + (int)blockDim.x - 1) / (int)blockDim.x * 32;
    int n_warps = share ? (n + share - 1) / share : 0, warp = threadIdx.x / 32,
        lane = threadIdx.x & 31;
    int begin = warp * share, end = begin + share < n ? begin + share : n;
    uint32_t *mine = counts + warp * a.n_local, below = (1u << lane) - 1;
    for (int i = threadIdx.x; i < n_warps * a.n_local; i += blockDim.x)
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

/* --- few tokens, one a warp: choices and plan by one block, counted directly */

#define ROUTE_NOWHERE INT32_MAX /* no expert of this slice */

/* Entries of list[0 .. n), a multiple of 4, that are below `e`; and those equal to it before `i`.
 */
__device__ __forceinline__ int32_t count_before(const int32_t *list, int n, int32_t e, int i)
{
    int32_t count = 0;
#pragma unroll 1
    for (int j = 0; j < n; j += 4) {
        int4 x = *(const int4 *)(list + j);
        count += (x.x < e) + (x.y < e) + (x.z < e) + (x.w < e);
        count += (x.x == e && j < i) + (x.y == e && j + 1 < i) + (x.z == e && j + 2 < i) +
                 (x.w == e && j + 3 < i);
    }
    return count;
}

template <int N>
__device__ __forceinline__ void route_few(const struct route_args &a, const float *logits)
{
    __shared__ __align__(16) int32_t list[ROUTE_FEW * ROUTE_TOP_K_MAX + 4];
    int token = threadIdx.x / 32, lane = threadIdx.x & 31, n = a.n_tokens * a.top_k;
    int32_t e[2];
    if (threadIdx.x < 4) list[n + threadIdx.x] = ROUTE_NOWHERE;
    if (token < a.n_tokens) {
        (void)top_k<N>(a, logits, token, e);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int local = e[h] < 0 ? -1 : e[h] - a.first, k = lane + 32 * h;
            e[h] = local >= 0 && local < a.n_local ? local : ROUTE_NOWHERE;
            if (k < a.top_k) list[token * a.top_k + k] = e[h];
        }
    }
    __syncthreads();
    n = (n + 3) / 4 * 4;
#pragma unroll 1
    for (int first = (int)(blockDim.x - 1 - threadIdx.x); first <= a.n_local; first += blockDim.x)
        a.offsets[first] = count_before(list, n, first, 0);
    if (token >= a.n_tokens) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int k = lane + 32 * h, i = token * a.top_k + k;
        if (k >= a.top_k) break;
        int32_t row = e[h] == ROUTE_NOWHERE ? -1 : count_before(list, n, e[h], i);
        a.row_of[i] = row;
        if (row >= 0) a.token_of[row] = token;
    }
}

#endif
