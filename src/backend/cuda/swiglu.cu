/*
 * swiglu.cu - round(silu(gate) * up) of f32 rows, where no GEMM's epilogue does it.
 *
 *   grid     (rows, ceil(n / 1024)), 256 threads of 4 elements
 *   bound    bytes: 8 read and 2 written an element
 */
#include "backend/cuda/kernels.h"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/ptx.cuh"

enum { SWIGLU_THREADS = 256 };

extern "C" __global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu(const __grid_constant__ struct swiglu_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    size_t row = blockIdx.x;
    int i = (blockIdx.y * SWIGLU_THREADS + threadIdx.x) * 4;
    if (i >= a.n || (a.n_rows && row >= *a.n_rows)) return;
    float4 g = *(const float4 *)(a.gate + row * a.ld + i),
           u = *(const float4 *)(a.up + row * a.ld + i);
    *(uint2 *)(a.out + row * a.n + i) =
        make_uint2(bf16_pack(swiglu_f32(g.x, u.x), swiglu_f32(g.y, u.y)),
                   bf16_pack(swiglu_f32(g.z, u.z), swiglu_f32(g.w, u.w)));
}
