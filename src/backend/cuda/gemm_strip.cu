/*
 * gemm_strip.cu - the GEMM kernels for few rows of x: a warp streams 16 rows of weights, or a
 * segment of them, by itself.
 *
 * A strip is 16 rows of weights (two units: neighbours of a panel, or with SWIGLU the same unit of
 * gate and up) times at most 8 rows of x.  Of a dense linear each segment has a warp of its own;
 * the warps of a strip are neighbours in a block, which adds their sums in order.  A warp keeps
 * DEPTH blocks of 64 k in registers, loaded straight from global memory: tiles are in fragment
 * order, so a load instruction reads neighbouring bytes; weights are asked for before the kernel
 * before has ended, where that is allowed.  mma.sync over the same chains of k16 steps as in
 * gemm.cuh.
 */
#include "backend/cuda/gemm.cuh"

enum { WARPS = GEMM_STRIP_THREADS / 32, DEPTH = 8 };

/* A block of 64 k as loaded. */
template <format_t F>
struct strip_block {
    struct raw<F> raw[2];
    uint32_t x[8];  /* of step s: registers 2 s and 2 s + 1 of B */
    float scale[2]; /* FP8 with block scales: of its chain */
};

/* Where a strip's data lie for this lane. */
struct strip {
    const char *unit[2];   /* its bytes of the first block's units */
    const char *small[2];  /* and small scales */
    const float *scale[2]; /* FP8 with block scales: of the row's 128 */
    const char *x;
    const char *next[GEMM_NEXT_MAX]; /* what the strip prefetches a share of */
    float factor[2];                 /* row_scale */
};

template <format_t F>
__device__ __forceinline__ struct strip strip_find(const struct gemm_args &a, const struct work &w)
{
    typedef weight<F> W;
    struct strip p;
    bool pair = a.out_kind == GEMM_SWIGLU;
    int lane = threadIdx.x & 31, blocks = (a.k + TILE_K - 1) / TILE_K;
    int unit = pair ? w.m : w.m * 2, row = unit * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int u = pair ? unit : unit + i;
        const struct gemm_weight m = (pair && i ? a.up : a.w)[w.group];
        const char *tile = (const char *)m.tiles + (size_t)(u / 8) * blocks * W::TILE;
        p.unit[i] = tile + u % 8 * W::UNIT + lane * (W::BITS == 4 ? 8 : 16);
        p.small[i] = tile + W::DATA + (u % 8 * 8 + lane / 4) * (64 / (W::GROUP ? W::GROUP : 64));
        p.scale[i] = m.scale + (F == FORMAT_FP8_BLOCK ? (size_t)(u / 16) * ((a.k + 127) / 128) : 0);
        p.factor[i] = row_scale<F>(&m, pair ? row : row + i * 8, w.n, a.scale_rows);
    }
#pragma unroll
    for (int j = 0; j < GEMM_NEXT_MAX; j++) {
        const struct gemm_next &next = a.next[j];
        if (next.w) p.next[j] = (const char *)next.w[next.by_group ? w.group : 0].tiles;
    }
    return p;
}

template <format_t F>
__device__ __forceinline__ void strip_weights(struct strip_block<F> &v, const struct strip &p,
                                              int b)
{
    typedef weight<F> W;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const char *from = p.unit[i] + (size_t)b * W::TILE, *s = p.small[i] + (size_t)b * W::TILE;
        struct raw<F> &r = v.raw[i];
        if (W::BITS == 16) {
            *(uint4 *)&r.q[0] = __ldcs((const uint4 *)from);
            *(uint4 *)&r.q[W::BITS / 4] = __ldcs((const uint4 *)(from + 512));
        } else if (W::BITS == 8) {
            *(uint4 *)&r.q[0] = __ldcs((const uint4 *)from);
        } else {
            *(uint2 *)&r.q[0] = __ldcs((const uint2 *)from);
        }
        if (W::GROUP == 16) r.s0 = __ldcs((const uint32_t *)s);
        if (W::GROUP == 32) r.s0 = __ldcs((const uint16_t *)s);
        if (F == FORMAT_FP8_BLOCK && b % 2 == 0) v.scale[i] = __ldg(p.scale[i] + b / 2);
    }
}

template <format_t F>
__device__ __forceinline__ void strip_rows(struct strip_block<F> &v, const struct strip &p, int b,
                                           int k)
{
#pragma unroll
    for (int i = 0; i < 8; i++) /* k = 64 b + 8 i + 2 (lane % 4); k is a multiple of 8 */
        v.x[i] = b * 64 + i * 8 < k ? *(const uint32_t *)(p.x + b * 128 + i * 16) : 0;
}

template <format_t F>
__device__ __forceinline__ void strip_multiply(float acc[4], struct strip_block<F> &v)
{
    weight_prepare<F>(v.raw[0]);
    weight_prepare<F>(v.raw[1]);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t f[4];
        weight_operand<F>(f, v.raw, step);
        mma_m16n8k16_bf16(acc, f, &v.x[2 * step]);
    }
}

/* A warp's part of a strip, blocks [begin, end); `begin` is even, and so is DEPTH: a chain's scale
 * is in the even one of two blocks.  v[] holds the first weights; sum: of this lane's four outputs.
 */
template <format_t F>
__device__ __forceinline__ void strip_run(float sum[4], struct strip_block<F> v[DEPTH],
                                          const struct strip &p, int k, int begin, int end)
{
    constexpr bool CHAINS = F == FORMAT_FP8_BLOCK;
    float acc[4] = {};
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (begin + d < end) strip_rows(v[d], p, begin + d, k);
    for (int b0 = begin; b0 < end; b0 += DEPTH)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int b = b0 + d;
            if (b >= end) break;
            strip_multiply<F>(acc, v[d]);
            if (CHAINS && (d % 2 || b + 1 == end))
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[i] = __fmaf_rn(acc[i], v[d / 2 * 2].scale[i / 2], sum[i]);
                    acc[i] = 0.0f;
                }
                /* Refill; with chains both blocks of one at its end. */
#pragma unroll
            for (int e = !CHAINS ? d : d % 2 ? d - 1 : d + 1; e <= d; e++)
                if (b0 + e + DEPTH < end) {
                    strip_weights(v[e], p, b0 + e + DEPTH);
                    strip_rows(v[e], p, b0 + e + DEPTH, k);
                }
        }
#pragma unroll
    for (int i = 0; i < 4 && !CHAINS; i++)
        sum[i] = acc[i];
}

/* --- which strip */

/* Groups [lane * step, ...) belong to a lane, which knows the strips before them. */
struct strip_table {
    int step, before, total;
};

__device__ __forceinline__ int group_rows(const struct gemm_args &a, const int32_t *first, int g)
{
    return a.first ? first[g + 1] - first[g] : a.n_rows;
}

__device__ __forceinline__ int strips_of(const struct gemm_args &a, const int32_t *first, int g)
{
    int rows = group_rows(a, first, g), per = a.out_kind == GEMM_SWIGLU ? 8 : 16;
    return rows ? (rows + 7) / 8 * ((weight_rows(a, g) + per - 1) / per) : 0;
}

__device__ __forceinline__ struct strip_table strip_count(const struct gemm_args &a,
                                                          const int32_t *first)
{
    struct strip_table t;
    int lane = threadIdx.x & 31, mine = 0, sum;
    t.step = (a.n_groups + 31) / 32;
    for (int g = lane * t.step; g < min(lane * t.step + t.step, a.n_groups); g++)
        mine += strips_of(a, first, g);
    sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    t.before = sum - mine;
    t.total = __shfl_sync(~0u, sum, 31);
    return t;
}

/* Strip i < total by a whole warp. */
__device__ __forceinline__ struct work strip_at(const struct gemm_args &a, const int32_t *first,
                                                const struct strip_table &t, int i)
{
    struct work w;
    int owner = __popc(__ballot_sync(~0u, t.before <= i)) - 1;
    int local = i - __shfl_sync(~0u, t.before, owner), n;
    for (w.group = owner * t.step; (n = strips_of(a, first, w.group)) <= local; w.group++)
        local -= n;
    int rows = group_rows(a, first, w.group), eights = (rows + 7) / 8;
    int m_strips = n / eights, j = local / m_strips;
    w.m = local - j * m_strips;
    w.row = (a.first ? first[w.group] : 0) + j * 8;
    w.width = min(8, rows - j * 8);
    w.n = weight_rows(a, w.group);
    w.col = a.first ? 0 : a.part[w.group];
    return w;
}

/* By strip i of n_work. */
__device__ __forceinline__ void strip_prefetch(const struct gemm_args &a, const struct strip &p,
                                               const struct work &w, int i, int n_work)
{
    int per = a.out_kind == GEMM_SWIGLU ? 8 : 16;
    if ((threadIdx.x & 31) != 0) return;
#pragma unroll
    for (int j = 0; j < GEMM_NEXT_MAX; j++)
        if (a.next[j].w && a.next[j].by_group)
            prefetch_share(p.next[j], a.next[j].bytes, w.m, (w.n + per - 1) / per);
        else if (a.next[j].w)
            prefetch_share(p.next[j], a.next[j].bytes, i, n_work);
}

/* --- kernels */

template <format_t F>
__device__ __forceinline__ void strip_body(const struct gemm_args &a)
{
    __shared__ int32_t first[GEMM_GROUPS_MAX + 1];
    __shared__ float4 sums[WARPS][32];
    bool pair = a.out_kind == GEMM_SWIGLU;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int blocks = (a.k + TILE_K - 1) / TILE_K, per_segment = a.segment / TILE_K;
    int n_segments = (blocks + per_segment - 1) / per_segment;
    int teams = WARPS / n_segments, team = warp / n_segments, segment = warp % n_segments;
    int begin = segment * per_segment, end = min(begin + per_segment, blocks);
    griddepcontrol_launch_dependents();
    bool waited = false;
    if (a.first) {
        for (int g = threadIdx.x * 8; g < a.n_groups; g += GEMM_STRIP_THREADS * 8) {
            prefetch_l2(a.w + g); /* the table is of the model, no kernel writes it */
            if (pair) prefetch_l2(a.up + g);
        }
        griddepcontrol_wait();
        waited = true;
        for (int g = threadIdx.x; g <= a.n_groups; g += GEMM_STRIP_THREADS)
            first[g] = a.first[g];
        __syncthreads();
    }
    if (!a.prefetch && !waited) {
        griddepcontrol_wait();
        waited = true;
    }
    struct strip_table t = strip_count(a, first);
    /* Neighbouring strips go to different SMs; all warps of a block go round equally often. */
    for (int i0 = blockIdx.x; i0 < t.total; i0 += gridDim.x * teams) {
        int i = i0 + team * gridDim.x;
        bool mine = team < teams && i < t.total;
        struct work w;
        struct strip p;
        struct strip_block<F> v[DEPTH];
        float sum[4] = {};
        if (mine) {
            w = strip_at(a, first, t, i);
            p = strip_find<F>(a, w);
#pragma unroll
            for (int d = 0; d < DEPTH; d++)
                if (begin + d < end) strip_weights(v[d], p, begin + d);
            if (segment == 0) strip_prefetch(a, p, w, i, t.total);
        }
        if (!waited) griddepcontrol_wait();
        waited = true;
        if (mine) {
            int row = w.row + min(lane / 4, w.width - 1);
            if (a.src) row = a.src[row];
            p.x = (const char *)a.x + ((size_t)row * a.ldx + lane % 4 * 2) * 2;
            strip_run<F>(sum, v, p, a.k, begin, end);
        }
        if (n_segments > 1) {
            sums[warp][lane] = {sum[0], sum[1], sum[2], sum[3]};
            __syncthreads();
            for (int s = 1; s < n_segments && mine && segment == 0; s++) {
                float4 v = sums[warp + s][lane];
                sum[0] = __fadd_rn(sum[0], v.x);
                sum[1] = __fadd_rn(sum[1], v.y);
                sum[2] = __fadd_rn(sum[2], v.z);
                sum[3] = __fadd_rn(sum[3], v.w);
            }
            __syncthreads();
        }
        if (!mine || segment > 0) continue;
        int col = (pair ? w.m : w.m * 2) * 8;
        if (pair || a.out_kind == GEMM_BF16)
            store_bf16<F, 8>(a, sum, p.factor, w, col, 8, pair);
        else
            store_f32<F, 8>(a, sum, p.factor, w, col, 8);
    }
    if (!waited) griddepcontrol_wait();
}

#define STRIP_KERNEL(F, name)                                                           \
    extern "C" __global__ void __launch_bounds__(GEMM_STRIP_THREADS, GEMM_STRIP_BLOCKS) \
        gemm_##name##_strip(const __grid_constant__ struct gemm_args a)                 \
    {                                                                                   \
        strip_body<F>(a);                                                               \
    }
STRIP_KERNEL(FORMAT_BF16, bf16)
STRIP_KERNEL(FORMAT_NVFP4, nvfp4)
STRIP_KERNEL(FORMAT_FP8_BLOCK, fp8_block)
STRIP_KERNEL(FORMAT_FP8_CHANNEL, fp8)
STRIP_KERNEL(FORMAT_MXFP8, mxfp8)
STRIP_KERNEL(FORMAT_MXFP4, mxfp4)
