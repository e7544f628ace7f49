/*
 * gemm_wgmma.cuh - the consumers of the GEMM kernel that multiply by wgmma (MEDIUM, LARGE).
 *
 * A warp decodes a k16 step of its weights while products of the steps before run.  consume_running
 * lets those of the RING steps before run, across blocks, and waits only where a chain must be
 * whole. BF16, which has nothing to decode, waits at the end of each block (consume_blocks).
 */
#ifndef BACKEND_CUDA_GEMM_WGMMA_CUH
#define BACKEND_CUDA_GEMM_WGMMA_CUH

#include "backend/cuda/gemm_store.cuh"
#include "backend/cuda/wgmma.cuh"

/* Steps whose products are on their way. */
enum { RING = 2 };

/* A of the last RING steps. */
template <int MT>
struct fragments {
    uint32_t of[RING][MT][4];
};

/* Registers that wgmma reads must stay as they are until it is done, which the compiler does not
 * know: after the wait, this makes them live up to there. */
template <int MT>
__device__ __forceinline__ void keep(const uint32_t f[MT][4])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
        asm volatile("" ::"r"(f[i][0]), "r"(f[i][1]), "r"(f[i][2]), "r"(f[i][3]));
}

/* Decoding starts no earlier than here, so that it needs no more registers than it must. */
template <format_t F>
__device__ __forceinline__ void pin(struct raw<F> v[2])
{
#pragma unroll
    for (int i = 0; i < weight<F>::BITS; i++)
        asm volatile("" : "+r"(v[i % 2].q[i / 2]));
}

/* The consumers need a stage no more; `empty`: its barrier for the first lane, 0 for the others and
 * where there is no stage. */
__device__ __forceinline__ void release(uint32_t empty)
{
    __syncwarp();
    if (empty) mbarrier_arrive(empty);
}

/* wgmma_descriptor of k16 step `step`, given its low word of step 0. */
__device__ __forceinline__ uint64_t step_descriptor(uint32_t low, int step)
{
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low + step * 2), "n"(1024 >> 4 | 1 << 30));
    return d;
}

/* A tile's sums: accumulators, and of FP8 with block scales also what the chains before came to,
 * and the scales of this one: for each slot that of its weights, those of the rows of x. */
template <format_t F, int SIZE, int N>
struct sums {
    typedef shape<F, SIZE> S;
    float acc[S::MT][N / 2], total[S::CHAINS ? S::MT : 1][S::CHAINS ? N / 2 : 1];
    float scale[S::CHAINS ? S::MT : 1][2];
    struct x_scales<N> x_scale;
};

/* All products are done, and a chain is whole. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void end_chain(struct sums<F, SIZE, N> &v,
                                          const struct fragments<shape<F, SIZE>::MT> &frag)
{
    typedef shape<F, SIZE> S;
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < RING; i++)
        keep<S::MT>(frag.of[i]);
    if (S::CHAINS)
#pragma unroll
        for (int i = 0; i < S::MT * N / 2; i += 4)
            chain_add(v.total[i / (N / 2)] + i % (N / 2), v.acc[i / (N / 2)] + i % (N / 2),
                      v.scale[i / (N / 2)], v.x_scale, i % (N / 2) / 4);
}

/* Scales of chain `chain` of the pairs of panels from `pair0`. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void load_scales(struct sums<F, SIZE, N> &v, const struct gemm_args &a,
                                            const struct work &w, const struct gemm_weight *w0,
                                            const struct gemm_weight *w1, int pair0, int chain)
{
    int chains = (a.k + 127) / 128;
    bool pair = a.out_kind == GEMM_SWIGLU;
#pragma unroll
    for (int mt = 0; mt < shape<F, SIZE>::MT; mt++) {
        int row = pair ? (pair0 + mt) / 2 : pair0 + mt; /* a panel is half of one */
        row = min(row, (w.n - 1) / 128);                /* pairs past the end */
        v.scale[mt][0] = __ldg(w0->scale + (size_t)row * chains + chain);
        v.scale[mt][1] = __ldg(w1->scale + (size_t)row * chains + chain);
    }
    if (GEMM_X_SCALES) x_scales_load(v.x_scale, a, w, chain, chains);
}

/* acc += or, `fresh`, = weights times the rows of a block at `rows`; of FP8 with block scales the
 * chain before ends then.  When all products of earlier blocks are done, `empty` is released. */
template <format_t F, int SIZE, int N, bool ONE>
__device__ __forceinline__ void multiply_running(struct sums<F, SIZE, N> &v,
                                                 struct fragments<shape<F, SIZE>::MT> &frag,
                                                 struct raw<F> raw[shape<F, SIZE>::MT][2],
                                                 uint32_t rows, bool fresh, uint32_t empty)
{
    constexpr int MT = shape<F, SIZE>::MT;
    uint32_t low = rows >> 4 | 1 << 16;
#pragma unroll
    for (int i = 0; i < MT * 2; i++)
        weight_prepare<F, ONE>(raw[i / 2][i % 2]);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t(*f)[4] = frag.of[step % RING];
        wgmma_wait_group<RING - 1>();
        keep<MT>(f);
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            pin<F>(raw[mt]);
        if (step == RING - 1) release(empty);
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            uint32_t w[2];
            weight_step<F, ONE>(w, raw[i / 2][i % 2], step);
            f[i / 2][i % 2] = w[0];
            f[i / 2][i % 2 + 2] = w[1];
        }
        if (step == 0 && shape<F, SIZE>::CHAINS && fresh) {
            keep<MT>(f); /* decoded before the wait */
            end_chain(v, frag);
        }
        wgmma_fence();
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            wgmma_m64k16<N>(v.acc[mt], f[mt], step_descriptor(low, step), step > 0 || !fresh);
        wgmma_commit_group();
    }
}

/* One tile with N columns. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void consume_running(const struct gemm_args &a, const struct place &at,
                                                struct ring *r, const struct work &w)
{
    typedef shape<F, SIZE> S;
    constexpr int MT = S::MT, KB = S::KB;
    constexpr int PITCH = KB * S::TILE, TILES = KB * S::B_BYTES; /* of panels; where they begin */
    constexpr bool SEGMENTS = SIZE == GEMM_LARGE;
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5 & 7, first = (threadIdx.x >> 8) * MT;
    int blocks = (a.k + TILE_K - 1) / TILE_K, per_segment = SEGMENTS ? a.segment / TILE_K : blocks;
    const struct gemm_weight *w0 = a.w + w.group,
                             *w1 = a.out_kind == GEMM_SWIGLU ? a.up + w.group : w0;
    struct sums<F, SIZE, N> v = {
    }; /* the first chain ends one of nothing */
    struct fragments<MT> frag = {
    };
    uint32_t tiles = TILES + first * 2 * PITCH,
             data = in_register(tiles + weight_at<F>(unit, lane)),
             scale = in_register(tiles + weight_scale_at<F>(unit, lane)),
             leader = in_register(lane ? 0u : ~0u);
    uint32_t stage = 0, running = 0, empty = 0; /* empty[] of stages that products may still read */
    for (int begin = 0, end; begin < blocks; begin = end) {
        end = min(begin + per_segment, blocks);
        for (int b = begin; b < end; b += 2)
#pragma unroll
            for (int u = 0; u < 2; u++) { /* of a chain */
                if (u > 0 && b + u >= end) break;
                if (u % KB == 0) {
                    mbarrier_wait(r->full, r->phase);
                    fence_proxy_async_shared(); /* x came through the generic proxy */
                    running = empty;
                    stage = r->stage, empty = (r->full + EMPTY) & leader;
                    ring_next<S>(r, at.smem);
                }
                struct raw<F> raw[MT][2];
#pragma unroll
                for (int i = 0; i < MT * 2; i++)
                    weight_load_at<F>(raw[i / 2][i % 2],
                                      stage + data + (i * PITCH + u % KB * S::TILE),
                                      stage + scale + (i * PITCH + u % KB * S::TILE));
                bool fresh = u == 0 && (S::CHAINS || (SEGMENTS && b == begin));
                uint32_t rows = stage + u % KB * S::B_BYTES, done = u % KB == 0 ? running : 0;
                multiply_running<F, SIZE, N, false>(v, frag, raw, rows, fresh, done);
                if (S::CHAINS && u == 0)
                    load_scales(v, a, w, w0, w1, w.m * S::PAIRS + first, b / 2);
            }
        end_chain(v, frag);
        release(empty);
        empty = 0;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            store<F, S, N>(a, at, S::CHAINS ? v.total[mt] : v.acc[mt], w, w0, w1,
                           w.m * S::PAIRS + first + mt, unit, SEGMENTS && begin > 0,
                           SEGMENTS && end < blocks);
        if (S::CHAINS && SEGMENTS) { /* no chain before the next segment's */
#pragma unroll
            for (int i = 0; i < (S::CHAINS ? N / 2 : 0); i++)
                v.acc[0][i] = v.total[0][i] = 0.0f;
        }
    }
}

/* acc += or, `fresh`, = weights times the rows of a block at `rows`.  The products are still
 * running on return.  `zero` is 0: else wgmma would be given the registers that the next block is
 * loaded into. */
template <format_t F, int N, int MT>
__device__ __forceinline__ void multiply_block(float acc[MT][N / 2], uint32_t frag[4][MT][4],
                                               struct raw<F> v[MT][2], uint32_t rows, bool fresh,
                                               uint32_t zero)
{
    uint32_t low = rows >> 4 | 1 << 16;
    fence_proxy_async_shared(); /* x came through the generic proxy */
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            uint32_t w[2];
            weight_step<F>(w, v[i / 2][i % 2], step);
            frag[step][i / 2][i % 2] = w[0] ^ zero;
            frag[step][i / 2][i % 2 + 2] = w[1] ^ zero;
        }
        wgmma_fence();
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            wgmma_m64k16<N>(acc[mt], frag[step][mt], step_descriptor(low, step),
                            step > 0 || !fresh);
        wgmma_commit_group();
    }
}

/* One tile with N columns; the loads of the next block run beside the last products of this one. */
template <format_t F, int SIZE, int N>
__device__ __forceinline__ void consume_blocks(const struct gemm_args &a, const struct place &at,
                                               struct ring *r, const struct work &w)
{
    typedef shape<F, SIZE> S;
    static_assert(S::KB == 1 && F == FORMAT_BF16, "a stage is a block, without scales");
    constexpr int MT = S::MT;
    constexpr bool SEGMENTS = SIZE == GEMM_LARGE;
    int lane = threadIdx.x & 31, unit = threadIdx.x >> 5 & 7, first = (threadIdx.x >> 8) * MT;
    int blocks = (a.k + TILE_K - 1) / TILE_K, per_segment = SEGMENTS ? a.segment / TILE_K : blocks;
    const struct gemm_weight *w0 = a.w + w.group,
                             *w1 = a.out_kind == GEMM_SWIGLU ? a.up + w.group : w0;
    float acc[MT][N / 2] = {};
    struct raw<F> now[MT][2];
    uint32_t frag[4][MT][4], zero = (uint32_t)a.prefetch >> 1; /* ptxas does not know */
    auto load = [&](uint32_t stage) {
#pragma unroll
        for (int i = 0; i < MT * 2; i++)
            weight_load<F>(now[i / 2][i % 2], stage + S::B_BYTES + (first * 2 + i) * S::TILE, unit,
                           lane);
    };
    mbarrier_wait(r->full, r->phase);
    load(r->stage);
    for (int begin = 0, end; begin < blocks; begin = end) {
        end = min(begin + per_segment, blocks);
        for (int b = begin; b < end; b++) {
            struct ring next = *r;
            ring_next<S>(&next, at.smem);
            multiply_block<F, N, MT>(acc, frag, now, r->stage, SEGMENTS && b == begin, zero);
            if (b + 1 < blocks) {
                mbarrier_wait(next.full, next.phase);
                load(next.stage);
            }
            wgmma_wait_group<0>();
#pragma unroll
            for (int i = 0; i < 4; i++)
                keep<MT>(frag[i]);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(r->full + EMPTY);
            *r = next;
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
            store<F, S, N>(a, at, acc[mt], w, w0, w1, w.m * S::PAIRS + first + mt, unit,
                           SEGMENTS && begin > 0, SEGMENTS && end < blocks);
    }
}

#endif
