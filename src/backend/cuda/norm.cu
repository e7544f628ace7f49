/*
 * norm.cu - residual stream and RMSNorm, fused with what produces the residual.
 *
 *   grid     one block a row, NORM_THREADS threads, 8 elements a thread and turn
 *   memory   [NORM_MAX] f32 of the row in shared memory, zeros behind it up to whole blocks of the
 *            lane chains; TURNS * 8 of each in registers
 *   roles    all: norm weights before the wait; make x, write it, keep it; half a warp: the 16 lane
 *            chains of the sum of squares (16 banks a step: no conflicts), the next 16 links'
 *            elements on their way while it adds; all: scale and round
 *   bound    bytes: (4 to 8 + 2) n a row, COMBINE 2 n top_k more.  At few rows the lane chain of n
 *            / 16 FMAs is what counts: 0.3 us for n = 2048, the price of the CPU's bits.
 */
#include "backend/cuda/kernels.h"
#include "backend/cuda/norm.cuh"
#include "backend/cuda/ptx.cuh"

enum {
    NORM_THREADS = 256,
    TURN = NORM_THREADS * 8,
    AHEAD = 8 /* expert rows in flight */
};

/* The experts' sum at columns [i, i + 8); false: no expert contributes. */
__device__ __forceinline__ bool combine(struct eight *out, const struct norm_args &a,
                                        const int32_t *row_of, const float *weight, int i)
{
    bool any = false;
    for (int j0 = 0; j0 < a.top_k; j0 += AHEAD) {
        uint4 r[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) /* where there is no row, row 0: never added */
            if (j0 + u < a.top_k)
                r[u] = *(const uint4 *)(a.expert + (size_t)max(row_of[j0 + u], 0) * a.n + i);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (j0 + u >= a.top_k || row_of[j0 + u] < 0) continue;
            struct eight x = eight_of(r[u]);
            float w = weight[j0 + u];
#pragma unroll
            for (int e = 0; e < 8; e++)
                out->f[e] = any ? __fmaf_rn(w, x.f[e], out->f[e]) : __fmul_rn(w, x.f[e]);
            any = true;
        }
    }
    return any;
}

template <norm_source_t SOURCE>
__device__ __forceinline__ struct eight residual(const struct norm_args &a, size_t row, int i,
                                                 const int32_t *row_of, const float *weight)
{
    struct eight v = {};
    if (SOURCE == NORM_EMBED) {
        int32_t id = a.ids[row];
        if (id >= 0 && id < a.vocab) v = load_bf16(a.embed + (size_t)id * a.n + i);
        return v;
    }
    v = load_f32(a.x + row * a.n + i);
    struct eight y;
    bool add = SOURCE == NORM_ADD;
    if (SOURCE == NORM_ADD) y = load_f32(a.y + row * a.n + i);
    if (SOURCE == NORM_COMBINE) add = combine(&y, a, row_of, weight, i);
    if (add)
#pragma unroll
        for (int e = 0; e < 8; e++)
            v.f[e] = __fadd_rn(v.f[e], y.f[e]);
    return v;
}

/* TURNS * TURN >= a.n. */
template <norm_source_t SOURCE, int TURNS>
__device__ __forceinline__ void norm_row(const struct norm_args &a)
{
    __shared__ __align__(16) float s[TURNS * TURN];
    __shared__ int32_t row_of[ROUTE_TOP_K_MAX];
    __shared__ float weight[ROUTE_TOP_K_MAX];
    __shared__ float inverse;
    griddepcontrol_launch_dependents();
    uint4 w[TURNS];
    struct eight v[TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        int i = t * TURN + threadIdx.x * 8;
        if (i < a.n && a.out) w[t] = *(const uint4 *)(a.w + i);
    }
    griddepcontrol_wait();
    size_t row = SOURCE == NORM_PLAIN && a.pick ? a.pick[blockIdx.x] : blockIdx.x;
    if (SOURCE == NORM_COMBINE) {
        if (threadIdx.x < a.top_k) {
            row_of[threadIdx.x] = a.row_of[row * a.top_k + threadIdx.x];
            weight[threadIdx.x] = bf16_lo(a.packed[row * a.top_k + threadIdx.x]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        int i = t * TURN + threadIdx.x * 8;
        v[t] = {};
        if (i < a.n) {
            v[t] = residual<SOURCE>(a, row, i, row_of, weight);
            if (SOURCE != NORM_PLAIN) store_f32(a.x + row * a.n + i, v[t]);
        }
        store_f32(s + i, v[t]);
    }
    if (!a.out) return;
    __syncthreads();
    if (threadIdx.x < 32) {
        float inv = inverse_rms(s, a.n, a.eps);
        if (threadIdx.x == 0) inverse = inv;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        int i = t * TURN + threadIdx.x * 8;
        if (i >= a.n) continue;
        struct eight x = v[t], f = eight_of(w[t]);
#pragma unroll
        for (int e = 0; e < 8; e++)
            x.f[e] = __fmul_rn(__fmul_rn(x.f[e], inverse), f.f[e]);
        *(uint4 *)(a.out + (size_t)blockIdx.x * a.n + i) =
            make_uint4(bf16_pack(x.f[0], x.f[1]), bf16_pack(x.f[2], x.f[3]),
                       bf16_pack(x.f[4], x.f[5]), bf16_pack(x.f[6], x.f[7]));
    }
}

/* Rows up to 2,048, 4,096 and 8,192 columns. */
#define NORM_OF(name, source, turns)                               \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS)     \
        name##_##turns(const __grid_constant__ struct norm_args a) \
    {                                                              \
        norm_row<source, turns>(a);                                \
    }
#define NORM(name, source) \
    NORM_OF(name, source, 1) NORM_OF(name, source, 2) NORM_OF(name, source, 4)
NORM(norm_plain, NORM_PLAIN)
NORM(norm_embed, NORM_EMBED)
NORM(norm_add, NORM_ADD)
NORM(norm_combine, NORM_COMBINE)
