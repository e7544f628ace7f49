/*
 * kv.cuh - where an element lies in a KV tile (kernels.h says how a tile looks).
 */
#ifndef BACKEND_CUDA_KV_CUH
#define BACKEND_CUDA_KV_CUH

#include "backend/cuda/kernels.h"

template <kv_type_t TYPE>
__device__ __forceinline__ constexpr uint32_t kv_row_bytes(void)
{
    return TYPE == KV_BF16 ? 128 : 64;
}

/* Byte of piece `piece` (16 bytes, counted along the whole head) of row `row` in a tile. */
template <kv_type_t TYPE>
__device__ __forceinline__ uint32_t kv_piece(uint32_t row, uint32_t piece)
{
    if (TYPE == KV_BF16)
        return (piece >> 3) * (KV_ROWS * 128) + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
    return (piece >> 2) * (KV_ROWS * 64) + row * 64 + (((piece & 3) ^ (row >> 1 & 3)) << 4);
}

template <kv_type_t TYPE>
__device__ __forceinline__ uint32_t kv_elem(uint32_t row, uint32_t d)
{
    if (TYPE == KV_BF16) return kv_piece<TYPE>(row, d >> 3) + (d & 7) * 2;
    return kv_piece<TYPE>(row, d >> 4) + (d & 15);
}

#endif
