#include "format/format.h"
#include "format/scalar.h"

#include <math.h>
#include <string.h>

static void bf16_row(float *out, const void *data, size_t cols)
{
    const uint16_t *w = data;
    for (size_t i = 0; i < cols; i++)
        out[i] = scalar_bf16(w[i]);
}

static void e4m3_row(float *out, const void *data, size_t cols)
{
    const uint8_t *w = data;
    for (size_t i = 0; i < cols; i++)
        out[i] = scalar_e4m3(w[i]);
}

static void e2m1_row(float *out, const void *data, size_t cols)
{
    const uint8_t *w = data;
    for (size_t i = 0; i < cols; i++)
        out[i] = scalar_e2m1((uint8_t)(w[i / 2] >> 4 * (i % 2)));
}

typedef void elem_row_fn(float *out, const void *data, size_t cols);
static elem_row_fn *const elem_row[] = {
    [ELEM_BF16] = bf16_row, [ELEM_E4M3] = e4m3_row, [ELEM_E2M1] = e2m1_row};

static float f32_at(const void *scale, size_t i)
{
    return ((const float *)scale)[i];
}

static float e8m0_at(const void *scale, size_t i)
{
    return scalar_e8m0(((const uint8_t *)scale)[i]);
}

static float e4m3_at(const void *scale, size_t i)
{
    return scalar_e4m3(((const uint8_t *)scale)[i]);
}

typedef float scale_at_fn(const void *scale, size_t i);
static scale_at_fn *const scale_at[] = {
    [SCALE_F32] = f32_at, [SCALE_E8M0] = e8m0_at, [SCALE_E4M3] = e4m3_at};

/* Index of the first scale of a row. */
static size_t scale_row(const struct format_parts *p, size_t row)
{
    const struct format *f = &formats[p->format];
    return f->group_rows == 0 ? 0 : row / f->group_rows * format_scale_cols(p->format, p->cols);
}

static const uint8_t *data_row(const struct format_parts *p, size_t row)
{
    return (const uint8_t *)p->data + row * format_row_bytes(p->format, p->cols);
}

void format_decode_row(float *out, const struct format_parts *p, size_t row)
{
    const struct format *f = &formats[p->format];
    elem_row[f->elem](out, data_row(p, row), p->cols);
    if (f->scale == SCALE_NONE) return;
    size_t group = f->group_cols ? f->group_cols : p->cols, at = scale_row(p, row);
    for (size_t c = 0; c < p->cols; c += group, at++) {
        float s = scale_at[f->scale](p->scale, at);
        size_t end = p->cols - c < group ? p->cols : c + group;
        for (size_t i = c; i < end; i++)
            out[i] *= s;
    }
    if (!f->tensor) return;
    for (size_t i = 0; i < p->cols; i++)
        out[i] *= p->tensor;
}

/* ---- checks ---- */

#define E8M0_LEAST (127 - 117)
#define E8M0_MOST  (127 + 119)

static bool f32_ok(const void *scale, size_t i)
{
    return format_check_tensor_scale(f32_at(scale, i));
}

static bool e8m0_ok(const void *scale, size_t i)
{
    uint8_t b = ((const uint8_t *)scale)[i];
    return b == 0 || (b >= E8M0_LEAST && b <= E8M0_MOST);
}

static bool e4m3_ok(const void *scale, size_t i)
{
    return ((const uint8_t *)scale)[i] < 0x7f;
}

/* Whole blocks at once, in a form that compilers vectorize; false: look closer. */
enum { BLOCK = 256 };

static bool e8m0_block_ok(const void *scale, size_t i)
{
    const uint8_t *x = (const uint8_t *)scale + i;
    uint8_t bad = 0;
    for (int k = 0; k < BLOCK; k++)
        bad |= (uint8_t)((x[k] < E8M0_LEAST || x[k] > E8M0_MOST) && x[k] != 0 ? 0xff : 0);
    return bad == 0;
}

static bool e4m3_scales_ok(const void *scale, size_t i)
{
    const uint8_t *x = (const uint8_t *)scale + i;
    uint8_t bad = 0;
    for (int k = 0; k < BLOCK; k++)
        bad |= (uint8_t)(x[k] >= 0x7f ? 0xff : 0);
    return bad == 0;
}

typedef bool ok_fn(const void *data, size_t i);

/* The first of n elements that is not `ok`, n if there is none; `whole` may be NULL. */
static size_t first_bad(ok_fn *ok, ok_fn *whole, const void *data, size_t n)
{
    size_t i = 0;
    for (; i < n; i++) {
        while (whole && n - i >= BLOCK && whole(data, i))
            i += BLOCK;
        if (i < n && !ok(data, i)) break;
    }
    return i < n ? i : n;
}

bool format_check_scales(format_t f, const void *scale, size_t n, size_t *at)
{
    static const struct {
        ok_fn *one, *whole;
    } checks[] = {[SCALE_F32] = {f32_ok, NULL},
                  [SCALE_E8M0] = {e8m0_ok, e8m0_block_ok},
                  [SCALE_E4M3] = {e4m3_ok, e4m3_scales_ok}};
    if (formats[f].scale == SCALE_NONE) return true;
    size_t bad = first_bad(checks[formats[f].scale].one, checks[formats[f].scale].whole, scale, n);
    if (bad < n) *at = bad;
    return bad == n;
}

bool format_check_tensor_scale(float tensor)
{
    return isfinite(tensor) && tensor >= 0.0f;
}

static bool bf16_ok(const void *data, size_t i)
{
    return (((const uint16_t *)data)[i] & 0x7f80) != 0x7f80;
}

static bool e4m3_elem_ok(const void *data, size_t i)
{
    return (((const uint8_t *)data)[i] & 0x7f) != 0x7f;
}

static bool bf16_block_ok(const void *data, size_t i)
{
    const uint16_t *x = (const uint16_t *)data + i;
    uint16_t bad = 0;
    for (int k = 0; k < BLOCK; k++)
        bad |= (uint16_t)((x[k] & 0x7f80) == 0x7f80 ? 0xffff : 0);
    return bad == 0;
}

static bool e4m3_block_ok(const void *data, size_t i)
{
    const uint8_t *x = (const uint8_t *)data + i;
    uint8_t bad = 0;
    for (int k = 0; k < BLOCK; k++)
        bad |= (uint8_t)((x[k] & 0x7f) == 0x7f ? 0xff : 0);
    return bad == 0;
}

bool format_check_data(format_t f, const void *data, size_t n, size_t *at)
{
    static const struct {
        ok_fn *one, *whole;
    } checks[] = {[ELEM_BF16] = {bf16_ok, bf16_block_ok},
                  [ELEM_E4M3] = {e4m3_elem_ok, e4m3_block_ok},
                  [ELEM_E2M1] = {NULL, NULL}};
    if (!checks[formats[f].elem].one) return true;
    size_t bad = first_bad(checks[formats[f].elem].one, checks[formats[f].elem].whole, data, n);
    if (bad < n) *at = bad;
    return bad == n;
}

/* Are elements [c, end) of a row all zeros of either sign? */
static bool all_zero(const struct format *f, const uint8_t *row, size_t c, size_t end)
{
    uint8_t any = 0;
    for (size_t i = c; i < end; i++)
        any |= f->elem == ELEM_E2M1 ? (uint8_t)(row[i / 2] >> 4 * (i % 2)) & 7 : row[i] & 0x7f;
    return any == 0;
}

bool format_check_zero_blocks(const struct format_parts *p, size_t row0, size_t n, size_t *at)
{
    const struct format *f = &formats[p->format];
    if (f->scale != SCALE_E8M0) return true;
    const uint8_t *scale = p->scale;
    size_t per_row = format_scale_cols(p->format, p->cols);
    if (f->group_rows == 1 && !memchr(scale + row0 * per_row, 0, n * per_row)) return true;
    for (size_t row = row0; row < row0 + n; row++) {
        size_t s = scale_row(p, row);
        for (size_t c = 0; c < p->cols; c += f->group_cols, s++) {
            size_t end = p->cols - c < f->group_cols ? p->cols : c + f->group_cols;
            if (scale[s] != 0 || all_zero(f, data_row(p, row), c, end)) continue;
            *at = s;
            return false;
        }
    }
    return true;
}
