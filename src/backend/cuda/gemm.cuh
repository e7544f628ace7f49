/*
 * gemm.cuh - the grouped GEMM kernel, one template for every format.
 *
 * A block is three warpgroups: consumers 0 and 1, producer 2.  It walks over tiles (group, 128 * MT rows of
 * weights, up to NMAX rows of x) with a stride of the grid; a tile runs through K in stages of 64:
 *
 *     producer warp 0     copies 2 * MT weight tiles (layout_cuda.h) a stage: slot 0 and slot 1 for each
 *                         of MT.  SWIGLU: slot 0 of the gates, slot 1 the same panel of the ups; else
 *                         two panels in a row
 *     producer warps 1-3  gather rows of x by cp.async into the 128-byte swizzle
 *     consumers           decode units of both slots into A fragments (row r of the fragment from slot 0,
 *                         r + 8 from slot 1) and run wgmma with N = width of the tile rounded up
 *
 * so that a thread ends up with gate and up of the same output.  Consumer w has units 4 w .. 4 w + 3 of
 * every panel, a warp each.  full[]: 1 (weights, with bytes) + 96 (x, when it has landed) arrivals; empty[]: 8
 * consumer warps.  The small kernel
 * uses mma.sync instead, which needs no fences: the same bits.
 */
#ifndef BACKEND_CUDA_GEMM_CUH
#define BACKEND_CUDA_GEMM_CUH

#include "backend/cuda/gemm.h"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/weight.cuh"
#include "backend/cuda/wgmma.cuh"
#include "backend/cuda/gemm_shape.h"

template <format_t F, bool LARGE>
struct shape {
    static constexpr bool CHAINS = F == FORMAT_FP8_BLOCK; /* a second set of accumulators */
    static constexpr int MT = LARGE && !CHAINS ? 2 : 1;
    static constexpr int NMAX = LARGE ? GEMM_LARGE_N : GEMM_SMALL_N;
    static constexpr int KB = gemm_stage_blocks(LARGE, weight<F>::BITS); /* k blocks of 64 a stage */
    static constexpr int TILE = weight<F>::TILE;
    static constexpr int B_BYTES = NMAX * 128; /* of a block; all blocks of x come first in a stage: 1,024-byte aligned */
    static constexpr int STAGE = gemm_stage_bytes(2 * MT, KB, TILE, NMAX);
    static constexpr int STAGES = gemm_stages(LARGE, STAGE);
    static constexpr int ROWS = 128 * MT; /* weight rows of a tile */
    static constexpr int PANELS = 2 * MT;
};

/* Where shared memory holds what, after the stages. */
struct tables {
    uint64_t full[GEMM_STAGES_MAX], empty[GEMM_STAGES_MAX];
    int32_t tiles[GEMM_GROUPS_MAX + 1]; /* tiles before a group */
    int32_t first[GEMM_GROUPS_MAX + 1]; /* rows before a group */
};

struct work {
    int group, m; /* m: which block of weight rows */
    int row, width;
};

/* Stage counter: slot and phase. */
struct ring {
    int slot;
    uint32_t phase;
};

template <int STAGES>
__device__ __forceinline__ void ring_next(struct ring *r)
{
    if (++r->slot == STAGES) {
        r->slot = 0;
        r->phase ^= 1;
    }
}

/* Rows and tiles before each group, by all threads of the block. */
template <int NMAX>
__device__ void tables_fill(struct tables *t, const struct gemm_args &a, int m_tiles)
{
    for (int g = threadIdx.x; g <= a.n_groups; g += GEMM_THREADS)
        t->first[g] = a.first ? a.first[g] : g ? a.n_rows : 0;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int lane = threadIdx.x, before = 0;
    for (int g0 = 0; g0 <= a.n_groups; g0 += 32) {
        int g = g0 + lane, rows = g < a.n_groups ? t->first[g + 1] - t->first[g] : 0;
        int n = (rows + NMAX - 1) / NMAX * m_tiles, sum = n;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (g <= a.n_groups) t->tiles[g] = before + sum - n;
        before += __shfl_sync(~0u, sum, 31);
    }
}

/* Tile `i` by a whole warp: the last group whose tiles start at or before it. */
template <int NMAX>
__device__ __forceinline__ struct work find_work(const struct tables *t, int n_groups, int m_tiles, int i)
{
    struct work w;
    int lane = threadIdx.x & 31, step = (n_groups + 31) / 32, at = min(lane * step, n_groups);
    int base = (__popc(__ballot_sync(~0u, lane * step < n_groups && t->tiles[at] <= i)) - 1) * step;
    at = base + lane;
    w.group = base + __popc(__ballot_sync(~0u, lane < step && at < n_groups && t->tiles[min(at, n_groups)] <= i)) - 1;
    int local = i - t->tiles[w.group], first = t->first[w.group], rows = t->first[w.group + 1] - first;
    int n_tiles = (rows + NMAX - 1) / NMAX, per = ((rows + n_tiles - 1) / n_tiles + 7) / 8 * 8;
    int j = local / m_tiles;
    w.m = local - j * m_tiles;
    w.row = first + j * per;
    w.width = min(per, rows - j * per);
    return w;
}

template <format_t F, bool LARGE>
__device__ void produce_weights(const struct gemm_args &a, struct tables *t, char *stages, int m_tiles, int n_work)
{
    typedef shape<F, LARGE> S;
    struct ring r = {0, 1};
    int blocks = (a.k + TILE_K - 1) / TILE_K, panels = (a.n + TILE_ROWS - 1) / TILE_ROWS;
    bool pair = a.out_kind == GEMM_SWIGLU;
    size_t panel_bytes = (size_t)blocks * S::TILE;
    for (int i = blockIdx.x; i < n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(t, a.n_groups, m_tiles, i);
        const char *w0 = (const char *)a.w[w.group].tiles, *w1 = pair ? (const char *)a.up[w.group].tiles : w0;
        for (int b = 0; b < blocks; b += S::KB) {
            mbarrier_wait(smem_addr(&t->empty[r.slot]), r.phase);
            if ((threadIdx.x & 31) == 0) {
                uint32_t to = smem_addr(stages + r.slot * S::STAGE + S::KB * S::B_BYTES), full = smem_addr(&t->full[r.slot]);
                uint32_t bytes = min(S::KB, blocks - b) * S::TILE; /* blocks of a panel lie side by side */
                int n_copies = 0;
#pragma unroll
                for (int s = 0; s < S::PANELS; s++)
                    n_copies += (pair ? w.m * S::MT + s / 2 : w.m * S::PANELS + s) < panels;
                mbarrier_arrive_expect_tx(full, n_copies * bytes);
#pragma unroll
                for (int s = 0; s < S::PANELS; s++) {
                    int p = pair ? w.m * S::MT + s / 2 : w.m * S::PANELS + s;
                    const char *from = (s % 2 ? w1 : w0) + p * panel_bytes + (size_t)b * S::TILE;
                    if (p < panels) cp_async_bulk(to + s * S::KB * S::TILE, from, bytes, full);
                }
            }
            ring_next<S::STAGES>(&r);
        }
    }
}

/* Rows past the width of a tile are not loaded, but for copies of its last row that fill a group of four. */
template <format_t F, bool LARGE>
__device__ void produce_rows(const struct gemm_args &a, struct tables *t, char *stages, int m_tiles, int n_work)
{
    typedef shape<F, LARGE> S;
    constexpr int QUADS = (S::NMAX / 4 + 2) / 3; /* groups of 4 rows a warp: q * 3 + warp */
    struct ring r = {0, 1};
    int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - 9, piece = lane & 7;
    int blocks = (a.k + TILE_K - 1) / TILE_K, pieces = a.k / 8;
    uint32_t place[2]; /* of this lane's 16 bytes in its group's 512, for even and odd q: the swizzle has 8 rows */
    for (int q = 0; q < 2; q++) {
        int row = (q * 3 + warp) * 4 + lane / 8;
        place[q] = row * 128 + ((piece ^ (row & 7)) << 4) - q * 1536;
    }
    for (int i = blockIdx.x; i < n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(t, a.n_groups, m_tiles, i);
        const char *from[QUADS];
        int n_quads = ((w.width + 3) / 4 - warp + 2) / 3;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            int row = w.row + min((q * 3 + warp) * 4 + lane / 8, w.width - 1);
            if (q < n_quads && a.src) row = __ldg(a.src + row);
            from[q] = (const char *)a.x + ((size_t)row * a.ldx + piece * 8) * 2;
        }
        for (int b = 0; b < blocks; b += S::KB) {
            int left = pieces - piece - b * 8; /* <= 0: this lane's piece is past the end of the row */
            uint32_t to = smem_addr(stages + r.slot * S::STAGE);
            mbarrier_wait(smem_addr(&t->empty[r.slot]), r.phase);
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                if (q >= n_quads) break;
#pragma unroll
                for (int kb = 0; kb < S::KB; kb++)
                    cp_async_cg_16_ignore(to + place[q & 1] + q * 1536 + kb * S::B_BYTES,
                                          left > kb * 8 ? from[q] + kb * 128 : (const char *)a.x, left <= kb * 8);
                from[q] += S::KB * 128;
            }
            cp_async_mbarrier_arrive_noinc(smem_addr(&t->full[r.slot]));
            ring_next<S::STAGES>(&r);
        }
    }
}

/* The f32 factor of slot `s`'s rows of this thread, and the result it gives. */
template <format_t F>
__device__ __forceinline__ float row_scale(const struct gemm_weight *w, int row, int n, int scale_rows)
{
    if (F == FORMAT_NVFP4) return __ldg(w->scale);
    if (F == FORMAT_FP8_CHANNEL) return __ldg(w->scale + (scale_rows ? min(row, n - 1) : 0));
    return 1.0f;
}

template <format_t F>
__device__ __forceinline__ float finish(float chain, float scale)
{
    if (F == FORMAT_NVFP4) return __fmul_rn(__fmul_rn(chain, 128.0f), scale);
    if (F == FORMAT_FP8_CHANNEL) return __fmul_rn(chain, scale);
    return chain;
}

__device__ __forceinline__ float silu_times(float gate, float up)
{
    float e, d;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(gate, -1.4426950408889634f)));
    asm("rcp.approx.f32 %0, %1;" : "=f"(d) : "f"(__fadd_rn(1.0f, e)));
    return __fmul_rn(__fmul_rn(gate, d), up);
}

__device__ __forceinline__ uint32_t pack_bf16x2(float lo, float hi)
{
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

/* A warpgroup's staging: f32 [slot][32 rows of x][GEMM_PITCH], 32 rows of weights each. */
__device__ __forceinline__ float *staged(float *staging, int slot, int row)
{
    return staging + (slot * 32 + row) * GEMM_PITCH;
}

/* Barriers are named by constants, or the compiler claims all 16. */
__device__ __forceinline__ void bar_sync_group(int group)
{
    if (group)
        asm volatile("bar.sync 2, 128;" ::: "memory");
    else
        asm volatile("bar.sync 1, 128;" ::: "memory");
}

/* Accumulators of N columns [j0 * 8, j0 * 8 + 32) to staging. */
template <format_t F, int N>
__device__ __forceinline__ void stage_columns(float *staging, const float *acc, int j0, const float scale[2])
{
    int lane = threadIdx.x & 31, col = (threadIdx.x >> 5 & 3) * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4 && j0 + j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            staged(staging, i / 2, j * 8 + lane % 4 * 2 + i % 2)[col] = finish<F>(acc[(j0 + j) * 4 + i], scale[i / 2]);
}

/* Eight neighbours of a row, to bf16 at `to` (16-byte aligned) or fewer at the edge. */
__device__ __forceinline__ void store_8(uint16_t *to, const float v[8], int n)
{
    uint4 r = {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7])};
    const uint32_t word[4] = {r.x, r.y, r.z, r.w};
    if (n >= 8) {
        *(uint4 *)to = r;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < n) to[i] = (uint16_t)(word[i / 2] >> (i % 2 * 16));
}

/* Staged rows (at most 32) to their places: 8 columns a thread, 4 threads a row. */
__device__ __forceinline__ void store_staged(const struct gemm_args &a, float *staging, int row, int rows, int panel)
{
    int thread = threadIdx.x & 127, i = thread / 4, c = thread % 4 * 8;
    int col = panel * 64 + (threadIdx.x >> 7) * 32 + c;
    if (i >= rows) return;
    size_t at = (size_t)(row + i) * a.ldo;
    if (a.out_kind == GEMM_SWIGLU) {
        float v[8];
        const float *gate = staged(staging, 0, i) + c, *up = staged(staging, 1, i) + c;
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = silu_times(gate[j], up[j]);
        store_8((uint16_t *)a.out + at + col, v, a.n - col);
        return;
    }
#pragma unroll
    for (int s = 0; s < 2; s++, col += 64) {
        const float *v = staged(staging, s, i) + c;
        float *out = (float *)a.out + at + col;
        if (a.out_kind == GEMM_BF16) {
            float copy[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                copy[j] = v[j];
            store_8((uint16_t *)a.out + at + col, copy, a.n - col);
        } else {
            bool add = a.out_kind == GEMM_ADD;
#pragma unroll 1
            for (int j = 0; j < 8 && col + j < a.n; j++)
                out[j] = add ? __fadd_rn(out[j], v[j]) : v[j];
        }
    }
}

/* A block of 64 k by wgmma: a step's products run while the next step is decoded.  `fresh`: acc starts at zero. */
template <format_t F, int N, int MT>
__device__ __forceinline__ void multiply_wgmma(float acc[MT][N / 2], const char *tiles, int tile_pitch, uint32_t rows,
                                               bool fresh)
{
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5;
    struct raw<F> raw[MT][2];
    uint32_t frag[4][MT][4];
    uint64_t b = wgmma_descriptor(rows);
#pragma unroll
    for (int i = 0; i < MT * 2; i++)
        weight_load<F>(raw[i / 2][i % 2], tiles + i * tile_pitch, unit, lane);
    fence_proxy_async_shared(); /* x came through the generic proxy */
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            uint32_t w[2];
            weight_step<F>(w, raw[i / 2][i % 2], step);
            frag[step][i / 2][i % 2] = w[0];
            frag[step][i / 2][i % 2 + 2] = w[1];
        }
        wgmma_fence();
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            wgmma_m64k16<N>(acc[mt], frag[step][mt], b + step * 2, step > 0 || !fresh);
        wgmma_commit_group();
    }
    wgmma_wait_group<0>();
}

/* The same by mma.sync. */
template <format_t F, int N>
__device__ __forceinline__ void multiply_mma(float acc[N / 2], const char *tiles, int tile_pitch, uint32_t rows, bool fresh)
{
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5;
    struct raw<F> raw[2];
    weight_load<F>(raw[0], tiles, unit, lane);
    weight_load<F>(raw[1], tiles + tile_pitch, unit, lane);
    if (fresh)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            acc[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t x[N / 8][4], f[2][4]; /* 8 rows x 32 k each; A of two steps */
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            ldmatrix_x4(x[j], rows + (j * 8 + (lane & 7)) * 128 + (((half * 4 + lane / 8) ^ (lane & 7)) << 4));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t w[2];
            weight_step<F>(w, raw[i % 2], half * 2 + i / 2);
            f[i / 2][i % 2] = w[0];
            f[i / 2][i % 2 + 2] = w[1];
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < N / 8; j++)
                mma_m16n8k16_bf16(acc + j * 4, f[i], x[j] + i * 2);
    }
}

/* One tile with N columns. */
template <format_t F, bool LARGE, int N>
__device__ __forceinline__ void consume(const struct gemm_args &a, struct tables *t, char *stages, float *staging,
                                        struct ring *r, const struct work &w)
{
    typedef shape<F, LARGE> S;
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5, group = threadIdx.x >> 7; /* units 0 .. 7 over both warpgroups */
    int blocks = (a.k + TILE_K - 1) / TILE_K;
    bool pair = a.out_kind == GEMM_SWIGLU;
    const struct gemm_weight *w0 = a.w + w.group, *w1 = pair ? a.up + w.group : w0;
    float acc[S::MT][N / 2], total[S::CHAINS ? N / 2 : 1], chain_scale[2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        for (int mt = 0; mt < S::MT; mt++)
            acc[mt][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < (S::CHAINS ? N / 2 : 1); i++)
        total[i] = 0.0f;
    for (int b = 0; b < blocks; b += S::KB) {
        mbarrier_wait(smem_addr(&t->full[r->slot]), r->phase);
        const char *stage = stages + r->slot * S::STAGE, *tiles = stage + S::KB * S::B_BYTES;
#pragma unroll
        for (int kb = 0; kb < S::KB; kb++) {
            if (kb > 0 && b + kb >= blocks) break;
            bool fresh = S::CHAINS && (b + kb) % 2 == 0;
            if (fresh) { /* both are at hand when the chain ends */
                int at = pair ? w.m / 2 : w.m, columns = (a.k + 127) / 128;
                chain_scale[0] = __ldg(w0->scale + (size_t)at * columns + (b + kb) / 2);
                chain_scale[1] = __ldg(w1->scale + (size_t)at * columns + (b + kb) / 2);
            }
            uint32_t rows = smem_addr(stage + kb * S::B_BYTES);
            if (LARGE)
                multiply_wgmma<F, N, S::MT>(acc, tiles + kb * S::TILE, S::KB * S::TILE, rows, fresh);
            else
                multiply_mma<F, N>(acc[0], tiles + kb * S::TILE, S::KB * S::TILE, rows, fresh);
            if (S::CHAINS && ((b + kb) % 2 || b + kb + 1 == blocks)) {
#pragma unroll
                for (int i = 0; i < (S::CHAINS ? N / 2 : 0); i++)
                    total[i] = __fmaf_rn(acc[0][i], chain_scale[i / 2 % 2], total[i]);
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_addr(&t->empty[r->slot]));
        ring_next<S::STAGES>(r);
    }
#pragma unroll
    for (int mt = 0; mt < S::MT; mt++) {
        const float *result = S::CHAINS ? total : acc[mt];
        int panel = pair ? w.m * S::MT + mt : w.m * S::PANELS + mt * 2, row = panel * 64 + unit * 8 + lane / 4;
        float scale[2] = {row_scale<F>(w0, row, a.n, a.scale_rows), row_scale<F>(w1, pair ? row : row + 64, a.n, a.scale_rows)};
#pragma unroll
        for (int j0 = 0; j0 < N / 8; j0 += 4) {
            bar_sync_group(group);
            stage_columns<F, N>(staging, result, j0, scale);
            bar_sync_group(group);
            store_staged(a, staging, w.row + j0 * 8, w.width - j0 * 8, panel);
        }
    }
}

/* N of the instruction for a tile of `width` rows. */
template <format_t F, bool LARGE>
__device__ __forceinline__ void consume_all(const struct gemm_args &a, struct tables *t, char *stages, float *staging,
                                            int m_tiles, int n_work)
{
    typedef shape<F, LARGE> S;
    struct ring r = {0, 0};
    for (int i = blockIdx.x; i < n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(t, a.n_groups, m_tiles, i);
#define TRY(width_max)                                                                             \
    if (w.width <= width_max) {                                                                    \
        consume<F, LARGE, width_max>(a, t, stages, staging, &r, w);                                \
        continue;                                                                                  \
    }
        if (LARGE) {
            TRY(16) TRY(32) TRY(48) TRY(64) TRY(80) TRY(96) TRY(112) TRY(128)
        } else {
            TRY(8) TRY(16) TRY(24) TRY(32)
        }
#undef TRY
    }
}

template <format_t F, bool LARGE>
__device__ __forceinline__ void gemm_body(const struct gemm_args &a)
{
    typedef shape<F, LARGE> S;
    extern __shared__ __align__(1024) char smem[];
    char *staging = smem + S::STAGES * S::STAGE;
    struct tables *t = (struct tables *)(staging + 2 * GEMM_STAGING);
    int warp = threadIdx.x >> 5, panels = (a.n + TILE_ROWS - 1) / TILE_ROWS;
    int m_tiles = a.out_kind == GEMM_SWIGLU ? (panels + S::MT - 1) / S::MT : (panels + S::PANELS - 1) / S::PANELS;
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++) {
            mbarrier_init(smem_addr(&t->full[s]), 97);
            mbarrier_init(smem_addr(&t->empty[s]), 8);
        }
        fence_mbarrier_init();
    }
    if (a.first) griddepcontrol_wait();
    tables_fill<S::NMAX>(t, a, m_tiles);
    __syncthreads();
    int n_work = t->tiles[a.n_groups];
    if (warp >= 8) {
        setmaxnreg_dec<LARGE ? 56 : 32>();
        if (warp == 8) {
            if (!a.prefetch) griddepcontrol_wait();
            produce_weights<F, LARGE>(a, t, smem, m_tiles, n_work);
        } else {
            griddepcontrol_wait();
            produce_rows<F, LARGE>(a, t, smem, m_tiles, n_work);
        }
    } else {
        setmaxnreg_inc<LARGE ? 224 : 104>();
        griddepcontrol_wait();
        consume_all<F, LARGE>(a, t, smem, (float *)(staging + (warp >> 2) * GEMM_STAGING), m_tiles, n_work);
    }
}

#define GEMM_KERNELS(F, name)                                                                      \
    extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 2)                                  \
        gemm_##name##_small(const __grid_constant__ struct gemm_args a)                            \
    {                                                                                              \
        gemm_body<F, false>(a);                                                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1)                                  \
        gemm_##name##_large(const __grid_constant__ struct gemm_args a)                            \
    {                                                                                              \
        gemm_body<F, true>(a);                                                                     \
    }

#endif
