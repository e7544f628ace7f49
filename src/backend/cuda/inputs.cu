/* inputs.cu - see inputs.h.  Bound: latency; it runs once after a commit. */
#include "backend/cuda/inputs.h"
#include "backend/cuda/ptx.cuh"
#include <float.h>

extern "C" __global__ void __launch_bounds__(INPUTS_THREADS)
    input_scales(const __grid_constant__ struct inputs_args a)
{
    __shared__ float of_warp[INPUTS_THREADS / 32];
    float most = 0.0f;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    for (int i = a.first[blockIdx.x] + threadIdx.x; i < a.first[blockIdx.x + 1];
         i += INPUTS_THREADS) {
        float v = *a.from[i];
        if (v > most && v <= FLT_MAX) most = v;
    }
    for (int w = 1; w < 32; w *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, w));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    for (int w = 0; w < INPUTS_THREADS / 32; w++)
        most = fmaxf(most, of_warp[w]);
    if (threadIdx.x == 0) a.out[blockIdx.x] = most;
}
