/* test_format.c - codecs and sizes of every format, exhaustively, against double arithmetic. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "format/format.h"
#include "format_doc.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static double e4m3_value(int code)
{
    int e = code >> 3 & 15, m = code & 7;
    double v = e ? ldexp(1.0 + m / 8.0, e - 7) : ldexp(m / 8.0, -6);
    if ((code & 127) == 127) return (double)NAN;
    return code & 128 ? -v : v;
}

static double e2m1_value(int code)
{
    int e = code >> 1 & 3, m = code & 1;
    double v = e ? ldexp(1.0 + m / 2.0, e - 1) : m / 2.0;
    return code & 8 ? -v : v;
}

static bool same(float got, double want)
{
    return isnan(want) ? isnan(got) : (double)got == want && !signbit(got) == !signbit(want);
}

/* The nearest of the n magnitudes, the even code in a tie; the largest above them. */
static int nearest(double (*value)(int), int n, double x)
{
    int best = 0;
    if (x > value(n - 1)) return n - 1;
    for (int c = 1; c < n; c++) {
        double d = fabs(value(c) - x), b = fabs(value(best) - x);
        if (d < b || (d == b && c % 2 == 0)) best = c;
    }
    return best;
}

static void scalars_decode(void **state)
{
    (void)state;
    for (int c = 0; c < 256; c++) {
        if (!same(format_e4m3((uint8_t)c), e4m3_value(c))) fail_msg("e4m3 %d", c);
        if (!same(format_e8m0((uint8_t)c), c == 255 ? (double)NAN : ldexp(1.0, c - 127)))
            fail_msg("e8m0 %d", c);
        if (!same(format_e2m1((uint8_t)c), e2m1_value(c & 15))) fail_msg("e2m1 %d", c);
    }
    for (int c = 0; c < 65536; c++) {
        uint16_t back = format_to_bf16(format_bf16((uint16_t)c));
        bool nan = (c & 0x7fff) > 0x7f80;
        if (back != (nan ? c | 0x40 : c)) fail_msg("bf16 %d gives %d", c, back);
    }
}

static void check_code(const char *what, float x, int got, int want)
{
    if (got != want) fail_msg("%s of %a is %d, not %d", what, (double)x, got, want);
}

static void check_round(float x)
{
    int sign = signbit(x) != 0;
    double a = fabs((double)x);
    check_code("e4m3", x, format_to_e4m3(x), nearest(e4m3_value, 127, a) | sign << 7);
    check_code("e2m1", x, format_to_e2m1(x), nearest(e2m1_value, 8, a) | sign << 3);
}

static void around(double v)
{
    float x = (float)v;
    float near[] = {x, nextafterf(x, INFINITY), nextafterf(x, -INFINITY)};
    for (size_t i = 0; i < 3; i++) {
        check_round(near[i]);
        check_round(-near[i]);
    }
}

/* Every code, every tie between two codes, their neighbours, and a grid over all exponents. */
static void scalars_encode(void **state)
{
    (void)state;
    for (int c = 0; c < 126; c++) {
        around(e4m3_value(c));
        around((e4m3_value(c) + e4m3_value(c + 1)) / 2);
    }
    for (int c = 0; c < 7; c++)
        around((e2m1_value(c) + e2m1_value(c + 1)) / 2);
    around(448.0);
    around(464.0);
    around(1e9);
    for (uint32_t u = 0; u < 0x7f800000u; u += 0x12345) {
        float x;
        memcpy(&x, &u, sizeof x);
        check_round(x);
    }
    assert_int_equal(format_to_e4m3(INFINITY), 0x7e);
    assert_int_equal(format_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(format_to_e2m1(INFINITY), 7);
    assert_int_equal(format_to_e4m3(NAN) & 0x7f, 0x7f);
    assert_int_equal(format_to_e2m1(NAN) & 7, 7);
    assert_int_equal(format_to_bf16(0x1.01p0f), 0x3f80); /* a tie: even below */
    assert_int_equal(format_to_bf16(0x1.03p0f), 0x3f82);
    assert_int_equal(format_to_bf16(0x1.fffffep127f), 0x7f80);
}

static void names(void **state)
{
    (void)state;
    for (int f = 0; f < FORMAT_COUNT; f++)
        assert_int_equal(format_find(formats[f].name), f);
    assert_int_equal(format_find("FP8_block"), FORMAT_FP8_BLOCK);
    assert_int_equal(format_find("fp8"), FORMAT_COUNT);
    assert_int_equal(format_find("nvfp4x"), FORMAT_COUNT);
    assert_int_equal(format_find(""), FORMAT_COUNT);
}

static void sizes(void **state)
{
    (void)state;
    static const struct {
        format_t f;
        uint64_t rows, cols;
        size_t data, scale;
    } t[] = {
        {FORMAT_BF16, 3, 5, 30, 0},
        {FORMAT_FP8_BLOCK, 128, 256, 32768, 8},
        {FORMAT_FP8_BLOCK, 129, 257, 33153, 24},
        {FORMAT_FP8_TENSOR, 7, 9, 63, 4},
        {FORMAT_FP8_CHANNEL, 7, 9, 63, 28},
        {FORMAT_MXFP8, 3, 33, 99, 6},
        {FORMAT_NVFP4, 768, 2048, 786432, 98304},
        {FORMAT_NVFP4, 2, 17, 18, 4},
        {FORMAT_MXFP4, 2880, 2880, 4147200, 259200},
        {FORMAT_MXFP8, 0, 33, 0, 0},
        {FORMAT_FP8_TENSOR, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        size_t data, scale;
        assert_true(format_bytes(t[i].f, t[i].rows, t[i].cols, &data, &scale));
        if (data != t[i].data || scale != t[i].scale) fail_msg("%zu: %zu %zu", i, data, scale);
    }
    size_t data = 1, scale = 2;
    assert_false(format_bytes(FORMAT_BF16, UINT64_MAX, UINT64_MAX, &data, &scale));
    assert_false(format_bytes(FORMAT_BF16, 1ull << 40, 1ull << 40, &data, &scale));
    assert_false(format_bytes(FORMAT_MXFP4, UINT64_MAX, 8, &data, &scale));
    assert_true(data == 1 && scale == 2);
}

/* Sixteen codes under every block scale: exact, and exact in BF16 where GEMMs may use them. */
static void fp4_products(void **state)
{
    (void)state;
    static const format_t fs[] = {FORMAT_NVFP4, FORMAT_MXFP4};
    for (size_t k = 0; k < 2; k++) {
        for (int s = 0; s < 256; s++) {
            uint8_t data[8], scale = (uint8_t)s;
            for (int i = 0; i < 8; i++)
                data[i] = (uint8_t)(2 * i | (2 * i + 1) << 4);
            struct format_parts p = {fs[k], 1, 16, data, &scale, 1.0f};
            float row[16];
            format_decode_row(row, &p, 0);
            double sv = k ? (s == 255 ? (double)NAN : ldexp(1.0, s - 127)) : e4m3_value(s);
            size_t at;
            bool usable = format_check_scales(fs[k], &scale, 1, &at);
            assert_int_equal(usable, k ? s == 0 || (s >= 10 && s <= 246) : s < 127);
            for (int i = 0; i < 16; i++) {
                double want = e2m1_value(i) * sv;
                if (!isnan(sv) && fabs(want) < 0x1p128 && !same(row[i], want))
                    fail_msg("%s code %d scale %d: %a, not %a", formats[fs[k]].name, i, s,
                             (double)row[i], want);
                if (usable && s) assert_true(format_bf16(format_to_bf16(row[i])) == row[i]);
            }
        }
    }
}

/* All E4M3 codes under every E8M0 scale, and an f32 scale with one rounding. */
static void fp8_products(void **state)
{
    (void)state;
    uint8_t data[256], scales[8];
    float row[256];
    for (int i = 0; i < 256; i++)
        data[i] = (uint8_t)i;
    for (int s = 0; s < 255; s++) {
        memset(scales, s, sizeof scales);
        struct format_parts p = {FORMAT_MXFP8, 1, 256, data, scales, 1.0f};
        format_decode_row(row, &p, 0);
        for (int i = 0; i < 256; i++) {
            double want = e4m3_value(i) * ldexp(1.0, s - 127);
            if (fabs(want) < 0x1p128 || isnan(want))
                if (!same(row[i], want)) fail_msg("mxfp8 code %d scale %d", i, s);
            if (s >= 10 && s <= 246 && !isnan(want))
                assert_true(format_bf16(format_to_bf16(row[i])) == row[i]);
        }
    }
    float s = 0x1.234568p-9f;
    struct format_parts p = {FORMAT_FP8_TENSOR, 1, 256, data, &s, 1.0f};
    format_decode_row(row, &p, 0);
    for (int i = 0; i < 256; i++)
        if (!same(row[i], (double)(float)(e4m3_value(i) * (double)s))) fail_msg("fp8 code %d", i);
}

/* Which scale belongs to which element, at partial groups: scales are powers of two that name
 * their index. */
static void groups_at_edges(void **state)
{
    (void)state;
    uint8_t data[131 * 261];
    float scale[131], row[261];
    memset(data, 0x38, sizeof data); /* 1.0 */
    for (int i = 0; i < 131; i++)
        scale[i] = (float)(i + 1);
    static const struct {
        format_t f;
        size_t gr, gc, per_row;
    } t[] = {{FORMAT_FP8_BLOCK, 128, 128, 3},
             {FORMAT_FP8_CHANNEL, 1, 261, 1},
             {FORMAT_FP8_TENSOR, 131, 261, 0}};
    for (size_t k = 0; k < 3; k++) {
        struct format_parts p = {t[k].f, 131, 261, data, scale, 1.0f};
        for (size_t r = 0; r < 131; r++) {
            format_decode_row(row, &p, r);
            for (size_t c = 0; c < 261; c++)
                assert_true(row[c] == (float)(r / t[k].gr * t[k].per_row + c / t[k].gc + 1));
        }
    }
    uint8_t packed[3 * 9], e8[3 * 2] = {127, 128, 129, 130, 131, 132}; /* 17 columns: 16 and 1 */
    uint8_t e4[3 * 2] = {0x38, 0x40, 0x48, 0x50, 0x58, 0x60};
    memset(packed, 0x22, sizeof packed);
    struct format_parts mx = {FORMAT_MXFP4, 3, 9 * 2 - 1, packed, e8, 1.0f};
    struct format_parts nv = {FORMAT_NVFP4, 3, 17, packed, e4, 0.5f};
    for (size_t r = 0; r < 3; r++) {
        format_decode_row(row, &mx, r);
        assert_true(row[16] == ldexpf(1.0f, (int)r));
        format_decode_row(row, &nv, r);
        assert_true(row[15] == ldexpf(0.5f, 2 * (int)r) && row[16] == ldexpf(1.0f, 2 * (int)r));
    }
}

static void checks(void **state)
{
    (void)state;
    size_t at = 99;
    float f[] = {0.0f, 1e-40f, 3.0f, -1.0f, NAN, INFINITY};
    assert_true(format_check_scales(FORMAT_FP8_BLOCK, f, 3, &at) && at == 99);
    for (size_t i = 3; i < 6; i++) {
        assert_false(format_check_tensor_scale(f[i]));
        assert_false(format_check_scales(FORMAT_FP8_BLOCK, f + i, 1, &at));
    }
    assert_false(format_check_scales(FORMAT_FP8_BLOCK, f, 6, &at));
    assert_int_equal(at, 3);
    uint16_t b[] = {0, 0x8000, 0x7f7f, 0x0001, 0xff80};
    assert_true(format_check_data(FORMAT_BF16, b, 4, &at));
    assert_false(format_check_data(FORMAT_BF16, b, 5, &at));
    assert_int_equal(at, 4);
    uint8_t e[] = {0x7e, 0xfe, 0x00, 0xff};
    assert_true(format_check_data(FORMAT_MXFP8, e, 3, &at));
    assert_false(format_check_data(FORMAT_MXFP8, e, 4, &at));
    assert_int_equal(at, 3);
    assert_true(format_check_data(FORMAT_NVFP4, e, 4, &at));

    uint8_t data[2 * 33] = {0}, scale[4] = {0, 127, 0, 0};
    struct format_parts p = {FORMAT_MXFP8, 2, 33, data, scale, 1.0f};
    data[0] = 0x80; /* -0 */
    data[32] = 1;   /* under scale 1 */
    assert_true(format_check_zero_blocks(&p, 0, 2, &at));
    data[33 + 32] = 1;
    assert_true(format_check_zero_blocks(&p, 0, 1, &at));
    assert_false(format_check_zero_blocks(&p, 1, 1, &at));
    assert_int_equal(at, 3);
    uint8_t nibbles[17] = {0x80, 0x08}, one = 0;
    struct format_parts q = {FORMAT_MXFP4, 1, 32, nibbles, &one, 1.0f};
    assert_true(format_check_zero_blocks(&q, 0, 1, &at));
    nibbles[15] = 0x10;
    assert_false(format_check_zero_blocks(&q, 0, 1, &at));
}

/* Every byte as the one bad scale or element of a long row, wherever it lies: in a whole block, at its edges, behind. */
static void bad_bytes_anywhere(void **state)
{
    (void)state;
    enum { N = 700 };
    static const size_t places[] = {0, 1, 255, 256, 300, 511, 512, 600, N - 1};
    uint8_t x[N];
    for (int b = 0; b < 256; b++) {
        const struct {
            bool ok;
            format_t f;
            bool scale;
        } want[] = {{b < 0x7f, FORMAT_NVFP4, true},
                    {b == 0 || (b >= 10 && b <= 246), FORMAT_MXFP8, true},
                    {(b & 0x7f) != 0x7f, FORMAT_MXFP8, false}};
        for (size_t k = 0; k < 3; k++)
            for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
                size_t at = N;
                memset(x, 0x38, sizeof x);
                x[places[i]] = (uint8_t)b;
                bool ok = want[k].scale ? format_check_scales(want[k].f, x, N, &at)
                                        : format_check_data(want[k].f, x, N, &at);
                if (ok != want[k].ok || at != (ok ? N : places[i]))
                    fail_msg("check %zu, byte %d at %zu: %d, at %zu", k, b, places[i], ok, at);
            }
    }
}

static void document(void **state)
{
    (void)state;
    struct buf want = {0}, got = {0};
    struct err e = {0};
    format_doc(&want);
    assert_false(want.failed);
    if (file_read(&got, "docs/formats.md", 1 << 20, &e) != OK) fail_msg("%s", e.msg);
    if (strcmp(got.data, want.data) != 0) fail_msg("docs/formats.md is old: run make docs");
    buf_release(&want);
    buf_release(&got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scalars_decode),
        cmocka_unit_test(scalars_encode),
        cmocka_unit_test(names),
        cmocka_unit_test(sizes),
        cmocka_unit_test(fp4_products),
        cmocka_unit_test(fp8_products),
        cmocka_unit_test(groups_at_edges),
        cmocka_unit_test(checks),
        cmocka_unit_test(bad_bytes_anywhere),
        cmocka_unit_test(document),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
