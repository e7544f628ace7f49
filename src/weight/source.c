#include "weight/source.h"

#include "base/mem.h"
#include "weight/cast.h"
#include <string.h>

#define SPAN_BYTES ((size_t)4 << 20) /* read at once, if a line is no longer */

/* n elements from a packed line to places `step` elements apart. */
typedef void convert_fn(void *to, size_t step, const void *from, size_t n);

static void copy8(void *to, size_t step, const void *from, size_t n)
{
    uint8_t *t = to;
    const uint8_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = f[i];
}

static void copy16(void *to, size_t step, const void *from, size_t n)
{
    uint16_t *t = to;
    const uint16_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = f[i];
}

static void copy32(void *to, size_t step, const void *from, size_t n)
{
    uint32_t *t = to;
    const uint32_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = f[i];
}

static void f16_bf16(void *to, size_t step, const void *from, size_t n)
{
    uint16_t *t = to;
    const uint16_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = cast_f16_bits(f[i]);
}

static void f32_bf16(void *to, size_t step, const void *from, size_t n)
{
    uint16_t *t = to;
    const uint32_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = cast_f32_bits(f[i]);
}

static void bf16_f32(void *to, size_t step, const void *from, size_t n)
{
    uint32_t *t = to;
    const uint16_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = (uint32_t)f[i] << 16;
}

static void f16_f32(void *to, size_t step, const void *from, size_t n)
{
    uint32_t *t = to;
    const uint16_t *f = from;
    for (size_t i = 0; i < n; i++)
        t[i * step] = cast_f16_f32_bits(f[i]);
}

static const struct {
    size_t in, out; /* bytes of an element */
    convert_fn *fn;
} converts[CONVERT_COUNT] = {
    [CONVERT_BYTE] = {1, 1, copy8},        [CONVERT_BF16] = {2, 2, copy16},
    [CONVERT_F16_BF16] = {2, 2, f16_bf16}, [CONVERT_F32_BF16] = {4, 2, f32_bf16},
    [CONVERT_F32] = {4, 4, copy32},        [CONVERT_BF16_F32] = {2, 4, bf16_f32},
    [CONVERT_F16_F32] = {2, 4, f16_f32},
};

size_t source_row_bytes(const struct source *s)
{
    return (size_t)s->cols * converts[s->convert].out;
}

uint64_t source_bytes(const struct source *s)
{
    return s->rows * s->cols * converts[s->convert].in;
}

static err_t reserve(struct source_scratch *scratch, size_t bytes, const struct source *s,
                     struct err *e)
{
    if (bytes <= scratch->cap) return OK;
    source_scratch_free(scratch);
    scratch->data = mem_try(bytes);
    if (scratch->data == NULL)
        return err_set(e, ERR_NOMEM, "tensor %s: no memory to read it (%zu bytes)", s->tensor->name,
                       bytes);
    scratch->cap = bytes;
    return OK;
}

void source_scratch_free(struct source_scratch *scratch)
{
    mem_free(scratch->data);
    *scratch = (struct source_scratch){0};
}

static void invert(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = 1.0f / x[i];
}

/* The rectangle as lines of neighbours in the file: its rows, or columns if it is transposed. */
struct lines {
    uint64_t at, stride; /* elements */
    size_t n, len;
    size_t to_line, to_elem; /* steps in the result, elements */
};

static struct lines lines_of(const struct source *s, uint64_t row0, size_t n)
{
    struct lines l = {.at = s->first + row0 * s->row_stride};
    size_t cols = (size_t)s->cols;
    if (s->col_stride == 1 && s->row_stride == s->cols) { /* one line */
        l.n = 1;
        l.len = n * cols;
        l.to_elem = 1;
    } else if (s->col_stride == 1) {
        l.stride = s->row_stride;
        l.n = n;
        l.len = cols;
        l.to_line = cols;
        l.to_elem = 1;
    } else {
        CHECK(s->row_stride == 1);
        l.stride = s->col_stride;
        l.n = cols;
        l.len = n;
        l.to_line = 1;
        l.to_elem = cols;
    }
    return l;
}

/* A long line in pieces. */
static err_t read_line(const struct source *s, const struct lines *l, char *to,
                       struct source_scratch *scratch, struct err *e)
{
    size_t in = converts[s->convert].in, out = converts[s->convert].out;
    if (in == out && s->convert != CONVERT_F16_BF16 && l->to_elem == 1)
        return st_read(s->file, s->tensor, l->at * in, to, l->len * in, e);
    size_t step = SPAN_BYTES / in < l->len ? SPAN_BYTES / in : l->len;
    err_t rc = reserve(scratch, step * in, s, e);
    for (size_t i = 0; rc == OK && i < l->len; i += step) {
        size_t n = l->len - i < step ? l->len - i : step;
        rc = st_read(s->file, s->tensor, (l->at + i) * in, scratch->data, n * in, e);
        if (rc == OK)
            converts[s->convert].fn(to + i * l->to_elem * out, l->to_elem, scratch->data, n);
    }
    return rc;
}

/* Several lines and what lies between them, in one read. */
static err_t read_span(const struct source *s, const struct lines *l, size_t line0, size_t n,
                       char *to, struct source_scratch *scratch, struct err *e)
{
    size_t in = converts[s->convert].in, out = converts[s->convert].out;
    size_t bytes = ((n - 1) * (size_t)l->stride + l->len) * in;
    err_t rc = reserve(scratch, bytes, s, e);
    if (rc == OK)
        rc = st_read(s->file, s->tensor, (l->at + line0 * l->stride) * in, scratch->data, bytes, e);
    for (size_t i = 0; rc == OK && i < n; i++)
        converts[s->convert].fn(to + (line0 + i) * l->to_line * out, l->to_elem,
                                (const char *)scratch->data + i * (size_t)l->stride * in, l->len);
    return rc;
}

err_t source_read(const struct source *s, uint64_t row0, size_t n, void *to,
                  struct source_scratch *scratch, struct err *e)
{
    CHECK(s->tensor && row0 <= s->rows && n <= s->rows - row0);
    if (n == 0 || s->cols == 0) return OK;
    struct lines l = lines_of(s, row0, n);
    size_t in = converts[s->convert].in;
    err_t rc = OK;
    if (l.n == 1) {
        rc = read_line(s, &l, to, scratch, e);
    } else {
        size_t fit = SPAN_BYTES / in / (size_t)l.stride, step = fit ? fit : 1;
        for (size_t i = 0; rc == OK && i < l.n; i += step)
            rc = read_span(s, &l, i, l.n - i < step ? l.n - i : step, to, scratch, e);
    }
    if (rc == OK && s->inverse) invert(to, n * (size_t)s->cols);
    return rc;
}
