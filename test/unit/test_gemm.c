/*
 * test_gemm.c - the GEMM of every format on every instruction set of this machine: the bits that
 * backend.h defines (computed here a second time, one element after another, from canonical parts),
 * the value in float64 of the decoded matrix, and a row's bits whatever it is batched with.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "backend/layout.h"
#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const isas[] = {"portable", "avx2", "avx512", "neon"};
enum { N_ISAS = 4 };

/* Largest error of a sum of n products against float64, in 2^-24 of the sum of their sizes: the
 * chain's roundings grow like n, the epilogue adds a few. */
static double tolerance(size_t cols)
{
    return ((double)cols + 8.0) * 0x1p-24;
}

static uint64_t rng = 7;

static uint32_t next(void)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 32);
}

static float uniform(float lo, float hi)
{
    return lo + (hi - lo) * (float)(next() >> 8) * 0x1p-24f;
}

struct weights {
    struct format_parts canon;
    uint8_t *data, *scale, *resident;
    struct matrix matrix;
};

/* Any code that a checkpoint may have; E8M0 scales within 2^-8 .. 2^8. */
static void fill(struct weights *w, size_t n_data, size_t n_scales)
{
    format_t f = w->canon.format;
    for (size_t i = 0; i < n_data; i++) {
        uint8_t b = (uint8_t)next();
        w->data[i] = formats[f].elem == ELEM_E4M3 && (b & 0x7f) == 0x7f ? 0x7e : b;
    }
    if (f == FORMAT_BF16)
        for (size_t i = 0; i < n_data / 2; i++)
            ((uint16_t *)(void *)w->data)[i] = f32_to_bf16(uniform(-2.0f, 2.0f));
    for (size_t i = 0; i < n_scales; i++)
        switch (formats[f].scale) {
        case SCALE_F32: ((float *)(void *)w->scale)[i] = uniform(0.0f, 0.02f); break;
        case SCALE_E8M0: w->scale[i] = (uint8_t)(119 + next() % 17); break;
        default: w->scale[i] = (uint8_t)(next() % 0x7f);
        }
}

static struct weights weights_new(format_t f, size_t rows, size_t cols)
{
    struct weights w = {.canon = {.format = f, .rows = rows, .cols = cols, .tensor = 1.0f}};
    size_t data, scale, len;
    assert_true(format_bytes(f, rows, cols, &data, &scale));
    assert_true(layout_bytes(&len, f, rows, cols));
    w.canon.data = w.data = mem_alloc(data);
    w.canon.scale = w.scale = mem_alloc(scale + 4);
    w.resident = mem_alloc(len);
    fill(&w, data, formats[f].scale_bytes ? scale / (size_t)formats[f].scale_bytes : 0);
    if (formats[f].tensor) w.canon.tensor = 0.0123f;
    return w;
}

static void weights_store(struct weights *w)
{
    const struct format_parts *c = &w->canon;
    const void *part[PART_COUNT] = {c->data, c->scale, &c->tensor, NULL};
    for (int p = PART_DATA; p < PART_INPUT; p++)
        layout_put(w->resident, c->format, c->rows, c->cols, (part_t)p, 0,
                   layout_part_rows(c->format, (part_t)p, c->rows), part[p]);
    w->matrix = layout_matrix(c->format, c->rows, c->cols, w->resident);
}

static void weights_free(struct weights *w)
{
    mem_free(w->data);
    mem_free(w->scale);
    mem_free(w->resident);
}

/* ---- the definition, once more ---- */

static float code_value(const struct format_parts *p, size_t r, size_t c)
{
    const uint8_t *row = (const uint8_t *)p->data + r * format_row_bytes(p->format, p->cols);
    switch (formats[p->format].elem) {
    case ELEM_BF16: return format_bf16((uint16_t)(row[2 * c] | row[2 * c + 1] << 8));
    case ELEM_E4M3: return format_e4m3(row[c]);
    default: return format_e2m1((uint8_t)(row[c / 2] >> 4 * (c % 2)));
    }
}

static size_t scale_index(const struct format_parts *p, size_t r, size_t c)
{
    const struct format *f = &formats[p->format];
    return (f->group_rows ? r / f->group_rows : 0) * format_scale_cols(p->format, p->cols) +
           (f->group_cols ? c / f->group_cols : 0);
}

/* element * small scale */
static float weight_at(const struct format_parts *p, size_t r, size_t c)
{
    if (c >= p->cols) return 0.0f;
    float x = code_value(p, r, c);
    const uint8_t *s = p->scale;
    if (formats[p->format].scale == SCALE_E8M0) x *= format_e8m0(s[scale_index(p, r, c)]);
    if (formats[p->format].scale == SCALE_E4M3) x *= format_e4m3(s[scale_index(p, r, c)]);
    assert_true(x == bf16_to_f32(f32_to_bf16(x)));
    return x;
}

static float f32_scale(const struct format_parts *p, size_t r, size_t c)
{
    return ((const float *)p->scale)[scale_index(p, r, c)];
}

/* The exponent of the largest of 16 activations, and element c of them in fixed point. */
static int block_exponent(const float *a, size_t n)
{
    float max = 0.0f;
    int e;
    for (size_t c = 0; c < n; c++)
        max = fabsf(a[c]) > max ? fabsf(a[c]) : max;
    if (max == 0.0f) return 0;
    (void)frexpf(max, &e);
    return e - 1 < -126 ? -126 : e - 1;
}

static float dot(const float *a, const struct format_parts *p, size_t r, size_t c, size_t end)
{
    float y = 0.0f;
    for (; c < end; c += 16) {
        size_t n = end - c < 16 ? end - c : 16;
        int e = block_exponent(a + c, n);
        int64_t sum = 0;
        for (size_t i = 0; i < n; i++)
            sum += (int64_t)rint(ldexp((double)a[c + i], 21 - e)) *
                   (int64_t)(2.0f * code_value(p, r, c + i));
        const uint8_t *s = (const uint8_t *)p->scale + scale_index(p, r, c);
        float scale = formats[p->format].scale == SCALE_E8M0 ? format_e8m0(*s) : format_e4m3(*s);
        y = fmaf((float)sum, scale * ldexpf(1.0f, e - 22), y);
    }
    return y;
}

static float chain(const float *a, const struct format_parts *p, size_t r, size_t c, size_t end)
{
    float acc = 0.0f;
    if (formats[p->format].elem == ELEM_E2M1) return dot(a, p, r, c, end);
    for (; c < end; c += 2) {
        acc = fmaf(a[c + 1], weight_at(p, r, c + 1), acc);
        acc = fmaf(a[c], weight_at(p, r, c), acc);
    }
    return acc;
}

static float defined(const struct gemm *g, const struct format_parts *p, size_t row, size_t r)
{
    const float *a = g->a + row * g->lda;
    bool w_block = p->format == FORMAT_FP8_BLOCK, a_block = g->act_scale == ACT_SCALE_128;
    size_t n = (p->cols + 127) / 128;
    float y = 0.0f;
    if (!w_block && !a_block) y = chain(a, p, r, 0, p->cols);
    for (size_t j = 0; j < n && (w_block || a_block); j++) {
        float c = chain(a, p, r, j * 128, j + 1 < n ? j * 128 + 128 : p->cols), s;
        if (w_block && a_block)
            s = g->a_scale[row * n + j] * f32_scale(p, r, j * 128);
        else
            s = w_block ? f32_scale(p, r, j * 128) : g->a_scale[row * n + j];
        y = j ? fmaf(c, s, y) : c * s;
    }
    if (p->format == FORMAT_FP8_CHANNEL || p->format == FORMAT_FP8_TENSOR) y *= f32_scale(p, r, 0);
    if (p->format == FORMAT_NVFP4) y *= p->tensor;
    if (g->act_scale == ACT_SCALE_ROW) y *= g->a_scale[row];
    return y;
}

/* Against float64: the decoded row times the scaled activations. */
static void check_value(const struct gemm *g, const struct format_parts *p, size_t row, size_t r,
                        const float *decoded, float got)
{
    double sum = 0.0, size = 0.0;
    size_t n = (p->cols + 127) / 128;
    for (size_t c = 0; c < p->cols; c++) {
        double s = g->act_scale == ACT_SCALE_128   ? (double)g->a_scale[row * n + c / 128]
                   : g->act_scale == ACT_SCALE_ROW ? (double)g->a_scale[row]
                                                   : 1.0;
        double x = (double)g->a[row * g->lda + c] * s * (double)decoded[c];
        sum += x;
        size += fabs(x);
    }
    (void)r;
    assert_true(fabs((double)got - sum) <= tolerance(p->cols) * size);
}

/* ---- cases ---- */

struct input {
    float *a, *scale;
    struct fixed *fixed;
    struct gemm g;
};

static struct input input_new(size_t m, size_t cols, act_scale_t act)
{
    struct input in = {.g = {.lda = (cols + 1) / 2 * 2 + 2 * (next() % 3), .act_scale = act}};
    size_t n = m * ((cols + 127) / 128);
    in.g.a = in.a = mem_alloc(m * in.g.lda * sizeof(float));
    in.g.a_scale = in.scale = mem_alloc(n * sizeof(float));
    in.g.fixed = in.fixed = mem_alloc(m * fixed_blocks(cols) * sizeof *in.fixed);
    for (size_t i = 0; i < m; i++) {
        for (size_t c = 0; c < cols; c++)
            in.a[i * in.g.lda + c] = act_round(uniform(-3.0f, 3.0f));
        if (i % 3 == 2 && cols > 40) memset(in.a + i * in.g.lda + 16, 0, 20 * sizeof(float));
        fixed_row(in.fixed + i * fixed_blocks(cols), in.a + i * in.g.lda, cols);
    }
    for (size_t i = 0; i < n; i++)
        in.scale[i] = uniform(0.001f, 1.0f);
    return in;
}

static void input_free(struct input *in)
{
    mem_free(in->a);
    mem_free(in->scale);
    mem_free(in->fixed);
}

static void check_definition(const struct gemm *g, const struct weights *w, const float *out,
                             size_t m)
{
    const struct format_parts *p = &w->canon;
    float *decoded = mem_alloc(p->cols * sizeof(float));
    for (size_t r = 0; r < p->rows; r++) {
        format_decode_row(decoded, p, r);
        for (size_t i = 0; i < m; i++) {
            float got = out[i * p->rows + r], want = defined(g, p, i, r);
            assert_memory_equal(&got, &want, sizeof got);
            check_value(g, p, i, r, decoded, got);
        }
    }
    mem_free(decoded);
}

/* Bits of an instruction set: whole, by indices in reverse, in two parts by panels. */
static void check_isa(const struct backend_ops *o, struct gemm g, const float *want, size_t m)
{
    size_t rows = g.w->rows, panels = (rows + 15) / 16, cut = panels / 2;
    float *out = mem_alloc(m * rows * sizeof(float));
    int32_t *idx = mem_alloc(m * sizeof *idx);
    g.out = out;
    g.ldo = rows;
    o->gemm(&g, m, 0, panels);
    assert_memory_equal(out, want, m * rows * sizeof(float));
    memset(out, 0xff, m * rows * sizeof(float));
    for (size_t i = 0; i < m; i++)
        idx[i] = (int32_t)(m - 1 - i);
    g.idx = idx;
    o->gemm(&g, m, 0, cut);
    g.out = out + cut * 16;
    g.col0 = cut * 16;
    o->gemm(&g, m, cut, panels - cut);
    for (size_t i = 0; i < m; i++)
        assert_memory_equal(out + i * rows, want + (m - 1 - i) * rows, rows * sizeof(float));
    mem_free(out);
    mem_free(idx);
}

static void one_case(format_t f, act_scale_t act, size_t m, size_t rows, size_t cols)
{
    struct weights w = weights_new(f, rows, cols);
    weights_store(&w);
    struct input in = input_new(m, cols, act);
    float *out = mem_alloc(m * rows * sizeof(float));
    in.g.w = &w.matrix;
    in.g.out = out;
    in.g.ldo = rows;
    cpu_ops_portable.gemm(&in.g, m, 0, (rows + 15) / 16);
    check_definition(&in.g, &w, out, m);
    for (int i = 0; i < N_ISAS; i++) {
        const struct backend_ops *o = cpu_ops_find(isas[i]);
        if (o) check_isa(o, in.g, out, m);
    }
    mem_free(out);
    input_free(&in);
    weights_free(&w);
}

static void bits_are_the_defined_ones(void **state)
{
    (void)state;
    static const size_t shapes[][2] = {{1, 1},   {5, 2},     {16, 16},  {37, 33},  {80, 47},
                                       {19, 64}, {130, 129}, {20, 300}, {150, 258}};
    for (int i = 0; i < N_ISAS; i++)
        if (cpu_ops_find(isas[i]) == NULL)
            print_message("%s: not on this machine or in this build\n", isas[i]);
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (int act = ACT_SCALE_NONE; act <= ACT_SCALE_128; act++)
            for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
                for (size_t m = 1; m <= 7; m += 1 + (act != ACT_SCALE_NONE || s > 5))
                    one_case((format_t)f, (act_scale_t)act, m, shapes[s][0], shapes[s][1]);
}

/* Past a block of rows, a K block and a group of panels. */
static void large_cases(void **state)
{
    (void)state;
    for (int f = 0; f < FORMAT_COUNT; f++) {
        one_case((format_t)f, ACT_SCALE_NONE, GEMM_ROWS + 5, 18, 34);
        one_case((format_t)f, f % 2 ? ACT_SCALE_128 : ACT_SCALE_ROW, 13, 16 * 17 + 3, 600);
    }
}

/* A row alone has the bits that it has among 64, at the real widths. */
static void a_row_alone(void **state)
{
    (void)state;
    enum { M = 64, ROWS = 96 };
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t cols = 768; cols <= 2048; cols += 1280) {
            struct weights w = weights_new((format_t)f, ROWS, cols);
            weights_store(&w);
            struct input in =
                input_new(M, cols, f == FORMAT_FP8_BLOCK ? ACT_SCALE_128 : ACT_SCALE_ROW);
            float *out = mem_alloc(M * ROWS * 4), one[ROWS * 4];
            in.g.w = &w.matrix;
            in.g.ldo = ROWS;
            for (int i = 0; i < N_ISAS; i++) {
                const struct backend_ops *o = cpu_ops_find(isas[i]);
                if (o == NULL || i == 0) continue; /* portable: tied to the others above */
                in.g.out = out;
                o->gemm(&in.g, M, 0, ROWS / 16);
                for (size_t r = 0, n; r < M; r += n) {
                    n = 1 + r % 4;
                    if (n > M - r) n = M - r;
                    struct gemm g = gemm_from_row(in.g, r);
                    g.out = one;
                    o->gemm(&g, n, 0, ROWS / 16);
                    assert_memory_equal(one, out + r * ROWS, n * ROWS * 4);
                }
            }
            mem_free(out);
            input_free(&in);
            weights_free(&w);
        }
}

/* Every code under every legal scale, read out by an activation that is 1 in one column. */
static void check_codes(format_t f, size_t cols, const struct weights *w)
{
    float *decoded = mem_alloc(cols * 4), *a = mem_alloc((cols + 1) * 4), out[5 * 256];
    struct fixed fixed[5 * 2];
    size_t blocks = fixed_blocks(cols);
    struct gemm g = {
        .a = a, .lda = cols + 1, .fixed = fixed, .w = &w->matrix, .out = out, .ldo = 256};
    for (int i = 0; i < N_ISAS; i++) {
        const struct backend_ops *o = cpu_ops_find(isas[i]);
        if (o == NULL) continue;
        for (size_t c = 0; c < cols; c += 5) {
            memset(a, 0, (cols + 1) * 4);
            a[c] = 1.0f;
            for (size_t k = 0; k < 5; k++)
                fixed_row(fixed + k * blocks, a, cols);
            for (size_t m = 1; m <= 5; m += 4) { /* few rows, many rows: the same row again */
                g.lda = m == 1 ? cols + 1 : 0;
                o->gemm(&g, m, 0, 16);
                for (size_t r = 0; r < 256; r++) {
                    format_decode_row(decoded, &w->canon, r);
                    assert_true(out[(m - 1) * 256 + r] == decoded[c]);
                }
            }
        }
    }
    (void)f;
    mem_free(decoded);
    mem_free(a);
}

static void every_code_is_exact(void **state)
{
    (void)state;
    static const struct {
        format_t f;
        size_t cols;
        unsigned first, last; /* legal scale codes */
    } rows[] = {{FORMAT_MXFP8, 32, 10, 246},
                {FORMAT_MXFP4, 32, 10, 246},
                {FORMAT_NVFP4, 16, 0, 126},
                {FORMAT_FP8_CHANNEL, 12, 0, 0}};
    for (int k = 0; k < 4; k++) {
        struct weights w = weights_new(rows[k].f, 256, rows[k].cols);
        size_t row_bytes = format_row_bytes(rows[k].f, rows[k].cols);
        w.canon.tensor = 1.0f;
        for (size_t r = 0; r < 256; r++) {
            uint8_t code = (uint8_t)(row_bytes < rows[k].cols ? r % 16 * 17
                                     : (r & 0x7f) == 0x7f     ? 0
                                                              : r);
            memset(w.data + r * row_bytes, code, row_bytes);
        }
        for (unsigned s = rows[k].first; s <= rows[k].last; s += 7 - 6 * (s < 12 || s > 240)) {
            if (formats[rows[k].f].scale_bytes == 1)
                memset(w.scale, (int)s, 256);
            else
                for (size_t r = 0; r < 256; r++)
                    ((float *)(void *)w.scale)[r] = 1.0f;
            weights_store(&w);
            check_codes(rows[k].f, rows[k].cols, &w);
        }
        weights_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(bits_are_the_defined_ones),
                                       cmocka_unit_test(large_cases), cmocka_unit_test(a_row_alone),
                                       cmocka_unit_test(every_code_is_exact)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
