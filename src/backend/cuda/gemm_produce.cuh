/*
 * gemm_produce.cuh - the warps of a GEMM block that fill its ring: one copies weights, the others
 * gather rows of x.
 */
#ifndef BACKEND_CUDA_GEMM_PRODUCE_CUH
#define BACKEND_CUDA_GEMM_PRODUCE_CUH

#include "backend/cuda/gemm_tiles.cuh"

template <typename S>
__device__ void produce_weights(const struct gemm_args &a, const struct place &at)
{
    struct ring r = {at.smem, at.full, 1};
    int blocks = (a.k + TILE_K - 1) / TILE_K;
    bool pair = a.out_kind == GEMM_SWIGLU;
    size_t panel_bytes = (size_t)blocks * S::TILE;
    for (int i = blockIdx.x; i < at.n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(at.t, a, at.per_tile, i);
        int panels = (w.n + TILE_ROWS - 1) / TILE_ROWS;
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
        struct work w = find_work<S::NMAX>(at.t, a, at.per_tile, i);
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

/* --- gemm_args.next: weights of a later kernel into the L2 cache */

/* Share i of n of `bytes`, a multiple of 16. */
__device__ __forceinline__ void prefetch_share(const void *from, uint32_t bytes, int i, int n)
{
    uint32_t share = (bytes / 16 + n - 1) / n * 16, at = share * i;
    if (at < bytes) prefetch_l2_bulk((const char *)from + at, min(share, bytes - at));
}

#endif
