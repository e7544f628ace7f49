/*
 * rope.cuh - a head's norm and rotation by half a warp: thread j holds elements j, j + 16, ...,
 * which are lane j of the norm's sum and both partners of the half-split rotation.
 */
#ifndef BACKEND_CUDA_ROPE_CUH
#define BACKEND_CUDA_ROPE_CUH

#include "backend/cuda/kv.cuh"
#include "backend/cuda/numerics.cuh"

/* All 32 threads must come here, whatever their heads are. */
template <int E>
__device__ __forceinline__ float head_rms(const float x[E], float eps)
{
    float acc = 0.0f;
#pragma unroll
    for (int i = 0; i < E; i++)
        acc = __fmaf_rn(x[i], x[i], acc);
    float mean = __fdiv_rn(lanes_sum(acc), (float)(E * 16));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

template <int E>
__device__ __forceinline__ void norm_rotate(float x[E], float inv, const float w[E],
                                            const float cs[E / 2], const float sn[E / 2])
{
#pragma unroll
    for (int i = 0; i < E; i++)
        x[i] = __fmul_rn(__fmul_rn(x[i], inv), w[i]);
#pragma unroll
    for (int i = 0; i < E / 2; i++) {
        float a = x[i], b = x[i + E / 2];
        x[i] = __fmaf_rn(a, cs[i], -__fmul_rn(b, sn[i]));
        x[i + E / 2] = __fmaf_rn(b, cs[i], __fmul_rn(a, sn[i]));
    }
}

template <kv_type_t TYPE>
__device__ __forceinline__ void write_elem(char *at, float x, float scale)
{
    if (TYPE == KV_BF16)
        *(uint16_t *)at = f32_bf16(x);
    else
        *(uint8_t *)at = (uint8_t)e4m3_pack(__fdiv_rn(x, scale), 0.0f);
}

template <kv_type_t TYPE, int E>
__device__ __forceinline__ void write_kv(char *tile, uint32_t row, const float x[E], float scale)
{
    int lane = threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < E; i++) {
        write_elem<TYPE>(tile + kv_elem<TYPE>(row, lane + 16 * i), x[i], scale);
    }
}

#endif
