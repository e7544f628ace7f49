/*
 * moe_trtllm.h - FlashInfer's trtllm layouts of an expert's matrices, as bijections on bytes.
 *
 * Stored row r of M (M = 2 I for w13, H for w2) holds row t of the block-wise unshuffled matrix,
 * with q = r % B, B = 16 for FP8_BLOCK and 32 else:
 *
 *     t = r - q + (q % 8) * (B / 8) + q / 8
 *
 * and w13's row t is up[t / 2] or gate[t / 2] as t is even or odd; FP8_BLOCK: up[t] or gate[t - I].
 * Byte b of stored row r lies at r * row_bytes + b, or block-major at
 * (b / 128) * M * 128 + r * 128 + b % 128.  Scale (r, k) of a byte format with C columns lies at
 * ((r / 128) * ceil(C / 4) + k / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + k % 4, in zeros up to
 * whole tiles.  FP8_BLOCK's scale grids are not permuted, up before gate.
 * (flashinfer/utils.py, fused_moe/core.py and prepare.py, gemm/gemm_bf16_fp4.py at fb28d724.)
 *
 * Nothing here reads a value: import is the inverse of export for any bytes, padding dropped.
 */
#ifndef MODEL_MOE_TRTLLM_H
#define MODEL_MOE_TRTLLM_H

#include "base/err.h"
#include "format/format.h"

typedef enum { TRTLLM_DATA, TRTLLM_SCALE, TRTLLM_BIAS } trtllm_part_t;

struct trtllm {
    format_t format;
    bool w13; /* gate and up; else one matrix */
    trtllm_part_t part;
    size_t rows, cols; /* of gate and of up alike, or of the matrix */
    bool block_major;
};

/* ERR_INPUT or ERR_UNSUPPORTED: the layout has no such part, or the sizes do not fit it.  *bytes is
 * what is stored. */
err_t trtllm_check(size_t *bytes, const struct trtllm *t, struct err *e) MUST_USE;
/* A checked t.  w2: `up` is NULL. */
void trtllm_export(void *stored, const struct trtllm *t, const void *gate, const void *up);
void trtllm_import(void *gate, void *up, const struct trtllm *t, const void *stored);

#endif
