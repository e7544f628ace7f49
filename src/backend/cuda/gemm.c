#include "backend/cuda/gemm_shape.h"
#include "backend/cuda/layout_cuda.h"
#include <stdio.h>

_Static_assert((int)GEMM_SIZES == (int)GEMM_KERNELS_MAX, "one kernel a size");

static bool exists(bool chains, int size)
{
    return !(chains && size == GEMM_MEDIUM);
}

/* As struct shape in gemm.cuh. */
static size_t smem_bytes(format_t f, int size)
{
    if (size < GEMM_SMALL) return 0;
    struct tile_shape t = tile_shape(f);
    bool chains = f == FORMAT_FP8_BLOCK;
    int stage = gemm_stage_bytes(gemm_consumers(size) * gemm_pairs(size, chains),
                                 gemm_stage_blocks(size, (int)t.elem_bits), (int)t.bytes,
                                 gemm_columns(size));
    int out = gemm_out_bytes(size, gemm_columns(size));
    return (size_t)(gemm_stages(size, stage, out) * stage + out + GEMM_TABLE_BYTES);
}

/* A scale a matrix is a scale a row with the stride 0: one kernel for both. */
static const char *const names[FORMAT_COUNT] = {
    [FORMAT_BF16] = "bf16",       [FORMAT_FP8_BLOCK] = "fp8_block", [FORMAT_FP8_TENSOR] = "fp8",
    [FORMAT_FP8_CHANNEL] = "fp8", [FORMAT_MXFP8] = "mxfp8",         [FORMAT_NVFP4] = "nvfp4",
    [FORMAT_MXFP4] = "mxfp4",
};
static const char *const sizes[GEMM_SIZES] = {"strip", "small", "medium", "large"};

err_t gemm_open(struct gemm_kernels *g, struct device *d, uint32_t which, struct err *e)
{
    struct gemm_kernels got = {.n_sms = device_about(d)->n_sms};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (int s = 0; s < GEMM_SIZES && which >> f & 1; s++) {
            if (!exists(f == FORMAT_FP8_BLOCK, s)) continue;
            char name[64];
            snprintf(name, sizeof name, "gemm_%s_%s", names[f], sizes[s]);
            err_t rc = device_kernel(&got.kernel[f][s], d, name, sizeof(struct gemm_args),
                                     smem_bytes((format_t)f, s), e);
            if (rc != OK) return rc;
        }
    *g = got;
    return OK;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* How much of the chip a dense product keeps busy: tiles over the places of all waves, times what a
 * size reaches with all places taken, in percent of LARGE. */
static double fill(const struct gemm_kernels *g, const struct gemm_args *a, int64_t rows, int size,
                   bool chains)
{
    static const double reach[GEMM_SIZES] = {
        [GEMM_SMALL] = 0.6, [GEMM_MEDIUM] = 0.93, [GEMM_LARGE] = 1.0};
    int64_t panels = gemm_consumers(size) * gemm_pairs(size, chains),
            per_tile = a->out_kind == GEMM_SWIGLU ? panels / 2 : panels;
    int64_t tiles = ceil_div(a->n, 64 * per_tile) * ceil_div(rows, gemm_columns(size));
    int64_t places = (int64_t)g->n_sms * gemm_blocks(size);
    return reach[size] * (double)tiles / (double)(ceil_div(tiles, places) * places);
}

static int choose_dense(const struct gemm_kernels *g, const struct gemm_args *a, int64_t rows,
                        bool chains)
{
    int best = GEMM_SMALL;
    if (rows <= gemm_columns(GEMM_STRIP)) return GEMM_STRIP;
    if (rows <= gemm_columns(GEMM_SMALL)) return GEMM_SMALL;
    for (int size = GEMM_MEDIUM; size < GEMM_SIZES; size++)
        if (exists(chains, size) && fill(g, a, rows, size, chains) > fill(g, a, rows, best, chains))
            best = size;
    return best;
}

/* As measured (bench/results/cuda-moe-h200.txt). */
static int choose(const struct gemm_kernels *g, format_t f, const struct gemm_args *a, int64_t rows)
{
    bool chains = f == FORMAT_FP8_BLOCK;
    if (!a->first) return choose_dense(g, a, rows, chains);
    if (rows * 4 <= a->n_groups) return GEMM_STRIP;
    if (rows <= 24 * (int64_t)a->n_groups) return GEMM_SMALL;
    return rows <= 110 * (int64_t)a->n_groups && exists(chains, GEMM_MEDIUM) ? GEMM_MEDIUM
                                                                             : GEMM_LARGE;
}

void gemm_launch_size(const struct gemm_kernels *g, struct queue *q, format_t f,
                      const struct gemm_args *a, int size, bool programmatic)
{
    CHECK(g->kernel[f][size].fn && a->n_groups >= 1 && a->n_groups <= GEMM_GROUPS_MAX);
    CHECK(a->k >= 1 && a->n >= 1 && a->k % 8 == 0 && a->ldx % 8 == 0 &&
          (a->first || a->n_groups == 1));
    CHECK(a->out_kind == GEMM_F32 || a->out_kind == GEMM_ADD || a->ldo % 8 == 0);
    struct gemm_args args = *a;
    args.scale_rows = f == FORMAT_FP8_CHANNEL;
    bool strip = size < GEMM_SMALL;
    uint32_t blocks = (uint32_t)(g->n_sms * (strip ? GEMM_STRIP_BLOCKS : gemm_blocks(size)));
    struct launch l = {.grid = {blocks, 1, 1}, .programmatic = programmatic};
    l.threads = strip ? GEMM_STRIP_THREADS : (uint32_t)gemm_threads(size);
    queue_launch(q, &g->kernel[f][size], l, &args);
}

void gemm_launch(const struct gemm_kernels *g, struct queue *q, format_t f,
                 const struct gemm_args *a, int64_t rows, bool programmatic)
{
    gemm_launch_size(g, q, f, a, choose(g, f, a, rows), programmatic);
}
