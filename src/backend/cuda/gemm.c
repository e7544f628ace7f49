#include "backend/cuda/gemm_few.h"
#include "backend/cuda/gemm_shape.h"
#include "backend/cuda/layout_cuda.h"
#include <stdio.h>

_Static_assert((int)GEMM_SIZES == (int)GEMM_KERNELS_MAX, "one kernel a size");

/* As struct shape in gemm.cuh. */
static size_t smem_bytes(format_t f, int size)
{
    if (size == GEMM_STRIP) return 0;
    if (size == GEMM_FEW) return GEMM_FEW_SMEM;
    if (size >= GEMM_PANEL) return (size_t)gemm_panel_ring(size) + 2 * GEMM_STAGES_MAX * 8;
    struct tile_shape t = tile_shape(f);
    bool chains = f == FORMAT_FP8_BLOCK;
    int stage =
        gemm_stage_bytes(gemm_tile_panels(size, chains), gemm_stage_blocks(size, (int)t.elem_bits),
                         (int)t.bytes, gemm_columns(size, chains));
    int out = gemm_out_bytes(size, (int)t.elem_bits, gemm_columns(size, chains));
    return (size_t)(gemm_stages(size, stage, out) * stage + out + GEMM_TABLE_BYTES);
}

/* A scale a matrix is a scale a row with the stride 0: one kernel for both. */
static const char *const names[FORMAT_COUNT] = {
    [FORMAT_BF16] = "bf16",       [FORMAT_FP8_BLOCK] = "fp8_block", [FORMAT_FP8_TENSOR] = "fp8",
    [FORMAT_FP8_CHANNEL] = "fp8", [FORMAT_MXFP8] = "mxfp8",         [FORMAT_NVFP4] = "nvfp4",
    [FORMAT_MXFP4] = "mxfp4",
};
static const char *const sizes[GEMM_SIZES] = {"strip", "small",  "medium", "large",
                                              "panel", "panels", "few"};

uint32_t gemm_x_scales(format_t f)
{
    return f == FORMAT_FP8_BLOCK ? 128 : f == FORMAT_NVFP4 ? UINT32_MAX : 0;
}

/* Sizes from `least` to `most`. */
static err_t open_format(struct kernel *out, struct device *d, format_t f, const char *more,
                         int least, int most, struct err *e)
{
    for (int s = least; s <= most; s++) {
        char name[64];
        snprintf(name, sizeof name, "gemm_%s%s_%s", names[f], more, sizes[s]);
        err_t rc = device_kernel(&out[s], d, name, sizeof(struct gemm_args), smem_bytes(f, s), e);
        if (rc != OK) return rc;
    }
    return OK;
}

err_t gemm_open(struct gemm_kernels *g, struct device *d, uint32_t which, struct err *e)
{
    struct gemm_kernels got = {.n_sms = device_about(d)->n_sms};
    for (format_t f = 0; f < FORMAT_COUNT; f++) {
        if (!(which >> f & 1)) continue;
        err_t rc = open_format(got.kernel[f], d, f, "", 0, GEMM_SIZES - 1, e);
        if (rc == OK && gemm_x_scales(f))
            rc = open_format(got.scaled[f], d, f, "_x", GEMM_SMALL, GEMM_LARGE, e);
        if (rc != OK) return rc;
    }
    *g = got;
    return OK;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* What panels take, and has segments. */
static bool is_linear(const struct gemm_args *a)
{
    return !a->first && a->out_kind != GEMM_SWIGLU && !a->x_scale;
}

static int32_t segment(const struct gemm_args *a)
{
    return is_linear(a) ? gemm_segment(a->n, a->k) : INT32_MAX / TILE_K * TILE_K;
}

/* How much of the chip a dense product keeps busy: what there is to do over the places of all
 * waves, times what a size reaches with all places taken, as a share of LARGE's. */
static double fill(const struct gemm_kernels *g, const struct gemm_args *a, int64_t rows, int size,
                   bool chains)
{
    static const double reach[GEMM_SIZES] = {
        [GEMM_SMALL] = 0.6, [GEMM_MEDIUM] = 0.93, [GEMM_LARGE] = 1.0};
    int64_t panels = gemm_tile_panels(size, chains),
            per_tile = a->out_kind == GEMM_SWIGLU ? panels / 2 : panels;
    int64_t across = ceil_div(a->n, 64 * per_tile),
            tiles = across * ceil_div(rows, gemm_columns(size, chains));
    int64_t places = (int64_t)g->n_sms * gemm_blocks(size);
    return reach[size] * (double)a->n / (double)(64 * per_tile * across) * (double)tiles /
           (double)(ceil_div(tiles, places) * places);
}

static int choose_dense(const struct gemm_kernels *g, format_t f, const struct gemm_args *a,
                        int64_t rows)
{
    bool chains = f == FORMAT_FP8_BLOCK;
    int best = GEMM_SMALL;
    /* From three rows on panels share their decoding among rows better. */
    if (gemm_few_takes(a) && a->n > 256 && (f == FORMAT_BF16 || rows <= 2)) return GEMM_FEW;
    if (is_linear(a)) {
        int64_t segments = ceil_div(a->k, segment(a));
        bool wide = ceil_div(a->n, TILE_ROWS) * segments > 2 * g->n_sms;
        if (rows <= GEMM_STRIP_COLUMNS && (wide || a->n <= 256)) return GEMM_STRIP;
        if (rows <= 32 && !wide) return GEMM_PANEL;
        int64_t tiles = ceil_div(a->n, 2 * TILE_ROWS) * ceil_div(rows, gemm_panel_columns(chains));
        if (segments > 1)
            return a->out_kind == GEMM_F32 && fill(g, a, rows, GEMM_LARGE, chains) >= 0.65
                       ? GEMM_LARGE
                       : GEMM_PANELS;
        if (tiles <= g->n_sms) return GEMM_PANELS;
    }
    if (rows <= GEMM_STRIP_COLUMNS) return GEMM_STRIP;
    if (rows <= gemm_columns(GEMM_SMALL, chains)) return GEMM_SMALL;
    for (int size = GEMM_MEDIUM; size <= GEMM_LARGE; size++)
        if (fill(g, a, rows, size, chains) > fill(g, a, rows, best, chains)) best = size;
    return best;
}

/* As measured (bench/results/cuda-moe-h200.txt). */
static int choose(const struct gemm_kernels *g, format_t f, const struct gemm_args *a, int64_t rows)
{
    bool chains = f == FORMAT_FP8_BLOCK;
    if (!a->first) return choose_dense(g, f, a, rows);
    if (rows * 4 <= a->n_groups) return GEMM_STRIP;
    if (rows <= 24 * (int64_t)a->n_groups) return GEMM_SMALL;
    return rows <= (chains ? 70 : 110) * (int64_t)a->n_groups ? GEMM_MEDIUM : GEMM_LARGE;
}

/* Pieces of `per` rows of weights that a dense linear has. */
static int64_t pieces(const struct gemm_args *a, int per)
{
    int64_t n = 0;
    for (int p = 0; p < a->n_groups; p++)
        n += ceil_div(a->part[p + 1] - a->part[p], per);
    return n;
}

/* Blocks of threads: those that are resident together, of strips no more than there are; of panels
 * one a tile and segment. */
static uint32_t grid(const struct gemm_kernels *g, format_t f, const struct gemm_args *a, int size)
{
    int64_t places = g->n_sms * (size == GEMM_STRIP ? GEMM_STRIP_BLOCKS : gemm_blocks(size));
    if (size >= GEMM_PANEL)
        return (uint32_t)(pieces(a, gemm_panels(size) * TILE_ROWS) * ceil_div(a->k, a->segment) *
                          ceil_div(a->n_rows, gemm_panel_columns(f == FORMAT_FP8_BLOCK)));
    if (size > GEMM_STRIP || a->first) return (uint32_t)places;
    int64_t strips =
        pieces(a, a->out_kind == GEMM_SWIGLU ? 8 : 16) * ceil_div(a->n_rows, GEMM_STRIP_COLUMNS);
    return (uint32_t)(strips < places ? strips : places);
}

static uint32_t threads(format_t f, int size)
{
    if (size == GEMM_STRIP) return GEMM_STRIP_THREADS;
    return (uint32_t)(size < GEMM_PANEL ? gemm_threads(size, (int)tile_shape(f).elem_bits)
                                        : gemm_panel_threads(size));
}

bool gemm_takes(const struct gemm_kernels *g, format_t f, const struct gemm_args *a, int size)
{
    if (size == GEMM_FEW && !gemm_few_takes(a)) return false;
    if (size >= GEMM_PANEL && !is_linear(a)) return false;
    if (size >= GEMM_SMALL && size <= GEMM_LARGE && segment(a) < a->k &&
        (size < GEMM_LARGE || a->out_kind != GEMM_F32))
        return false;
    return (a->x_scale ? g->scaled : g->kernel)[f][size].fn != NULL;
}

void gemm_launch_size(const struct gemm_kernels *g, struct queue *q, format_t f,
                      const struct gemm_args *a, int size, bool programmatic)
{
    CHECK(gemm_takes(g, f, a, size) && a->n_groups >= 1 && a->n_groups <= GEMM_GROUPS_MAX);
    CHECK(a->k >= 1 && a->n >= 1 && a->k % 8 == 0 && a->ldx % 8 == 0 &&
          (a->first || (!a->src && a->n_groups <= GEMM_PARTS_MAX)));
    CHECK(a->out_kind == GEMM_F32 || a->out_kind == GEMM_ADD || a->ldo % 8 == 0);
    struct gemm_args args = *a;
    args.scale_rows = f == FORMAT_FP8_CHANNEL;
    args.segment = segment(a);
    if (!a->first && a->n_groups == 1) args.part[1] = a->n;
    CHECK(a->first ||
          (args.part[a->n_groups] == a->n && (a->n_groups == 1 || a->out_kind == GEMM_F32)));
    struct launch l = {.grid = {grid(g, f, &args, size), 1, 1}, .threads = threads(f, size)};
    if (size == GEMM_FEW)
        l = gemm_few_launch(&args, f, g->n_sms);
    else if (size >= GEMM_PANEL && args.segment < args.k)
        l.cluster = (uint32_t)ceil_div(args.k, args.segment);
    l.programmatic = programmatic;
    queue_launch(q, a->x_scale ? &g->scaled[f][size] : &g->kernel[f][size], l, &args);
}

void gemm_launch(const struct gemm_kernels *g, struct queue *q, format_t f,
                 const struct gemm_args *a, int64_t rows, bool programmatic)
{
    int size = choose(g, f, a, rows);
    if (a->x_scale && size < GEMM_SMALL) size = GEMM_SMALL;
    gemm_launch_size(g, q, f, a, size, programmatic);
}
