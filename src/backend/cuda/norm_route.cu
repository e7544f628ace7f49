/*
 * norm_route.cu - few tokens: residual add, norm, router and plan in one kernel.
 *
 *   grid     one cluster, a block of 16 experts each; 256 threads
 *   memory   the block's router weights, copied before the wait; each token's row in f32, and in
 *            BF16 as the router reads it
 *   roles    all: the norms (struct share).  A warp a segment of K: mma.sync over the same
 *            chains as the GEMM kernels, sums added in order; logits to block 0, which makes
 *            choices and plan (route.cuh)
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
    AHEAD = 4,                                   /* turns of residuals in flight */
    ALL_TOKENS = 2
};

/* Dynamic shared memory, in this order: kernels.c has its size. */
struct map {
    char *weights;    /* [k / 64] BLOCK_BYTES */
    float *rows;      /* [tokens][n] */
    uint16_t *inputs; /* [tokens][n + 8]: rows of a fragment in different banks */
    float *logits;    /* [tokens][n_experts] of block 0 */
    __device__ __forceinline__ map(const struct norm_route_args &a, char *smem)
    {
        int n = a.norm.n, tokens = a.route.n_tokens;
        weights = smem;
        rows = (float *)(weights + n / TILE_K * BLOCK_BYTES);
        inputs = (uint16_t *)(rows + tokens * n);
        logits = (float *)(inputs + tokens * (n + 8));
    }
};

__device__ __forceinline__ void fetch_weights(const struct norm_route_args &a, const struct map &m,
                                              uint32_t full)
{
    int blocks = a.norm.n / TILE_K, unit = blockIdx.x * 2;
    const char *from = (const char *)a.router->tiles +
                       (size_t)(unit / 8) * blocks * weight<FORMAT_BF16>::TILE +
                       unit % 8 * weight<FORMAT_BF16>::UNIT;
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, blocks * BLOCK_BYTES);
#pragma unroll 1
    for (int b = 0; b < blocks; b++)
        cp_async_bulk(smem_addr(m.weights + b * BLOCK_BYTES),
                      from + (size_t)b * weight<FORMAT_BF16>::TILE, BLOCK_BYTES, full);
}

/* Of few tokens each block does all norms for itself: an exchange less.  Else those of every
 * gridDim.x-th token, for all blocks. */
struct share {
    int first, step, n; /* tokens first + i * step, i < n */
    bool all;
    __device__ __forceinline__ share(int tokens)
    {
        int rank = blockIdx.x, blocks = gridDim.x;
        all = tokens <= ALL_TOKENS || blocks == 1;
        first = all ? 0 : rank;
        step = all ? 1 : blocks;
        n = all ? tokens : rank < tokens ? 1 : 0;
        for (int t = rank + blocks; !all && t < tokens; t += blocks)
            n++;
    }
};

/* rows[i] = x + y of token i of the share; where no other block reads x, in memory too. */
__device__ __forceinline__ void add(const struct norm_route_args &a, const struct map &m,
                                    const struct share &own)
{
    int shift = __ffs(a.norm.n / 8) - 1, n = own.n << shift; /* n / 8 is a power of 2 */
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < n; i0 += AHEAD * THREADS) {
        struct eight x[AHEAD], y[AHEAD];
        size_t at[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            int i = i0 + u * THREADS, token = own.first + (i >> shift) * own.step;
            at[u] = ((size_t)token << shift | (i & ((1 << shift) - 1))) * 8;
            if (i >= n) continue;
            x[u] = load_f32(a.norm.x + at[u]);
            y[u] = load_f32(a.norm.y + at[u]);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            int i = i0 + u * THREADS;
            if (i >= n) continue;
#pragma unroll
            for (int e = 0; e < 8; e++)
                x[u].f[e] = __fadd_rn(x[u].f[e], y[u].f[e]);
            store_f32(m.rows + i * 8, x[u]);
            if (!own.all) store_f32(a.norm.x + at[u], x[u]);
        }
    }
}

/* Of the share's rows: BF16 to memory, and to the blocks that multiply it.  w: the norm's weights
 * of this thread's columns, which are the same in all turns. */
__device__ __forceinline__ void scale(const struct norm_route_args &a, const struct map &m,
                                      const struct share &own, const float *inverse, uint4 w)
{
    int shift = __ffs(a.norm.n / 8) - 1, n = own.n << shift;
    struct eight f = eight_of(w);
    bool writes = !own.all || blockIdx.x == gridDim.x - 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += THREADS) {
        int row = i >> shift, col = (i & ((1 << shift) - 1)) * 8,
            token = own.first + row * own.step;
        struct eight x = load_f32(m.rows + i * 8);
#pragma unroll
        for (int e = 0; e < 8; e++)
            x.f[e] = __fmul_rn(__fmul_rn(x.f[e], inverse[row]), f.f[e]);
        uint4 out = make_uint4(bf16_pack(x.f[0], x.f[1]), bf16_pack(x.f[2], x.f[3]),
                               bf16_pack(x.f[4], x.f[5]), bf16_pack(x.f[6], x.f[7]));
        uint16_t *to = m.inputs + token * (a.norm.n + 8) + col;
        if (writes) *(uint4 *)(a.norm.out + (size_t)token * a.norm.n + col) = out;
        if (own.all) {
            *(uint4 *)to = out;
            continue;
        }
        float v[4] = {__uint_as_float(out.x), __uint_as_float(out.y), __uint_as_float(out.z),
                      __uint_as_float(out.w)};
#pragma unroll 1
        for (int r = 0; r < gridDim.x; r++)
            st_shared_cluster_v4(mapa_shared_cluster(smem_addr(to), r), v);
    }
}

/* Of a block of 64 k. */
struct fragments {
    struct raw<FORMAT_BF16> w[2];
    uint32_t x[8];
    __device__ __forceinline__ void load(uint32_t tile, const uint16_t *row)
    {
        int lane = threadIdx.x & 31;
        weight_load<FORMAT_BF16>(w[0], tile, 0, lane);
        weight_load<FORMAT_BF16>(w[1], tile, 1, lane);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = *(const uint32_t *)(row + i * 8);
    }
    __device__ __forceinline__ void multiply(float acc[4])
    {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[2], b[2];
            weight_step<FORMAT_BF16>(a, w[0], step);
            weight_step<FORMAT_BF16>(b, w[1], step);
            uint32_t f[4] = {a[0], b[0], a[1], b[1]};
            mma_m16n8k16_bf16(acc, f, &x[2 * step]);
        }
    }
};

/* A warp's segment: 16 experts x 8 tokens. */
__device__ __forceinline__ void multiply(float acc[4], const struct norm_route_args &a,
                                         const struct map &m, int segment)
{
    int lane = threadIdx.x & 31, per = a.segment / TILE_K, begin = segment * per,
        end = min(begin + per, a.norm.n / TILE_K);
    const uint16_t *x = m.inputs + min(lane / 4, a.route.n_tokens - 1) * (a.norm.n + 8) +
                        lane % 4 * 2 + begin * TILE_K;
    uint32_t tile = smem_addr(m.weights) + begin * BLOCK_BYTES;
    struct fragments f[2];
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    f[0].load(tile, x);
#pragma unroll 1
    for (int b = begin; b < end; b += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            tile += BLOCK_BYTES;
            x += TILE_K;
            if (b + i + 1 < end) f[1 - i].load(tile, x);
            if (b + i < end) f[i].multiply(acc);
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
#pragma unroll 1
    for (int s = 1; s < n_segments; s++) {
        v = sums[s][lane];
        sum[0] = __fadd_rn(sum[0], v.x);
        sum[1] = __fadd_rn(sum[1], v.y);
        sum[2] = __fadd_rn(sum[2], v.z);
        sum[3] = __fadd_rn(sum[3], v.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int token = lane % 4 * 2 + i % 2, e = blockIdx.x * 16 + lane / 4 + i / 2 * 8;
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
    struct share own(a.route.n_tokens);
    int warp = threadIdx.x / 32, n = a.norm.n;
    barrier_cluster_arrive();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) fetch_weights(a, m, smem_addr(&full));
    uint4 w = *(const uint4 *)(a.norm.w + (threadIdx.x & (n / 8 - 1)) * 8);
    barrier_cluster_wait(); /* all blocks run */
    griddepcontrol_wait();
    add(a, m, own);
    __syncthreads();
    if (warp < own.n) {
        float inv = inverse_rms(m.rows + warp * n, n, a.norm.eps);
        if (threadIdx.x % 32 == 0) inverse[warp] = inv;
    }
    __syncthreads();
    scale(a, m, own, inverse, w);
    if (!own.all) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    __syncthreads();
    if (warp < a.n_segments) {
        float acc[4];
        mbarrier_wait(smem_addr(&full), 0);
        multiply(acc, a, m, warp);
        sums[warp][threadIdx.x % 32] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    }
    __syncthreads();
    if (warp == 0) send_logits(a, m, sums, a.n_segments);
    barrier_cluster_arrive();
    barrier_cluster_wait(); /* block 0 has all logits, and all have read x */
    if (own.all && blockIdx.x == gridDim.x - 1)
#pragma unroll 1
        for (int i = threadIdx.x; i < own.n * n / 4; i += THREADS)
            ((float4 *)a.norm.x)[i] = ((const float4 *)m.rows)[i];
    if (blockIdx.x == 0) route_few<4>(a.route, m.logits);
}
