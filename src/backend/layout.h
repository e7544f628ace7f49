/*
 * layout.h - the CPU's resident form of a matrix, and back: one bijection a format.
 *
 *     canonical  parts as in format/format.h, row-major
 *     resident   one run of bytes, as in matrix.h:
 *                [panels][f32 scales][f32 tensor scale][f32 input scale]
 *
 * A panel is 16 rows, front to back in columns: records, each of some units and, where scales are
 * bytes (MXFP8, NVFP4, MXFP4), the 16 rows' scales of the record's columns behind them.
 *
 *     unit      BF16, 2 columns: [16][2] elements
 *               E4M3, 2 columns: 32 bytes, element (r, c) at byte place(r) + c
 *               E2M1, 8 columns: 64 bytes, element (r, c) at byte 4 * r + c % 4, in the low nibble
 *               for c < 4
 *               place(r) = 2 * (r % 4) + 16 * (r / 4 % 2) + 8 * (r / 8): unpacking bytes within the
 *               128-bit halves of a register then gives rows 0-7 and rows 8-15 in order
 *     record    one unit; with byte scales as many units as one scale covers, then [16] scales
 *
 * Columns past the last of the last unit or record and rows past the last of the last panel are
 * zeros.  The high nibble behind an odd row of 4-bit elements is dropped, and comes back as zero.
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

/* Columns and bytes of a unit, and of a record where they differ. */
enum {
    UNIT_BF16_COLS = 2,
    UNIT_BF16_BYTES = 64,
    UNIT_E4M3_COLS = 2,
    UNIT_E4M3_BYTES = 32,
    UNIT_E2M1_COLS = 8,
    UNIT_E2M1_BYTES = 64,
    RECORD_MXFP8_COLS = 32,
    RECORD_MXFP8_BYTES = 32 / UNIT_E4M3_COLS * UNIT_E4M3_BYTES + 16,
    RECORD_NVFP4_COLS = 16,
    RECORD_NVFP4_BYTES = 16 / UNIT_E2M1_COLS * UNIT_E2M1_BYTES + 16,
    RECORD_MXFP4_COLS = 32,
    RECORD_MXFP4_BYTES = 32 / UNIT_E2M1_COLS * UNIT_E2M1_BYTES + 16
};

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
