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
 * (FP8 with 128 x 128 scales: chains of 128 k, total = fma(chain, scale, total) from 0), then
 *
 *     v = chain * 2^7 (NVFP4) * scale    f32, one rounding a product; scale: the tensor scale (NVFP4,
 *                                        FP8 tensor) or the row's (FP8 channel)
 *     GEMM_BF16    out = round(v)
 *     GEMM_F32     out = v
 *     GEMM_ADD     out += v                                        f32
 *     GEMM_SWIGLU  out = round(silu(gate) * up)   gate and up from the two matrices of a group
 *
 * silu(g) = g * rcp(1 + ex2(-g * log2 e)) with the chip's approximate ex2 and rcp (2 ulp).
 * k is a multiple of 8; x is not read past it.
 */
#ifndef BACKEND_CUDA_GEMM_H
#define BACKEND_CUDA_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#define GEMM_GROUPS_MAX 512

typedef enum { GEMM_BF16, GEMM_F32, GEMM_ADD, GEMM_SWIGLU } gemm_out_t;

/* One matrix; in device memory, so that graphs stay valid when a table changes. */
struct gemm_weight {
    const void *tiles;
    const float *scale; /* f32: NVFP4 [1] tensor scale; FP8 [1], [rows], or [ceil(rows /
                           128)][ceil(k / 128)] */
};

struct gemm_args {
    const void *x;                /* bf16 [..][ldx], rows 16-byte aligned: ldx a multiple of 8 */
    const int32_t *src;           /* row of x for each row; NULL: the same */
    const int32_t *first;         /* [n_groups + 1] device; NULL: one group of n_rows */
    const struct gemm_weight *w;  /* [n_groups]; SWIGLU: the gates */
    const struct gemm_weight *up; /* SWIGLU: [n_groups] */
    void *out;                    /* [rows][ldo], bf16 or f32; bf16: 16-byte aligned, ldo a
                                     multiple of 8 */
    int32_t ldx, ldo;
    int32_t k, n;             /* columns of x, a multiple of 8; rows of a weight */
    int32_t n_groups, n_rows; /* n_rows: without `first` */
    int32_t out_kind;         /* gemm_out_t */
    int32_t scale_rows;       /* set by gemm_launch: FP8, a scale a row; 0: one */
    int32_t
        prefetch; /* the weights are not written by the kernel before: may be read before it ends */
};

#ifndef __CUDACC__
#include "backend/cuda/device.h"
#include "format/format.h"

/* Kernels for each format by the size of their tiles: 16 rows of weights a warp, then tiles of 128,
 * 256 and 256 rows.  Not every format has all (fn NULL). */
enum { GEMM_KERNELS_MAX = 4 };
struct gemm_kernels {
    int n_sms;
    struct kernel kernel[FORMAT_COUNT][GEMM_KERNELS_MAX];
};

/* `formats`: bit f for each format_t f that will be launched. */
err_t gemm_open(struct gemm_kernels *g, struct device *d, uint32_t formats, struct err *e) MUST_USE;
/* `rows`: all rows of all groups if the host knows them, or a guess: it chooses the kernel, not the
 * bits. `programmatic`: as in struct launch. */
void gemm_launch(const struct gemm_kernels *g, struct queue *q, format_t f,
                 const struct gemm_args *a, int64_t rows, bool programmatic);
/* The same with kernel `size` (0 .. GEMM_KERNELS_MAX - 1; one that the format has), for tests. */
void gemm_launch_size(const struct gemm_kernels *g, struct queue *q, format_t f,
                      const struct gemm_args *a, int size, bool programmatic);
#endif

#endif
