/* test_fixed.c - activations in fixed point: the value and the error that fixed.h promises. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/fixed.h"
#include <math.h>
#include <stdlib.h>

static uint64_t rng = 3;

static uint32_t next(void)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 32);
}

static int32_t value(const struct fixed *x, int i)
{
    return x->digit[0][i] + x->digit[1][i] * 256 + x->digit[2][i] * 65536;
}

/* A value and its block against the text, in float64. */
static void check_block(const struct fixed *x, const float *a)
{
    int64_t sum = 0;
    double max = 0.0;
    for (int i = 0; i < 16; i++)
        if (fabs((double)a[i]) > max) max = fabs((double)a[i]);
    if (max == 0.0) assert_true(x->unit == 0.0f);
    for (int i = 0; i < 16; i++) {
        int32_t v = value(x, i);
        double back = 2.0 * (double)x->unit * v, size = fabs((double)a[i]);
        sum += v;
        assert_true(abs(v) <= 1 << 22);
        if (max < 0x1p-126) continue;
        assert_true(fabs(back - (double)a[i]) <= max * 0x1p-22);
        if (size >= max * 0x1p-14 && a[i] == bf16_to_f32(f32_to_bf16(a[i])))
            assert_true(back == (double)a[i]);
    }
    assert_int_equal(x->bias, -12 * sum);
}

static void values(void **state)
{
    (void)state;
    struct fixed x;
    float a[16];
    for (int n = 0; n < 200000; n++) {
        int spread = (int)(next() % 40), centre = (int)(next() % 250) - 125;
        for (int i = 0; i < 16; i++) {
            float m = (float)(int32_t)next() * 0x1p-31f;
            a[i] = ldexpf(m, centre - (spread ? (int)(next() % (unsigned)spread) : 0));
            if (n % 2) a[i] = bf16_to_f32(f32_to_bf16(a[i]));
            if (next() % 16 == 0) a[i] = 0.0f;
        }
        fixed_row(&x, a, 16);
        check_block(&x, a);
    }
}

/* Ties go to even, and the largest significand fits the digits. */
static void edges(void **state)
{
    (void)state;
    struct fixed x;
    float a[16] = {1.0f,          0x1.8p-21f, 0x1.4p-20f, -0x1.8p-21f,
                   0x1.fffffep0f, -0x1.fep0f, 0x1p-22f,   -0.0f};
    fixed_row(&x, a, 16);
    assert_int_equal(value(&x, 0), 1 << 21);
    assert_int_equal(value(&x, 1), 2);
    assert_int_equal(value(&x, 2), 2);
    assert_int_equal(value(&x, 3), -2);
    assert_int_equal(value(&x, 4), 1 << 22);
    assert_int_equal(value(&x, 5), -(0xff << 14));
    assert_int_equal(value(&x, 6), 0);
    assert_int_equal(value(&x, 7), 0);
    assert_true(x.unit == 0x1p-22f);
    a[0] = 0x1p-149f;
    fixed_row(&x, a, 1);
    assert_true(x.unit == 0x1p-148f && value(&x, 0) == 0);
    a[0] = -0x1.fep127f;
    fixed_row(&x, a, 1);
    assert_true(2.0 * (double)x.unit * value(&x, 0) == (double)a[0]);
}

/* Past the row's end are zeros, whatever lies there; what is not finite spoils its block alone. */
static void rows(void **state)
{
    (void)state;
    enum { COLS = 37 };
    struct fixed x[3];
    float a[COLS + 11];
    for (int bad = -1; bad < 3; bad++) {
        for (int i = 0; i < COLS + 11; i++)
            a[i] = i < COLS ? (float)(i + 1) : 1e30f;
        if (bad >= 0) a[17] = bad == 0 ? NAN : bad == 1 ? INFINITY : -INFINITY;
        fixed_row(x, a, COLS);
        for (int b = 0; b < 3; b++)
            for (int i = 0; i < 16; i++) {
                bool in = b * 16 + i < COLS && !(b == 1 && bad >= 0);
                float want = in ? a[b * 16 + i] : 0.0f;
                if (b == 1 && bad >= 0)
                    assert_int_equal(value(&x[b], i), 0);
                else
                    assert_true(2.0f * x[b].unit * (float)value(&x[b], i) == want);
            }
        assert_int_equal(isnan(x[1].unit) != 0, bad >= 0);
        if (bad >= 0) assert_int_equal(x[1].bias, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(values), cmocka_unit_test(edges),
                                       cmocka_unit_test(rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
