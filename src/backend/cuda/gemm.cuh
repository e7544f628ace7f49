/*
 * gemm.cuh - the grouped GEMM kernel, one template for every format.
 *
 * A block is CONSUMERS warpgroups, one warp that copies weights, and GATHERERS warps that gather x.
 * It walks over tiles (group, 64 * PANELS rows of weights, up to NMAX rows of x) with a stride of
 * the grid; a tile runs through K in stages of KB blocks of 64:
 *
 *     weights    the tiles (layout_cuda.h) of PANELS panels: pairs of slot 0 and slot 1.  SWIGLU:
 *                slot 0 of the gates, slot 1 the same panel of the ups; else two panels in a row
 *     x          by cp.async into the 128-byte swizzle of wgmma
 *     consumers  warp i has unit i % 8 of both slots of the MT pairs from i / 8 * MT.  It decodes
 *                them into A fragments (row r of the fragment from slot 0, r + 8 from slot 1), so
 *                that a thread ends up with gate and up of the same output, and multiplies: wgmma
 *                with N = width of the tile rounded up (gemm_wgmma.cuh); SMALL mma.sync
 *     results    bf16 by way of shared memory, as lines of 128 bytes; SMALL and f32 directly
 *
 * full[]: 1 (weights, with bytes) + 32 * GATHERERS (x, when it has landed) arrivals; empty[]:
 * consumer warps.
 */
#ifndef BACKEND_CUDA_GEMM_CUH
#define BACKEND_CUDA_GEMM_CUH

#include "backend/cuda/gemm.h"
#include "backend/cuda/gemm_shape.h"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/weight.cuh"
#include "backend/cuda/wgmma.cuh"

template <format_t F, int SIZE>
struct shape {
    static constexpr bool CHAINS = F == FORMAT_FP8_BLOCK; /* a second set of accumulators */
    static constexpr int CONSUMERS = gemm_consumers(SIZE), MT = gemm_pairs(SIZE, CHAINS);
    static constexpr int PANELS = CONSUMERS * MT, PAIRS = PANELS / 2; /* a warp has MT pairs */
    static constexpr int GATHERERS = gemm_gatherers(SIZE), THREADS = gemm_threads(SIZE),
                         BLOCKS = gemm_blocks(SIZE);
    static constexpr int NMAX = gemm_columns(SIZE);
    static constexpr bool WGMMA = SIZE != GEMM_SMALL;
    static constexpr int KB = gemm_stage_blocks(SIZE, weight<F>::BITS); /* k blocks of 64 a stage */
    static constexpr bool RUNS_ON = SIZE == GEMM_MEDIUM && KB == 2; /* consume_running */
    static constexpr int TILE = weight<F>::TILE;
    /* x of a block.  All blocks of x come first in a stage, so that they are 1,024-byte aligned. */
    static constexpr int B_BYTES = NMAX * 128;
    static constexpr int STAGE = gemm_stage_bytes(PANELS, KB, TILE, NMAX);
    static constexpr int OUT = gemm_out_bytes(SIZE, NMAX); /* where results are put in rows */
    static constexpr int STAGES = gemm_stages(SIZE, STAGE, OUT);
};

/* Where shared memory holds what, after the stages. */
struct tables {
    uint64_t full[GEMM_STAGES_MAX], empty[GEMM_STAGES_MAX]; /* in this order: struct ring */
    int32_t tiles[GEMM_GROUPS_MAX + 1];                     /* tiles before a group */
    int32_t first[GEMM_GROUPS_MAX + 1];                     /* rows before a group */
};

struct work {
    int group, m; /* m: which block of weight rows */
    int row, width;
};

/* A position in the ring of stages, as shared-memory addresses. */
struct ring {
    uint32_t stage, full; /* empty[] lies behind full[] */
    uint32_t phase;
};

enum { EMPTY = GEMM_STAGES_MAX * 8 };

template <typename S>
__device__ __forceinline__ void ring_next(struct ring *r, uint32_t smem)
{
    r->stage += S::STAGE;
    r->full += 8;
    if (r->stage == smem + S::STAGES * S::STAGE) {
        r->stage = smem;
        r->full -= 8 * S::STAGES;
        r->phase ^= 1;
    }
}

/* Rows and tiles before each group, by all threads of the block. */
template <int NMAX, int THREADS>
__device__ void tables_fill(struct tables *t, const struct gemm_args &a, int m_tiles)
{
    for (int g = threadIdx.x; g <= a.n_groups; g += THREADS)
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
__device__ __forceinline__ struct work find_work(const struct tables *t, int n_groups, int m_tiles,
                                                 int i)
{
    struct work w;
    int lane = threadIdx.x & 31, step = (n_groups + 31) / 32, at = min(lane * step, n_groups);
    int base = (__popc(__ballot_sync(~0u, lane * step < n_groups && t->tiles[at] <= i)) - 1) * step;
    at = base + lane;
    w.group = base +
              __popc(__ballot_sync(~0u, lane < step && at < n_groups &&
                                            t->tiles[min(at, n_groups)] <= i)) -
              1;
    int local = i - t->tiles[w.group], first = t->first[w.group],
        rows = t->first[w.group + 1] - first;
    int n_tiles = (rows + NMAX - 1) / NMAX, per = ((rows + n_tiles - 1) / n_tiles + 7) / 8 * 8;
    int j = local / m_tiles;
    w.m = local - j * m_tiles;
    w.row = first + j * per;
    w.width = min(per, rows - j * per);
    return w;
}

/* Everything a role needs. */
struct place {
    const struct tables *t;
    uint32_t smem, full; /* addresses of the stages and of full[0] */
    int m_tiles, n_work;
};

template <typename S>
__device__ void produce_weights(const struct gemm_args &a, const struct place &at)
{
    struct ring r = {at.smem, at.full, 1};
    int blocks = (a.k + TILE_K - 1) / TILE_K, panels = (a.n + TILE_ROWS - 1) / TILE_ROWS;
    bool pair = a.out_kind == GEMM_SWIGLU;
    size_t panel_bytes = (size_t)blocks * S::TILE;
    for (int i = blockIdx.x; i < at.n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(at.t, a.n_groups, at.m_tiles, i);
        const char *w0 = (const char *)a.w[w.group].tiles,
                   *w1 = pair ? (const char *)a.up[w.group].tiles : w0;
        const char *from[S::PANELS];
        int n_copies = 0; /* panels past the end are not copied; those that are come first */
#pragma unroll
        for (int s = 0; s < S::PANELS; s++) {
            int p = pair ? w.m * S::PAIRS + s / 2 : w.m * S::PANELS + s;
            from[s] = (s % 2 ? w1 : w0) + p * panel_bytes;
            n_copies += p < panels;
        }
        for (int b = 0; b < blocks; b += S::KB) {
            /* Blocks of a panel lie side by side. */
            uint32_t bytes = min(S::KB, blocks - b) * S::TILE;
            mbarrier_wait(r.full + EMPTY, r.phase);
            if ((threadIdx.x & 31) == 0) {
                mbarrier_arrive_expect_tx(r.full, n_copies * bytes);
#pragma unroll
                for (int s = 0; s < S::PANELS; s++)
                    if (s < n_copies)
                        cp_async_bulk(r.stage + S::KB * (S::B_BYTES + s * S::TILE),
                                      from[s] + (size_t)b * S::TILE, bytes, r.full);
            }
            ring_next<S>(&r, at.smem);
        }
    }
}

/* Rows past the width of a tile are not loaded, but for copies of its last row that fill a group of
 * four.  This takes few registers and few instructions a row: the consumers need both. */
template <typename S>
__device__ void produce_rows(const struct gemm_args &a, const struct place &at, int warp)
{
    /* Groups of four rows: q * G + warp. */
    constexpr int G = S::GATHERERS, QUADS = (S::NMAX / 4 + G - 1) / G;
    struct ring r = {at.smem, at.full, 1};
    int lane = threadIdx.x & 31, piece = lane & 7;
    int blocks = (a.k + TILE_K - 1) / TILE_K;
    uint32_t offset[2]; /* of this lane's 16 bytes; even and odd groups: the swizzle has 8 rows */
#pragma unroll
    for (int q = 0; q < 2; q++)
        offset[q] = lane / 8 * 128 + ((piece ^ ((q + warp) % 2 * 4 + lane / 8)) << 4) + warp * 512;
    for (int i = blockIdx.x; i < at.n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(at.t, a.n_groups, at.m_tiles, i);
        const uint4 *x = (const uint4 *)a.x;
        uint32_t from[QUADS]; /* in units of 16 bytes from x: a register each */
        int n_quads = ((w.width + 3) / 4 - warp + G - 1) / G;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            int row = w.row + min((q * G + warp) * 4 + lane / 8, w.width - 1);
            if (q < n_quads && a.src) row = a.src[row];
            from[q] = (uint32_t)row * (a.ldx / 8) + piece;
        }
        for (int b = 0; b < blocks; b += S::KB) {
            mbarrier_wait(r.full + EMPTY, r.phase);
            uint32_t to[2] = {r.stage + offset[0], r.stage + offset[1]};
            if ((b + S::KB) * TILE_K <= a.k) {
#pragma unroll
                for (int q = 0; q < QUADS; q++)
#pragma unroll
                    for (int kb = 0; kb < S::KB; kb++)
                        cp_async_cg_16_if(q < n_quads,
                                          to[q * G % 2] + q * G * 512 + kb * S::B_BYTES,
                                          x + from[q] + kb * 8);
            } else { /* some lanes' pieces are past the row's end */
                int left = a.k / 8 - piece - b * 8;
#pragma unroll
                for (int q = 0; q < QUADS; q++) {
                    if (q >= n_quads) break;
#pragma unroll
                    for (int kb = 0; kb < S::KB; kb++)
                        cp_async_cg_16_ignore(to[q * G % 2] + q * G * 512 + kb * S::B_BYTES,
                                              left > kb * 8 ? x + from[q] + kb * 8 : x,
                                              left <= kb * 8);
                }
            }
            x += S::KB * 8;
            cp_async_mbarrier_arrive_noinc(r.full);
            ring_next<S>(&r, at.smem);
        }
    }
}

/* The f32 factor of a row of weights, and the result it gives. */
template <format_t F>
__device__ __forceinline__ float row_scale(const struct gemm_weight *w, int row, int n,
                                           int scale_rows)
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

/* Two neighbours in a row of x's result, at most n of them. */
__device__ __forceinline__ void store_bf16x2(uint16_t *to, uint32_t v, int n)
{
    if (n >= 2)
        *(uint32_t *)to = v;
    else if (n == 1)
        *to = (uint16_t)v;
}

/* bf16 results of a warp's 8 rows of weights in each slot, `gap` columns apart (SWIGLU: one row of
 * both): columns of the accumulator become rows by movmatrix, so that four lanes write 16 bytes of
 * one row of x. */
template <format_t F, int N>
__device__ __forceinline__ void store_bf16(const struct gemm_args &a, const float acc[N / 2],
                                           const float scale[2], const struct work &w, int col0,
                                           int gap, bool pair)
{
    int lane = threadIdx.x & 31, col = col0 + lane % 4 * 2, n = a.n - col;
    uint16_t *to = (uint16_t *)a.out + (size_t)(w.row + lane / 4) * a.ldo + col;
#pragma unroll
    for (int j = 0; j < N / 8; j++, to += (size_t)a.ldo * 8) {
        const float *d = acc + j * 4;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = finish<F>(d[i], scale[i / 2]);
        bool in = j * 8 + lane / 4 < w.width;
        uint32_t first = pair ? pack_bf16x2(silu_times(v[0], v[2]), silu_times(v[1], v[3]))
                              : pack_bf16x2(v[0], v[1]);
        first = movmatrix_trans_b16(first);
        if (in) store_bf16x2(to, first, n);
        if (pair) continue;
        uint32_t second = movmatrix_trans_b16(pack_bf16x2(v[2], v[3]));
        if (in) store_bf16x2(to + gap, second, n - gap);
    }
}

/* f32 results: eight lanes write 32 bytes of one row of x. */
template <format_t F, int N>
__device__ __forceinline__ void store_f32(const struct gemm_args &a, const float acc[N / 2],
                                          const float scale[2], const struct work &w, int col0,
                                          int gap)
{
    int lane = threadIdx.x & 31, col = col0 + lane / 4;
    float *to = (float *)a.out + (size_t)(w.row + lane % 4 * 2) * a.ldo + col;
    bool add = a.out_kind == GEMM_ADD;
#pragma unroll
    for (int j = 0; j < N / 8; j++, to += (size_t)a.ldo * 8) {
        float old[4];
        bool ok[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ok[i] = j * 8 + lane % 4 * 2 + i % 2 < w.width && col + i / 2 * gap < a.n;
            old[i] = add && ok[i] ? to[(i % 2 ? a.ldo : 0) + i / 2 * gap] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v = finish<F>(acc[j * 4 + i], scale[i / 2]);
            if (ok[i]) to[(i % 2 ? a.ldo : 0) + i / 2 * gap] = add ? __fadd_rn(old[i], v) : v;
        }
    }
}

/* bf16 results of the eight warps of a pair of panels, by way of shared memory at `room`, so that
 * whole lines are written: [slot][row of x][64 columns], 16-byte piece c of row r at c ^ (r % 8).
 */
template <format_t F, int N, int NMAX>
__device__ __forceinline__ void store_lines(const struct gemm_args &a, const float result[N / 2],
                                            const float scale[2], const struct work &w, int col0,
                                            bool pair, uint32_t room)
{
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5 & 7, barrier = 1 + (threadIdx.x >> 8);
    /* Lanes 0 to 7 have the addresses of a group of eight rows, 8 to 15 those of the other slot. */
    uint32_t to =
        room + (lane >> 3 & 1) * NMAX * 128 + (lane & 7) * 128 + ((unit ^ (lane & 7)) << 4);
    bar_sync(barrier, 256); /* `room` has been read */
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = finish<F>(result[j * 4 + i], scale[i / 2]);
        if (pair)
            stmatrix_x1_trans(to + j * 1024,
                              pack_bf16x2(silu_times(v[0], v[2]), silu_times(v[1], v[3])));
        else
            stmatrix_x2_trans(to + j * 1024, pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]));
    }
    bar_sync(barrier, 256);
    int piece = lane & 7, row = (threadIdx.x & 255) >> 3;
    uint32_t from = room + row * 128 + ((piece ^ (row & 7)) << 4);
    uint16_t *out = (uint16_t *)a.out + (size_t)(w.row + row) * a.ldo + col0 + piece * 8;
    for (; row < w.width; row += 32, from += 32 * 128, out += (size_t)32 * a.ldo)
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            int left = a.n - col0 - piece * 8 - slot * 64;
            if (slot && pair) break;
            uint4 v = ld_shared_v4(from + slot * NMAX * 128);
            if (left >= 8) {
                *(uint4 *)(out + slot * 64) = v;
            } else {
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; i++)
                    store_bf16x2(out + slot * 64 + i * 2, words[i], left - i * 2);
            }
        }
}

/* Results of warp `unit` of pair `p` of the panels. */
template <format_t F, typename S, int N>
__device__ __forceinline__ void store(const struct gemm_args &a, const struct place &at,
                                      const float result[N / 2], const struct work &w,
                                      const struct gemm_weight *w0, const struct gemm_weight *w1,
                                      int p, int unit)
{
    bool pair = a.out_kind == GEMM_SWIGLU;
    int panel = pair ? p : p * 2, col = panel * 64 + unit * 8, row = col + (threadIdx.x & 31) / 4;
    float scale[2] = {row_scale<F>(w0, row, a.n, a.scale_rows),
                      row_scale<F>(w1, pair ? row : row + 64, a.n, a.scale_rows)};
    if (!pair && a.out_kind != GEMM_BF16)
        store_f32<F, N>(a, result, scale, w, col, 64);
    else if constexpr (S::WGMMA)
        store_lines<F, N, S::NMAX>(a, result, scale, w, panel * 64, pair,
                                   at.smem + S::STAGES * S::STAGE +
                                       (threadIdx.x >> 8) * (2 * S::NMAX * 128));
    else
        store_bf16<F, N>(a, result, scale, w, col, 64, pair);
}

/* Unit `unit` of both slots of a pair of panels; `tile`: address of slot 0's, pitch: to slot 1's.
 */
template <format_t F>
__device__ __forceinline__ void weight_load_pair(struct raw<F> v[2], uint32_t tile, int pitch,
                                                 int unit, int lane)
{
    weight_load<F>(v[0], tile, unit, lane);
    weight_load<F>(v[1], tile + pitch, unit, lane);
}

template <format_t F, int N, bool ONE>
__device__ __forceinline__ void multiply_mma_as(float acc[N / 2], struct raw<F> v[2], uint32_t rows,
                                                bool fresh)
{
    weight_prepare<F, ONE>(v[0]);
    weight_prepare<F, ONE>(v[1]);
    int lane = threadIdx.x & 31;
    uint32_t row = rows + (lane & 7) * 128, swizzle = (lane / 8 ^ (lane & 7)) << 4;
    if (fresh)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            acc[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t f[2][4]; /* A of two steps */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t w[2];
            weight_step<F, ONE>(w, v[i % 2], half * 2 + i / 2);
            f[i / 2][i % 2] = w[0];
            f[i / 2][i % 2 + 2] = w[1];
        }
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            uint32_t x[4]; /* 8 rows x 32 k */
            ldmatrix_x4(x, row + j * 1024 + (swizzle ^ half * 64));
            mma_m16n8k16_bf16(acc + j * 4, f[0], x);
            mma_m16n8k16_bf16(acc + j * 4, f[1], x + 2);
        }
    }
}

template <format_t F, int N>
__device__ __forceinline__ void multiply_mma(float acc[N / 2], struct raw<F> v[2], uint32_t rows,
                                             bool fresh)
{
    if (weight<F>::GROUP == 32 && weight_small<F>(v))
        multiply_mma_as<F, N, weight<F>::GROUP == 32>(acc, v, rows, fresh);
    else
        multiply_mma_as<F, N, false>(acc, v, rows, fresh);
}

/* One tile with N columns by mma.sync. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void consume_mma(const struct gemm_args &a, const struct place &at,
                                            struct ring *r, const struct work &w)
{
    typedef shape<F, SIZE> S;
    static_assert(S::CONSUMERS == 2 && S::MT == 1 && (S::KB == 2 || !S::CHAINS), "");
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5;
    int blocks = (a.k + TILE_K - 1) / TILE_K;
    bool pair = a.out_kind == GEMM_SWIGLU;
    const struct gemm_weight *w0 = a.w + w.group, *w1 = pair ? a.up + w.group : w0;
    float acc[N / 2], total[S::CHAINS ? N / 2 : 1], chain_scale[2];
    struct raw<F> now[2], second[2]; /* of the two blocks of a stage */
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < (S::CHAINS ? N / 2 : 1); i++)
        total[i] = 0.0f;
    constexpr int TILES = S::KB * S::B_BYTES, PITCH = S::KB * S::TILE;
    mbarrier_wait(r->full, r->phase);
    weight_load_pair<F>(now, r->stage + TILES, PITCH, unit, lane);
    for (int b = 0; b < blocks; b += S::KB) { /* a chain is a stage */
        bool two = S::KB == 2 && b + 1 < blocks;
        struct ring next = *r;
        ring_next<S>(&next, at.smem);
        if (S::CHAINS) {                    /* at hand when the chain ends */
            int row = pair ? w.m / 2 : w.m; /* a tile has one pair of panels */
            int columns = (a.k + 127) / 128;
            chain_scale[0] = __ldg(w0->scale + (size_t)row * columns + b / 2);
            chain_scale[1] = __ldg(w1->scale + (size_t)row * columns + b / 2);
        }
        /* Weights are loaded a block ahead. */
        if (two) weight_load_pair<F>(second, r->stage + TILES + S::TILE, PITCH, unit, lane);
        multiply_mma<F, N>(acc, now, r->stage, S::CHAINS);
        if (b + S::KB < blocks) {
            mbarrier_wait(next.full, next.phase);
            weight_load_pair<F>(now, next.stage + TILES, PITCH, unit, lane);
        }
        if (two) multiply_mma<F, N>(acc, second, r->stage + S::B_BYTES, false);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(r->full + EMPTY);
        *r = next;
        if (S::CHAINS)
#pragma unroll
            for (int i = 0; i < (S::CHAINS ? N / 2 : 0); i++)
                total[i] = __fmaf_rn(acc[i], chain_scale[i / 2 % 2], total[i]);
    }
    store<F, S, N>(a, at, S::CHAINS ? total : acc, w, w0, w1, w.m, unit);
}

#include "backend/cuda/gemm_wgmma.cuh"

/* N of the instruction for a tile of `width` rows. */
template <format_t F, int SIZE>
__device__ __forceinline__ void consume_all(const struct gemm_args &a, const struct place &at)
{
    typedef shape<F, SIZE> S;
    struct ring r = {at.smem, at.full, 0};
    for (int i = blockIdx.x; i < at.n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(at.t, a.n_groups, at.m_tiles, i);
#define TRY(way, N)                              \
    if (w.width <= N) {                          \
        consume_##way<F, SIZE, N>(a, at, &r, w); \
        continue;                                \
    }
        /* clang-format off */
        if constexpr (S::RUNS_ON) { /* with more widths the compiler runs out of registers */
            TRY(running, 32) TRY(running, 64) TRY(running, 80) TRY(running, 96)
        } else if constexpr (S::WGMMA) {
            TRY(wgmma, 16) TRY(wgmma, 32) TRY(wgmma, 48) TRY(wgmma, 64) TRY(wgmma, 80)
            TRY(wgmma, 96)
            if constexpr (S::NMAX > 96) { TRY(wgmma, 112) TRY(wgmma, 128) }
        } else {
            TRY(mma, 8) TRY(mma, 16) TRY(mma, 24) TRY(mma, 32)
        }
        /* clang-format on */
#undef TRY
    }
}

template <format_t F, int SIZE>
__device__ __forceinline__ void gemm_body(const struct gemm_args &a)
{
    typedef shape<F, SIZE> S;
    extern __shared__ __align__(1024) char smem[];
    struct tables *t = (struct tables *)(smem + S::STAGES * S::STAGE + S::OUT);
    int warp = threadIdx.x >> 5, panels = (a.n + TILE_ROWS - 1) / TILE_ROWS;
    int per_tile = a.out_kind == GEMM_SWIGLU ? S::PAIRS : S::PANELS;
    struct place at = {t, smem_addr_once(smem), smem_addr_once(t->full),
                       (panels + per_tile - 1) / per_tile, 0};
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++) {
            mbarrier_init(at.full + s * 8, 1 + 32 * S::GATHERERS);
            mbarrier_init(at.full + s * 8 + EMPTY, S::CONSUMERS * 4);
        }
        fence_mbarrier_init();
    }
    if (a.first) griddepcontrol_wait();
    tables_fill<S::NMAX, S::THREADS>(t, a, at.m_tiles);
    __syncthreads();
    at.n_work = t->tiles[a.n_groups];
    if (warp < S::CONSUMERS * 4) {
        if (SIZE != GEMM_SMALL) setmaxnreg_inc<S::CONSUMERS == 2 ? 224 : S::RUNS_ON ? 112 : 104>();
        griddepcontrol_wait();
        consume_all<F, SIZE>(a, at);
    } else {
        if (SIZE != GEMM_SMALL) setmaxnreg_dec<S::CONSUMERS == 2 ? 56 : S::RUNS_ON ? 32 : 40>();
        if (warp > S::CONSUMERS * 4) {
            griddepcontrol_wait();
            produce_rows<S>(a, at, warp - S::CONSUMERS * 4 - 1);
        } else {
            if (!a.prefetch) griddepcontrol_wait();
            produce_weights<S>(a, at);
        }
    }
}

#include "backend/cuda/gemm_strip.cuh"

#define GEMM_KERNEL(F, name, size, SIZE)                                                          \
    extern "C" __global__ void __launch_bounds__(shape<F, SIZE>::THREADS, shape<F, SIZE>::BLOCKS) \
        gemm_##name##_##size(const __grid_constant__ struct gemm_args a)                          \
    {                                                                                             \
        gemm_body<F, SIZE>(a);                                                                    \
    }
#define GEMM_STRIP_KERNEL(F, name)                                                      \
    extern "C" __global__ void __launch_bounds__(GEMM_STRIP_THREADS, GEMM_STRIP_BLOCKS) \
        gemm_##name##_strip(const __grid_constant__ struct gemm_args a)                 \
    {                                                                                   \
        strip_body<F, 1>(a);                                                            \
    }
#define GEMM_KERNELS(F, name)                 \
    GEMM_STRIP_KERNEL(F, name)                \
    GEMM_KERNEL(F, name, small, GEMM_SMALL)   \
    GEMM_KERNEL(F, name, medium, GEMM_MEDIUM) \
    GEMM_KERNEL(F, name, large, GEMM_LARGE)
/* FP8 with block scales: MEDIUM's registers do not hold two sets of accumulators. */
#define GEMM_KERNELS_CHAINS(F, name)        \
    GEMM_STRIP_KERNEL(F, name)              \
    GEMM_KERNEL(F, name, small, GEMM_SMALL) \
    GEMM_KERNEL(F, name, large, GEMM_LARGE)

#endif
