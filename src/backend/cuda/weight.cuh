/*
 * weight.cuh - one lane's weights of a unit (8 rows x 64 k, layout_cuda.h), decoded to BF16.
 *
 * weight_load and weight_prepare take them from shared memory, weight_step gives the two pairs of a
 * k16 step: registers a0 and a2 (or a1 and a3) of a tensor-core A fragment.  Decoding is exact;
 * NVFP4 comes out times 2^-7, which the epilogue takes back.
 */
#ifndef BACKEND_CUDA_WEIGHT_CUH
#define BACKEND_CUDA_WEIGHT_CUH

#include "backend/cuda/layout_cuda.h"
#include "backend/cuda/ptx.cuh"

/* Compile-time twin of tile_shape. */
template <format_t F>
struct weight {
    static constexpr int BITS = F == FORMAT_BF16                         ? 16
                                : F == FORMAT_NVFP4 || F == FORMAT_MXFP4 ? 4
                                                                         : 8;
    static constexpr int GROUP = F == FORMAT_NVFP4                        ? 16
                                 : F == FORMAT_MXFP4 || F == FORMAT_MXFP8 ? 32
                                                                          : 0;
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

/* Both by the low, or the high, half of `b`; one instruction each. */
__device__ __forceinline__ uint32_t mul_bf16x2_low(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.bf16x2 %0, %1, "
        "t; }"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ uint32_t mul_bf16x2_high(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.bf16x2 %0, %1, "
        "t; }"
        : "=r"(d)
        : "r"(a), "r"(b));
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

/* (a & mask) | (b & ~mask), one instruction */
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}

/* What a lane holds of a unit before decoding: words, and scales as pairs of BF16. */
template <format_t F>
struct raw {
    uint32_t q[weight<F>::BITS / 2]; /* the lane's bytes */
    uint32_t x;                      /* 4 bits: see layout_cuda.h */
    uint32_t s0, s1; /* NVFP4: scales x 2^119 of steps 0 and 2, 1 and 3; E8M0: of steps 0-1, 2-3,
                        twice each */
};

/* Where a lane's bytes, and its small scales, lie in a tile; unit 0 .. 7. */
template <format_t F>
__device__ __forceinline__ uint32_t weight_at(int unit, int lane)
{
    return unit * weight<F>::UNIT + lane * (weight<F>::BITS == 4 ? 8 : 16);
}

template <format_t F>
__device__ __forceinline__ uint32_t weight_scale_at(int unit, int lane)
{
    typedef weight<F> W;
    return W::DATA + (unit * 8 + lane / 4) * (64 / (W::GROUP ? W::GROUP : 64));
}

/* Loads one after another, then the arithmetic: shared-memory addresses, weight_at and
 * weight_scale_at past that of a tile. */
template <format_t F>
__device__ __forceinline__ void weight_load_at(struct raw<F> &r, uint32_t p, uint32_t scale)
{
    typedef weight<F> W;
    if (W::BITS == 16) {
        *(uint4 *)&r.q[0] = ld_shared_v4(p);
        *(uint4 *)&r.q[W::BITS / 4] = ld_shared_v4(p + 512);
    } else if (W::BITS == 8) {
        *(uint4 *)&r.q[0] = ld_shared_v4(p);
    } else {
        *(uint2 *)&r.q[0] = ld_shared_v2(p);
    }
    if (F == FORMAT_NVFP4) r.s0 = ld_shared_u32(scale);
    if (W::GROUP == 32) r.s0 = ld_shared_u16(scale);
}

template <format_t F>
__device__ __forceinline__ void weight_load(struct raw<F> &r, uint32_t tile, int unit, int lane)
{
    weight_load_at<F>(r, tile + weight_at<F>(unit, lane), tile + weight_scale_at<F>(unit, lane));
}

/* Formats with E8M0 scales: 2^s of a block and the constant that makes an element's bits a BF16 are
 * one factor as long as s <= 0, so here for all of a warp's blocks. */
template <format_t F>
__device__ __forceinline__ bool weight_small(const struct raw<F> v[2])
{
    return !__any_sync(~0u, (v[0].s0 | v[1].s0) & 0x8080);
}

/* ONE: of weights that are small in the sense above.  The same to weight_step. */
template <format_t F, bool ONE = false>
__device__ __forceinline__ void weight_prepare(struct raw<F> &r)
{
    typedef weight<F> W;
    uint32_t s = r.s0;
    if (W::BITS == 4) r.x = select_bits(0x06030603u, r.q[0], r.q[1]);
    if (F == FORMAT_NVFP4) {
        r.s0 = mul_bf16x2(mul_bf16x2(s << 4 & 0x07F007F0u, BF16X2_2P127), BF16X2_2P112);
        r.s1 = mul_bf16x2(mul_bf16x2(s >> 4 & 0x07F007F0u, BF16X2_2P127), BF16X2_2P112);
    } else if (W::GROUP == 32) {
        constexpr uint32_t more = !ONE ? 0 : W::BITS == 4 ? 126 : 120;
        r.s0 = ((s & 0xff) + more) * 0x00800080u;
        r.s1 = ((s >> 8) + more) * 0x00800080u;
    }
}

/* E2M1 pair i as BF16 x 2^-126: t(i) of layout_cuda.h. */
__device__ __forceinline__ uint32_t e2m1_pair(const uint32_t q[2], uint32_t x, int i)
{
    const uint32_t m = 0x81C081C0u;
    switch (i) {
    case 0: return q[0] & m;
    case 1: return q[0] << 4 & m;
    case 2: return rotl(q[0], 10) & m;
    case 3: return q[1] << 2 & m;
    case 4: return q[1] << 6 & m;
    case 5: return rotl(q[1], 12) & m;
    case 6: return rotl(x, 8) & m;
    default: return rotl(x, 14) & m;
    }
}

/* The two pairs of k16 step `step` (0 .. 3, a constant). */
template <format_t F, bool ONE = false>
__device__ __forceinline__ void weight_step(uint32_t w[2], const struct raw<F> &r, int step)
{
    typedef weight<F> W;
    if (W::BITS == 16) {
        w[0] = r.q[2 * step % (W::BITS / 2)];
        w[1] = r.q[(2 * step + 1) % (W::BITS / 2)];
        return;
    }
    if (W::BITS == 8) {
        uint32_t q = r.q[step % (W::BITS / 2)];
        w[0] = (q << 8 & 0x80008000u) | (q << 4 & 0x07F007F0u);
        w[1] = (q & 0x80008000u) | (q >> 4 & 0x07F007F0u);
    } else {
        w[0] = e2m1_pair(r.q, r.x, 2 * step);
        w[1] = e2m1_pair(r.q, r.x, 2 * step + 1);
    }
    if (!ONE && F != FORMAT_NVFP4) {
        w[0] = mul_bf16x2(w[0], W::BITS == 8 ? BF16X2_2P120 : BF16X2_2P126);
        w[1] = mul_bf16x2(w[1], W::BITS == 8 ? BF16X2_2P120 : BF16X2_2P126);
    }
    if (W::GROUP == 32) {
        w[0] = mul_bf16x2(w[0], step < 2 ? r.s0 : r.s1);
        w[1] = mul_bf16x2(w[1], step < 2 ? r.s0 : r.s1);
    } else if (W::GROUP == 16) {
        uint32_t s = step % 2 ? r.s1 : r.s0;
        w[0] = step < 2 ? mul_bf16x2_low(w[0], s) : mul_bf16x2_high(w[0], s);
        w[1] = step < 2 ? mul_bf16x2_low(w[1], s) : mul_bf16x2_high(w[1], s);
    }
}

/* Operand A of k16 step `step`, of 16 rows: two units of 8. */
template <format_t F, bool ONE = false>
__device__ __forceinline__ void weight_operand(uint32_t f[4], const struct raw<F> r[2], int step)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t w[2];
        weight_step<F, ONE>(w, r[i], step);
        f[i] = w[0];
        f[i + 2] = w[1];
    }
}

#endif
