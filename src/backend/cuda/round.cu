/*
 * round.cu - activations rounded as low-precision GEMMs of other devices round them (format/act.h).
 *
 *   grid     one block a row, 256 threads, 8 neighbouring columns a thread and turn
 *   roles    a group of 16, 32 or 128 columns is 2, 4 or 16 neighbouring threads: its largest
 *            magnitude by shuffles; NVFP4 per token: the row's first, in a pass of its own
 *   bound    bytes: 2 read and 2 written a column
 *
 * Every operation is act.c's, in its order; the results are its bits.
 */
#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"
#include <float.h>

enum { ROUND_THREADS = 256, TURN = ROUND_THREADS * 8 };

/* E4M3 codes of two numbers, decoded: nearest even, saturating. */
__device__ __forceinline__ float2 through_e4m3(float lo, float hi)
{
    uint32_t h;
    float2 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(e4m3_pack(lo, hi)));
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(r.x), "=f"(r.y)
        : "r"(h));
    return r;
}

/* The E2M1 value nearest to x (ties to the even code), saturating; +0 unless x < 0. */
__device__ __forceinline__ float through_e2m1(float x)
{
    float a = fabsf(x);
    float v = a <= 0.25f   ? 0.0f
              : a < 0.75f  ? 0.5f
              : a <= 1.25f ? 1.0f
              : a < 1.75f  ? 1.5f
              : a <= 2.5f  ? 2.0f
              : a < 3.5f   ? 3.0f
              : a <= 5.0f  ? 4.0f
                           : 6.0f;
    return x < 0.0f ? -v : v;
}

__device__ __forceinline__ float e8m0(uint32_t code)
{
    return __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}

/* The code of the least power of two >= x. */
__device__ __forceinline__ uint32_t e8m0_up(float x)
{
    uint32_t u = __float_as_uint(x), exponent = u >> 23 & 0xff, mantissa = u & 0x7fffff;
    if (exponent == 0) return mantissa > 0x400000;
    return exponent + (mantissa > 0 && exponent < 254);
}

/* Largest magnitude of v and of the N neighbouring threads'. */
template <int N>
__device__ __forceinline__ float largest(const float v[8])
{
    float a = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        a = fmaxf(a, fabsf(v[i]));
#pragma unroll
    for (int w = 1; w < N; w *= 2)
        a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, w));
    return a;
}

__device__ __forceinline__ void round_fp8(float v[8], float *scale, int group, bool writes)
{
    float a = fmaxf(1e-10f, largest<16>(v)), m = __fdiv_rn(448.0f, a);
    if (writes && (threadIdx.x & 15) == 0) scale[group] = __fmul_rn(a, 1.0f / 448.0f);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float2 r = through_e4m3(__fmul_rn(v[i], m), __fmul_rn(v[i + 1], m));
        v[i] = r.x, v[i + 1] = r.y;
    }
}

__device__ __forceinline__ void round_mxfp8(float v[8])
{
    uint32_t code = e8m0_up(__fdiv_rn(largest<4>(v), 448.0f));
    float s = e8m0(code), inverse = e8m0(254 - code);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float2 r = through_e4m3(__fmul_rn(v[i], inverse), __fmul_rn(v[i + 1], inverse));
        v[i] = __fmul_rn(r.x, s), v[i + 1] = __fmul_rn(r.y, s);
    }
}

/* g: the inverse tensor scale. */
__device__ __forceinline__ void round_nvfp4(float v[8], float g)
{
    float s = through_e4m3(__fmul_rn(largest<2>(v), __fmul_rn(g, 1.0f / 6.0f)), 0.0f).x;
    float m = __fdiv_rn(1.0f, __fmul_rn(s, __fdiv_rn(1.0f, g)));
    m = m < FLT_MAX ? m : FLT_MAX;
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = __fmul_rn(through_e2m1(__fmul_rn(v[i], m)), s);
}

__device__ __forceinline__ void load(float v[8], const uint16_t *x, int i, int n)
{
    uint4 u = i < n ? *(const uint4 *)(x + i) : make_uint4(0, 0, 0, 0);
    v[0] = bf16_lo(u.x), v[1] = bf16_hi(u.x), v[2] = bf16_lo(u.y), v[3] = bf16_hi(u.y);
    v[4] = bf16_lo(u.z), v[5] = bf16_hi(u.z), v[6] = bf16_lo(u.w), v[7] = bf16_hi(u.w);
}

__device__ __forceinline__ float row_largest(const uint16_t *x, int n)
{
    __shared__ float of_warp[ROUND_THREADS / 32];
    float a = 0.0f, v[8];
    for (int i = threadIdx.x * 8; i - (int)threadIdx.x * 8 < n; i += TURN) {
        load(v, x, i, n);
        a = fmaxf(a, largest<32>(v));
    }
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x / 32] = a;
    __syncthreads();
    for (int w = 0; w < ROUND_THREADS / 32; w++)
        a = fmaxf(a, of_warp[w]);
    return a;
}

extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
    round_rows(const __grid_constant__ struct round_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    size_t row = blockIdx.x;
    if (a.n_rows && row >= *a.n_rows) return;
    const uint16_t *x = a.x + row * a.n;
    float scale = a.kind == ROUND_NVFP4 ? *a.input_scale : 0.0f, g = 0.0f, v[8];
    if (a.kind == ROUND_NVFP4_PER_TOKEN) scale = __fmul_rn(row_largest(x, a.n), 1.0f / 2688.0f);
    if (a.kind == ROUND_NVFP4 || a.kind == ROUND_NVFP4_PER_TOKEN) {
        g = __fdiv_rn(1.0f, scale);
        g = g > FLT_MAX ? FLT_MAX : g;
        if (threadIdx.x == 0) a.scale[row] = scale;
    }
    for (int i = threadIdx.x * 8; i - (int)threadIdx.x * 8 < a.n; i += TURN) {
        load(v, x, i, a.n);
        if (a.kind == ROUND_FP8_BLOCK)
            round_fp8(v, a.scale + row * ((a.n + 127) / 128), i / 128, i < a.n);
        else if (a.kind == ROUND_MXFP8)
            round_mxfp8(v);
        else
            round_nvfp4(v, g);
        bool zero = a.kind == ROUND_NVFP4_PER_TOKEN && !(scale > 0.0f);
        uint4 out = make_uint4(bf16_pack(v[0], v[1]), bf16_pack(v[2], v[3]), bf16_pack(v[4], v[5]),
                               bf16_pack(v[6], v[7]));
        if (i < a.n) *(uint4 *)(a.out + row * a.n + i) = zero ? make_uint4(0, 0, 0, 0) : out;
    }
}
