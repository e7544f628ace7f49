/* test_act.c - rounding of activations against the definitions in float64. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "format/act.h"
#include "format/format.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define F32(x) ((double)(float)(x)) /* one f32 operation done in float64 */
enum { COLS = 300 };                /* groups of 16, 32 and 128 end in the middle */

/* Nearest value with m mantissa bits and least exponent e0, up to `top`; ties to even. */
static double nearest(double x, int m, int e0, double top)
{
    if (x == 0) return x;
    int e = ilogb(x) < e0 ? e0 : ilogb(x);
    double v = ldexp(nearbyint(ldexp(x, m - e)), e - m);
    return fabs(v) > top ? copysign(top, v) : v;
}

static double e4m3(double x)
{
    return nearest(x, 3, -6, 448);
}

static double e2m1(double x)
{
    return nearest(x, 1, 0, 6);
}

static double amax(const float *x, size_t n)
{
    double a = 0;
    for (size_t i = 0; i < n; i++)
        a = fmax(a, fabs((double)x[i]));
    return a;
}

static size_t upto(size_t c, size_t group)
{
    return c + group < COLS ? group : COLS - c;
}

static void want_fp8(double *out, double *scale, const float *x)
{
    for (size_t c = 0; c < COLS; c += 128) {
        double a = fmax(amax(x + c, upto(c, 128)), F32(1e-10)), m = F32(448 / a);
        scale[c / 128] = F32(a * F32(1.0 / 448));
        for (size_t i = c; i < c + upto(c, 128); i++)
            out[i] = e4m3(F32((double)x[i] * m));
    }
}

static void want_mxfp8(double *out, double *scale, const float *x)
{
    (void)scale;
    for (size_t c = 0; c < COLS; c += 32) {
        double r = F32(amax(x + c, upto(c, 32)) / 448);
        int k = r == 0 ? -127 : (int)fmax(-127, ceil(log2(r)));
        for (size_t i = c; i < c + upto(c, 32); i++)
            out[i] = nearest(ldexp(e4m3(ldexp((double)x[i], -k)), k), 7, -126, DBL_MAX);
    }
}

static void want_nvfp4(double *out, double s, const float *x)
{
    double g = fmin(F32(1 / s), (double)FLT_MAX);
    for (size_t c = 0; c < COLS; c += 16) {
        double a = amax(x + c, upto(c, 16)), b = e4m3(F32(a * F32(g * F32(1.0 / 6))));
        double p = F32(b * F32(1 / g));
        double m = p == 0 ? (double)FLT_MAX : fmin(F32(1 / p), (double)FLT_MAX);
        for (size_t i = c; i < c + upto(c, 16); i++)
            out[i] = e2m1(F32((double)x[i] * m)) * b;
    }
}

static uint32_t draw(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*s >> 32);
}

/* Like an activation: bell-shaped, with outliers, zero groups, and by kind tiny or on a grid. */
static void fill(float *x, int kind, uint64_t seed)
{
    for (size_t i = 0; i < COLS; i++) {
        double u = ((double)draw(&seed) + (double)draw(&seed)) * 0x1p-31 - 2.0;
        if (draw(&seed) % 61 == 0) u *= 50;
        if (i / 32 == 3) u = 0;
        double v[] = {u,
                      ldexp(u, -110),
                      (double)((int)(draw(&seed) % 33) - 16) * 0.25,
                      u * 1e-12,
                      0,
                      ldexp(u, (int)(draw(&seed) % 60) - 30)};
        x[i] = (float)v[kind];
    }
}

static void compare(act_t a, const float *x, float input_scale, const double *out,
                    const double *scale)
{
    float got[COLS], got_scale[3] = {0};
    memcpy(got, x, sizeof got);
    act_row(a, got, got_scale, got, COLS, input_scale); /* in place */
    for (size_t i = 0; i < COLS; i++) {
        if ((double)got[i] != out[i])
            fail_msg("%s [%zu]: %a is %a, not %a", acts[a].name, i, (double)x[i], (double)got[i],
                     out[i]);
        assert_true(format_bf16(format_to_bf16(got[i])) == got[i]);
    }
    for (size_t i = 0; i < act_scales(a, COLS); i++)
        if ((double)got_scale[i] != scale[i])
            fail_msg("%s scale %zu: %a, not %a", acts[a].name, i, (double)got_scale[i], scale[i]);
}

static void definitions(void **state)
{
    (void)state;
    float x[COLS];
    double out[COLS], scale[3];
    for (int kind = 0; kind < 6; kind++)
        for (uint64_t seed = 1; seed < 200; seed++) {
            fill(x, kind, seed * 11 + (uint64_t)kind);
            for (size_t i = 0; i < COLS; i++)
                out[i] = nearest((double)x[i], 7, -126, DBL_MAX);
            compare(ACT_BF16, x, NAN, out, scale);
            want_fp8(out, scale, x);
            compare(ACT_FP8_BLOCK, x, NAN, out, scale);
            want_mxfp8(out, scale, x);
            compare(ACT_MXFP8, x, NAN, out, scale);
            static const double inputs[] = {0.00123, 1.0, 3e-7};
            for (size_t k = 0; k < 3; k++) { /* from far too small to far too large for the row */
                scale[0] = F32(inputs[k]);
                want_nvfp4(out, scale[0], x);
                compare(ACT_NVFP4, x, (float)inputs[k], out, scale);
            }
            scale[0] = F32(amax(x, COLS) * F32(1.0 / 2688));
            if (scale[0] == 0)
                memset(out, 0, sizeof out);
            else
                want_nvfp4(out, scale[0], x);
            compare(ACT_NVFP4_PER_TOKEN, x, NAN, out, scale);
        }
}

/* What a reader of the format expects of the error: half a step of the largest element. */
static void errors_are_small(void **state)
{
    (void)state;
    static const double bound[] = {0x1p-8, 32 / 896.0, 32 / 448.0, 0, 0.2};
    float x[COLS], y[COLS], s[3];
    for (uint64_t seed = 1; seed < 100; seed++) {
        fill(x, 0, seed);
        for (int a = 0; a < ACT_COUNT; a++) {
            if (acts[a].static_scale) continue;
            act_row((act_t)a, y, s, x, COLS, NAN);
            for (size_t i = 0; i < COLS; i++) {
                uint32_t g = acts[a].scale_group;
                double v = (double)y[i] * (g == 0 ? 1 : (double)s[g == ACT_ROW ? 0 : i / g]);
                size_t c = i / 16 * 16, n = a == ACT_NVFP4_PER_TOKEN ? upto(c, 16) : COLS;
                double top = a == ACT_BF16 ? fabs((double)x[i]) : amax(n == COLS ? x : x + c, n);
                assert_true(fabs(v - (double)x[i]) <= bound[a] * top);
            }
        }
    }
}

static void table(void **state)
{
    (void)state;
    for (int a = 0; a < ACT_COUNT; a++)
        assert_int_equal(act_find(acts[a].name), a);
    assert_int_equal(act_find("FP8_BLOCK"), ACT_FP8_BLOCK);
    assert_int_equal(act_find("fp8"), ACT_COUNT);
    assert_int_equal(act_scales(ACT_FP8_BLOCK, 300), 3);
    assert_int_equal(act_scales(ACT_FP8_BLOCK, 256), 2);
    assert_int_equal(act_scales(ACT_NVFP4, 300), 1);
    assert_int_equal(act_scales(ACT_MXFP8, 300), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(definitions),
        cmocka_unit_test(errors_are_small),
        cmocka_unit_test(table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
