/*
 * norm_route.cu - few tokens: residual add, norm, router and plan in one kernel.
 *
 *   grid     one cluster, a block of 16 experts each; 256 threads
 *   memory   the block's router weights, copied before the wait; each token's row in f32, and in
 *            BF16 as the router reads it
 *   roles    each block does all norms for itself, and writes some of the rows: out at once, x when
 *            all blocks have read it.  A warp a segment of K: mma.sync over the same chains as the
 *            GEMM kernels, sums added in order; logits to block 0, which makes choices and plan
 *            (route.cuh)
 *   bound    latency: two loads, a norm's lane chain, 32 k16 steps, a cluster barrier, a choice
 */
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/norm.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/route.cuh"
#include "backend/cuda/weight.cuh"

enum {
    THREADS = NORM_ROUTE_THREADS,
    BLOCK_BYTES = 2 * weight<FORMAT_BF16>::UNIT, /* 16 experts x 64 k */
    AHEAD = 4                                    /* turns of residuals in flight */
};

/* Dynamic shared memory, in this order: kernels.c has its size. */
struct map {
    char *weights;    /* [k / 64] BLOCK_BYTES */
    float *rows;      /* [tokens][n] */
    uint16_t *inputs; /* [tokens][n + 8]: rows of a fragment in different banks */
    float *logits;    /* [tokens][n_experts] of block 0 */
    uint32_t *plan;
    __device__ __forceinline__ map(const struct norm_route_args &a, char *smem)
    {
        int n = a.norm.n, tokens = a.route.n_tokens;
        weights = smem;
        rows = (float *)(weights + n / TILE_K * BLOCK_BYTES);
        inputs = (uint16_t *)(rows + tokens * n);
        logits = (float *)(inputs + tokens * (n + 8));
        plan = (uint32_t *)(logits + tokens * a.route.n_experts);
    }
};

__device__ __forceinline__ void fetch_weights(const struct norm_route_args &a, const struct map &m,
                                              uint32_t full)
{
    const int blocks = a.norm.n / TILE_K, unit = cluster_ctarank() * 2;
    const char *from = (const char *)a.router->tiles +
                       (size_t)(unit / 8) * blocks * weight<FORMAT_BF16>::TILE +
                       unit % 8 * weight<FORMAT_BF16>::UNIT;
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, blocks * BLOCK_BYTES);
    for (int b = 0; b < blocks; b++)
        cp_async_bulk(smem_addr(m.weights + b * BLOCK_BYTES),
                      from + (size_t)b * weight<FORMAT_BF16>::TILE, BLOCK_BYTES, full);
}

/* rows = x + y. */
__device__ __forceinline__ void add(const struct norm_route_args &a, const struct map &m)
{
    int all = a.route.n_tokens * a.norm.n / 8;
    for (int i0 = threadIdx.x; i0 < all; i0 += AHEAD * THREADS) {
        struct eight x[AHEAD], y[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            size_t i = i0 + u * THREADS;
            if (i >= all) continue;
            x[u] = load_f32(a.norm.x + i * 8);
            y[u] = load_f32(a.norm.y + i * 8);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            int i = i0 + u * THREADS;
            if (i >= all) continue;
#pragma unroll
            for (int e = 0; e < 8; e++)
                x[u].f[e] = __fadd_rn(x[u].f[e], y[u].f[e]);
            store_f32(m.rows + i * 8, x[u]);
        }
    }
}

/* The block that writes a token's rows; block 0 has other work. */
__device__ __forceinline__ bool writes(int token)
{
    int blocks = gridDim.x;
    return cluster_ctarank() == blocks - 1 - token % blocks;
}

/* w: the norm's weights of this thread's columns, which are the same in all turns. */
__device__ __forceinline__ void scale(const struct norm_route_args &a, const struct map &m,
                                      const float *inverse, uint4 w)
{
    int n = a.norm.n, per = n / 8, all = a.route.n_tokens * per;
    struct eight f = eight_of(w);
    for (int i = threadIdx.x; i < all; i += THREADS) {
        int token = i / per, col = i % per * 8;
        struct eight x = load_f32(m.rows + i * 8);
#pragma unroll
        for (int e = 0; e < 8; e++)
            x.f[e] = __fmul_rn(__fmul_rn(x.f[e], inverse[token]), f.f[e]);
        uint4 out = make_uint4(bf16_pack(x.f[0], x.f[1]), bf16_pack(x.f[2], x.f[3]),
                               bf16_pack(x.f[4], x.f[5]), bf16_pack(x.f[6], x.f[7]));
        *(uint4 *)(m.inputs + token * (n + 8) + col) = out;
        if (writes(token)) *(uint4 *)(a.norm.out + (size_t)token * n + col) = out;
    }
}

/* A warp's segment: 16 experts x 8 tokens. */
__device__ __forceinline__ void multiply(float acc[4], const struct norm_route_args &a,
                                         const struct map &m, int segment)
{
    int lane = threadIdx.x & 31, n = a.norm.n, per = a.segment / TILE_K;
    int begin = segment * per, end = min(begin + per, n / TILE_K);
    const uint16_t *x =
        m.inputs + min(lane / 4, a.route.n_tokens - 1) * (n + 8) + lane % 4 * 2 + begin * TILE_K;
    uint32_t tile = smem_addr(m.weights) + begin * BLOCK_BYTES;
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
#pragma unroll 2
    for (int b = begin; b < end; b++, x += TILE_K, tile += BLOCK_BYTES) {
        struct raw<FORMAT_BF16> r[2];
        weight_load<FORMAT_BF16>(r[0], tile, 0, lane);
        weight_load<FORMAT_BF16>(r[1], tile, 1, lane);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t w[2][2], v[2] = {*(const uint32_t *)(x + step * 16),
                                      *(const uint32_t *)(x + step * 16 + 8)};
            weight_step<FORMAT_BF16>(w[0], r[0], step);
            weight_step<FORMAT_BF16>(w[1], r[1], step);
            uint32_t f[4] = {w[0][0], w[1][0], w[0][1], w[1][1]};
            mma_m16n8k16_bf16(acc, f, v);
        }
    }
}

/* The segments' sums, by one warp, to block 0. */
__device__ __forceinline__ void send_logits(const struct norm_route_args &a, const struct map &m,
                                            float4 sums[][32], int n_segments)
{
    int lane = threadIdx.x & 31;
    float4 v = sums[0][lane];
    float sum[4] = {v.x, v.y, v.z, v.w};
    for (int s = 1; s < n_segments; s++) {
        v = sums[s][lane];
        sum[0] = __fadd_rn(sum[0], v.x);
        sum[1] = __fadd_rn(sum[1], v.y);
        sum[2] = __fadd_rn(sum[2], v.z);
        sum[3] = __fadd_rn(sum[3], v.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int token = lane % 4 * 2 + i % 2, e = cluster_ctarank() * 16 + lane / 4 + i / 2 * 8;
        if (token < a.route.n_tokens && e < a.route.n_experts)
            st_shared_cluster_u32(
                mapa_shared_cluster(smem_addr(m.logits + token * a.route.n_experts + e), 0),
                __float_as_uint(sum[i]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_route(const __grid_constant__ struct norm_route_args a)
{
    extern __shared__ __align__(128) char smem[];
    __shared__ uint64_t full;
    __shared__ float inverse[NORM_ROUTE_TOKENS];
    __shared__ float4 sums[GEMM_SEGMENTS_MAX][32];
    struct map m(a, smem);
    int warp = threadIdx.x / 32, n = a.norm.n, tokens = a.route.n_tokens,
        n_segments = (n + a.segment - 1) / a.segment;
    barrier_cluster_arrive();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) fetch_weights(a, m, smem_addr(&full));
    if (cluster_ctarank() == 0) clear_words(a.route, sets_at(a.route, m.plan));
    uint4 w = *(const uint4 *)(a.norm.w + threadIdx.x % (n / 8) * 8);
    griddepcontrol_wait();
    add(a, m);
    __syncthreads();
    if (warp < tokens) {
        float inv = inverse_rms(m.rows + warp * n, n, a.norm.eps);
        if (threadIdx.x % 32 == 0) inverse[warp] = inv;
    }
    __syncthreads();
    scale(a, m, inverse, w);
    __syncthreads();
    if (warp < n_segments) {
        float acc[4];
        mbarrier_wait(smem_addr(&full), 0);
        multiply(acc, a, m, warp);
        sums[warp][threadIdx.x % 32] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    }
    __syncthreads();
    barrier_cluster_wait(); /* all blocks run */
    if (warp == 0) send_logits(a, m, sums, n_segments);
    barrier_cluster_arrive();
    barrier_cluster_wait(); /* block 0 has all logits, and all have read x */
    for (int i = threadIdx.x; i < tokens * n / 4; i += THREADS)
        if (writes(i / (n / 4))) ((float4 *)a.norm.x)[i] = ((const float4 *)m.rows)[i];
    if (cluster_ctarank() == 0) route_few<4>(a.route, m.logits, m.plan);
}
