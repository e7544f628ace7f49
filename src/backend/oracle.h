/*
 * oracle.h - the bf16 tensor core of Hopper in integers, and the GEMM built on it: slow, exact, on
 * the CPU.
 *
 *     struct oracle_bf16 w[cols], x[cols];
 *     oracle_weights(w, &parts, row);
 *     x[k] = oracle_split(bf16_of_x[k]);
 *     float v = oracle_gemm(&parts, row, w, x, segment);     // cuda/gemm.h's v, bit for bit
 *
 * A step takes 16 products and the accumulator c.  emax is the largest exponent of the terms that
 * are not zero (a product's is ea + eb, not normalised; subnormals count as the smallest normal
 * exponent).  Every term is cut toward zero to a multiple of 2^(emax - 25), the sum is exact and is
 * converted to f32 toward zero.  Found by experiment on an H200: no difference to wgmma of any
 * shape or to mma.sync m16n8k16.  `moult check-gpu` asks a GPU whether it is so there.
 */
#ifndef BACKEND_ORACLE_H
#define BACKEND_ORACLE_H

#include "format/format.h"

/* value = m * 2^(e - 7), |m| < 256 */
struct oracle_bf16 {
    int16_t m, e;
};

struct oracle_bf16 oracle_split(uint16_t bf16);
/* c plus n <= 16 products (the rest of the step is zeros). */
float oracle_step(float c, const struct oracle_bf16 *a, const struct oracle_bf16 *b, int n);
/* One chain over k. */
float oracle_chain(const struct oracle_bf16 *a, const struct oracle_bf16 *b, size_t k);
/* Row `row` of a matrix, elements times their small scales; these are BF16 numbers in every format.
 */
void oracle_weights(struct oracle_bf16 *out, const struct format_parts *p, size_t row);
/* One output before the epilogue's kind.  The chain starts anew every `segment` columns (as many as
 * there are, or more: one chain), and segments are added in f32 in order. */
float oracle_gemm(const struct format_parts *p, size_t row, const struct oracle_bf16 *w,
                  const struct oracle_bf16 *x, size_t segment);

#endif
