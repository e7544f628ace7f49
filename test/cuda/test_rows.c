/*
 * test_rows.c - residual and norm, rope and KV write, SwiGLU on the GPU: the CPU's bits, at odd
 * shapes, and the same bits for a row alone.
 */
#include "backend/cpu/cpu.h"
#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include "format/format.h"
#include <math.h>

static struct gpu gpu;

enum { EXPERTS = 16, TOP_K = 8, VOCAB = 1000 };

static struct kernels *kernels_of(int32_t hidden, int32_t head_dim, int32_t heads, int32_t kv_heads,
                                  kv_type_t kv)
{
    struct kernels_shape s = {.hidden = hidden,
                              .vocab = VOCAB,
                              .n_heads = heads,
                              .n_kv_heads = kv_heads,
                              .head_dim = head_dim,
                              .n_experts = EXPERTS,
                              .top_k = TOP_K,
                              .kv = kv};
    struct kernels *k = NULL;
    MUST(kernels_new(&k, gpu.d, &s, &must_e));
    return k;
}

static float *noise_floats(size_t n, float scale, uint64_t seed)
{
    float *p = mem_alloc(n * sizeof *p);
    for (size_t i = 0; i < n; i++)
        p[i] = noise_f32(&seed) * scale * (noise_u32(&seed) % 50 == 0 ? 30.0f : 1.0f);
    return p;
}

static uint16_t *noise_bf16(size_t n, float scale, uint64_t seed)
{
    uint16_t *p = mem_alloc(n * sizeof *p);
    for (size_t i = 0; i < n; i++)
        p[i] = f32_to_bf16(noise_f32(&seed) * scale);
    return p;
}

static void same_bytes(const void *a, const void *b, size_t n, const char *what)
{
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < n; i++)
        if (x[i] != y[i])
            fail_msg("%s: byte %zu of %zu is %02x, must be %02x", what, i, n, x[i], y[i]);
}

struct residual {
    int32_t rows, n;
    float *x, *y;
    uint16_t *embed, *expert, *w;
    int32_t *ids, *row_of;
    uint32_t *packed;
};

/* What the CPU makes of row i: x in place, the rounded norm in out. */
static void cpu_row(const struct residual *r, norm_source_t source, int32_t i, float *x,
                    uint16_t *out)
{
    const struct backend_ops *ops = cpu_ops_best();
    size_t n = (size_t)r->n, at = (size_t)i * n;
    float *rows[TOP_K], w[TOP_K], *norm = mem_alloc(n * sizeof *norm);
    const float *used[TOP_K];
    int k = 0;
    memcpy(x, r->x + at, n * sizeof *x);
    if (source == NORM_EMBED)
        for (size_t j = 0; j < n; j++)
            x[j] = r->ids[i] < 0 || r->ids[i] >= VOCAB
                       ? 0.0f
                       : bf16_to_f32(r->embed[(size_t)r->ids[i] * n + j]);
    if (source == NORM_ADD)
        for (size_t j = 0; j < n; j++)
            x[j] += r->y[at + j];
    for (int j = 0; source == NORM_COMBINE && j < TOP_K; j++) {
        int32_t row = r->row_of[i * TOP_K + j];
        if (row < 0) continue;
        rows[k] = mem_alloc(n * sizeof(float));
        for (size_t c = 0; c < n; c++)
            rows[k][c] = bf16_to_f32(r->expert[(size_t)row * n + c]);
        used[k] = rows[k];
        w[k++] = bf16_to_f32((uint16_t)r->packed[i * TOP_K + j]);
    }
    if (k) ops->combine(x, used, w, (size_t)k, n);
    for (int j = 0; j < k; j++)
        mem_free(rows[j]);
    ops->rmsnorm(norm, x, r->w, n, 1e-6f);
    for (size_t j = 0; j < n; j++)
        out[j] = f32_to_bf16(norm[j]);
    mem_free(norm);
}

static void residual_new(struct residual *r, int32_t rows, int32_t n)
{
    size_t all = (size_t)rows * (size_t)n;
    uint64_t seed = (uint64_t)n + 7;
    *r = (struct residual){.rows = rows, .n = n};
    r->x = noise_floats(all, 2.0f, 1);
    r->y = noise_floats(all, 0.7f, 2);
    r->embed = noise_bf16((size_t)VOCAB * (size_t)n, 1.0f, 3);
    r->expert = noise_bf16(all * TOP_K, 1.0f, 4);
    r->w = noise_bf16((size_t)n, 1.5f, 5);
    r->ids = mem_alloc((size_t)rows * 4);
    r->row_of = mem_alloc((size_t)rows * TOP_K * 4);
    r->packed = mem_alloc((size_t)rows * TOP_K * 4);
    for (int32_t i = 0; i < rows; i++)
        r->ids[i] = i == 1 ? -1 : i == 2 ? VOCAB : (int32_t)(noise_u32(&seed) % VOCAB);
    for (int32_t i = 0; i < rows * TOP_K; i++) {
        r->row_of[i] = noise_u32(&seed) % 5 == 0 || i / TOP_K == 1
                           ? -1
                           : (int32_t)(noise_u32(&seed) % (uint32_t)(rows * TOP_K));
        r->packed[i] = noise_u32(&seed) << 16 | f32_to_bf16(noise_f32(&seed));
    }
}

static void residual_free(struct residual *r)
{
    void *all[] = {r->x, r->y, r->embed, r->expert, r->w, r->ids, r->row_of, r->packed};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
}

static void check_residual(const struct kernels *k, const struct residual *r, norm_source_t source)
{
    size_t n = (size_t)r->n, all = (size_t)r->rows * n;
    devptr_t x = gpu_new(&gpu, r->x, all * 4), y = gpu_new(&gpu, r->y, all * 4),
             out = gpu_new(&gpu, NULL, all * 2);
    devptr_t embed = gpu_new(&gpu, r->embed, VOCAB * n * 2),
             expert = gpu_new(&gpu, r->expert, all * TOP_K * 2);
    devptr_t w = gpu_new(&gpu, r->w, n * 2), ids = gpu_new(&gpu, r->ids, (size_t)r->rows * 4);
    devptr_t row_of = gpu_new(&gpu, r->row_of, (size_t)r->rows * TOP_K * 4);
    devptr_t packed = gpu_new(&gpu, r->packed, (size_t)r->rows * TOP_K * 4);
    struct norm_args a = {.x = (float *)x,
                          .y = (const float *)y,
                          .ids = (const int32_t *)ids,
                          .embed = (const uint16_t *)embed,
                          .expert = (const uint16_t *)expert,
                          .row_of = (const int32_t *)row_of,
                          .packed = (const uint32_t *)packed,
                          .w = (const uint16_t *)w,
                          .out = (uint16_t *)out,
                          .n = r->n,
                          .vocab = VOCAB,
                          .top_k = TOP_K,
                          .eps = 1e-6f};
    float *want_x = mem_alloc(all * 4), *got_x = mem_alloc(all * 4);
    uint16_t *want = mem_alloc(all * 2), *got = mem_alloc(all * 2);
    for (int32_t i = 0; i < r->rows; i++)
        cpu_row(r, source, i, want_x + (size_t)i * n, want + (size_t)i * n);
    kernels_norm(k, gpu.q, source, &a, r->rows, true);
    gpu_read(&gpu, got_x, x, all * 4);
    gpu_read(&gpu, got, out, all * 2);
    same_bytes(got_x, want_x, all * 4, "residual");
    same_bytes(got, want, all * 2, "norm");
    if (source == NORM_PLAIN && r->rows > 2) { /* a chosen row, alone */
        int32_t pick = r->rows - 2;
        devptr_t p = gpu_new(&gpu, &pick, 4);
        a.pick = (const int32_t *)p;
        kernels_norm(k, gpu.q, source, &a, 1, false);
        gpu_read(&gpu, got, out, n * 2);
        same_bytes(got, want + (size_t)pick * n, n * 2, "picked row");
        gpu_free(&gpu, p);
    }
    devptr_t dev[] = {x, y, out, embed, expert, w, ids, row_of, packed};
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(want_x), mem_free(got_x), mem_free(want), mem_free(got);
}

static void norms(void **state)
{
    (void)state;
    static const int32_t sizes[] = {8, 56, 264, 2048, 4096, 8192};
    for (size_t s = 0; s < (gpu.few ? 3 : sizeof sizes / sizeof sizes[0]); s++) {
        struct kernels *k = kernels_of(sizes[s], 128, 8, 2, KV_BF16);
        struct residual r;
        residual_new(&r, sizes[s] > 2048 ? 5 : 37, sizes[s]);
        for (norm_source_t source = 0; source < NORM_SOURCES; source++)
            check_residual(k, &r, source);
        residual_free(&r);
        kernels_free(k);
    }
}

/* attention.c, rotate, without the last rounding. */
static void cpu_rotate(float *x, const uint16_t *norm, const float *cs, const float *sn, int hd)
{
    cpu_ops_best()->rmsnorm_f32(x, x, norm, (size_t)hd, 1e-6f);
    for (int i = 0; i < hd / 2; i++) {
        float a = x[i], b = x[i + hd / 2];
        x[i] = fmaf(a, cs[i], -(b * sn[i]));
        x[i + hd / 2] = fmaf(b, cs[i], a * sn[i]);
    }
}

/* kernels.h: the byte of element d of row `row` in a tile. */
static size_t tile_byte(kv_type_t kv, int row, int d)
{
    int size = kv == KV_BF16 ? 2 : 1, piece = d % 64 * size / 16,
        turn = kv == KV_BF16 ? row % 8 : row / 2 % 4;
    return (size_t)(d / 64 * KV_ROWS * 64 * size + row * 64 * size + (piece ^ turn) * 16 +
                    d % 64 * size % 16);
}

enum { TOKENS = 41, SEQS = 3, TABLE = 5, PAGES = 16, POSITIONS = 80 };

struct rope_case {
    kv_type_t kv;
    int32_t hd, heads, kv_heads;
};

static void put_kv(uint8_t *pages, const struct rope_case *c, int32_t page, int head, int row,
                   const float *x, float scale)
{
    uint8_t *tile =
        pages + ((size_t)page * (size_t)c->kv_heads + (size_t)head) * kv_tile_bytes(c->kv, c->hd);
    for (int d = 0; d < c->hd; d++) {
        uint16_t h = f32_to_bf16(x[d]);
        if (c->kv == KV_BF16)
            memcpy(tile + tile_byte(c->kv, row, d), &h, 2);
        else
            tile[tile_byte(c->kv, row, d)] = format_to_e4m3(x[d] / scale);
    }
}

static void check_rope(const struct rope_case *c)
{
    int32_t units = c->heads + 2 * c->kv_heads;
    size_t hd = (size_t)c->hd, ld = (size_t)units * hd + 16, nq = (size_t)c->heads * hd;
    size_t kv_bytes = (size_t)PAGES * (size_t)c->kv_heads * kv_tile_bytes(c->kv, c->hd);
    float k_scale = c->kv == KV_BF16 ? 1.0f : 0.037f, v_scale = c->kv == KV_BF16 ? 1.0f : 0.011f;
    float *qkv = noise_floats(TOKENS * ld, 3.0f, 11),
          *cs = noise_floats(POSITIONS * hd / 2, 1.0f, 12);
    float *sn = noise_floats(POSITIONS * hd / 2, 1.0f, 13);
    uint16_t *qn = noise_bf16(hd, 2.0f, 14), *kn = noise_bf16(hd, 2.0f, 15);
    int32_t pos[TOKENS], seq[TOKENS], tables[SEQS * TABLE];
    for (int i = 0; i < TOKENS; i++) {
        seq[i] = i == 5 ? -1 : i % SEQS;
        pos[i] = i * 2 % POSITIONS - i * 2 % POSITIONS % 2 + i % 2;
    }
    for (int i = 0; i < SEQS * TABLE; i++)
        tables[i] = (i * 7 + 3) % PAGES;
    uint16_t *q = mem_alloc(TOKENS * nq * 2), *got_q = mem_alloc(TOKENS * nq * 2);
    uint8_t *kp = mem_alloc(kv_bytes), *vp = mem_alloc(kv_bytes), *got = mem_alloc(kv_bytes);
    memset(q, 0xAA, TOKENS * nq * 2), memset(kp, 0xAA, kv_bytes), memset(vp, 0xAA, kv_bytes);
    for (int i = 0; i < TOKENS; i++) {
        if (seq[i] < 0) continue;
        for (int h = 0; h < units; h++) {
            float x[256];
            const float *c0 = cs + (size_t)pos[i] * hd / 2, *s0 = sn + (size_t)pos[i] * hd / 2;
            memcpy(x, qkv + (size_t)i * ld + (size_t)h * hd, hd * 4);
            int32_t page = tables[seq[i] * TABLE + pos[i] / KV_ROWS], kvh = h - c->heads;
            if (kvh < c->kv_heads) cpu_rotate(x, kvh < 0 ? qn : kn, c0, s0, c->hd);
            for (int d = 0; kvh < 0 && d < c->hd; d++)
                q[(size_t)i * nq + (size_t)h * hd + (size_t)d] = f32_to_bf16(x[d]);
            if (kvh >= c->kv_heads)
                put_kv(vp, c, page, kvh - c->kv_heads, pos[i] % KV_ROWS, x, v_scale);
            else if (kvh >= 0)
                put_kv(kp, c, page, kvh, pos[i] % KV_ROWS, x, k_scale);
        }
    }
    struct kernels *k = kernels_of(256, c->hd, c->heads, c->kv_heads, c->kv);
    devptr_t dev[] = {gpu_new(&gpu, qkv, TOKENS * ld * 4),
                      gpu_new(&gpu, cs, POSITIONS * hd * 2),
                      gpu_new(&gpu, sn, POSITIONS * hd * 2),
                      gpu_new(&gpu, qn, hd * 2),
                      gpu_new(&gpu, kn, hd * 2),
                      gpu_new(&gpu, pos, sizeof pos),
                      gpu_new(&gpu, seq, sizeof seq),
                      gpu_new(&gpu, tables, sizeof tables),
                      gpu_new(&gpu, NULL, TOKENS * nq * 2),
                      gpu_new(&gpu, NULL, kv_bytes),
                      gpu_new(&gpu, NULL, kv_bytes)};
    struct rope_args a = {(const float *)dev[0],
                          (int64_t)ld,
                          (const uint16_t *)dev[3],
                          (const uint16_t *)dev[4],
                          (const float *)dev[1],
                          (const float *)dev[2],
                          (const int32_t *)dev[5],
                          (const int32_t *)dev[6],
                          (const int32_t *)dev[7],
                          TABLE,
                          (uint16_t *)dev[8],
                          (void *)dev[9],
                          (void *)dev[10],
                          c->heads,
                          c->kv_heads,
                          1e-6f,
                          k_scale,
                          v_scale};
    kernels_rope(k, gpu.q, &a, TOKENS, true);
    gpu_read(&gpu, got_q, dev[8], TOKENS * nq * 2);
    same_bytes(got_q, q, TOKENS * nq * 2, "q");
    gpu_read(&gpu, got, dev[9], kv_bytes);
    same_bytes(got, kp, kv_bytes, "k pages");
    gpu_read(&gpu, got, dev[10], kv_bytes);
    same_bytes(got, vp, kv_bytes, "v pages");
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(qkv), mem_free(cs), mem_free(sn), mem_free(qn), mem_free(kn), mem_free(q),
        mem_free(got_q);
    mem_free(kp), mem_free(vp), mem_free(got);
    kernels_free(k);
}

static void ropes(void **state)
{
    (void)state;
    static const struct rope_case cases[] = {
        {KV_BF16, 64, 5, 1},   {KV_BF16, 128, 32, 4}, {KV_BF16, 128, 3, 3}, {KV_BF16, 256, 8, 1},
        {KV_E4M3, 64, 16, 16}, {KV_E4M3, 128, 32, 4}, {KV_E4M3, 256, 5, 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_rope(&cases[i]);
}

static void swiglus(void **state)
{
    (void)state;
    enum { ROWS = 19, N = 1036, LD = 2 * N };
    float *x = noise_floats(ROWS * LD, 12.0f, 21), row[N];
    uint16_t *got = mem_alloc(ROWS * N * 2);
    int32_t n_rows = ROWS - 2;
    x[3] = -200.0f, x[4] = 200.0f, x[5] = -88.5f, x[6] = 0.0f, x[7] = -0.0f;
    struct kernels *k = kernels_of(256, 128, 8, 2, KV_BF16);
    devptr_t in = gpu_new(&gpu, x, ROWS * LD * 4), out = gpu_new(&gpu, NULL, ROWS * N * 2),
             nr = gpu_new(&gpu, &n_rows, 4);
    struct swiglu_args a = {.gate = (const float *)in,
                            .up = (const float *)in + N,
                            .ld = LD,
                            .out = (uint16_t *)out,
                            .n_rows = (const int32_t *)nr,
                            .n = N};
    kernels_swiglu(k, gpu.q, &a, ROWS, true);
    gpu_read(&gpu, got, out, ROWS * N * 2);
    for (int i = 0; i < n_rows; i++) {
        uint16_t want[N];
        cpu_ops_best()->swiglu(row, x + i * LD, x + i * LD + N, N);
        for (int j = 0; j < N; j++)
            want[j] = f32_to_bf16(row[j]);
        same_bytes(got + i * N, want, sizeof want, "swiglu");
    }
    for (int j = 0; j < 2 * N; j++)
        assert_int_equal(got[n_rows * N + j], 0xAAAA);
    gpu_free(&gpu, in), gpu_free(&gpu, out), gpu_free(&gpu, nr);
    mem_free(x), mem_free(got);
    kernels_free(k);
}

static void refusals(void **state)
{
    (void)state;
    struct kernels_shape good = {.hidden = 256,
                                 .vocab = 100,
                                 .n_heads = 8,
                                 .n_kv_heads = 2,
                                 .head_dim = 128},
                         s;
    struct kernels *k = NULL;
    struct err e = {0};
#define REFUSED(field, value, text)                                    \
    s = good;                                                          \
    s.field = value;                                                   \
    assert_int_equal(kernels_new(&k, gpu.d, &s, &e), ERR_UNSUPPORTED); \
    assert_non_null(strstr(e.msg, text))
    REFUSED(hidden, 12, "hidden_size: 12");
    REFUSED(hidden, 16384, "hidden_size: 16384");
    REFUSED(head_dim, 96, "head_dim: 96");
    REFUSED(n_heads, 34, "num_attention_heads: 34");
    REFUSED(n_experts, 513, "num_experts: 513");
    REFUSED(top_k, 1, "num_experts_per_tok: 1");
    REFUSED(vocab, 300000, "vocab_size: 300000");
    assert_null(k);
}

int main(void)
{
    if (!gpu_open(&gpu)) return 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(norms), cmocka_unit_test(ropes),
                                       cmocka_unit_test(swiglus), cmocka_unit_test(refusals)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
