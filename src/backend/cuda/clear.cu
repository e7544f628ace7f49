/* clear.cu - see clear.h.  Bound: 4,000 GB/s of writes; a page of Qwen3-30B-A3B is 96 pieces of 16 KiB. */
#include "backend/cuda/clear.h"

extern "C" __global__ void __launch_bounds__(CLEAR_THREADS)
    clear_pages(const __grid_constant__ struct clear_args a)
{
    char *at = a.kv + blockIdx.y * a.half_bytes + (uint64_t)a.pages[blockIdx.x] * a.page_bytes;
    for (uint64_t i = threadIdx.x * 16; i < a.page_bytes; i += CLEAR_THREADS * 16)
        *(uint4 *)(at + i) = make_uint4(0, 0, 0, 0);
}
