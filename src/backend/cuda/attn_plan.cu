/*
 * attn_plan.cu - where attention's blocks of threads find their items: once a step, for all layers.
 *
 *   grid     one warp; 32 blocks a turn and a scan over their items
 */
#include "backend/cuda/attn.cuh"
#include "backend/cuda/ptx.cuh"

extern "C" __global__ void __launch_bounds__(32)
    attn_plan(const __grid_constant__ struct attn_plan_args a)
{
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    int lane = threadIdx.x, before = 0;
    for (int i0 = 0; i0 <= a.n_blocks; i0 += 32) {
        struct attn_span s = {};
        int i = i0 + lane, items = 0;
        if (i < a.n_blocks) {
            struct attn_block b = a.blocks[i];
            int n_keys = b.n <= 0      ? 0
                         : a.of_prefix ? b.prefix * ATTN_CHUNK
                                       : a.pos[b.token + b.n - 1] + 1;
            s = {0, b.token, b.n, b.seq, n_keys, n_keys && !a.of_prefix ? b.prefix : 0};
            items = (chunk_count(n_keys, a.first_chunk) - s.prefix) * a.n_kv_heads;
        }
        int sum = items;
        for (int w = 1; w < 32; w *= 2) {
            int x = __shfl_up_sync(FULL_WARP, sum, w);
            if (lane >= w) sum += x;
        }
        s.first = before + sum - items;
        if (i == a.n_blocks) s.token = (s.first + a.n_runs - 1) / a.n_runs;
        if (i <= a.n_blocks) a.spans[i] = s;
        before += __shfl_sync(FULL_WARP, sum, 31);
    }
}
