#include "backend/cuda/copy.h"

enum { WIDE = COPY_PIECE / (COPY_THREADS * 16) };

extern "C" __global__ void __launch_bounds__(COPY_THREADS)
    copy_pieces(const __grid_constant__ struct copy_args a)
{
    struct copy_piece p = a.pieces[blockIdx.x];
    char *dst = (char *)p.dst;
    const char *src = (const char *)p.src;
    uint32_t done = 0;
    if (((p.dst | p.src) & 15) == 0) {
        uint32_t n = p.bytes / 16;
        uint4 v[WIDE]; /* all loads are in flight before the first store */
#pragma unroll
        for (int i = 0; i < WIDE; i++)
            if (threadIdx.x + i * COPY_THREADS < n)
                v[i] = __ldcs((const uint4 *)src + threadIdx.x + i * COPY_THREADS);
#pragma unroll
        for (int i = 0; i < WIDE; i++)
            if (threadIdx.x + i * COPY_THREADS < n)
                __stcs((uint4 *)dst + threadIdx.x + i * COPY_THREADS, v[i]);
        done = n * 16;
    }
    for (uint32_t i = done + threadIdx.x; i < p.bytes; i += COPY_THREADS)
        dst[i] = src[i];
}
