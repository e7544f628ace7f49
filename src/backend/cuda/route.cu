/*
 * route.cu - router logits to experts, weights and rows.
 *
 *   route_4, _8, _16   one warp a token, that many experts a thread (e = lane + 32 i); the last
 *                      block to finish makes the plan; few tokens are one block.  A warp's choice
 *                      is some 900 instructions: where there are multiprocessors enough, a block
 *                      has fewer tokens than warps
 *   route_plan         the plan alone, from packed ids; one block
 *
 *   plan     for choices of the kernel's own, which name an expert once a token: for 32 tokens and
 *            an expert one word, a bit a token that chose it (ROUTE_SET); one thread an expert
 *            counts bits, a scan over the experts gives their first rows, and the bits below a
 *            token's give its place.  For any ids: a counting sort, each warp counts its equal
 *            share of the entries by expert (match_any: a leader a value, so no atomics), one
 *            thread an expert adds up the warps and a scan the experts, then the warps walk their
 *            share again and give out rows in order
 *   memory   sets: words and rows before each of them [tokens / 32][n_local], where they do not
 *            fit in turns; counting sort: [warps][n_local]; dynamic
 *   bound    none that matters: 4 n_experts bytes a token; few tokens wait for one load of logits,
 *            top_k picks of two warp reductions and four barriers
 */
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/route.cuh"

extern __shared__ uint32_t smem[];

/* *ticket counts blocks, and in its upper half those with a token whose experts are not distinct.
 */
template <int N>
__device__ __forceinline__ void route(const struct route_args &a)
{
    __shared__ uint32_t seen;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (gridDim.x == 1) {
        route_few<N>(a, a.logits);
        return;
    }
    int warp = threadIdx.x / 32, token = blockIdx.x * a.block_tokens + warp;
    int32_t id[2];
    bool chooses = warp < a.block_tokens && token < a.n_tokens;
    bool distinct = chooses ? top_k<N>(a, a.logits, token, id) : true;
    distinct = __syncthreads_and(distinct);
    if (threadIdx.x == 0) {
        uint32_t one = distinct ? 1 : 0x10001;
        __threadfence();
        seen = atomicAdd(a.ticket, one) + one;
        if ((seen & 0xffff) == gridDim.x) *a.ticket = 0;
    }
    __syncthreads();
    if ((seen & 0xffff) != gridDim.x) return;
    __threadfence();
    if (seen >> 16)
        plan(a, smem);
    else
        plan_sets(a, sets_at(a, smem));
}

#define ROUTE(n)                                                   \
    extern "C" __global__ void __launch_bounds__(ROUTE_THREADS, 1) \
        route_##n(const __grid_constant__ struct route_args a)     \
    {                                                              \
        route<n>(a);                                               \
    }
ROUTE(4)
ROUTE(8)
ROUTE(16)

extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)
    route_plan(const __grid_constant__ struct route_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    plan(a, smem);
}
