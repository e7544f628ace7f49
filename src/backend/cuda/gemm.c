#include "backend/cuda/gemm_shape.h"
#include "backend/cuda/layout_cuda.h"
#include <stdio.h>

/* As struct shape in gemm.cuh. */
static size_t smem_bytes(format_t f, bool large)
{
    struct tile_shape t = tile_shape(f);
    int stage = gemm_stage_bytes(large && f != FORMAT_FP8_BLOCK ? 4 : 2, gemm_stage_blocks(large, (int)t.elem_bits),
                                 (int)t.bytes, large ? GEMM_LARGE_N : GEMM_SMALL_N);
    return (size_t)(gemm_stages(large, stage) * stage + 2 * GEMM_STAGING + GEMM_TABLE_BYTES);
}

/* One scale for a matrix is a kernel's one scale a row with the stride 0. */
static const char *const names[FORMAT_COUNT][2] = {
    [FORMAT_BF16] = {"gemm_bf16_small", "gemm_bf16_large"},
    [FORMAT_FP8_BLOCK] = {"gemm_fp8_block_small", "gemm_fp8_block_large"},
    [FORMAT_FP8_TENSOR] = {"gemm_fp8_small", "gemm_fp8_large"},
    [FORMAT_FP8_CHANNEL] = {"gemm_fp8_small", "gemm_fp8_large"},
    [FORMAT_MXFP8] = {"gemm_mxfp8_small", "gemm_mxfp8_large"},
    [FORMAT_NVFP4] = {"gemm_nvfp4_small", "gemm_nvfp4_large"},
    [FORMAT_MXFP4] = {"gemm_mxfp4_small", "gemm_mxfp4_large"},
};

err_t gemm_open(struct gemm_kernels *g, struct device *d, uint32_t which, struct err *e)
{
    struct gemm_kernels got = {.n_sms = device_about(d)->n_sms};
    for (int f = 0; f < FORMAT_COUNT; f++) {
        if (!(which >> f & 1)) continue;
        int per_sm = 0;
        err_t rc = device_kernel(&got.small[f], d, names[f][0], sizeof(struct gemm_args), smem_bytes(f, false), e);
        if (rc == OK) rc = device_kernel(&got.large[f], d, names[f][1], sizeof(struct gemm_args), smem_bytes(f, true), e);
        if (rc == OK) rc = device_occupancy(&per_sm, d, &got.small[f], GEMM_THREADS, e);
        if (rc != OK) return rc;
        CHECK(per_sm >= 1);
        got.small_per_sm[f] = (uint32_t)per_sm;
    }
    *g = got;
    return OK;
}

void gemm_launch(const struct gemm_kernels *g, struct queue *q, format_t f, const struct gemm_args *a, int64_t rows,
                 bool programmatic)
{
    CHECK(g->small[f].fn && a->n_groups >= 1 && a->n_groups <= GEMM_GROUPS_MAX && a->k >= 1 && a->n >= 1 && a->k % 8 == 0 && a->ldx % 8 == 0);
    CHECK((a->out_kind == GEMM_F32 || a->out_kind == GEMM_ADD || a->ldo % 8 == 0) && (a->first || a->n_groups == 1));
    struct gemm_args args = *a;
    args.scale_rows = f == FORMAT_FP8_CHANNEL;
    bool large = rows > 24 * (int64_t)a->n_groups;
    uint32_t blocks = (uint32_t)g->n_sms * (large ? 1 : g->small_per_sm[f]);
    queue_launch(q, large ? &g->large[f] : &g->small[f],
                 (struct launch){.grid = {blocks, 1, 1}, .threads = GEMM_THREADS, .programmatic = programmatic}, &args);
}
