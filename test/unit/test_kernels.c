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

static void attention_bits(void **state)
{
    (void)state;
    enum { HD = 80, KEYS = 600, PAGES = 38, HEADS = 6, SIZE = 16 * HD };
    kv_t *k = mem_alloc(PAGES * SIZE * sizeof *k), *v = mem_alloc(PAGES * SIZE * sizeof *v);
    float q[HEADS * HD], out[HEADS * HD], got[HEADS * HD];
    int32_t pages[PAGES];
    uint64_t seed = 5;
    fill(q, HEADS * HD, 2.0f, 4);
    for (int i = 0; i < PAGES; i++)
        pages[i] = i * 7 % PAGES;
    for (int i = 0; i < PAGES * SIZE; i++) {
        k[i] = kv_from_f32(noise(&seed));
        v[i] = kv_from_f32(noise(&seed));
    }
    static const int lens[] = {1, 15, 16, 17, 255, 256, 257, 512, KEYS};
    for (int l = 0; l < 9; l++) {
        struct attn a = {.q = q,
                         .out = out,
                         .first_chunk = KV_CHUNK,
                         .n_heads = HEADS,
                         .head_dim = HD,
                         .k = k,
                         .v = v,
                         .page_stride = SIZE,
                         .pages = pages,
                         .n_keys = lens[l],
                         .scale = 0.11f};
        cpu_ops_portable.attention(&a);
        a.out = got;
        for (int i = 0; i < N_ISAS; i++) {
            const struct backend_ops *o = cpu_ops_find(isas[i]);
            if (o == NULL) continue;
            o->attention(&a);
            assert_memory_equal(out, got, sizeof out);
        }
    }
    mem_free(k);
    mem_free(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(gemm_bits), cmocka_unit_test(rows_bits),
                                       cmocka_unit_test(attention_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
