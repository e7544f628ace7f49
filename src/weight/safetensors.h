/*
 * safetensors.h - one safetensors file, read with suspicion.
 *
 * Format (huggingface/safetensors, README): 8 bytes little-endian header length n <= 100,000,000,
 * n bytes of JSON {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__":
 * {...}}, then the data; offsets count from the end of the header.  Checked before anything is
 * believed: the length against the file and the limit, every product, every span (it must equal
 * shape x dtype, lie inside the file, neither overlap another nor leave a hole), every dtype (an
 * unknown one is refused even if nobody needs the tensor), and no name twice (cases C65, C67).
 *
 * st_open keeps the descriptor; st_read preads, and refuses if size or mtime changed since (C11).
 */
#ifndef WEIGHT_SAFETENSORS_H
#define WEIGHT_SAFETENSORS_H

#include "base/err.h"
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define ST_MAX_DIMS 8

typedef enum {
    ST_BOOL,
    ST_U8,
    ST_I8,
    ST_F8_E4M3,
    ST_F8_E5M2,
    ST_F8_E8M0,
    ST_F4,
    ST_I16,
    ST_U16,
    ST_F16,
    ST_BF16,
    ST_I32,
    ST_U32,
    ST_F32,
    ST_F64,
    ST_I64,
    ST_U64,
} st_dtype_t;

const char *st_dtype_name(st_dtype_t d);
int st_dtype_bits(st_dtype_t d);

struct st_tensor {
    const char *name; /* owned by the file */
    st_dtype_t dtype;
    int n_dims;
    uint64_t shape[ST_MAX_DIMS];
    uint64_t offset; /* from the start of the file */
    uint64_t bytes;
};

struct st_file {
    char *path;
    int fd;
    uint64_t file_bytes;
    struct timespec mtime;
    size_t n;
    struct st_tensor *tensors; /* in offset order */
    struct json_t *metadata;   /* __metadata__, or NULL */
};

/* Parse a header of n bytes that describes `data_bytes` bytes of data; fills tensors and n.
 * `data_start` is added to each offset.  For tests and fuzzing; st_open uses it. */
err_t st_parse(struct st_file *f, const char *header, size_t n, uint64_t data_start,
               uint64_t data_bytes, struct err *e) MUST_USE;
err_t st_open(struct st_file *f, const char *path, struct err *e) MUST_USE;
void st_close(struct st_file *f);
/* A string of __metadata__, owned by the file; NULL: absent. */
const char *st_metadata(const struct st_file *f, const char *key);
/* ERR_IO if size or mtime are no longer those of st_open. */
err_t st_unchanged(const struct st_file *f, struct err *e) MUST_USE;
/* Part of a tensor: `bytes` bytes from `offset` within it. */
err_t st_read(const struct st_file *f, const struct st_tensor *t, uint64_t offset, void *to,
              size_t bytes, struct err *e) MUST_USE;

#endif
