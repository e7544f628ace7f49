/*
 * weight.cuh - one lane's weights of a unit (8 rows x 64 k, layout_cuda.h), decoded to BF16.
 *
 * w[2 s] and w[2 s + 1] are the two pairs of k16 step s: registers a0 and a2 (or a1 and a3) of a tensor-core
 * A fragment.  Decoding is exact; NVFP4 comes out times 2^-7, which the epilogue takes back.
 */
#ifndef BACKEND_CUDA_WEIGHT_CUH
#define BACKEND_CUDA_WEIGHT_CUH

#include "backend/cuda/layout_cuda.h"
#include <stdint.h>

/* Compile-time twin of tile_shape. */
template <format_t F>
struct weight {
    static constexpr int BITS = F == FORMAT_BF16 ? 16 : F == FORMAT_NVFP4 || F == FORMAT_MXFP4 ? 4 : 8;
    static constexpr int GROUP = F == FORMAT_NVFP4 ? 16 : F == FORMAT_MXFP4 || F == FORMAT_MXFP8 ? 32 : 0;
    static constexpr int DATA = TILE_ROWS * TILE_K * BITS / 8;
    static constexpr int UNIT = DATA / 8;
    static constexpr int TILE = DATA + (GROUP ? TILE_ROWS * TILE_K / (GROUP ? GROUP : 1) : 0);
};

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ uint32_t rotl(uint32_t x, int n)
{
    return __funnelshift_l(x, x, n);
}

#define BF16X2_2P127 0x7F007F00u
#define BF16X2_2P126 0x7E807E80u
#define BF16X2_2P120 0x7B807B80u
#define BF16X2_2P112 0x77807780u

/* Eight pairs of E2M1 as BF16 x 2^-126. */
__device__ __forceinline__ void e2m1_pairs(uint32_t w[8], uint2 q)
{
    const uint32_t m = 0x81C081C0u;
    uint32_t x = (q.x & 0x06030603u) | (q.y & ~0x06030603u);
    w[0] = q.x & m;
    w[1] = q.x << 4 & m;
    w[2] = rotl(q.x, 10) & m;
    w[3] = q.y << 2 & m;
    w[4] = q.y << 6 & m;
    w[5] = rotl(q.y, 12) & m;
    w[6] = rotl(x, 8) & m;
    w[7] = rotl(x, 14) & m;
}

/* Eight pairs of E4M3 as BF16, exact. */
__device__ __forceinline__ void e4m3_pairs(uint32_t w[8], uint4 q)
{
    const uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        uint32_t lo = (word[s] << 8 & 0x80008000u) | (word[s] << 4 & 0x07F007F0u);
        uint32_t hi = (word[s] & 0x80008000u) | (word[s] >> 4 & 0x07F007F0u);
        w[2 * s] = mul_bf16x2(lo, BF16X2_2P120);
        w[2 * s + 1] = mul_bf16x2(hi, BF16X2_2P120);
    }
}

/* Two E8M0 scales (steps 0, 1 and 2, 3) times eight pairs. */
__device__ __forceinline__ void e8m0_scale(uint32_t w[8], uint32_t two)
{
    uint32_t s0 = (two & 0xff) * 0x00800080u, s1 = (two >> 8) * 0x00800080u;
#pragma unroll
    for (int i = 0; i < 8; i++)
        w[i] = mul_bf16x2(w[i], i < 4 ? s0 : s1);
}

/* `tile` in shared memory, unit 0 .. 7. */
template <format_t F>
__device__ __forceinline__ void weight_decode(uint32_t w[8], const char *tile, int unit, int lane)
{
    const char *p = tile + unit * weight<F>::UNIT;
    const char *scale = tile + weight<F>::DATA + (unit * 8 + lane / 4) * (weight<F>::GROUP ? 64 / (weight<F>::GROUP ? weight<F>::GROUP : 1) : 0);
    if (F == FORMAT_BF16) {
        *(uint4 *)&w[0] = *(const uint4 *)(p + lane * 16);
        *(uint4 *)&w[4] = *(const uint4 *)(p + 512 + lane * 16);
    } else if (weight<F>::BITS == 8) {
        e4m3_pairs(w, *(const uint4 *)(p + lane * 16));
        if (F == FORMAT_MXFP8) e8m0_scale(w, *(const uint16_t *)scale);
    } else if (F == FORMAT_MXFP4) {
        e2m1_pairs(w, *(const uint2 *)(p + lane * 8));
#pragma unroll
        for (int i = 0; i < 8; i++)
            w[i] = mul_bf16x2(w[i], BF16X2_2P126);
        e8m0_scale(w, *(const uint16_t *)scale);
    } else {
        uint32_t s = *(const uint32_t *)scale;
        e2m1_pairs(w, *(const uint2 *)(p + lane * 8));
        /* E4M3 scales x 2^119: steps 0 and 2, steps 1 and 3 */
        uint32_t s02 = mul_bf16x2(mul_bf16x2(s << 4 & 0x07F007F0u, BF16X2_2P127), BF16X2_2P112);
        uint32_t s13 = mul_bf16x2(mul_bf16x2(s >> 4 & 0x07F007F0u, BF16X2_2P127), BF16X2_2P112);
#pragma unroll
        for (int i = 0; i < 8; i++)
            w[i] = mul_bf16x2(w[i], __byte_perm(i / 2 % 2 ? s13 : s02, 0, i < 4 ? 0x1010 : 0x3232));
    }
}

#endif
