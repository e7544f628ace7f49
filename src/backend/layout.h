/*
 * layout.h - the panel layout of a matrix, and back.
 *
 *     canonical  BF16 [rows][cols], row-major
 *     panel      BF16 [ceil(rows / 16)][ceil(cols / 2)][16][2], padded with zeros
 *
 * so that element (r, c) lies at ((r / 16 * ceil(cols / 2) + c / 2) * 16 + r % 16) * 2 + c % 2.
 * A GEMM reads a panel of 16 rows front to back: 32 values, one row pair-wise in each 32-bit lane.
 * Both functions work on a range of rows, so that threads can share a matrix and a reader can pass
 * it in pieces; ranges that do not overlap touch no common value (padding rows belong to the caller
 * of the last row).  `canon` is the address of row `row0`, not of the matrix.
 */
#ifndef BACKEND_LAYOUT_H
#define BACKEND_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PANEL_ROWS 16

/* BF16 values of the panel form, padding included; false when it overflows. */
bool layout_panel_len(size_t *out, uint64_t rows, uint64_t cols);
/* Values per panel of 16 rows. */
static inline size_t layout_panel_stride(size_t cols)
{
    return (cols / 2 + cols % 2) * PANEL_ROWS * 2;
}

/* Rows [row0, row0 + n) of a [rows][cols] matrix. */
void layout_to_panel(uint16_t *panel, const uint16_t *canon, size_t rows, size_t cols, size_t row0,
                     size_t n);
void layout_from_panel(uint16_t *canon, const uint16_t *panel, size_t rows, size_t cols,
                       size_t row0, size_t n);

#endif
