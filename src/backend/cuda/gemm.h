/*
 * gemm.h - grouped matrix products on the tensor cores; a dense linear is one group.
 *
 *     out[row][n] = sum over k of x[src[row]][k] * w[n][k]       for the rows of each group
 *
 * Rows are sorted by group (expert): group g has rows first[g] .. first[g + 1], read on the device.
 * Weights are tiles of layout_cuda.h in any format, x is BF16.
 *
 *     struct gemm_kernels g;
 *     if (gemm_open(&g, device, 1u << FORMAT_NVFP4, e) != OK) ...
 *     gemm_launch(&g, queue, FORMAT_NVFP4, &args, rows, true);
 *
 * The bits of a row do not depend on the other rows, on their number, or on the kernel chosen:
 * every output is one chain of bf16 tensor-core steps of 16 k in ascending order in f32
 * (FP8 with 128 x 128 scales: chains of 128 k, total = fma(chain, scale, total) from 0).  Of a
 * dense linear (no `first`, not SWIGLU, no x_scale) that starts anew every gemm_segment(n, k) of k,
 * and the segments are added in f32 in order: so all multiprocessors can share a product of few
 * rows.  Then
 *
 *     v = chain * 2^7 (NVFP4) * scale    f32, one rounding a product; scale: the tensor scale
 *                                        (NVFP4, FP8 tensor) or the row's (FP8 channel)
 *     GEMM_BF16    out = round(v)
 *     GEMM_F32     out = v
 *     GEMM_ADD     out += v                                        f32
 *     GEMM_SWIGLU  out = round(silu(gate) * up)   gate and up from the two matrices of a group
 *
 * silu(g) = g * rcp(1 + ex2(-g * log2 e)) with the chip's approximate ex2 and rcp (2 ulp).
 * k is a multiple of 8; x is not read past it.
 *
 * x_scale: f32 factors of rows of x that were rounded (format/act.h), by kernels of their own.  FP8
 * with 128 x 128 scales: one a row and chain, whose scale is x's times the weight's, rounded once.
 * NVFP4: one a row, by which v is multiplied last.  The other formats take none.
 */
#ifndef BACKEND_CUDA_GEMM_H
#define BACKEND_CUDA_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#define GEMM_GROUPS_MAX 512
#define GEMM_PARTS_MAX  4

/* k of a segment of a dense linear with n rows of weights: a multiple of 128; at most
 * GEMM_SEGMENTS_MAX of them. */
enum { GEMM_SEGMENTS_MAX = 4 };
static inline int32_t gemm_segment(int32_t n, int32_t k)
{
    int32_t pieces = n <= 256 ? GEMM_SEGMENTS_MAX : k >= 4096 ? 2 : 1;
    return (k + pieces * 128 - 1) / (pieces * 128) * 128;
}

typedef enum { GEMM_BF16, GEMM_F32, GEMM_ADD, GEMM_SWIGLU } gemm_out_t;

/* One matrix; in device memory, so that graphs stay valid when a table changes. */
struct gemm_weight {
    const void *tiles;
    const float *scale; /* f32: NVFP4 [1] tensor scale; FP8 [1], [rows], or [ceil(rows /
                           128)][ceil(k / 128)] */
};

/* Weights that a later kernel reads: strips fetch them into the L2 cache beside their own work. */
enum { GEMM_NEXT_MAX = 3 };
struct gemm_next {
    const struct gemm_weight *w; /* NULL: nothing */
    uint32_t bytes;              /* of its tiles; of each group's */
    int32_t by_group;            /* w[g] for each group g that has rows; else one matrix */
};

struct gemm_args {
    const void *x;        /* bf16 [..][ldx], rows 16-byte aligned: ldx a multiple of 8 */
    const int32_t *src;   /* with `first`: row of x for each row; NULL: the same */
    const int32_t *first; /* [n_groups + 1] device; NULL: every group has the rows 0 .. n_rows */
    const struct gemm_weight *w;  /* [n_groups]; SWIGLU: the gates */
    const struct gemm_weight *up; /* SWIGLU: [n_groups] */
    const float *x_scale;         /* [rows of x] or [rows of x][ceil(k / 128)]; NULL: none */
    void *out;                    /* [rows][ldo], bf16 or f32; bf16: 16-byte aligned, ldo a
                                     multiple of 8 */
    int32_t ldx, ldo;
    int32_t k, n;             /* columns of x, a multiple of 8; rows of a weight (all parts') */
    int32_t n_groups, n_rows; /* n_rows: without `first` */
    int32_t out_kind;         /* gemm_out_t */
    /* Without `first`: several matrices that read the same x, each its own columns of `out`: w[i]
     * has the rows, and gives the columns, [part[i], part[i + 1]); n is part[n_groups].  GEMM_F32;
     * of one matrix gemm_launch writes this. */
    int32_t part[GEMM_PARTS_MAX + 1];
    int32_t scale_rows; /* set by gemm_launch: FP8, a scale a row; 0: one */
    int32_t segment;    /* likewise: k of a segment */
    /* the weights are not written by the kernel before: may be read before it ends */
    int32_t prefetch;
    struct gemm_next next[GEMM_NEXT_MAX];
};

#ifndef __CUDACC__
#include "backend/cuda/device.h"
#include "format/format.h"

/* Kernels for each format by the size of their tiles: 16 rows of weights a warp; then tiles of 128,
 * 256 and (FP8 with block scales: 128) 256 rows, of which only the last takes segments, of GEMM_F32;
 * then of 64 and 128 for dense linears alone, and 16 a warp for those of few rows of x. */
enum { GEMM_KERNELS_MAX = 7 };
struct gemm_kernels {
    int n_sms;
    struct kernel kernel[FORMAT_COUNT][GEMM_KERNELS_MAX];
    struct kernel scaled[FORMAT_COUNT][GEMM_KERNELS_MAX]; /* with x_scale; no strips */
};

/* K of a scale of x that kernels of a format take: 128, all of it (UINT32_MAX), or 0: none. */
uint32_t gemm_x_scales(format_t f);
/* `formats`: bit f for each format_t f that will be launched. */
err_t gemm_open(struct gemm_kernels *g, struct device *d, uint32_t formats, struct err *e) MUST_USE;
/* `rows`: all rows of all groups if the host knows them, or a guess: it chooses the kernel, not the
 * bits. `programmatic`: as in struct launch. */
void gemm_launch(const struct gemm_kernels *g, struct queue *q, format_t f,
                 const struct gemm_args *a, int64_t rows, bool programmatic);
/* Whether kernel `size` takes this. */
bool gemm_takes(const struct gemm_kernels *g, format_t f, const struct gemm_args *a, int size);
/* The same with kernel `size` (0 .. GEMM_KERNELS_MAX - 1 that takes it), for tests. */
void gemm_launch_size(const struct gemm_kernels *g, struct queue *q, format_t f,
                      const struct gemm_args *a, int size, bool programmatic);
#endif

#endif
