#include "backend/oracle.h"
#include "backend/backend.h"
#include "base/err.h"
#include <math.h>
#include <string.h>

struct oracle_bf16 oracle_split(uint16_t h)
{
    int e = h >> 7 & 0xff, m = h & 0x7f;
    struct oracle_bf16 r = {(int16_t)(e ? m | 0x80 : m), (int16_t)(e ? e - 127 : -126)};
    if (h >> 15) r.m = (int16_t)-r.m;
    return r;
}

/* m * 2^shift, toward zero */
static int64_t cut(int64_t m, int shift)
{
    if (m == 0) return 0; /* without a term the shift is anything */
    if (shift >= 0) return m * ((int64_t)1 << shift);
    if (shift <= -40) return 0;
    return m < 0 ? -(-m >> -shift) : m >> -shift;
}

static float to_f32(int64_t sum, int exponent)
{
    uint64_t a = sum < 0 ? (uint64_t)-sum : (uint64_t)sum;
    int drop = 0;
    while (a >> drop >> 24)
        drop++;
    if (exponent + drop < -149) drop = -149 - exponent;
    if (drop > 0) a = drop < 64 ? a >> drop << drop : 0;
    double v = ldexp((double)a, exponent);
    return (float)(sum < 0 ? -v : v);
}

float oracle_step(float c, const struct oracle_bf16 *a, const struct oracle_bf16 *b, int n)
{
    enum { F = 25, NONE = -100000 };
    int emax = NONE, ec = 0;
    int64_t mc = 0;
    if (c != 0.0f) {
        uint32_t u;
        memcpy(&u, &c, 4);
        ec = (int)(u >> 23 & 0xff);
        mc = ec ? (int64_t)(u & 0x7fffff) | 0x800000 : (int64_t)(u & 0x7fffff);
        ec = ec ? ec - 127 : -126;
        if (u >> 31) mc = -mc;
        emax = ec;
    }
    for (int i = 0; i < n; i++)
        if (a[i].m && b[i].m && a[i].e + b[i].e > emax) emax = a[i].e + b[i].e;
    if (emax == NONE) return 0.0f;
    int64_t sum = cut(mc, ec - 23 - emax + F);
    for (int i = 0; i < n; i++)
        if (a[i].m && b[i].m) sum += cut((int64_t)a[i].m * b[i].m, a[i].e + b[i].e - 14 - emax + F);
    return to_f32(sum, emax - F);
}

float oracle_chain(const struct oracle_bf16 *a, const struct oracle_bf16 *b, size_t k)
{
    float c = 0.0f;
    for (size_t i = 0; i < k; i += 16)
        c = oracle_step(c, a + i, b + i, k - i < 16 ? (int)(k - i) : 16);
    return c;
}

void oracle_weights(struct oracle_bf16 *out, const struct format_parts *p, size_t row)
{
    const struct format *f = &formats[p->format];
    const uint8_t *data = (const uint8_t *)p->data + row * format_row_bytes(p->format, p->cols);
    size_t scale_cols = format_scale_cols(p->format, p->cols);
    for (size_t k = 0; k < p->cols; k++) {
        uint16_t h;
        float v;
        if (f->elem == ELEM_BF16) {
            memcpy(&h, data + k * 2, 2);
            out[k] = oracle_split(h);
            continue;
        }
        v = f->elem == ELEM_E4M3 ? format_e4m3(data[k])
                                 : format_e2m1(data[k / 2] >> (k % 2 * 4) & 15);
        if (f->scale == SCALE_E8M0 || f->scale == SCALE_E4M3) {
            uint8_t s = ((const uint8_t *)p->scale)[row * scale_cols + k / f->group_cols];
            v *= f->scale == SCALE_E8M0 ? format_e8m0(s) : format_e4m3(s);
        }
        h = f32_to_bf16(v);
        CHECK(bf16_to_f32(h) == v);
        out[k] = oracle_split(h);
    }
}

/* Columns [k0, k1) of a row: one chain, or with block scales a chain each 128. */
static float segment_of(const struct format_parts *p, size_t row, const struct oracle_bf16 *w,
                        const struct oracle_bf16 *x, size_t k0, size_t k1)
{
    const float *scale = p->scale;
    float total = 0.0f;
    if (p->format != FORMAT_FP8_BLOCK) return oracle_chain(w + k0, x + k0, k1 - k0);
    for (size_t k = k0; k < k1; k += 128) {
        size_t n = k1 - k < 128 ? k1 - k : 128;
        total = fmaf(oracle_chain(w + k, x + k, n),
                     scale[row / 128 * format_scale_cols(p->format, p->cols) + k / 128], total);
    }
    return total;
}

float oracle_gemm(const struct format_parts *p, size_t row, const struct oracle_bf16 *w,
                  const struct oracle_bf16 *x, size_t segment)
{
    const float *scale = p->scale;
    float sum = 0.0f;
    for (size_t k = 0, n; k < p->cols; k += n) {
        n = p->cols - k < segment ? p->cols - k : segment;
        float part = segment_of(p, row, w, x, k, k + n);
        sum = k ? sum + part : part;
    }
    switch (p->format) {
    case FORMAT_FP8_BLOCK: return sum;
    case FORMAT_FP8_CHANNEL: return sum * scale[row];
    case FORMAT_FP8_TENSOR: return sum * scale[0];
    default: return sum * p->tensor;
    }
}
