/*
 * norm.cu - residual stream and RMSNorm, fused with what produces the residual.
 *
 *   grid     one block a row, NORM_THREADS threads, 8 elements a thread and turn
 *   memory   [NORM_MAX] f32 of the row in shared memory
 *   roles    all: make x, write it, keep it in shared memory; half a warp: the 16 lane chains of
 *            the sum of squares (16 banks a step: no conflicts); all: scale and round
 *   bound    bytes: (4 to 8 + 2) n a row, COMBINE 2 n top_k more.  At few rows the lane chain of n
 *            / 16 FMAs is what counts: 0.3 us for n = 2048, the price of the CPU's bits.
 */
#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"

enum { NORM_THREADS = 256, TOP_K_MAX = 64 };

struct eight {
    float f[8];
};

__device__ __forceinline__ struct eight load_f32(const float *p)
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store_f32(float *p, const struct eight &v)
{
    ((float4 *)p)[0] = make_float4(v.f[0], v.f[1], v.f[2], v.f[3]);
    ((float4 *)p)[1] = make_float4(v.f[4], v.f[5], v.f[6], v.f[7]);
}

__device__ __forceinline__ struct eight load_bf16(const uint16_t *p)
{
    uint4 u = *(const uint4 *)p;
    return {{bf16_lo(u.x), bf16_hi(u.x), bf16_lo(u.y), bf16_hi(u.y), bf16_lo(u.z), bf16_hi(u.z),
             bf16_lo(u.w), bf16_hi(u.w)}};
}

/* The experts' sum at columns [i, i + 8); false: no expert contributes. */
__device__ __forceinline__ bool combine(struct eight *out, const struct norm_args &a,
                                        const int32_t *row_of, const float *weight, int i)
{
    bool any = false;
#pragma unroll 4
    for (int j = 0; j < a.top_k; j++) {
        if (row_of[j] < 0) continue;
        struct eight r = load_bf16(a.expert + (size_t)row_of[j] * a.n + i);
#pragma unroll
        for (int e = 0; e < 8; e++)
            out->f[e] =
                any ? __fmaf_rn(weight[j], r.f[e], out->f[e]) : __fmul_rn(weight[j], r.f[e]);
        any = true;
    }
    return any;
}

__device__ __forceinline__ float inverse_rms(const float *row, int n, float eps)
{
    float acc = 0.0f;
#pragma unroll 16
    for (int i = threadIdx.x & 15; i < n; i += 16)
        acc = __fmaf_rn(row[i], row[i], acc);
    float mean = __fdiv_rn(lanes_sum(acc), (float)n);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
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

template <norm_source_t SOURCE>
__device__ __forceinline__ void norm_row(const struct norm_args &a)
{
    __shared__ __align__(16) float s[NORM_MAX];
    __shared__ int32_t row_of[TOP_K_MAX];
    __shared__ float weight[TOP_K_MAX];
    __shared__ float inverse;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    size_t row = SOURCE == NORM_PLAIN && a.pick ? a.pick[blockIdx.x] : blockIdx.x;
    if (SOURCE == NORM_COMBINE) {
        if (threadIdx.x < a.top_k) {
            row_of[threadIdx.x] = a.row_of[row * a.top_k + threadIdx.x];
            weight[threadIdx.x] = bf16_lo(a.packed[row * a.top_k + threadIdx.x]);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x * 8; i < a.n; i += NORM_THREADS * 8) {
        struct eight v = residual<SOURCE>(a, row, i, row_of, weight);
        store_f32(s + i, v);
        if (SOURCE != NORM_PLAIN) store_f32(a.x + row * a.n + i, v);
    }
    if (!a.out) return;
    __syncthreads();
    if (threadIdx.x < 32) {
        float inv = inverse_rms(s, a.n, a.eps);
        if (threadIdx.x == 0) inverse = inv;
    }
    __syncthreads();
    for (int i = threadIdx.x * 8; i < a.n; i += NORM_THREADS * 8) {
        struct eight v = load_f32(s + i), w = load_bf16(a.w + i);
#pragma unroll
        for (int e = 0; e < 8; e++)
            v.f[e] = __fmul_rn(__fmul_rn(v.f[e], inverse), w.f[e]);
        *(uint4 *)(a.out + (size_t)blockIdx.x * a.n + i) =
            make_uint4(bf16_pack(v.f[0], v.f[1]), bf16_pack(v.f[2], v.f[3]),
                       bf16_pack(v.f[4], v.f[5]), bf16_pack(v.f[6], v.f[7]));
    }
}

#define NORM(name, source)                                     \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS) \
        name(const __grid_constant__ struct norm_args a)       \
    {                                                          \
        norm_row<source>(a);                                   \
    }
NORM(norm_plain, NORM_PLAIN)
NORM(norm_embed, NORM_EMBED)
NORM(norm_add, NORM_ADD)
NORM(norm_combine, NORM_COMBINE)
