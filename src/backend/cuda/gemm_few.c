#include "backend/cuda/gemm_few.h"
#include "backend/cuda/layout_cuda.h"

bool gemm_few_takes(const struct gemm_args *a)
{
    return !a->first && a->out_kind != GEMM_SWIGLU && !a->x_scale && a->n_rows <= GEMM_FEW_ROWS &&
           a->k <= GEMM_FEW_X / 2 && gemm_few_x_bytes(a->k, a->n_rows) <= GEMM_FEW_X;
}

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

/* Blocks of two warps as long as two blocks a multiprocessor have room for all strips: of three q,
 * k and v take 0.9 us longer.  Else as many warps as fit, and each has several strips. */
struct launch gemm_few_launch(const struct gemm_args *a, format_t f, int n_sms)
{
    int strips = 0, block = (int)tile_shape(f).bytes / 4,
        segments = a->segment < a->k ? ceil_div(a->k, a->segment) : 1;
    for (int p = 0; p < a->n_groups; p++)
        strips += ceil_div(a->part[p + 1] - a->part[p], 16);
    int x = gemm_few_x_bytes(a->k, a->n_rows),
        most = (GEMM_FEW_SMEM - x) / (GEMM_FEW_CHUNKS * 2 * block);
    int warps_max = strips * segments > 4 * n_sms ? GEMM_FEW_WARPS : segments > 2 ? segments : 2;
    if (most > warps_max) most = warps_max;
    most /= segments;
    int teams = ceil_div(strips, n_sms) < most ? ceil_div(strips, n_sms) : most,
        warps = teams * segments, grid = ceil_div(strips, teams);
    int chunk = gemm_few_chunk(a->k, a->segment, a->n_rows, warps, block);
    return (struct launch){.grid = {(uint32_t)(grid < 2 * n_sms ? grid : 2 * n_sms), 1, 1},
                           .threads = (uint32_t)warps * 32,
                           .smem = (uint32_t)(warps * GEMM_FEW_CHUNKS * chunk * block + x)};
}
