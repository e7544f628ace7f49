/*
 * norm.cuh - eight elements a thread, and a row's norm, as norm.cu and norm_route.cu do them.
 */
#ifndef BACKEND_CUDA_NORM_CUH
#define BACKEND_CUDA_NORM_CUH

#include "backend/cuda/numerics.cuh"

enum { CHAIN = 16 /* links of a lane's chain whose elements are loaded at once */ };

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

__device__ __forceinline__ struct eight eight_of(uint4 u)
{
    return {{bf16_lo(u.x), bf16_hi(u.x), bf16_lo(u.y), bf16_hi(u.y), bf16_lo(u.z), bf16_hi(u.z),
             bf16_lo(u.w), bf16_hi(u.w)}};
}

__device__ __forceinline__ struct eight load_bf16(const uint16_t *p)
{
    return eight_of(*(const uint4 *)p);
}

/* Of `row`, which has zeros behind it: an FMA of 0 leaves a sum of squares as it is. */
__device__ __forceinline__ float inverse_rms(const float *row, int n, float eps)
{
    float acc = 0.0f, next[CHAIN];
    row += threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < CHAIN; i++)
        next[i] = row[i * 16];
    for (int i0 = 0; i0 < n; i0 += CHAIN * 16) {
        float x[CHAIN];
#pragma unroll
        for (int i = 0; i < CHAIN; i++)
            x[i] = next[i];
        if (i0 + CHAIN * 16 < n)
#pragma unroll
            for (int i = 0; i < CHAIN; i++)
                next[i] = row[i0 + (CHAIN + i) * 16];
#pragma unroll
        for (int i = 0; i < CHAIN; i++)
            acc = __fmaf_rn(x[i], x[i], acc);
    }
    float mean = __fdiv_rn(lanes_sum(acc), (float)n);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

#endif
