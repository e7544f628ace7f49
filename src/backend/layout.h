/*
 * layout.h - the CPU's resident form of a matrix, and back: one bijection a format.
 *
 *     canonical  parts as in format/format.h, row-major
 *     resident   one run of bytes, as in matrix.h:
 *                [panels][f32 scales][f32 tensor scale][f32 input scale]
 *
 * BF16 panel: [ceil(cols / 2)][16][2], padded with zeros, so that element (r, c) lies at
 * ((r / 16 * ceil(cols / 2) + c / 2) * 16 + r % 16) * 2 + c % 2.
 *
 * Functions work on a range of rows of a part, so that threads can share a matrix and a reader can
 * pass it in pieces; ranges that do not overlap touch no common byte (padding rows belong to the
 * caller of the last row).  `canon` is the address of row `row0`, not of the matrix.  A row of
 * PART_SCALE is a row of the scale grid; PART_TENSOR and PART_INPUT are one f32.
 */
#ifndef BACKEND_LAYOUT_H
#define BACKEND_LAYOUT_H

#include "backend/matrix.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { PART_DATA, PART_SCALE, PART_TENSOR, PART_INPUT, PART_COUNT } part_t;

/* Rows and bytes a row of a part; 0 rows: the format has no such part.  (PART_INPUT: quantized
 * formats.) */
size_t layout_part_rows(format_t f, part_t part, size_t rows);
size_t layout_part_row_bytes(format_t f, part_t part, size_t cols);

/* Bytes of the resident form; false when they overflow. */
bool layout_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols);
size_t layout_panel_bytes(format_t f, size_t cols); /* of a panel of 16 rows */
/* The view that kernels read. */
struct matrix layout_matrix(format_t f, size_t rows, size_t cols, const void *resident);

/* Rows [row0, row0 + n) of a part of a [rows][cols] matrix. */
void layout_put(void *resident, format_t f, size_t rows, size_t cols, part_t part, size_t row0,
                size_t n, const void *canon);
void layout_get(void *canon, format_t f, size_t rows, size_t cols, part_t part, size_t row0,
                size_t n, const void *resident);

#endif
