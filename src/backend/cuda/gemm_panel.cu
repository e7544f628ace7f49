/*
 * gemm_panel.cu - the GEMM kernels for dense linears of tens to hundreds of rows of x: small tiles,
 * and a block for each segment of one, so that all multiprocessors have work.
 *
 * A cluster of blocks has one tile, PANELS panels of weights times at most gemm_panel_columns()
 * rows of x, a block for each segment of K.  A block is PANELS consumer warpgroups and four warps
 * that fetch: one copies weights, three x, through a ring of stages as in gemm.cuh.  Warp i of a
 * warpgroup has units 2 i and 2 i + 1 of its panel as A fragments of wgmma.  The sums of the
 * segments meet in shared memory: each block adds, in order, a share of the tile and stores it.
 */
#include "backend/cuda/gemm.cuh"

template <format_t F, int PANELS>
struct panel_shape {
    static constexpr int SIZE = PANELS == 1 ? GEMM_PANEL : GEMM_PANELS;
    static constexpr bool CHAINS = F == FORMAT_FP8_BLOCK;
    static constexpr int CONSUMERS = PANELS * 128, THREADS = gemm_panel_threads(SIZE),
                         BLOCKS = 3 - PANELS;
    static constexpr int NMAX = gemm_panel_columns(CHAINS);
};

/* The tile of a block, and its segment of K in blocks of 64. */
struct panel_tile {
    struct work w;
    int columns; /* N of the instruction: w.width or more */
    int begin, end;
};

/* The ring, by numbers of the tile; positions in it. */
struct panel_ring {
    uint32_t smem, full; /* empty[] lies EMPTY behind */
    int blocks;          /* of 64 k, a stage */
    uint32_t stage_bytes;
    int stages;
    int at;
    uint32_t phase;
};

__device__ __forceinline__ uint32_t stage_of(const struct panel_ring &r)
{
    return r.smem + r.at * r.stage_bytes;
}

__device__ __forceinline__ void panel_next(struct panel_ring &r)
{
    if (++r.at == r.stages) {
        r.at = 0;
        r.phase ^= 1;
    }
}

__device__ __forceinline__ int panel_columns(int width)
{
    return width <= 16 ? 16 : width <= 32 ? 32 : width <= 64 ? 64 : width <= 96 ? 96 : 128;
}

template <typename S, int PANELS>
__device__ __forceinline__ struct panel_tile panel_find(const struct gemm_args &a)
{
    struct panel_tile t;
    int blocks = (a.k + TILE_K - 1) / TILE_K, per_segment = a.segment / TILE_K;
    int segments = (blocks + per_segment - 1) / per_segment, item = blockIdx.x / segments, n;
    int n_columns = (a.n_rows + S::NMAX - 1) / S::NMAX;
    int per = ((a.n_rows + n_columns - 1) / n_columns + 7) / 8 * 8;
    for (t.w.group = 0; (n = blocks_of(a, t.w.group, PANELS) * n_columns) <= item; t.w.group++)
        item -= n;
    t.w.m = item / n_columns;
    t.w.row = item % n_columns * per;
    t.w.width = min(per, a.n_rows - t.w.row);
    t.w.n = weight_rows(a, t.w.group);
    t.w.col = a.part[t.w.group];
    t.columns = panel_columns(t.w.width);
    t.begin = blockIdx.x % segments * per_segment;
    t.end = min(t.begin + per_segment, blocks);
    return t;
}

template <format_t F, int PANELS>
__device__ __forceinline__ void panel_weights(const struct gemm_args &a, const struct panel_tile &t,
                                              struct panel_ring r)
{
    typedef weight<F> W;
    int panels = (t.w.n + TILE_ROWS - 1) / TILE_ROWS, first = t.w.m * PANELS;
    int n = min(PANELS, panels - first);
    size_t pitch = (size_t)((a.k + TILE_K - 1) / TILE_K) * W::TILE;
    const char *from = (const char *)a.w[t.w.group].tiles + first * pitch;
    r.phase = 1;
    for (int b = t.begin; b < t.end; b += r.blocks) {
        uint32_t bytes = min(r.blocks, t.end - b) * W::TILE;
        mbarrier_wait(r.full + r.at * 8 + EMPTY, r.phase);
        if ((threadIdx.x & 31) == 0) {
            uint32_t to = stage_of(r) + r.blocks * t.columns * 128;
            mbarrier_arrive_expect_tx(r.full + r.at * 8, n * bytes);
            for (int p = 0; p < n; p++)
                cp_async_bulk(to + p * r.blocks * W::TILE, from + p * pitch + (size_t)b * W::TILE,
                              bytes, r.full + r.at * 8);
        }
        panel_next(r);
    }
}

/* Groups of four rows: 3 q + warp.  Rows past the width are not loaded, but for copies of the last
 * that fill a group. */
template <int NMAX>
__device__ __forceinline__ void panel_rows(const struct gemm_args &a, const struct panel_tile &t,
                                           struct panel_ring r, int warp)
{
    constexpr int QUADS = (NMAX / 4 + 2) / 3;
    int lane = threadIdx.x & 31, piece = lane & 7, n_quads = ((t.w.width + 3) / 4 - warp + 2) / 3;
    uint32_t from[QUADS]; /* in units of 16 bytes from x */
    uint32_t offset[2];   /* of this lane's 16 bytes; even and odd groups: the swizzle has 8 rows */
#pragma unroll
    for (int q = 0; q < 2; q++)
        offset[q] = lane / 8 * 128 + ((piece ^ ((q + warp) % 2 * 4 + lane / 8)) << 4) + warp * 512;
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        from[q] =
            (uint32_t)(t.w.row + min((q * 3 + warp) * 4 + lane / 8, t.w.width - 1)) * (a.ldx / 8) +
            piece;
    r.phase = 1;
    for (int b = t.begin; b < t.end; b += r.blocks) {
        mbarrier_wait(r.full + r.at * 8 + EMPTY, r.phase);
        uint32_t to = stage_of(r);
        for (int kb = 0; kb < r.blocks && b + kb < t.end; kb++, to += t.columns * 128) {
            bool past = (b + kb) * 8 + piece >= a.k / 8;
            const uint4 *x = (const uint4 *)a.x + (past ? 0 : (b + kb) * 8);
#pragma unroll
            for (int q = 0; q < QUADS; q++) { /* 3 groups: 1,536 bytes, and the other kind */
                if (q >= n_quads) break;
                cp_async_cg_16_ignore(to + offset[q % 2] + q * 1536, x + (past ? 0 : from[q]),
                                      past);
            }
        }
        cp_async_mbarrier_arrive_noinc(r.full + r.at * 8);
        panel_next(r);
    }
}

/* A warp's weights of a block. */
template <format_t F>
__device__ __forceinline__ void panel_load(struct raw<F> v[2], uint32_t tile)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
    for (int i = 0; i < 2; i++)
        weight_load<F>(v[i], tile, warp * 2 + i, lane);
}

/* acc += or, `fresh`, = weights times rows of x of a block.  A step's product runs while the next
 * step is decoded; all may still be running on return.  `zero` is 0: BF16, which needs no decoding,
 * would else be multiplied from the registers that the next block is loaded into. */
template <format_t F, int N>
__device__ __forceinline__ void panel_block(float acc[N / 2], uint32_t frag[4][4],
                                            struct raw<F> v[2], uint32_t rows, bool fresh,
                                            uint32_t zero)
{
    uint64_t b = wgmma_descriptor(rows);
    fence_proxy_async_shared(); /* x came through the generic proxy */
    weight_prepare<F>(v[0]);
    weight_prepare<F>(v[1]);
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t w[2];
            weight_step<F>(w, v[i], step);
            frag[step][i] = F == FORMAT_BF16 ? w[0] ^ zero : w[0];
            frag[step][i + 2] = F == FORMAT_BF16 ? w[1] ^ zero : w[1];
        }
        wgmma_fence();
        wgmma_m64k16<N>(acc, frag[step], b + step * 2, step > 0 || !fresh);
        wgmma_commit_group();
    }
}

/* Registers that wgmma reads must stay as they are until it is done, which the compiler does not
 * know: after the wait, this makes them live up to there. */
__device__ __forceinline__ void panel_keep(const uint32_t frag[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("" ::"r"(frag[i][0]), "r"(frag[i][1]), "r"(frag[i][2]), "r"(frag[i][3]));
}

/* The segment's sums of this thread. */
template <format_t F, int N>
__device__ __forceinline__ void panel_multiply(float sum[N / 2], const struct gemm_args &a,
                                               const struct panel_tile &t, struct panel_ring r,
                                               int panel, const float *scales)
{
    typedef weight<F> W;
    constexpr bool CHAINS = F == FORMAT_FP8_BLOCK;
    float acc[N / 2];
    struct raw<F> now[2];
    uint32_t frag[4][4];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = sum[i] = 0.0f;
    uint32_t zero = (uint32_t)a.prefetch >> 1; /* which the compiler does not know */
    int tiles = r.blocks * N * 128 + panel * r.blocks * W::TILE, sub = 0;
    mbarrier_wait(r.full, 0);
    panel_load<F>(now, r.smem + tiles);
    for (int b = t.begin; b < t.end; b++) {
        float scale = CHAINS ? __ldg(scales + b / 2) : 0.0f;
        uint32_t full = r.full + r.at * 8;
        panel_block<F, N>(acc, frag, now, stage_of(r) + sub * N * 128, CHAINS && b % 2 == 0, zero);
        bool last = ++sub == r.blocks || b + 1 == t.end; /* of the stage */
        if (last) {
            panel_next(r);
            sub = 0;
        }
        if (b + 1 < t.end) {
            if (last) mbarrier_wait(r.full + r.at * 8, r.phase);
            panel_load<F>(now, stage_of(r) + tiles + sub * W::TILE);
        }
        wgmma_wait_group<0>();
        panel_keep(frag);
        if (last) {
            __syncwarp();
            if ((threadIdx.x & 31) == 0) mbarrier_arrive(full + EMPTY);
        }
        if (CHAINS && (b % 2 || b + 1 == t.end))
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                sum[i] = __fmaf_rn(acc[i], scale, sum[i]);
    }
#pragma unroll
    for (int i = 0; i < N / 2 && !CHAINS; i++)
        sum[i] = acc[i];
}

/* Eight rows of x. */
template <format_t F>
__device__ __forceinline__ void panel_store(const struct gemm_args &a, const struct panel_tile &t,
                                            const float v[4], const float factor[2], int j, int col)
{
    struct work w = t.w;
    w.row += j * 8;
    w.width -= j * 8;
    if (a.out_kind == GEMM_BF16)
        store_bf16<F, 8>(a, v, factor, w, col, 8, false);
    else
        store_f32<F, 8>(a, v, factor, w, col, 8);
}

template <format_t F, int PANELS, int N>
__device__ __forceinline__ void panel_consume(const struct gemm_args &a, const struct panel_tile &t,
                                              const struct panel_ring &r)
{
    typedef panel_shape<F, PANELS> S;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int panel = t.w.m * PANELS + warp / 4, col = panel * 64 + warp % 4 * 16, row = col + lane / 4;
    int segments = (a.k + a.segment - 1) / a.segment, rank = blockIdx.x % segments;
    const struct gemm_weight *w = a.w + t.w.group;
    float factor[2] = {row_scale<F>(w, row, t.w.n, a.scale_rows),
                       row_scale<F>(w, row + 8, t.w.n, a.scale_rows)};
    const float *scales = w->scale + (S::CHAINS ? (size_t)(panel / 2) * ((a.k + 127) / 128) : 0);
    float sum[N / 2];
    panel_multiply<F, N>(sum, a, t, r, warp / 4, scales);
    if (segments == 1) {
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            panel_store<F>(a, t, sum + j * 4, factor, j, col);
        return;
    }
    /* The ring is done with. */
    uint32_t mine = r.smem + threadIdx.x * 16;
    bar_sync(1, S::CONSUMERS);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
        st_shared_v4(mine + j * S::CONSUMERS * 16, sum + j * 4);
    cluster_arrive();
    cluster_wait();
    for (int j = rank; j * 8 < t.w.width; j += segments) {
        float v[4];
        ld_shared_cluster_v4(v, cluster_address(mine + j * S::CONSUMERS * 16, 0));
        for (int s = 1; s < segments; s++) {
            float more[4];
            ld_shared_cluster_v4(more, cluster_address(mine + j * S::CONSUMERS * 16, s));
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = __fadd_rn(v[i], more[i]);
        }
        panel_store<F>(a, t, v, factor, j, col);
    }
}

template <format_t F, int PANELS>
__device__ __forceinline__ void panel_body(const struct gemm_args &a)
{
    typedef panel_shape<F, PANELS> S;
    extern __shared__ __align__(1024) char smem[];
    int warp = threadIdx.x >> 5;
    griddepcontrol_launch_dependents();
    struct panel_tile t = panel_find<S, PANELS>(a);
    struct panel_ring r = {smem_addr_once(smem), smem_addr_once(smem + gemm_panel_ring(S::SIZE))};
    int block_bytes = t.columns * 128 + PANELS * weight<F>::TILE;
    r.blocks = block_bytes <= 8192 ? 4 : block_bytes <= 16384 ? 2 : 1;
    r.stage_bytes = (r.blocks * block_bytes + 1023) / 1024 * 1024;
    r.stages = min(gemm_panel_ring(S::SIZE) / (int)r.stage_bytes, (int)GEMM_STAGES_MAX);
    if (threadIdx.x == 0) {
        for (int s = 0; s < r.stages; s++) {
            mbarrier_init(r.full + s * 8, 1 + 3 * 32);
            mbarrier_init(r.full + s * 8 + EMPTY, PANELS * 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp < PANELS * 4) {
        setmaxnreg_inc<PANELS == 1 ? 168 : 216>();
        switch (t.columns) {
        case 16: panel_consume<F, PANELS, 16>(a, t, r); break;
        case 32: panel_consume<F, PANELS, 32>(a, t, r); break;
        case 64: panel_consume<F, PANELS, 64>(a, t, r); break;
        case 96: panel_consume < F, PANELS, S::NMAX<96 ? 16 : 96>(a, t, r); break;
        default: panel_consume < F, PANELS, S::NMAX<128 ? 16 : 128>(a, t, r); break;
        }
    } else {
        setmaxnreg_dec<PANELS == 1 ? 80 : 64>();
        if (warp == PANELS * 4) {
            if (!a.prefetch) griddepcontrol_wait();
            panel_weights<F, PANELS>(a, t, r);
            griddepcontrol_wait();
        } else {
            if (warp == PANELS * 4 + 1 && (threadIdx.x & 31) == 0)
#pragma unroll
                for (int j = 0; j < GEMM_NEXT_MAX; j++)
                    if (a.next[j].w)
                        prefetch_share(a.next[j].w->tiles, a.next[j].bytes, blockIdx.x, gridDim.x);
            griddepcontrol_wait();
            panel_rows<S::NMAX>(a, t, r, warp - PANELS * 4 - 1);
        }
        if (a.segment < a.k) {
            cluster_arrive();
            cluster_wait();
        }
    }
    if (a.segment < a.k) { /* the others may still read this block's sums */
        cluster_arrive();
        cluster_wait();
    }
}

#define PANEL_KERNEL(F, name, size, PANELS)                                       \
    extern "C" __global__ void __launch_bounds__(panel_shape<F, PANELS>::THREADS, \
                                                 panel_shape<F, PANELS>::BLOCKS)  \
        gemm_##name##_##size(const __grid_constant__ struct gemm_args a)          \
    {                                                                             \
        panel_body<F, PANELS>(a);                                                 \
    }
#define PANEL_BOTH(F, name)         \
    PANEL_KERNEL(F, name, panel, 1) \
    PANEL_KERNEL(F, name, panels, 2)
PANEL_BOTH(FORMAT_BF16, bf16)
PANEL_BOTH(FORMAT_NVFP4, nvfp4)
PANEL_BOTH(FORMAT_FP8_BLOCK, fp8_block)
#ifndef PANEL_FEW
PANEL_BOTH(FORMAT_FP8_CHANNEL, fp8)
PANEL_BOTH(FORMAT_MXFP8, mxfp8)
PANEL_BOTH(FORMAT_MXFP4, mxfp4)
#endif
