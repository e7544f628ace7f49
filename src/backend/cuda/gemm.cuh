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

#include "backend/cuda/gemm_mma.cuh"
#include "backend/cuda/gemm_produce.cuh"
#include "backend/cuda/gemm_wgmma.cuh"

/* N of the instruction for a tile of `width` rows. */
template <format_t F, int SIZE>
__device__ __forceinline__ void consume_all(const struct gemm_args &a, const struct place &at)
{
    typedef shape<F, SIZE> S;
    struct ring r = {at.smem, at.full, 0};
    for (int i = blockIdx.x; i < at.n_work; i += gridDim.x) {
        struct work w = find_work<S::NMAX>(at.t, a, at.per_tile, i);
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
    tables_fill<S::NMAX, S::THREADS>(t, a, at.per_tile);
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
/* FP8 with block scales: MEDIUM's registers do not hold two sets of accumulators. */
#define GEMM_KERNELS_CHAINS(F, name)        \
    GEMM_KERNEL(F, name, small, GEMM_SMALL) \
    GEMM_KERNEL(F, name, large, GEMM_LARGE)

#endif
