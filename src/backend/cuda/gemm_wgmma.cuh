/*
 * gemm_wgmma.cuh - the consumers of the GEMM kernel that multiply by wgmma (MEDIUM, LARGE).
 *
 * A warp decodes a k16 step of its weights while the product of the step before runs; the loads of
 * the next block of 64 k run beside the last products of this one.
 */
#ifndef BACKEND_CUDA_GEMM_WGMMA_CUH
#define BACKEND_CUDA_GEMM_WGMMA_CUH

#include "backend/cuda/gemm_mma.cuh"
#include "backend/cuda/wgmma.cuh"

/* Registers that wgmma reads must stay as they are until it is done, which the compiler does not
 * know: after the wait, this makes them live up to there. */
__device__ __forceinline__ void keep(const uint32_t f[4])
{
    asm volatile("" ::"r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]));
}

/* wgmma_descriptor of k16 step `step`, given its low word: of a constant high word, so with less
 * arithmetic. */
__device__ __forceinline__ uint64_t step_descriptor(uint32_t low, int step)
{
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "n"(1024 >> 4 | 1 << 30));
    return d + step * 2;
}

/* acc += or, `fresh`, = weights times rows of x.  The products are still running on return. */
template <format_t F, int N, int MT>
__device__ __forceinline__ void multiply_wgmma(float acc[MT][N / 2], uint32_t frag[4][MT][4],
                                               struct raw<F> v[MT][2], uint32_t rows, bool fresh)
{
    uint32_t low = rows >> 4 | 1 << 16;
#pragma unroll
    for (int i = 0; i < MT * 2; i++)
        weight_prepare<F>(v[i / 2][i % 2]);
    fence_proxy_async_shared(); /* x came through the generic proxy */
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            uint32_t w[2];
            weight_step<F>(w, v[i / 2][i % 2], step);
            frag[step][i / 2][i % 2] = w[0];
            frag[step][i / 2][i % 2 + 2] = w[1];
        }
        wgmma_fence();
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            wgmma_m64k16<N>(acc[mt], frag[step][mt], step_descriptor(low, step),
                            step > 0 || !fresh);
        wgmma_commit_group();
    }
}

/* One tile with N columns. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void consume_wgmma(const struct gemm_args &a, const struct place &at,
                                              struct ring *r, const struct work &w)
{
    typedef shape<F, SIZE> S;
    static_assert(S::KB == 1, "a stage is a block");
    constexpr int MT = S::MT;
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5 & 7, first = (threadIdx.x >> 8) * MT;
    int blocks = (a.k + TILE_K - 1) / TILE_K;
    bool pair = a.out_kind == GEMM_SWIGLU;
    const struct gemm_weight *w0 = a.w + w.group, *w1 = pair ? a.up + w.group : w0;
    float acc[MT][N / 2], total[S::CHAINS ? N / 2 : 1], chain_scale[2];
    struct x_scales<N> x_scale;
    struct raw<F> now[MT][2];
    uint32_t frag[4][MT][4];
#pragma unroll
    for (int i = 0; i < MT * N / 2; i++)
        acc[i / (N / 2)][i % (N / 2)] = 0.0f;
#pragma unroll
    for (int i = 0; i < (S::CHAINS ? N / 2 : 1); i++)
        total[i] = 0.0f;
    auto load = [&](uint32_t stage) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            weight_load_pair<F>(now[mt], stage + S::B_BYTES + (first + mt) * 2 * S::TILE, S::TILE,
                                unit, lane);
    };
    mbarrier_wait(r->full, r->phase);
    load(r->stage);
    for (int b = 0; b < blocks; b++) {
        struct ring next = *r;
        ring_next<S>(&next, at.smem);
        bool fresh = S::CHAINS && b % 2 == 0;
        if (fresh) {                        /* both are at hand when the chain ends */
            int row = pair ? w.m / 2 : w.m; /* a tile has one pair of panels */
            int columns = (a.k + 127) / 128;
            chain_scale[0] = __ldg(w0->scale + (size_t)row * columns + b / 2);
            chain_scale[1] = __ldg(w1->scale + (size_t)row * columns + b / 2);
            if (GEMM_X_SCALES) x_scales_load(x_scale, a, w, b / 2, columns);
        }
        multiply_wgmma<F, N, MT>(acc, frag, now, r->stage, fresh);
        if (b + 1 < blocks) { /* the next stage's loads, beside the products */
            mbarrier_wait(next.full, next.phase);
            load(next.stage);
        }
        wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < 4 * MT; i++)
            keep(frag[i / MT][i % MT]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(r->full + EMPTY);
        *r = next;
        if (S::CHAINS && (b % 2 || b + 1 == blocks))
#pragma unroll
            for (int i = 0; i < (S::CHAINS ? N / 2 : 0); i += 4)
                chain_add(total + i, acc[0] + i, chain_scale, x_scale, i / 4);
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        store<F, S, N>(a, at, S::CHAINS ? total : acc[mt], w, w0, w1, w.m * S::PAIRS + first + mt,
                       unit);
}

/* Decoding starts no earlier than here, so that it needs no more registers than it must. */
template <format_t F>
__device__ __forceinline__ void pin(struct raw<F> v[2])
{
#pragma unroll
    for (int i = 0; i < weight<F>::BITS; i++)
        asm volatile("" : "+r"(v[i % 2].q[i / 2]));
}

/* The consumers need a stage no more; 0: no stage. */
__device__ __forceinline__ void release(uint32_t empty)
{
    __syncwarp();
    if (empty && (threadIdx.x & 31) == 0) mbarrier_arrive(empty);
}

/* Products of consume_running on their way. */
enum { RING = 2 };

/* acc += weights times the rows at `rows`.  frag[] is what the last RING products read.  When all
 * products of earlier blocks are done, `empty` is released. */
template <format_t F, int N>
__device__ __forceinline__ void multiply_running(float acc[N / 2], uint32_t frag[RING][4],
                                                 struct raw<F> v[2], uint32_t rows, uint32_t empty)
{
    weight_prepare<F>(v[0]);
    weight_prepare<F>(v[1]);
    uint32_t low = rows >> 4 | 1 << 16;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t *f = frag[step % RING];
        wgmma_wait_group<RING - 1>();
        keep(f);
        pin<F>(v);
        if (step == RING - 1) release(empty);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t w[2];
            weight_step<F>(w, v[i], step);
            f[i] = w[0];
            f[i + 2] = w[1];
        }
        wgmma_fence();
        wgmma_m64k16<N>(acc, f, step_descriptor(low, step), 1);
        wgmma_commit_group();
    }
}

/* The same with products that run on: up to RING of them while later steps, those of the next block
 * too, are decoded.  This takes registers; it pays where decoding is short beside the products. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void consume_running(const struct gemm_args &a, const struct place &at,
                                                struct ring *r, const struct work &w)
{
    typedef shape<F, SIZE> S;
    static_assert(S::MT == 1 && !S::CHAINS, "a chain must be whole when it ends");
    constexpr int PITCH = S::KB * S::TILE;
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5 & 7, first = threadIdx.x >> 8;
    int blocks = (a.k + TILE_K - 1) / TILE_K;
    const struct gemm_weight *w0 = a.w + w.group,
                             *w1 = a.out_kind == GEMM_SWIGLU ? a.up + w.group : w0;
    float acc[N / 2];
    uint32_t frag[RING][4] = {},
             running = 0; /* empty[] of the stage that products may still read */
    struct raw<F> raw[2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[i] = 0.0f;
    for (int b = 0; b < blocks; b += S::KB) {
        mbarrier_wait(r->full, r->phase);
        fence_proxy_async_shared(); /* x came through the generic proxy */
        uint32_t stage = r->stage, empty = r->full + EMPTY;
        ring_next<S>(r, at.smem);
#pragma unroll
        for (int kb = 0; kb < S::KB; kb++) {
            if (kb > 0 && b + kb >= blocks) break;
            weight_load_pair<F>(raw, stage + S::KB * S::B_BYTES + first * 2 * PITCH + kb * S::TILE,
                                PITCH, unit, lane);
            multiply_running<F, N>(acc, frag, raw, stage + kb * S::B_BYTES, kb == 0 ? running : 0);
        }
        running = empty;
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < RING; i++)
        keep(frag[i]);
    release(running);
    store<F, S, N>(a, at, acc, w, w0, w1, w.m * S::PAIRS + first, unit);
}

#endif
