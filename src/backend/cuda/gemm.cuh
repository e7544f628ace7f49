/*
 * gemm.cuh - the grouped GEMM kernel, one template for every format.
 *
 * A block is CONSUMERS warpgroups that multiply, one warp that copies weights, and GATHERERS warps
 * that gather x.  It walks over tiles (group, 64 * PANELS rows of weights, up to NMAX rows of x;
 * those of all groups in the order of gemm_tiles.cuh); a tile runs through K in stages of KB blocks
 * of 64:
 *
 *     weights    the tiles (layout_cuda.h) of PANELS panels: pairs of slot 0 and slot 1.  SWIGLU:
 *                slot 0 of the gates, slot 1 the same panel of the ups; else two panels in a row
 *     x          by cp.async into the 128-byte swizzle of wgmma
 *     consumers  warp i has unit i % 8 of both slots of MT pairs.  It decodes them into A fragments
 *                (row r of the fragment from slot 0, r + 8 from slot 1), so that a thread ends up
 *                with gate and up of the same output, and multiplies: wgmma with N = width of the
 *                tile rounded up (gemm_wgmma.cuh); SMALL mma.sync (gemm_mma.cuh)
 *     results    bf16 by way of shared memory, as lines of 128 bytes; SMALL and f32 directly
 *                (gemm_store.cuh)
 *
 * full[]: 1 (weights, with bytes) + 32 * GATHERERS (x, when it has landed) arrivals; empty[]:
 * consumer warps.
 */
#ifndef BACKEND_CUDA_GEMM_CUH
#define BACKEND_CUDA_GEMM_CUH

#include "backend/cuda/gemm_mma.cuh"
#include "backend/cuda/gemm_produce.cuh"
#include "backend/cuda/gemm_wgmma.cuh"

/* N of the instruction for a tile of `width` rows. */
template <format_t F, int SIZE>
__device__ __forceinline__ void consume_all(const struct gemm_args &a, const struct place &at)
{
    typedef shape<F, SIZE> S;
    struct ring r = {at.smem, at.full, 0};
    for (int round = 0, i; (i = tile_of_round(round)) < at.n_work; round++) {
        struct work w = find_work<S::NMAX>(at.t, a, at.per_tile, i);
#define TRY(way, N)                              \
    if (w.width <= N) {                          \
        consume_##way<F, SIZE, N>(a, at, &r, w); \
        continue;                                \
    }
        /* clang-format off */
        if constexpr (!S::WGMMA) {
            TRY(mma, 8) TRY(mma, 16) TRY(mma, 24) TRY(mma, 32)
        } else if constexpr (!S::RUNS_ON) {
            TRY(blocks, 16) TRY(blocks, 32) TRY(blocks, 48) TRY(blocks, 64) TRY(blocks, 80)
            TRY(blocks, 96)
            if constexpr (S::NMAX > 96) { TRY(blocks, 112) TRY(blocks, 128) }
        } else { /* few: ptxas gives A of each width registers of its own */
            if constexpr (SIZE == GEMM_MEDIUM && !S::CHAINS) { TRY(running, 48) }
            TRY(running, 64) TRY(running, 80)
            if constexpr (S::NMAX > 80) { TRY(running, 96) }
            if constexpr (S::NMAX > 96) { TRY(running, 128) }
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
    int warp = threadIdx.x >> 5;
    struct place at = {t, smem_addr_once(smem), smem_addr_once(t->full),
                       a.out_kind == GEMM_SWIGLU ? S::PAIRS : S::PANELS, 0};
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++) {
            mbarrier_init(at.full + s * 8, 1 + 32 * S::GATHERERS);
            mbarrier_init(at.full + s * 8 + EMPTY, S::CONSUMERS * 4);
        }
        fence_mbarrier_init();
    }
    if (a.first) griddepcontrol_wait();
    tables_fill<S::NMAX, S::THREADS, S::WGMMA>(t, a, at.per_tile);
    __syncthreads();
    at.n_work = t->tiles[a.n_groups];
    if (warp < S::CONSUMERS * 4) {
        if (SIZE != GEMM_SMALL) setmaxnreg_inc<S::CONSUMERS == 2 ? 232 : 112>();
        griddepcontrol_wait();
        consume_all<F, SIZE>(a, at);
    } else {
        if (SIZE != GEMM_SMALL) setmaxnreg_dec<S::CONSUMERS == 2 ? 40 : 32>();
        if (warp > S::CONSUMERS * 4) {
            griddepcontrol_wait();
            produce_rows<S>(a, at, warp - S::CONSUMERS * 4 - 1);
        } else {
            if (!a.prefetch) griddepcontrol_wait();
            produce_weights<S>(a, at);
        }
    }
}

#define GEMM_KERNEL(F, name, size, SIZE)                                                          \
    extern "C" __global__ void __launch_bounds__(shape<F, SIZE>::THREADS, shape<F, SIZE>::BLOCKS) \
        gemm_##name##_##size(const __grid_constant__ struct gemm_args a)                          \
    {                                                                                             \
        gemm_body<F, SIZE>(a);                                                                    \
    }
#define GEMM_KERNELS(F, name)                 \
    GEMM_KERNEL(F, name, small, GEMM_SMALL)   \
    GEMM_KERNEL(F, name, medium, GEMM_MEDIUM) \
    GEMM_KERNEL(F, name, large, GEMM_LARGE)
#endif
