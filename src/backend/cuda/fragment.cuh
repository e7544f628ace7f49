/*
 * fragment.cuh - mma.sync m16n8k16 fragments from KV tiles in shared memory.
 *
 * Scores:  A = 16 keys x 16 of head_dim from a K tile, B = q.  Output: A = 16 of head_dim x 16 keys
 *          from a
 * V tile (transposed on the way), B = P.  For E4M3 the elements of a k16 step are permuted alike in
 *                                         both
 * operands, and the 16 output rows too (elem_of_row); neither changes a bit.
 */
#ifndef BACKEND_CUDA_FRAGMENT_CUH
#define BACKEND_CUDA_FRAGMENT_CUH

#include "backend/cuda/kv.cuh"
#include "backend/cuda/ptx.cuh"

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a)
{
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t selector)
{
    uint32_t d;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(a), "r"(selector));
    return d;
}

/* Two E4M3 codes, each sign-extended to 16 bits, to BF16: exact, NaN codes to 480.  Shifted left
 * by 4 the sign and the exponent's and mantissa's 7 bits lie in place, 2^120 too small. */
__device__ __forceinline__ uint32_t e4m3x2_bf16x2(uint32_t x)
{
    uint32_t small = x << 4 & 0x87f087f0u, r;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(small), "r"(0x7b807b80u)); /* 2^120 */
    return r;
}

/* prmt selectors: bytes i and j of a word, sign-extended (8: the sign of a byte). */
#define SIGNED_BYTES(i, j) ((i) | (8 | (i)) << 4 | (j) << 8 | (8 | (j)) << 12)

/* A of k16 steps [2 * pair, 2 * pair + 2) of a K tile. */
template <kv_type_t TYPE>
__device__ __forceinline__ void k_fragments(uint32_t a[2][4], uint32_t tile, int pair)
{
    int lane = threadIdx.x & 31;
    if (TYPE == KV_BF16) {
        ldmatrix_x4(a[0], tile + kv_piece<TYPE>(lane & 15, pair * 4 + (lane >> 4)));
        ldmatrix_x4(a[1], tile + kv_piece<TYPE>(lane & 15, pair * 4 + 2 + (lane >> 4)));
        return;
    }
    uint32_t m[4]; /* keys 0-7, 8-15 of 16 bytes; the same of the next 16 */
    ldmatrix_x4(m, tile + kv_piece<TYPE>(lane & 15, pair * 2 + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i / 2][i % 2] = e4m3x2_bf16x2(prmt(m[i], SIGNED_BYTES(0, 1)));
        a[i / 2][i % 2 + 2] = e4m3x2_bf16x2(prmt(m[i], SIGNED_BYTES(2, 3)));
    }
}

/* First of the two neighbours in head_dim of B register r (0, 1) of k16 step `step`. */
template <kv_type_t TYPE>
__device__ __forceinline__ int q_elem(int step, int r)
{
    int c = threadIdx.x & 3;
    return TYPE == KV_BF16 ? step * 16 + c * 2 + r * 8 : step * 16 + c * 4 + r * 2;
}

/* A of V tiles t and t + 1 (tile_bytes apart), elements [16 * block, 16 * block + 16) of
 * head_dim. */
template <kv_type_t TYPE>
__device__ __forceinline__ void v_fragments(uint32_t a[2][4], uint32_t tile, uint32_t tile_bytes,
                                            int block)
{
    int lane = threadIdx.x & 31;
    if (TYPE == KV_BF16) {
        uint32_t at = kv_piece<TYPE>((lane & 7) + (lane >> 4) * 8, block * 2 + (lane >> 3 & 1));
        ldmatrix_x4_trans(a[0], tile + at);
        ldmatrix_x4_trans(a[1], tile + tile_bytes + at);
        return;
    }
    uint32_t m[4]; /* keys 0-7, 8-15 of tile t; of tile t + 1 */
    ldmatrix_x4_trans(m, tile + (lane >> 4) * tile_bytes + kv_piece<TYPE>(lane & 15, block));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i / 2][i % 2 * 2] = e4m3x2_bf16x2(prmt(m[i], SIGNED_BYTES(0, 2)));
        a[i / 2][i % 2 * 2 + 1] = e4m3x2_bf16x2(prmt(m[i], SIGNED_BYTES(1, 3)));
    }
}

/* The element of head_dim that accumulator row half h (0: c0, c1; 1: c2, c3) of v block `block`
 * is. */
template <kv_type_t TYPE>
__device__ __forceinline__ int elem_of_row(int block, int h)
{
    int g = (threadIdx.x & 31) >> 2;
    return block * 16 + (TYPE == KV_BF16 ? g + h * 8 : g * 2 + h);
}

#endif
