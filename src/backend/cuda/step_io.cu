/*
 * step_io.cu - see step_io.h.
 *
 *   grid     upload: any; download: a warp a row
 *   bound    the bus: 50 GB/s, about 2 us to the first byte
 */
#include "backend/cuda/step_io.h"

extern "C" __global__ void __launch_bounds__(STEP_IO_THREADS)
    step_upload(const __grid_constant__ struct step_upload_args a)
{
    uint32_t thread = blockIdx.x * STEP_IO_THREADS + threadIdx.x;
    uint32_t threads = gridDim.x * STEP_IO_THREADS, before = 0;
    for (int p = 0; p < a.n_pieces; p++) { /* begins with the thread after the last piece's end */
        const struct step_piece &s = a.pieces[p];
        uint32_t first = (thread + threads - before % threads) % threads;
        for (uint32_t i = first; i < s.units; i += threads)
            ((uint4 *)s.dst)[i] = ((const uint4 *)s.src)[i];
        before += s.units;
    }
    for (uint32_t i = thread; i < (uint32_t)a.n_ids; i += threads) {
        int32_t id = a.host_ids[i];
        a.ids[i] = id >= 0 ? id : a.drawn[~id];
    }
}

extern "C" __global__ void __launch_bounds__(STEP_IO_THREADS)
    step_download(const __grid_constant__ struct step_download_args a)
{
    int32_t row = blockIdx.x * (STEP_IO_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (row >= a.n) return;
    const struct sample_result *from = a.results + row;
    struct sample_result *to = a.host + row;
    if (lane == 0) *(uint4 *)to = *(const uint4 *)from; /* id, logprob, finite, n_top */
    for (int32_t i = lane; i < from->n_top; i += 32) {
        to->top_ids[i] = from->top_ids[i];
        to->top_logprobs[i] = from->top_logprobs[i];
    }
}
