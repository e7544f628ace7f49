/*
 * gemm_store.cuh - results of the GEMM kernels: factors of weights and of rows of x, SwiGLU, and
 * the way from accumulators (laid out as by mma.sync m16n8k16) to rows of `out`.
 */
#ifndef BACKEND_CUDA_GEMM_STORE_CUH
#define BACKEND_CUDA_GEMM_STORE_CUH

#include "backend/cuda/gemm_tiles.cuh"

#ifndef GEMM_X_SCALES
#define GEMM_X_SCALES 0 /* 1: kernels that take x_scale of struct gemm_args */
#endif

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

/* Factors of a tile's rows of x, for a warp: lane l has those of rows l, l + 32, ... */
template <int N>
struct x_scales {
    float of[(N + 31) / 32];
};

/* The i-th of n of each row. */
template <int N>
__device__ __forceinline__ void x_scales_load(struct x_scales<N> &x, const struct gemm_args &a,
                                              const struct work &w, int i, int n)
{
#pragma unroll
    for (int q = 0; q < (N + 31) / 32; q++) {
        int row = w.row + min(q * 32 + (int)(threadIdx.x & 31), w.width - 1);
        if (a.src) row = a.src[row];
        x.of[q] = a.x_scale[(size_t)row * n + i];
    }
}

/* Those of a thread's columns of the j-th eight of a result. */
template <int N>
__device__ __forceinline__ float2 x_scales_at(const struct x_scales<N> &x, int j)
{
    int lane = j % 4 * 8 + (threadIdx.x & 3) * 2;
    return make_float2(__shfl_sync(~0u, x.of[j / 4], lane),
                       __shfl_sync(~0u, x.of[j / 4], lane + 1));
}

/* total[q] += chain[q] * scale for a thread's results q of weight row q / 2 and columns q % 2 of
 * the j-th eight. */
template <int N>
__device__ __forceinline__ void chain_add(float total[4], const float chain[4],
                                          const float weight_scale[2],
                                          const struct x_scales<N> &x_scale, int j)
{
    float2 x = make_float2(1.0f, 1.0f);
    if (GEMM_X_SCALES) x = x_scales_at(x_scale, j);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        float s = weight_scale[q / 2];
        if (GEMM_X_SCALES) s = __fmul_rn(q % 2 ? x.y : x.x, s);
        total[q] = __fmaf_rn(chain[q], s, total[q]);
    }
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
    int lane = threadIdx.x & 31, col = col0 + lane % 4 * 2, n = w.n - col;
    uint16_t *to = (uint16_t *)a.out + (size_t)(w.row + lane / 4) * a.ldo + w.col + col;
    constexpr bool scaled = GEMM_X_SCALES && F != FORMAT_FP8_BLOCK;
    struct x_scales<N> x_scale;
    if (scaled) x_scales_load(x_scale, a, w, 0, 1);
#pragma unroll
    for (int j = 0; j < N / 8; j++, to += (size_t)a.ldo * 8) {
        const float *d = acc + j * 4;
        float v[4];
        float2 x = make_float2(1.0f, 1.0f);
        if (scaled) x = x_scales_at(x_scale, j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = finish<F>(d[i], scale[i / 2]);
            if (scaled) v[i] = __fmul_rn(v[i], i % 2 ? x.y : x.x);
        }
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

/* f32 results: eight lanes write 32 bytes of one row of x.  Of one segment after the other: where
 * there are segments `before`, `out` has their sum, and as long as there are `more`, it gets it. */
template <format_t F, int N>
__device__ __forceinline__ void store_f32(const struct gemm_args &a, const float acc[N / 2],
                                          const float scale[2], const struct work &w, int col0,
                                          int gap, bool before = false, bool more = false)
{
    int lane = threadIdx.x & 31, col = col0 + lane / 4;
    float *to = (float *)a.out + (size_t)(w.row + lane % 4 * 2) * a.ldo + w.col + col;
    bool add = a.out_kind == GEMM_ADD;
    constexpr bool scaled = GEMM_X_SCALES && F != FORMAT_FP8_BLOCK;
    struct x_scales<N> x_scale;
    if (scaled) x_scales_load(x_scale, a, w, 0, 1);
#pragma unroll
    for (int j = 0; j < N / 8; j++, to += (size_t)a.ldo * 8) {
        float old[4];
        bool ok[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ok[i] = j * 8 + lane % 4 * 2 + i % 2 < w.width && col + i / 2 * gap < w.n;
            old[i] = (add || before) && ok[i] ? to[(i % 2 ? a.ldo : 0) + i / 2 * gap] : 0.0f;
        }
        float2 x = make_float2(1.0f, 1.0f);
        if (scaled) x = x_scales_at(x_scale, j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v = before ? __fadd_rn(old[i], acc[j * 4 + i]) : acc[j * 4 + i];
            if (!more) v = finish<F>(v, scale[i / 2]);
            if (scaled) v = __fmul_rn(v, i % 2 ? x.y : x.x);
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
    constexpr bool scaled = GEMM_X_SCALES && F != FORMAT_FP8_BLOCK;
    struct x_scales<N> x_scale;
    if (scaled) x_scales_load(x_scale, a, w, 0, 1);
    bar_sync(barrier, 256); /* `room` has been read */
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float v[4];
        float2 x = make_float2(1.0f, 1.0f);
        if (scaled) x = x_scales_at(x_scale, j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = finish<F>(result[j * 4 + i], scale[i / 2]);
            if (scaled) v[i] = __fmul_rn(v[i], i % 2 ? x.y : x.x);
        }
        if (pair)
            stmatrix_x1_trans(to + j * 1024,
                              pack_bf16x2(silu_times(v[0], v[2]), silu_times(v[1], v[3])));
        else
            stmatrix_x2_trans(to + j * 1024, pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]));
    }
    bar_sync(barrier, 256);
    int piece = lane & 7, row = (threadIdx.x & 255) >> 3;
    uint32_t from = room + row * 128 + ((piece ^ (row & 7)) << 4);
    uint16_t *out = (uint16_t *)a.out + (size_t)(w.row + row) * a.ldo + w.col + col0 + piece * 8;
    for (; row < w.width; row += 32, from += 32 * 128, out += (size_t)32 * a.ldo)
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            int left = w.n - col0 - piece * 8 - slot * 64;
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

/* Results of warp `unit` of pair `p` of the panels; `before`, `more`: as of store_f32. */
template <format_t F, typename S, int N>
__device__ __forceinline__ void store(const struct gemm_args &a, const struct place &at,
                                      const float result[N / 2], const struct work &w,
                                      const struct gemm_weight *w0, const struct gemm_weight *w1,
                                      int p, int unit, bool before = false, bool more = false)
{
    bool pair = a.out_kind == GEMM_SWIGLU;
    int panel = pair ? p : p * 2, col = panel * 64 + unit * 8, row = col + (threadIdx.x & 31) / 4;
    float scale[2] = {row_scale<F>(w0, row, w.n, a.scale_rows),
                      row_scale<F>(w1, pair ? row : row + 64, w.n, a.scale_rows)};
    if (!pair && a.out_kind != GEMM_BF16)
        store_f32<F, N>(a, result, scale, w, col, 64, before, more);
    else if constexpr (S::WGMMA)
        store_lines<F, N, S::NMAX>(a, result, scale, w, panel * 64, pair,
                                   at.smem + S::STAGES * S::STAGE +
                                       (threadIdx.x >> 8) * (2 * S::NMAX * 128));
    else
        store_bf16<F, N>(a, result, scale, w, col, 64, pair);
}

#endif
