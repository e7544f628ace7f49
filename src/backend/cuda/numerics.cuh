/*
 * numerics.cuh - the CPU's scalar arithmetic on the device, operation by operation.
 *
 * What backend.h promises for the CPU holds here too: lane sums (element i belongs to lane i % 16,
 * chains in index order, then lane j + 8 to j, 4, 2, 1), our own exp, nearest-even rounding.  Every
 * operation is written with a rounding intrinsic, so the compiler fuses nothing.  A NaN's payload
 * and sign are the only things that may differ from the CPU.
 */
#ifndef BACKEND_CUDA_NUMERICS_CUH
#define BACKEND_CUDA_NUMERICS_CUH

#include <stdint.h>

#define FULL_WARP 0xffffffffu
#define MINUS_INF __int_as_float(0xff800000)

__device__ __forceinline__ float bf16_f32(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

/* Of two in one word: the low half is the first element. */
__device__ __forceinline__ float bf16_lo(uint32_t u)
{
    return __uint_as_float(u << 16);
}

__device__ __forceinline__ float bf16_hi(uint32_t u)
{
    return __uint_as_float(u & 0xffff0000u);
}

__device__ __forceinline__ uint32_t bf16_pack(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

__device__ __forceinline__ uint16_t f32_bf16(float x)
{
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

/* Nearest even, saturating at 448, NaN 0x7f; lo in the low byte. */
__device__ __forceinline__ uint16_t e4m3_pack(float lo, float hi)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}

/* v_exp's polynomial: 2^n * *p = e^y, where the low bits of the result hold n. */
__device__ __forceinline__ float exp_parts(float y, float *p)
{
    const float magic = 12582912.0f;
    float t = __fmaf_rn(y, 1.44269504f, magic);
    float n = __fsub_rn(t, magic);
    float r = __fmaf_rn(n, -0.693359375f, y);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    *p = __fmaf_rn(1.0f / 720.0f, r, 1.0f / 120.0f);
    *p = __fmaf_rn(*p, r, 1.0f / 24.0f);
    *p = __fmaf_rn(*p, r, 1.0f / 6.0f);
    *p = __fmaf_rn(*p, r, 0.5f);
    *p = __fmaf_rn(*p, r, 1.0f);
    *p = __fmaf_rn(*p, r, 1.0f);
    return t;
}

/*
 * kernels.inc, v_exp.  The CPU clamps x to [-87.3, 88] first and afterwards replaces what lay below
 * by 0; so below the clamp changes no result and is left out, and where x <= 0 is known, all of it.
 */
template <bool NOT_POSITIVE>
__device__ __forceinline__ float exp_cpu(float x)
{
    float p, t = exp_parts(NOT_POSITIVE ? x : (88.0f < x ? 88.0f : x), &p);
    p = __fmul_rn(p, __uint_as_float((__float_as_uint(t) << 23) + 0x3f800000u));
    return x < -87.3f ? 0.0f : p;
}

/* The same for x <= 0 that is no NaN (which gives some number): 2^n joins the exponent of p,
 * which is in (0.7, 1.5), and above 1 where n = -126. */
__device__ __forceinline__ float exp_weight(float x)
{
    float p, t = exp_parts(x, &p);
    p = __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
    return x < -87.3f ? 0.0f : p;
}

/* NaN if one is. */
__device__ __forceinline__ float max_nan(float a, float b)
{
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* The tree of v_sum over 16 neighbouring threads, one lane each; all 16 get the result. */
__device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int w = 8; w; w /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, w, 16));
    return x;
}

/* gate / (1 + exp(-gate)) * up, not rounded to BF16. */
__device__ __forceinline__ float swiglu_f32(float gate, float up)
{
    float d = __fadd_rn(1.0f, exp_cpu<false>(__fsub_rn(0.0f, gate)));
    return __fmul_rn(__fdiv_rn(gate, d), up);
}

#endif
