/*
 * test_encode_tiny.c - the tiny model as an independent tool quantized it: decoded values lie
 * within half a step of the original, and our encoder writes the same bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/encode.h"
#include "weight/safetensors.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TINY "../shared/models/tiny-moe/"

static double e4m3_of(int code)
{
    return (double)format_e4m3((uint8_t)code);
}

static double e2m1_of(int code)
{
    return (double)format_e2m1((uint8_t)code);
}

static const struct st_tensor *find(const struct st_file *f, const char *base, const char *suffix)
{
    char name[512];
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
            size_t s =
                r / f->group_rows * format_scale_cols(p->format, p->cols) + c / f->group_cols;
            double d = f->scale == SCALE_F32 ? (double)((const float *)p->scale)[s]
                       : f->scale == SCALE_E8M0
                           ? (double)format_e8m0(((const uint8_t *)p->scale)[s])
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
                snprintf(other, sizeof other, "%.*s%s.weight", (int)(last - base), base,
                         sets[i][k]);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiny_moe)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
