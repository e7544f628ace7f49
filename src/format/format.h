/*
 * format.h - the weight formats: one row each, everything else derived from it.
 *
 * A quantized matrix has up to three parts, called canonical when they are as a checkpoint has them
 * (moe-formats: docs/formats.md, generated from this table):
 *
 *     data    rows x cols elements, row-major; 4-bit elements two a byte, the even one in the low
 *             nibble; a row starts on a byte
 *     scale   one a group of group_rows x group_cols elements, row-major [ceil(rows / group_rows)]
 *             [ceil(cols / group_cols)]: edge groups are partial, nothing is padded
 *     tensor  one f32 for the whole matrix, where the row says so
 *
 *     value = element * scale * tensor          (every scale is a decode multiplier)
 *
 * FP8 scales are f32 here; checkpoints may hold them in BF16 or F16, which widens exactly.  The
 * inverse scales of compressed-tensors (1 / tensor) are turned around by the loader.
 *
 * Codes    E4M3 is the "fn" kind: no infinity, 0x7f and 0xff NaN, largest 448, subnormals of 2^-9.
 *          E2M1: 0 .5 1 1.5 2 3 4 6 and a sign.  E8M0: 2^(b - 127), 0xff NaN, 0 is 2^-127.
 *          (OCP Microscaling Formats v1.0; OCP FP8 v1.0.)
 * Pure: no allocation, no I/O, no state; any thread.
 */
#ifndef FORMAT_FORMAT_H
#define FORMAT_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    FORMAT_BF16,
    FORMAT_FP8_BLOCK,   /* E4M3, f32 scale a 128 x 128 block */
    FORMAT_FP8_TENSOR,  /* E4M3, one f32 scale */
    FORMAT_FP8_CHANNEL, /* E4M3, f32 scale a row */
    FORMAT_MXFP8,       /* E4M3, E8M0 scale a 1 x 32 group */
    FORMAT_NVFP4,       /* E2M1, E4M3 scale a 1 x 16 group, f32 tensor scale */
    FORMAT_MXFP4,       /* E2M1, E8M0 scale a 1 x 32 group */
    FORMAT_COUNT
} format_t;

typedef enum { ELEM_BF16, ELEM_E4M3, ELEM_E2M1 } elem_t;
typedef enum { SCALE_NONE, SCALE_F32, SCALE_E8M0, SCALE_E4M3 } scale_t;

struct format {
    const char *name;  /* "nvfp4": command lines, reports */
    const char *about; /* one line for people */
    elem_t elem;
    int elem_bits;
    scale_t scale;
    int scale_bytes;                 /* of one scale; 0 without */
    uint32_t group_rows, group_cols; /* elements that share one; 0: the whole extent */
    bool tensor;                     /* has a tensor scale */
    uint32_t segment; /* K of one multiply-add chain in a GEMM: 128 where the scale is per K block
                         and f32; else 0, the whole K.  See backend.h */
};

extern const struct format formats[FORMAT_COUNT];

/* One scale (or tensor scale) depends on the whole matrix: an encoder needs its amax first. */
static inline bool format_needs_amax(const struct format *f)
{
    return f->tensor || (f->scale != SCALE_NONE && f->group_rows == 0 && f->group_cols == 0);
}

/* By name, any case, '_' as '-'; FORMAT_COUNT if unknown. */
format_t format_find(const char *name);

/* Bytes of a row of data, and scales in each direction. */
size_t format_row_bytes(format_t f, size_t cols);
size_t format_scale_rows(format_t f, size_t rows);
size_t format_scale_cols(format_t f, size_t cols);
/* Bytes of data and of scales (tensor scale apart); false when they overflow size_t. */
bool format_bytes(format_t f, uint64_t rows, uint64_t cols, size_t *data, size_t *scale);

/* Scalars, exact. */
float format_e4m3(uint8_t code);
float format_e8m0(uint8_t code);
float format_e2m1(uint8_t nibble); /* low 4 bits */
float format_bf16(uint16_t code);
/* Nearest even; a NaN stays one. */
uint16_t format_to_bf16(float x);
/* Nearest even, saturating at 448 and 6; a NaN stays one (E4M3) or becomes the largest (E2M1). */
uint8_t format_to_e4m3(float x);
uint8_t format_to_e2m1(float x);

/* Canonical parts of a matrix, borrowed. */
struct format_parts {
    format_t format;
    size_t rows, cols;
    const void *data;
    const void *scale;
    float tensor; /* 1 where the format has none */
};

/* Row `row` as f32: element * scale exact, times tensor with one rounding; FP8 with f32 scales: one
 * rounding. */
void format_decode_row(float *out, const struct format_parts *p, size_t row);

/* First scale that a GEMM may not use: NaN or negative E4M3 (also -0), E8M0 outside 2^-117 ..
 * 2^119, f32 NaN, infinite or negative (a zero and subnormals are fine: products are exact or
 * zero).  false: `at` is its index in the part.  E8M0 code 0 passes: encoders give it to a block of
 * zeros, and format_check_zero_blocks makes sure that it is one. */
bool format_check_scales(format_t f, const void *scale, size_t n, size_t *at);
bool format_check_tensor_scale(float tensor);
/* First E4M3 NaN or BF16 NaN or infinity of n elements (4-bit codes are always finite).  false:
 * `at`. */
bool format_check_data(format_t f, const void *data, size_t n, size_t *at);
/* First scale of rows [row0, row0 + n) that is E8M0 code 0 over an element that is not zero; always
 * true where scales are not E8M0. */
bool format_check_zero_blocks(const struct format_parts *p, size_t row0, size_t n, size_t *at);

#endif
