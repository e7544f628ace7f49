#include "backend/cuda/copy.h"

extern "C" __global__ void __launch_bounds__(COPY_ROWS_THREADS)
    copy_rows(const __grid_constant__ struct copy_rows_args a)
{
    const uint32_t wide = a.width / 16, step = gridDim.x * COPY_ROWS_THREADS;
    const uint64_t all = (uint64_t)a.n * wide;
#pragma unroll 4
    for (uint64_t i = blockIdx.x * COPY_ROWS_THREADS + threadIdx.x; i < all; i += step) {
        uint64_t at = i / wide * a.pitch + i % wide * 16;
        *(uint4 *)(a.dst + at) = *(const uint4 *)(a.src + at);
    }
}
