/*
 * test_encode.c - encoding against float64: each rule again in double arithmetic with a search for the
 * nearest code, and the tiny model as an independent tool quantized it.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "base/file.h"
#include "base/mem.h"
#include "format/encode.h"
#include "weight/safetensors.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the rules, in float64 ---- */

/* One f32 operation: float64 has more than 2 * 24 + 2 bits, so rounding twice is rounding once. */
#define F32(x) ((double)(float)(x))

static double e4m3_of(int c)
{
    return c >> 3 ? ldexp(8 + (c & 7), (c >> 3) - 10) : ldexp(c, -9);
}

static double e2m1_of(int c)
{
    static const double v[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return v[c];
}

/* Nearest of n magnitudes; ties to the even code, or down. */
static int nearest(double (*of)(int), int n, double x, bool ties_down)
{
    int c = 0;
    while (c + 1 < n && of(c + 1) <= x)
        c++;
    if (c + 1 == n) return c;
    double mid = (of(c) + of(c + 1)) / 2;
    if (x > mid) return c + 1;
    return x == mid && !ties_down && c % 2 ? c + 1 : c;
}

static int e4m3_code(double x)
{
    return nearest(e4m3_of, 127, fabs(x), false) | (signbit(x) ? 128 : 0);
}

static int e2m1_code(double x)
{
    return nearest(e2m1_of, 8, fabs(x), false) | (x < 0 ? 8 : 0);
}

struct want {
    double tensor;
    uint8_t codes[128];
    uint8_t scale;
};

typedef void rule_fn(struct want *w, const float *x, size_t n, double amax, double A);

static void fill4(struct want *w, const float *x, size_t n, double d, bool multiply)
{
    for (size_t i = 0; i < n; i++)
        w->codes[i] = (uint8_t)e2m1_code(multiply ? F32((double)x[i] * d) : F32((double)x[i] / d));
}

static void r_modelopt(struct want *w, const float *x, size_t n, double amax, double A)
{
    w->tensor = F32(A / 2688) != 0 ? F32(A / 2688) : 1;
    double s = F32(amax / F32(6 * w->tensor));
    if (s == 0) s = 1;
    w->scale = (uint8_t)e4m3_code(s < ldexp(1, -9) ? ldexp(1, -9) : s);
    fill4(w, x, n, F32(e4m3_of(w->scale) * w->tensor), false);
}

static double inverse_scale(double s, double t)
{
    double p = F32(s * t);
    return p == 0 || 1 / p > (double)FLT_MAX ? (double)FLT_MAX : F32(1 / p);
}

static double gain(double top, double A)
{
    if (A == 0) return 1;
    return top / A > (double)FLT_MAX ? (double)FLT_MAX : F32(top / A);
}

static void r_te(struct want *w, const float *x, size_t n, double amax, double A)
{
    double g = gain(2688, A);
    w->tensor = F32(1 / g);
    w->scale = (uint8_t)e4m3_code(F32(amax * F32(g * F32(1.0 / 6))));
    fill4(w, x, n, inverse_scale(e4m3_of(w->scale), w->tensor), true);
}

static void r_ct(struct want *w, const float *x, size_t n, double amax, double A)
{
    double g = gain(2688, A);
    w->tensor = F32(1 / g);
    w->scale = (uint8_t)e4m3_code(F32(g * F32(amax / 6)));
    if (w->scale == 0) w->scale = 0x20;
    fill4(w, x, n, F32(e4m3_of(w->scale) / g), false);
}

static double four_error(const struct want *w, const float *x, size_t n, double A)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double q = e2m1_of(w->codes[i] & 7) * (w->codes[i] & 8 ? -1 : 1);
        double d = F32(F32(F32(F32(q * e4m3_of(w->scale)) * A) / 1536) - (double)x[i]);
        sum = F32(sum + F32(d * d));
    }
    return sum;
}

static void r_4over6(struct want *w, const float *x, size_t n, double amax, double A)
{
    double g = gain(1536, A), b = F32(F32(amax / 6) * g);
    struct want four = {.tensor = F32(1 / g)};
    w->tensor = four.tensor;
    w->scale = (uint8_t)e4m3_code(b);
    four.scale = (uint8_t)e4m3_code(F32(b * 1.5));
    fill4(w, x, n, inverse_scale(e4m3_of(w->scale), w->tensor), true);
    fill4(&four, x, n, inverse_scale(e4m3_of(four.scale), w->tensor), true);
    if (four_error(&four, x, n, A) < four_error(w, x, n, A)) *w = four;
}

static void mx(struct want *w, const float *x, size_t n, int exponent, bool fp8)
{
    int code = exponent + 127;
    w->scale = (uint8_t)(code < 0 ? 0 : code > 254 ? 254 : code);
    for (size_t i = 0; i < n; i++) {
        double v = (double)x[i] * ldexp(1, 127 - w->scale);
        w->codes[i] = (uint8_t)(fp8 ? e4m3_code(v) : e2m1_code(v));
    }
}

static int exponent_up(double x)
{
    int e;
    if (x == 0) return -127;
    return frexp(x, &e) == 0.5 ? e - 1 : e;
}

static void r_up8(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    mx(w, x, n, exponent_up(F32(amax / 448)), true);
}

static void r_up4(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    mx(w, x, n, exponent_up(F32(amax / 6)), false);
}

static int exponent_down(double x)
{
    return x == 0 ? -1000 : ilogb(x);
}

static void r_floor8(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    mx(w, x, n, exponent_down(amax) - 8, true);
}

static void r_floor4(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    mx(w, x, n, exponent_down(amax) - 2, false);
}

/* From 1.75 up the mantissa rounds to 2. */
static int exponent_even(double x)
{
    int e = exponent_down(x);
    return x != 0 && x >= ldexp(1.75, e) ? e + 1 : e;
}

static void r_even8(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    mx(w, x, n, exponent_even(amax) - 8, true);
}

static void r_even4(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    mx(w, x, n, exponent_even(amax) - 2, false);
}

static void r_mx4_modelopt(struct want *w, const float *x, size_t n, double amax, double A)
{
    (void)A;
    r_up4(w, x, n, amax, A);
    for (size_t i = 0; i < n; i++) {
        double v = (double)x[i] * ldexp(1, 127 - w->scale);
        w->codes[i] = (uint8_t)(nearest(e2m1_of, 8, fabs(v), true) | (v > 0 ? 0 : 8));
    }
}

static const struct {
    format_t f;
    const char *name;
    rule_fn *rule;
} grouped[] = {
    {FORMAT_NVFP4, "modelopt", r_modelopt}, {FORMAT_NVFP4, "transformer-engine", r_te},
    {FORMAT_NVFP4, "compressed-tensors", r_ct}, {FORMAT_NVFP4, "4over6", r_4over6},
    {FORMAT_MXFP8, "round-up", r_up8}, {FORMAT_MXFP8, "ocp-floor", r_floor8},
    {FORMAT_MXFP8, "even", r_even8}, {FORMAT_MXFP4, "round-up", r_up4},
    {FORMAT_MXFP4, "ocp-floor", r_floor4}, {FORMAT_MXFP4, "even", r_even4},
    {FORMAT_MXFP4, "modelopt", r_mx4_modelopt},
};
#define N_GROUPED (sizeof grouped / sizeof grouped[0])

/* ---- matrices to try ---- */

static uint32_t draw(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*s >> 32);
}

/* BF16 values: kind 0 bell-shaped, 1 a coarse grid (ties everywhere), 2 exponents over 2^-40 .. 1,
 * 3 tiny (2^-120), 4 huge, 5 zero groups and signed zeros among others. */
static void fill(float *x, size_t n, int kind, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        double u = ((double)draw(&seed) + (double)draw(&seed)) * 0x1p-31 - 2.0;
        double g = (int)(draw(&seed) % 97) - 48;
        double v[] = {u * 0.05, g * 0.125, ldexp(u, -(int)(draw(&seed) % 40)), u * 0x1p-120,
                      u * 0x1p126, i / 48 % 3 ? (i % 5 ? u : -0.0) : 0.0};
        x[i] = format_bf16(format_to_bf16((float)v[kind]));
    }
}

static void encode_all(format_t f, const char *rule, const float *x, size_t rows, size_t cols,
                       size_t step, uint8_t *data, uint8_t *scale, struct encode *e)
{
    const struct format *fmt = &formats[f];
    float amax = format_needs_amax(fmt) ? encode_amax(0, x, rows * cols) : NAN;
    const struct encode_rule *r = encode_rule_find(f, rule);
    assert_non_null(r);
    encode_init(e, f, r, rows, cols, amax);
    for (size_t row = 0; row < rows; row += step) {
        size_t n = rows - row < step ? rows - row : step, at = 0;
        if (fmt->group_rows)
            at = row / fmt->group_rows * format_scale_cols(f, cols) * (size_t)fmt->scale_bytes;
        encode_rows(e, x + row * cols, row, n, data + row * format_row_bytes(f, cols), scale + at);
    }
}

static void compare_groups(size_t k, const float *x, size_t rows, size_t cols, const uint8_t *data,
                           const uint8_t *scale, const struct encode *e)
{
    format_t f = grouped[k].f;
    size_t group = formats[f].group_cols, row_bytes = format_row_bytes(f, cols);
    double A = 0;
    for (size_t i = 0; i < rows * cols; i++)
        A = fmax(A, fabs((double)x[i]));
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c += group, scale++) {
            size_t n = cols - c < group ? cols - c : group;
            struct want w = {.tensor = 1};
            double a = 0;
            for (size_t i = 0; i < n; i++)
                a = fmax(a, fabs((double)x[r * cols + c + i]));
            grouped[k].rule(&w, x + r * cols + c, n, a, A);
            if (w.scale != *scale || (float)w.tensor != e->tensor)
                fail_msg("%s %s: row %zu column %zu (amax %a of %a): scale %d, not %d; tensor %a",
                         formats[f].name, grouped[k].name, r, c, a, A, *scale, w.scale,
                         (double)e->tensor);
            for (size_t i = 0; i < n; i++) {
                const uint8_t *row = data + r * row_bytes;
                int got = formats[f].elem == ELEM_E2M1 ? row[(c + i) / 2] >> 4 * ((c + i) % 2) & 15
                                                       : row[c + i];
                if (got != w.codes[i])
                    fail_msg("%s %s: row %zu column %zu: %a is %d, not %d", formats[f].name,
                             grouped[k].name, r, c + i, (double)x[r * cols + c + i], got,
                             w.codes[i]);
            }
        }
}

static const size_t shapes[][2] = {{1, 16}, {3, 33}, {5, 64}, {7, 47}, {2, 2880}, {64, 256}};

static void grouped_rules(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_GROUPED; k++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (int kind = 0; kind < 6; kind++) {
                size_t rows = shapes[s][0], cols = shapes[s][1], data_n, scale_n;
                assert_true(format_bytes(grouped[k].f, rows, cols, &data_n, &scale_n));
                float *x = mem_alloc(rows * cols * sizeof *x);
                uint8_t *data = mem_alloc(data_n), *scale = mem_alloc(scale_n);
                struct encode e;
                fill(x, rows * cols, kind, k * 1000 + s * 10 + (uint64_t)kind);
                encode_all(grouped[k].f, grouped[k].name, x, rows, cols, 1 + s, data, scale, &e);
                compare_groups(k, x, rows, cols, data, scale, &e);
                mem_free(x);
                mem_free(data);
                mem_free(scale);
            }
}

/* FP8 with f32 scales, and BF16: every element against the definition, in whole row groups. */
static void fp8_rules(void **state)
{
    (void)state;
    static const struct {
        format_t f;
        const char *rule;
        bool bf16;
    } t[] = {{FORMAT_FP8_BLOCK, NULL, false}, {FORMAT_FP8_BLOCK, "amax-bf16", true},
             {FORMAT_FP8_TENSOR, NULL, false}, {FORMAT_FP8_CHANNEL, NULL, false}};
    enum { ROWS = 259, COLS = 200 };
    float *x = mem_alloc(ROWS * COLS * sizeof *x);
    uint8_t *data = mem_alloc(ROWS * COLS);
    float scale[ROWS];
    for (size_t k = 0; k < 4; k++)
        for (int kind = 0; kind < 6; kind++) {
            const struct format *f = &formats[t[k].f];
            struct encode e;
            fill(x, ROWS * COLS, kind, k * 7 + (uint64_t)kind);
            encode_all(t[k].f, t[k].rule, x, ROWS, COLS, 128, data, (uint8_t *)scale, &e);
            size_t gr = f->group_rows ? f->group_rows : ROWS, gc = f->group_cols ? f->group_cols : COLS;
            for (size_t i = 0; i < ROWS * COLS; i++) {
                size_t r0 = i / COLS / gr * gr, c0 = i % COLS / gc * gc;
                double a = 0;
                if (i % COLS != c0 || i / COLS != r0) a = -1; /* known from the group's first */
                for (size_t r = r0; a >= 0 && r < ROWS && r < r0 + gr; r++)
                    for (size_t c = c0; c < COLS && c < c0 + gc; c++)
                        a = fmax(a, fabs((double)x[r * COLS + c]));
                double s = (double)scale[r0 / gr * format_scale_cols(t[k].f, COLS) + c0 / gc];
                double want = t[k].bf16 ? (double)format_bf16(format_to_bf16((float)F32(a / 448)))
                                        : F32(a / 448);
                if (a >= 0 && s != (want == 0 ? 1 : want)) fail_msg("%s: scale %a", f->name, s);
                if (data[i] != e4m3_code(F32((double)x[i] / s))) fail_msg("%s: %zu", f->name, i);
            }
        }
    uint16_t *b = mem_alloc(ROWS * COLS * sizeof *b);
    struct encode e;
    encode_init(&e, FORMAT_BF16, encode_rule_find(FORMAT_BF16, NULL), ROWS, COLS, 0);
    encode_rows(&e, x, 0, ROWS, b, NULL);
    for (size_t i = 0; i < ROWS * COLS; i++)
        assert_int_equal(b[i], format_to_bf16(x[i]));
    mem_free(b);
    mem_free(x);
    mem_free(data);
}

/* Values that are elements, under scales that are exact, come back (NVFP4: up to two roundings). */
static void round_trips(void **state)
{
    (void)state;
    enum { ROWS = 130, COLS = 160 };
    float *x = mem_alloc(ROWS * COLS * sizeof *x), *y = mem_alloc(COLS * sizeof *y);
    for (int f = 0; f < FORMAT_COUNT; f++) {
        size_t data_n, scale_n;
        assert_true(format_bytes((format_t)f, ROWS, COLS, &data_n, &scale_n));
        uint8_t *data = mem_alloc(data_n), *scale = mem_alloc(scale_n);
        struct encode e;
        bool e4m3 = formats[f].elem == ELEM_E4M3;
        for (size_t i = 0; i < ROWS * COLS; i++) /* elements, the largest in every group */
            x[i] = e4m3 ? format_e4m3((uint8_t)(i % 8 ? i % 127 : 126))
                        : format_e2m1((uint8_t)(i % 8 ? i % 16 : 7));
        encode_all((format_t)f, NULL, x, ROWS, COLS, 128, data, scale, &e);
        struct format_parts p = {(format_t)f, ROWS, COLS, data, scale, e.tensor};
        for (size_t r = 0; r < ROWS; r++) {
            format_decode_row(y, &p, r);
            for (size_t c = 0; c < COLS; c++)
                if (fabsf(y[c] - x[r * COLS + c]) > 1e-6f * fabsf(x[r * COLS + c]))
                    fail_msg("%s: %a became %a", formats[f].name, (double)x[r * COLS + c],
                             (double)y[c]);
        }
        mem_free(data);
        mem_free(scale);
    }
    mem_free(x);
    mem_free(y);
}

static void rule_table(void **state)
{
    (void)state;
    for (int f = 0; f < FORMAT_COUNT; f++) {
        int standard = 0;
        for (size_t i = 0; i < ENCODE_RULES; i++) {
            const struct encode_rule *r = &encode_rules[i];
            standard += r->standard >> f & 1;
            if (r->formats >> f & 1) assert_ptr_equal(encode_rule_find((format_t)f, r->name), r);
            if (formats[f].tensor && r->formats >> f & 1) assert_non_null(r->tensor);
        }
        assert_int_equal(standard, 1);
    }
    assert_null(encode_rule_find(FORMAT_NVFP4, "round-up"));
    assert_null(encode_rule_find(FORMAT_MXFP8, "modelopt"));
    assert_string_equal(encode_rule_find(FORMAT_NVFP4, NULL)->name, "modelopt");
    assert_true(isnan(encode_amax(1, (float[]){2, NAN, 3}, 3)));
    assert_true(isinf(encode_amax(1, (float[]){2, -INFINITY, 3}, 3)));
    assert_true(encode_amax(1, (float[]){-2, 0, 1.5f}, 3) == 2);
}

/* ---- the tiny model, quantized by an independent tool ---- */

#define TINY "../shared/models/tiny-moe/"

static const struct st_tensor *find(const struct st_file *f, const char *base, const char *suffix)
{
    char name[256];
    snprintf(name, sizeof name, "%s%s", base, suffix);
    for (size_t i = 0; i < f->n; i++)
        if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    return NULL;
}

static void *load(const struct st_file *f, const struct st_tensor *t)
{
    struct err e = {0};
    void *p = mem_alloc(t->bytes);
    if (st_read(f, t, 0, p, t->bytes, &e) != OK) fail_msg("%s", e.msg);
    return p;
}

static float *widen(const uint16_t *w, size_t n)
{
    float *x = mem_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = format_bf16(w[i]);
    return x;
}

/* Half the distance between the codes around u, at least that at the least normal. */
static double half_step(elem_t elem, double u)
{
    if (elem == ELEM_E2M1) return u < 2 ? 0.25 : u < 4 ? 0.5 : u <= 7 ? 1 : 0;
    return u >= 464 ? 0 : ldexp(1, (u < 0x1p-6 ? -6 : ilogb(u)) - 4);
}

struct tally {
    size_t matrices, elements, codes, scales, tensors; /* of those: how many differ */
};

/* Is u, rounded to code `a` by one and to `b` by the other, a tie but for float64 against f32? */
static void check_tie(const char *name, double (*of)(int), int a, int b, double u)
{
    double mid = (of(a) + of(b)) / 2;
    if (abs(a - b) != 1 || fabs(u - mid) > 3e-7 * mid)
        fail_msg("%s: %.9g is code %d here, %d there", name, u, a, b);
}

static int nibble(const void *data, size_t row_bytes, size_t r, size_t c)
{
    return ((const uint8_t *)data)[r * row_bytes + c / 2] >> 4 * (c % 2) & 15;
}

/* The tool that wrote the NVFP4 folder divides in float64, Model-Optimizer in f32: what is a tie in
 * f32 may go the other way there, nothing else may. */
static void compare_nvfp4(struct tally *t, const struct format_parts *p, const float *x,
                          const uint8_t *data, const uint8_t *scale, const char *name)
{
    size_t per_row = p->cols / 16, row_bytes = p->cols / 2;
    const uint8_t *theirs = p->scale;
    for (size_t i = 0; i < p->rows * per_row; i++) {
        const float *g = x + i * 16;
        double d = (double)p->tensor * e4m3_of(theirs[i]);
        if (scale[i] != theirs[i]) {
            t->scales++;
            check_tie(name, e4m3_of, scale[i], theirs[i],
                      (double)encode_amax(0, g, 16) / 6 / (double)p->tensor);
            continue;
        }
        for (size_t j = 0; j < 16; j++) {
            size_t c = i % per_row * 16 + j;
            int a = nibble(data, row_bytes, i / per_row, c);
            int b = nibble(p->data, row_bytes, i / per_row, c);
            if (a == b) continue;
            t->codes++;
            assert_int_equal(a & 8, b & 8);
            check_tie(name, e2m1_of, a & 7, b & 7, fabs((double)g[j]) / d);
        }
    }
}

/* Decoded values lie within half a step of the original; then the same bytes from our encoder. */
static void check_matrix(struct tally *t, const struct format_parts *p, const float *x,
                         const char *rule, float amax, const char *name)
{
    const struct format *f = &formats[p->format];
    size_t data_n, scale_n, at;
    assert_true(format_bytes(p->format, p->rows, p->cols, &data_n, &scale_n));
    size_t scales = scale_n / (size_t)f->scale_bytes;
    assert_true(format_check_scales(p->format, p->scale, scales, &at));
    assert_true(format_check_data(p->format, p->data, data_n, &at));
    assert_true(format_check_zero_blocks(p, 0, p->rows, &at));
    float *y = mem_alloc(p->cols * sizeof *y);
    for (size_t r = 0; r < p->rows; r++) {
        format_decode_row(y, p, r);
        for (size_t c = 0; c < p->cols; c++) {
            size_t s = r / f->group_rows * format_scale_cols(p->format, p->cols) + c / f->group_cols;
            double d = f->scale == SCALE_F32    ? (double)((const float *)p->scale)[s]
                       : f->scale == SCALE_E8M0 ? (double)format_e8m0(((const uint8_t *)p->scale)[s])
                                                : (double)format_e4m3(((const uint8_t *)p->scale)[s]);
            d *= (double)p->tensor;
            double u = fabs((double)x[r * p->cols + c]) / d;
            double off = fabs((double)y[c] - (double)x[r * p->cols + c]) / d;
            if (off > half_step(f->elem, u) * 1.0001)
                fail_msg("%s row %zu column %zu: %a decodes to %a", name, r, c,
                         (double)x[r * p->cols + c], (double)y[c]);
        }
    }
    mem_free(y);
    uint8_t *data = mem_alloc(data_n), *scale = mem_alloc(scale_n);
    struct encode e;
    encode_init(&e, p->format, encode_rule_find(p->format, rule), p->rows, p->cols, amax);
    encode_rows(&e, x, 0, p->rows, data, scale);
    t->matrices++;
    t->elements += p->rows * p->cols;
    t->tensors += e.tensor != p->tensor;
    if (p->format == FORMAT_NVFP4) compare_nvfp4(t, p, x, data, scale, name);
    for (size_t i = 0; p->format != FORMAT_NVFP4 && i < data_n; i++)
        t->codes += data[i] != ((const uint8_t *)p->data)[i];
    for (size_t i = 0; p->format != FORMAT_NVFP4 && i < scale_n; i++)
        t->scales += scale[i] != ((const uint8_t *)p->scale)[i];
    mem_free(data);
    mem_free(scale);
}

/* Matrices that share a tensor scale with `name`: '?' stands for one of the words. */
static float shared_amax(const struct st_file *f, const char *base)
{
    static const char *const sets[][4] = {{"q_proj", "k_proj", "v_proj", NULL},
                                          {"gate_proj", "up_proj", NULL, NULL}};
    const char *last = strrchr(base, '.') + 1;
    float amax = 0;
    for (size_t i = 0; i < 2; i++)
        for (size_t j = 0; sets[i][j]; j++) {
            if (strcmp(sets[i][j], last) != 0) continue;
            for (size_t k = 0; sets[i][k]; k++) {
                char other[256];
                snprintf(other, sizeof other, "%.*s%s.weight", (int)(last - base), base, sets[i][k]);
                const struct st_tensor *t = find(f, other, "");
                assert_non_null(t);
                uint16_t *w = load(f, t);
                float *x = widen(w, t->bytes / 2);
                amax = encode_amax(amax, x, t->bytes / 2);
                mem_free(x);
                mem_free(w);
            }
            return amax;
        }
    return 0;
}

static void tiny_folder(const char *folder, format_t format, const char *scale_suffix,
                        const char *tensor_suffix, const char *rule, struct tally *t)
{
    struct err err = {0};
    struct st_file q, w;
    char path[256];
    snprintf(path, sizeof path, TINY "%s/model.safetensors", folder);
    if (st_open(&q, path, &err) != OK) fail_msg("%s", err.msg);
    if (st_open(&w, TINY "final/model-00001-of-00001.safetensors", &err) != OK)
        fail_msg("%s", err.msg);
    for (size_t i = 0; i < q.n; i++) {
        char base[256];
        size_t len = strlen(q.tensors[i].name);
        if (len < 8 || strcmp(q.tensors[i].name + len - 7, ".weight") != 0) continue;
        snprintf(base, sizeof base, "%.*s", (int)(len - 7), q.tensors[i].name);
        const struct st_tensor *s = find(&q, base, scale_suffix), *d = &q.tensors[i];
        const struct st_tensor *o = find(&w, base, ".weight");
        if (s == NULL) continue;
        assert_non_null(o);
        struct format_parts p = {format, o->shape[0], o->shape[1], load(&q, d), load(&q, s), 1.0f};
        void *raw = (void *)(uintptr_t)p.scale, *codes = (void *)(uintptr_t)p.data;
        float *wide = NULL;
        if (s->dtype == ST_BF16) p.scale = wide = widen(raw, s->bytes / 2);
        uint16_t *bf16 = load(&w, o);
        float *x = widen(bf16, p.rows * p.cols), amax = encode_amax(0, x, p.rows * p.cols);
        if (tensor_suffix) {
            float *ts = load(&q, find(&q, base, tensor_suffix));
            p.tensor = *ts;
            mem_free(ts);
            float joint = shared_amax(&w, base);
            if (joint > 0) amax = joint;
        }
        check_matrix(t, &p, x, rule, amax, q.tensors[i].name);
        mem_free(x);
        mem_free(bf16);
        mem_free(wide);
        mem_free(raw);
        mem_free(codes);
    }
    st_close(&q);
    st_close(&w);
    print_message("%s, %s: %zu matrices, %zu elements; differing: %zu codes, %zu scales, "
                  "%zu tensor scales\n",
                  folder, encode_rule_find(format, rule)->name, t->matrices, t->elements, t->codes,
                  t->scales, t->tensors);
}

static void tiny_moe(void **state)
{
    (void)state;
    if (!file_exists(TINY "final/config.json")) {
        print_message("skip: ../shared/models/tiny-moe is absent\n");
        skip();
    }
    struct tally nv = {0}, mx = {0}, fp8 = {0};
    tiny_folder("nvfp4", FORMAT_NVFP4, ".weight_scale", ".weight_scale_2", "modelopt", &nv);
    tiny_folder("mxfp8-last1-bf16", FORMAT_MXFP8, ".weight_scale_inv", NULL, "round-up", &mx);
    tiny_folder("fp8", FORMAT_FP8_BLOCK, ".weight_scale_inv", NULL, "amax-bf16", &fp8);
    assert_true(nv.matrices == 156 && nv.tensors == 0 && nv.scales < 200 && nv.codes < 5000);
    assert_true(mx.matrices == 104 && mx.codes + mx.scales == 0);
    assert_true(fp8.matrices == 156 && fp8.codes + fp8.scales == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rule_table),  cmocka_unit_test(grouped_rules), cmocka_unit_test(fp8_rules),
        cmocka_unit_test(round_trips), cmocka_unit_test(tiny_moe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
