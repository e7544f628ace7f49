/*
 * source.h - a rectangle of elements inside a tensor of a checkpoint, and reading its rows.
 *
 * A source is one part (format/format.h) of one weight: whole tensors, an expert's slab of a fused
 * one, its transpose, every second row.  source_read gives rows in canonical order and type
 * whatever the file has, in bounded memory:
 *
 *     element (r, c) of the part lies at element offset first + r * row_stride + c * col_stride
 *
 * An element is what is copied whole: 2 or 4 bytes of a BF16, F16 or F32 value; a byte of E4M3,
 * E8M0 or of two packed E2M1 codes (cols counts bytes then, and a transposed tensor is transposed
 * by bytes, as ModelOpt writes it).
 */
#ifndef WEIGHT_SOURCE_H
#define WEIGHT_SOURCE_H

#include "weight/safetensors.h"
#include <stdbool.h>
#include <stddef.h>

typedef enum {
    CONVERT_BYTE,     /* 1 -> 1 */
    CONVERT_BF16,     /* BF16 -> BF16 */
    CONVERT_F16_BF16, /* nearest even */
    CONVERT_F32_BF16, /* nearest even */
    CONVERT_F32,      /* F32 -> F32 */
    CONVERT_BF16_F32, /* exact */
    CONVERT_F16_F32,  /* exact */
    CONVERT_COUNT
} convert_t;

struct source {
    const struct st_file *file;
    const struct st_tensor *tensor;         /* NULL: the checkpoint has no such part */
    uint64_t first, row_stride, col_stride; /* elements */
    uint64_t rows, cols;
    convert_t convert;
    bool inverse; /* f32: 1 / x is meant (compressed-tensors' global scales) */
};

/* Memory that one reader keeps between calls; zeroed to begin with. */
struct source_scratch {
    void *data;
    size_t cap;
};

/* Bytes of a row as source_read gives it. */
size_t source_row_bytes(const struct source *s);
/* Bytes that the part takes in the file. */
uint64_t source_bytes(const struct source *s);
/* Rows [row0, row0 + n), packed, n * source_row_bytes bytes.  Reads at most a few MiB at once. */
err_t source_read(const struct source *s, uint64_t row0, size_t n, void *to,
                  struct source_scratch *scratch, struct err *e) MUST_USE;
void source_scratch_free(struct source_scratch *scratch);

#endif
