/* test_encode.c - each encoding rule again in float64, with a search for the nearest code. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "format/encode.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
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
    {FORMAT_NVFP4, "modelopt", r_modelopt},
    {FORMAT_NVFP4, "transformer-engine", r_te},
    {FORMAT_NVFP4, "compressed-tensors", r_ct},
    {FORMAT_NVFP4, "4over6", r_4over6},
    {FORMAT_MXFP8, "round-up", r_up8},
    {FORMAT_MXFP8, "ocp-floor", r_floor8},
    {FORMAT_MXFP8, "even", r_even8},
    {FORMAT_MXFP4, "round-up", r_up4},
    {FORMAT_MXFP4, "ocp-floor", r_floor4},
    {FORMAT_MXFP4, "even", r_even4},
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
        double v[] = {u * 0.05,     g * 0.125,   ldexp(u, -(int)(draw(&seed) % 40)),
                      u * 0x1p-120, u * 0x1p126, i / 48 % 3 ? (i % 5 ? u : -0.0) : 0.0};
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
    } t[] = {{FORMAT_FP8_BLOCK, NULL, false},
             {FORMAT_FP8_BLOCK, "amax-bf16", true},
             {FORMAT_FP8_TENSOR, NULL, false},
             {FORMAT_FP8_CHANNEL, NULL, false}};
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
            size_t gr = f->group_rows ? f->group_rows : ROWS,
                   gc = f->group_cols ? f->group_cols : COLS;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rule_table),
        cmocka_unit_test(grouped_rules),
        cmocka_unit_test(fp8_rules),
        cmocka_unit_test(round_trips),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
