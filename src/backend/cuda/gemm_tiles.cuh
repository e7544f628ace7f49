/*
 * gemm_tiles.cuh - what a block of the GEMM kernels works on: its sizes, its ring of stages in
 * shared memory, and the tiles of all groups, which blocks take in turn.
 */
#ifndef BACKEND_CUDA_GEMM_TILES_CUH
#define BACKEND_CUDA_GEMM_TILES_CUH

#include "backend/cuda/gemm.h"
#include "backend/cuda/gemm_shape.h"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/weight.cuh"

template <format_t F, int SIZE>
struct shape {
    static constexpr bool CHAINS = F == FORMAT_FP8_BLOCK; /* a second set of accumulators */
    static constexpr int BITS = weight<F>::BITS, CONSUMERS = gemm_consumers(SIZE, BITS);
    static constexpr int PANELS = gemm_tile_panels(SIZE, CHAINS), PAIRS = PANELS / 2;
    static constexpr int MT = PANELS / CONSUMERS; /* pairs of panels of a warp */
    static constexpr int GATHERERS = gemm_gatherers(SIZE), THREADS = gemm_threads(SIZE, BITS),
                         BLOCKS = gemm_blocks(SIZE);
    static constexpr int NMAX = gemm_columns(SIZE, CHAINS);
    static constexpr bool WGMMA = SIZE != GEMM_SMALL;
    static constexpr bool RUNS_ON = F != FORMAT_BF16;
    static constexpr int KB = gemm_stage_blocks(SIZE, BITS); /* k blocks of 64 a stage */
    static constexpr int TILE = weight<F>::TILE;
    /* x of a block.  All blocks of x come first in a stage, so that they are 1,024-byte aligned. */
    static constexpr int B_BYTES = NMAX * 128;
    static constexpr int STAGE = gemm_stage_bytes(PANELS, KB, TILE, NMAX);
    static constexpr int OUT = gemm_out_bytes(SIZE, BITS, NMAX); /* where results are put in rows */
    static constexpr int STAGES = gemm_stages(SIZE, STAGE, OUT);
};

/* Where shared memory holds what, after the stages. */
struct tables {
    uint64_t full[GEMM_STAGES_MAX], empty[GEMM_STAGES_MAX]; /* in this order: struct ring */
    int32_t tiles[GEMM_GROUPS_MAX + 1];                     /* before the i-th group in turn */
    int32_t first[GEMM_GROUPS_MAX + 1];                     /* rows before a group */
    int16_t turn[GEMM_GROUPS_MAX];                          /* the i-th group in turn */
    uint8_t width[GEMM_GROUPS_MAX];                         /* of a group's tiles */
    int32_t kinds[32]; /* groups of each kind_of width; then the turn of the next of them */
};

struct work {
    int group, m; /* m: which block of weight rows */
    int row, width;
    int n, col; /* rows of the group's weight, and the column of out where they start */
};

/* Without `first` groups are parts: other weights, the same rows. */
__device__ __forceinline__ int weight_rows(const struct gemm_args &a, int group)
{
    return a.first ? a.n : a.part[group + 1] - a.part[group];
}

/* Blocks of `per_tile` panels of a group's weight. */
__device__ __forceinline__ int blocks_of(const struct gemm_args &a, int group, int per_tile)
{
    return (weight_rows(a, group) + TILE_ROWS * per_tile - 1) / (TILE_ROWS * per_tile);
}

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

/* Tiles that `rows` are shared out to, and rows of each but the last: whole eights. */
template <int NMAX>
__device__ __forceinline__ int tiles_of(int rows)
{
    return (rows + NMAX - 1) / NMAX;
}

__device__ __forceinline__ int rows_of_tile(int rows, int n_tiles)
{
    return ((rows + n_tiles - 1) / n_tiles + 7) / 8 * 8;
}

__device__ __forceinline__ int kind_of(int width)
{
    return 16 - width / 8;
}

/* Groups with wide tiles come first, so that the tiles which blocks take at the same time are alike
 * (tile_of_round): else who gets wide ones again and again is late.  By one warp, from how many
 * groups there are of each kind; the same in all blocks. */
__device__ __forceinline__ void turns_fill(struct tables *t, int n_groups)
{
    int lane = threadIdx.x & 31, n = t->kinds[lane], sum = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    t->kinds[lane] = sum - n;
    __syncwarp();
    for (int g0 = 0; g0 < n_groups; g0 += 32) {
        int g = g0 + lane, kind = g < n_groups ? kind_of(t->width[g]) : 31;
        uint32_t same = __match_any_sync(~0u, kind);
        int turn = t->kinds[kind], before = __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (before == 0) t->kinds[kind] = turn + __popc(same);
        if (g < n_groups) t->turn[turn + before] = (int16_t)g;
        __syncwarp();
    }
}

/* Rows, widths and tiles of each group, by all threads of the block.  SORT: as turns_fill says. */
template <int NMAX, int THREADS, bool SORT>
__device__ void tables_fill(struct tables *t, const struct gemm_args &a, int per_tile)
{
    for (int g = threadIdx.x; g <= a.n_groups; g += THREADS)
        t->first[g] = a.first ? a.first[g] : g * a.n_rows;
    if (threadIdx.x < 32) t->kinds[threadIdx.x] = 0;
    __syncthreads();
    for (int g = threadIdx.x; g < a.n_groups; g += THREADS) {
        int rows = t->first[g + 1] - t->first[g],
            width = rows ? rows_of_tile(rows, tiles_of<NMAX>(rows)) : 0;
        t->width[g] = (uint8_t)width;
        t->turn[g] = (int16_t)g;
        if (SORT) atomicAdd(&t->kinds[kind_of(width)], 1);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    if (SORT) turns_fill(t, a.n_groups);
    int lane = threadIdx.x, before = 0;
    for (int i0 = 0; i0 <= a.n_groups; i0 += 32) {
        int i = i0 + lane, g = i < a.n_groups ? t->turn[i] : 0,
            n = i < a.n_groups
                    ? tiles_of<NMAX>(t->first[g + 1] - t->first[g]) * blocks_of(a, g, per_tile)
                    : 0,
            sum = n;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (i <= a.n_groups) t->tiles[i] = before + sum - n;
        before += __shfl_sync(~0u, sum, 31);
    }
}

/* The tile that a block takes in a round: to and fro. */
__device__ __forceinline__ int tile_of_round(int round)
{
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* Tile `i` by a whole warp: of the last group in turn whose tiles start at or before it. */
template <int NMAX>
__device__ __forceinline__ struct work find_work(const struct tables *t, const struct gemm_args &a,
                                                 int per_tile, int i)
{
    struct work w;
    int n_groups = a.n_groups;
    int lane = threadIdx.x & 31, step = (n_groups + 31) / 32, at = min(lane * step, n_groups);
    int base = (__popc(__ballot_sync(~0u, lane * step < n_groups && t->tiles[at] <= i)) - 1) * step;
    at = base + lane;
    int turn = base +
               __popc(__ballot_sync(~0u, lane < step && at < n_groups &&
                                             t->tiles[min(at, n_groups)] <= i)) -
               1;
    w.group = t->turn[turn];
    int local = i - t->tiles[turn], first = t->first[w.group], rows = t->first[w.group + 1] - first,
        m_tiles = blocks_of(a, w.group, per_tile);
    int per = t->width[w.group], j = local / m_tiles;
    w.m = local - j * m_tiles;
    w.row = (a.first ? first : 0) + j * per;
    w.width = min(per, rows - j * per);
    w.n = weight_rows(a, w.group);
    w.col = a.first ? 0 : a.part[w.group];
    return w;
}

/* Everything a role needs. */
struct place {
    const struct tables *t;
    uint32_t smem, full;  /* addresses of the stages and of full[0] */
    int per_tile, n_work; /* panels of a weight that a tile has */
};

#endif
