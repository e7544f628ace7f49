/*
 * fixed.h - rows of activations in fixed point, which matrices of 4-bit elements are multiplied by.
 *
 * A block is 16 of K, zeros past the last.  With 2^e <= the largest |x| < 2^(e + 1), e at least
 * -126, an element is the integer v nearest to x * 2^(21 - e), even on ties; |v| <= 2^22.  A BF16
 * element down to 2^-14 of the block's largest is exact; below that the error is at most 2^-22 of
 * the largest.  The product of a block by E2M1 elements is an integer, whatever the order of its sum.
 *
 * A block with an element that is not finite has digits 0 and a NaN for its unit.
 */
#ifndef BACKEND_FIXED_H
#define BACKEND_FIXED_H

#include <stddef.h>
#include <stdint.h>

enum { FIXED_COLS = 16, FIXED_DIGITS = 3 };

struct fixed {
    int8_t digit[FIXED_DIGITS][FIXED_COLS]; /* v = sum of digit[d] * 256^d */
    float unit;                             /* 2^(e - 22): of sums of v times twice an element */
    int32_t bias; /* -12 * the sum of v, for kernels that add 12 to twice an element */
};

static inline size_t fixed_blocks(size_t cols)
{
    return cols / FIXED_COLS + (cols % FIXED_COLS != 0);
}

/* out[fixed_blocks(cols)].  Pure; any thread. */
void fixed_row(struct fixed *out, const float *x, size_t cols);

#endif
