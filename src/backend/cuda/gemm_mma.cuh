/*
 * gemm_mma.cuh - the consumers of the GEMM kernel that multiply by mma.sync (SMALL).
 */
#ifndef BACKEND_CUDA_GEMM_MMA_CUH
#define BACKEND_CUDA_GEMM_MMA_CUH

#include "backend/cuda/gemm_store.cuh"

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
        for (int i = 0; i < 2; i++)
            weight_operand<F, ONE>(f[i], v, half * 2 + i);
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
    struct x_scales<N> x_scale;
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
            if (GEMM_X_SCALES) x_scales_load(x_scale, a, w, b / 2, columns);
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
            for (int i = 0; i < (S::CHAINS ? N / 2 : 0); i += 4)
                chain_add(total + i, acc + i, chain_scale, x_scale, i / 4);
    }
    store<F, S, N>(a, at, S::CHAINS ? total : acc, w, w0, w1, w.m, unit);
}

#endif
