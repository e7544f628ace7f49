/* test_kernels.c - every instruction set of this machine gives the portable bits. */
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

static const char *const isas[] = {"avx2", "avx512", "neon"};
enum { N_ISAS = 3 };

static float noise(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*s >> 32) * 0x1p-31f;
}

static void fill(float *x, size_t n, float scale, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        x[i] = act_round(noise(&seed) * scale);
}

static const struct backend_ops *other(int i)
{
    const struct backend_ops *o = cpu_ops_find(isas[i]);
    if (o == NULL) print_message("%s: not on this machine or in this build\n", isas[i]);
    return o;
}

static void gemm_case(size_t m, size_t n, size_t k)
{
    size_t lda = (k + 1) / 2 * 2, len;
    assert_true(layout_bytes(&len, FORMAT_BF16, n, k));
    float *a = mem_alloc(m * lda * 4), *out = mem_alloc(m * n * 4), *one = mem_alloc(m * n * 4);
    uint16_t *w = mem_alloc(n * k * 2), *panel = mem_alloc(len);
    uint64_t seed = m * 131 + n * 17 + k;
    int32_t idx[16];
    for (size_t i = 0; i < m; i++) {
        fill(a + i * lda, k, 3.0f, seed + i);
        idx[i] = (int32_t)(m - 1 - i);
    }
    for (size_t i = 0; i < n * k; i++)
        w[i] = f32_to_bf16(noise(&seed));
    layout_put(panel, FORMAT_BF16, n, k, PART_DATA, 0, n, w);
    struct matrix mat = layout_matrix(FORMAT_BF16, n, k, panel);
    struct gemm g = {.a = a, .lda = lda, .w = &mat, .out = out, .ldo = n};
    cpu_ops_portable.gemm(&g, m, 0, (n + 15) / 16);
    for (size_t i = 0; i < m; i++)
        for (size_t r = 0; r < n; r++) {
            double sum = 0.0, size = 0.0;
            for (size_t j = 0; j < k; j++) {
                double p = (double)a[i * lda + j] * (double)bf16_to_f32(w[r * k + j]);
                sum += p;
                size += fabs(p);
            }
            assert_true(fabs(sum - (double)out[i * n + r]) <= 1e-6 * size * 4.0);
        }
    g.out = one; /* a row alone has the bits that it has among others */
    for (size_t i = 0; i < m; i++, g.a += lda, g.out += n)
        cpu_ops_portable.gemm(&g, 1, 0, (n + 15) / 16);
    assert_memory_equal(out, one, m * n * 4);
    g.a = a;
    for (int i = 0; i < N_ISAS; i++) {
        const struct backend_ops *o = cpu_ops_find(isas[i]);
        if (o == NULL) continue;
        g.out = one;
        o->gemm(&g, m, 0, (n + 15) / 16);
        assert_memory_equal(out, one, m * n * 4);
        g.idx = idx;
        o->gemm(&g, m, 0, (n + 15) / 16);
        for (size_t r = 0; r < m; r++)
            assert_memory_equal(out + r * n, one + (m - 1 - r) * n, n * 4);
        g.idx = NULL;
    }
    mem_free(a);
    mem_free(out);
    mem_free(one);
    mem_free(w);
    mem_free(panel);
}

static void gemm_bits(void **state)
{
    (void)state;
    static const size_t ns[] = {1, 16, 37, 80, 131}, ks[] = {2, 7, 64, 258};
    for (size_t m = 1; m <= 9; m++)
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 4; j++)
                gemm_case(m, ns[i], ks[j]);
}

static void rows_bits(void **state)
{
    (void)state;
    enum { N = 5003 };
    float *x = mem_alloc(N * 4), *y = mem_alloc(N * 4), *p = mem_alloc(N * 4),
          *q = mem_alloc(N * 4);
    uint16_t *w = mem_alloc(N * 2);
    fill(x, N, 100.0f, 1);
    fill(y, N, 5.0f, 2);
    x[3] = -1000.0f;
    x[7] = 1000.0f;
    for (int i = 0; i < N; i++)
        w[i] = f32_to_bf16(y[i]);
    double sum = cpu_ops_portable.exp_sum(p, x, 100.0f, N);
    for (int i = 0; i < N; i++) {
        double want = exp((double)x[i] - 100.0);
        if (want > 1e-37 && x[i] < 180.0f) assert_true(fabs((double)p[i] - want) <= 3e-7 * want);
    }
    for (int i = 0; i < N_ISAS; i++) {
        const struct backend_ops *o = other(i), *c = &cpu_ops_portable;
        if (o == NULL) continue;
        assert_true(o->exp_sum(q, x, 100.0f, N) == sum);
        c->exp_sum(p, x, 100.0f, N);
        assert_memory_equal(p, q, N * 4);
        c->rmsnorm(p, x, w, N, 1e-6f);
        o->rmsnorm(q, x, w, N, 1e-6f);
        assert_memory_equal(p, q, N * 4);
        c->swiglu(p, x, y, N);
        o->swiglu(q, x, y, N);
        assert_memory_equal(p, q, N * 4);
        const float *rows[3] = {x, y, x};
        const float k[3] = {0.25f, 0.7f, 0.05f};
        fill(p, N, 1.0f, 9);
        fill(q, N, 1.0f, 9);
        c->combine(p, rows, k, 3, N);
        o->combine(q, rows, k, 3, N);
        assert_memory_equal(p, q, N * 4);
    }
    mem_free(x);
    mem_free(y);
    mem_free(p);
    mem_free(q);
    mem_free(w);
}

/* Attention in float64 over what the cache holds: K and V decoded one by one. */
struct cached {
    kv_type_t type;
    int hd, n_pages;
    float k_scale, v_scale;
    const float *k, *v; /* [key][hd], as given */
};

static double stored(const struct cached *c, float x, float scale)
{
    if (c->type == KV_BF16) return (double)bf16_to_f32(f32_to_bf16(x));
    return (double)format_e4m3(format_to_e4m3(x / scale)) * (double)scale;
}

static void check_attention(const struct attn *a, const struct cached *c, int h)
{
    double *p = mem_alloc(sizeof *p * (size_t)a->n_keys), max = -1e300, l = 0.0;
    for (int i = 0; i < a->n_keys; i++) {
        double s = 0.0;
        for (int d = 0; d < c->hd; d++)
            s += (double)a->q[h * c->hd + d] * stored(c, c->k[i * c->hd + d], c->k_scale);
        p[i] = s * (double)a->scale;
        max = p[i] > max ? p[i] : max;
    }
    for (int i = 0; i < a->n_keys; i++)
        l += p[i] = exp(p[i] - max);
    for (int d = 0; d < c->hd; d++) {
        double o = 0.0;
        for (int i = 0; i < a->n_keys; i++)
            o += p[i] / l * stored(c, c->v[i * c->hd + d], c->v_scale);
        /* P and the output are rounded to BF16, 2^-9 each, values are below 1.2 */
        assert_true(fabs(o - (double)a->out[h * c->hd + d]) <= 1.2 * 0x1p-8);
    }
    mem_free(p);
}

static void attention_case(kv_type_t type, float k_scale, float v_scale)
{
    enum { HD = 80, KEYS = 600, PAGES = 38, HEADS = 6 };
    size_t page = KV_PAGE_ROWS * HD * kv_elem_bytes(type);
    uint8_t *k = mem_alloc(PAGES * page), *v = mem_alloc(PAGES * page);
    float *kf = mem_alloc(KEYS * HD * 4), *vf = mem_alloc(KEYS * HD * 4);
    float q[HEADS * HD], out[HEADS * HD], got[HEADS * HD];
    int32_t pages[PAGES];
    uint64_t seed = 5;
    fill(q, HEADS * HD, 2.0f, 4);
    for (int i = 0; i < PAGES; i++)
        pages[i] = i * 7 % PAGES;
    for (int i = 0; i < KEYS * HD; i++) {
        kf[i] = noise(&seed);
        vf[i] = noise(&seed);
    }
    for (int i = 0; i < KEYS; i++)
        kv_write(type, k + (size_t)pages[i / 16] * page, v + (size_t)pages[i / 16] * page, i % 16,
                 HD, kf + i * HD, vf + i * HD, k_scale, v_scale);
    struct cached c = {type, HD, PAGES, k_scale, v_scale, kf, vf};
    static const int lens[] = {1, 15, 16, 17, 255, 256, 257, 512, KEYS};
    for (int l = 0; l < 9; l++) {
        struct attn a = {.q = q,
                         .out = out,
                         .first_chunk = KV_CHUNK,
                         .n_heads = HEADS,
                         .head_dim = HD,
                         .kv = type,
                         .k_scale = k_scale,
                         .v_scale = v_scale,
                         .k = k,
                         .v = v,
                         .page_stride = page,
                         .pages = pages,
                         .n_keys = lens[l],
                         .scale = 0.11f};
        cpu_ops_portable.attention(&a);
        for (int h = 0; h < HEADS; h += 5)
            check_attention(&a, &c, h);
        a.out = got;
        for (int i = 0; i < N_ISAS; i++) {
            const struct backend_ops *o = cpu_ops_find(isas[i]);
            if (o == NULL) continue;
            memset(got, 0xff, sizeof got);
            o->attention(&a);
            assert_memory_equal(out, got, sizeof out);
            memset(got, 0xff, sizeof got);
            /* heads are taken 4, 2 or 1 at once: each has the bits that it has alone */
            for (int h = 0; h < HEADS; h++) {
                struct attn one = a;
                one.q = q + h * HD;
                one.out = got + h * HD;
                one.n_heads = 1;
                o->attention(&one);
            }
            assert_memory_equal(out, got, sizeof out);
        }
    }
    mem_free(k);
    mem_free(v);
    mem_free(kf);
    mem_free(vf);
}

static void attention_bits(void **state)
{
    (void)state;
    attention_case(KV_BF16, 1.0f, 1.0f);
    attention_case(KV_E4M3, 1.0f, 1.0f);
    attention_case(KV_E4M3, 0.0123f, 0.0071f);  /* uses the upper codes */
    attention_case(KV_E4M3, 1.0f / 512, 37.0f); /* saturates K at 0.875; V is subnormal */
}

/* Every code of a page is read as its value, and NaN as NaN. */
static void attention_codes(void **state)
{
    (void)state;
    enum { HD = 16 };
    uint8_t k[16 * HD] = {0}, v[16 * HD];
    float q[HD] = {0}, out[HD];
    int32_t page = 0;
    struct attn a = {.q = q,
                     .out = out,
                     .first_chunk = KV_CHUNK,
                     .n_heads = 1,
                     .head_dim = HD,
                     .kv = KV_E4M3,
                     .k_scale = 1.0f,
                     .v_scale = 1.0f,
                     .k = k,
                     .v = v,
                     .page_stride = sizeof k,
                     .pages = &page,
                     .n_keys = 1,
                     .scale = 1.0f};
    for (int i = -1; i < N_ISAS; i++) {
        const struct backend_ops *o = i < 0 ? &cpu_ops_portable : cpu_ops_find(isas[i]);
        for (int code = 0; o && code < 256; code++) {
            memset(v, code, sizeof v);
            o->attention(&a);
            float want = format_e4m3((uint8_t)code);
            for (int d = 0; d < HD; d++)
                assert_true(isnan(want) ? isnan(out[d]) : out[d] == want);
            memset(v, 0, sizeof v);
            memset(k, code, sizeof k);
            q[3] = 1.0f;
            o->attention(&a);
            assert_true(isnan(want) == isnan(out[0]));
            memset(k, 0, sizeof k);
            q[3] = 0.0f;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(gemm_bits), cmocka_unit_test(rows_bits),
                                       cmocka_unit_test(attention_bits),
                                       cmocka_unit_test(attention_codes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
