/*
 * export.h - resident weights under the names, dtypes and shapes that a checkpoint has.
 *
 * A slot is up to four tensors: the weight and its scales (the scales of K and V are two).  Names are
 * those that the loader reads (spelling.h), by format:
 *
 *     bf16         .weight BF16
 *     fp8-block    .weight F8_E4M3, .weight_scale_inv F32
 *     fp8-tensor   .weight F8_E4M3, .weight_scale F32 [], .input_scale F32 []
 *     fp8-channel  .weight F8_E4M3, .weight_scale F32 [N, 1], .input_scale
 *     mxfp8        .weight F8_E4M3, .weight_scale_inv U8
 *     nvfp4        .weight U8, .weight_scale F8_E4M3, .weight_scale_2 F32 [], .input_scale
 *     mxfp4        .weight U8, .weight_scale U8
 *
 * The bytes of a tensor are store_get's rows of its part; export_has tells of a read scale whether a
 * checkpoint would have it (an input scale that is "none" it has not).
 */
#ifndef WEIGHT_EXPORT_H
#define WEIGHT_EXPORT_H

#include "base/buf.h"
#include "weight/safetensors.h"
#include "weight/store.h"
#include <stdbool.h>

enum { EXPORT_MAX = 4 };

struct export_tensor {
    char name[160];
    st_dtype_t dtype;
    int n_dims;
    uint64_t shape[2];
    part_t part;
    size_t rows, row_bytes; /* of the part */
    size_t at, bytes;       /* of a scale of K or V: its place in the row; else 0 and all bytes */
};

/* How many; the weight comes first. */
size_t export_tensors(const struct slot_spec *p, struct export_tensor out[EXPORT_MAX]);
/* The slot and which of its tensors a name means; ERR_NOTFOUND. */
err_t export_find(const struct store *s, const char *name, size_t *slot, size_t *tensor,
                  struct err *e) MUST_USE;
/* `bytes`: of the tensor. */
bool export_has(const struct slot_spec *p, const struct export_tensor *t, const void *bytes);
/* Appends bytes and header of a safetensors file: the header of n tensors, whose data follow. */
bool export_header(struct buf *out, const struct export_tensor *t, size_t n);

#endif
