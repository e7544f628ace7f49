#include "backend/cuda/selftest.h"
#include "backend/cpu/cpu.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/repack.h"
#include "backend/oracle.h"
#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Of a GEMM: a part of a tile on every side, several k blocks; no multiple of a segment or more
 * than one tile of the largest kernel is needed to see another arithmetic. */
enum { N = 328, K = 456, X_ROWS = 41, FEW_ROWS = 8, LDO = 336 };
enum { TOP_K = 8, WIDTH = 512, EXPERT_ROWS = 64, TOKENS = 37 };
enum { COPY_RUNS = 5 };
#define COPY_BYTES ((size_t)256 << 20)

typedef enum { DATA_NORMAL, DATA_WIDE, DATA_CANCEL, DATA_TINY, DATA_KINDS } data_t;
static const char *const data_names[DATA_KINDS] = {"like a model's", "of many sizes", "cancelling",
                                                   "subnormal"};

struct run {
    struct selftest *t;
    struct device *d;
    struct queue *q;
    struct gemm_kernels gemm;
    struct kernels *kernels;
    struct repack repack;
    devptr_t blocks[16]; /* of one check */
    int n_blocks;
    bool spoil;
    uint64_t seed;
};

/* --- numbers: splitmix64 */

static uint64_t draw(struct run *r)
{
    uint64_t z = r->seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* -1 .. 1 */
static float unit(struct run *r)
{
    return (float)((double)(int64_t)draw(r) * 0x1p-63);
}

static float weight_number(struct run *r, data_t kind, size_t k)
{
    float u = unit(r);
    if (kind == DATA_WIDE) return u * exp2f(unit(r) * 12.0f);
    if (kind == DATA_TINY) return u * 0x1p-126f;
    return kind == DATA_CANCEL && k % 2 ? -1.0f : u;
}

static float x_number(struct run *r, data_t kind, size_t k, float before)
{
    float u = unit(r) * (k % 97 == 5 ? 30.0f : 1.0f);
    if (kind == DATA_WIDE) return u * exp2f(unit(r) * 12.0f);
    if (kind == DATA_TINY) return u * 0x1p100f;
    return kind == DATA_CANCEL && k % 2 == 0 ? -before : u;
}

/* --- device memory of one check */

static devptr_t block(struct run *r, const void *bytes, size_t n, err_t *rc, struct err *e)
{
    devptr_t p = 0;
    CHECK(r->n_blocks < (int)(sizeof r->blocks / sizeof r->blocks[0]));
    if (*rc == OK) *rc = device_alloc(&p, r->d, n, e);
    if (*rc != OK) return 0;
    r->blocks[r->n_blocks++] = p;
    if (bytes)
        queue_copy(r->q, p, host_addr(bytes), n);
    else
        queue_fill(r->q, p, 0xAA, n);
    return p;
}

static void drop_blocks(struct run *r)
{
    while (r->n_blocks > 0)
        device_free(r->d, r->blocks[--r->n_blocks]);
}

static err_t fetch(struct run *r, void *to, devptr_t from, size_t n, struct err *e)
{
    queue_copy(r->q, host_addr(to), from, n);
    err_t rc = queue_sync(r->q, e);
    if (rc == OK && r->spoil) ((uint8_t *)to)[n / 3] ^= 4;
    return rc;
}

static struct selftest_row *row_of(struct run *r, const char *what)
{
    struct selftest *t = r->t;
    CHECK(t->n < SELFTEST_ROWS);
    struct selftest_row *row = &t->rows[t->n++];
    snprintf(row->what, sizeof row->what, "%s", what);
    return row;
}

/* --- GEMM */

struct matrix_bytes {
    struct format_parts p;
    uint8_t *data, *scale;
    size_t data_bytes, scale_bytes;
};

static void matrix_fill(struct run *r, struct matrix_bytes *m, data_t kind)
{
    const struct format *f = &formats[m->p.format];
    size_t n_scales = m->scale_bytes / (size_t)(f->scale_bytes ? f->scale_bytes : 1);
    for (size_t i = 0; i < m->data_bytes; i++)
        m->data[i] = (uint8_t)draw(r);
    for (size_t i = 0; f->elem == ELEM_BF16 && i < m->data_bytes / 2; i++) {
        uint16_t h = f32_to_bf16(weight_number(r, kind, i));
        memcpy(m->data + i * 2, &h, 2);
    }
    for (size_t i = 0; f->elem == ELEM_E4M3 && i < m->data_bytes; i++)
        if ((m->data[i] & 0x7f) == 0x7f) m->data[i] ^= 1; /* no NaN */
    for (size_t i = 0; i < n_scales; i++) {
        float v = 0.001f + fabsf(unit(r)) * 0.02f;
        if (f->scale == SCALE_E4M3) m->scale[i] = (uint8_t)(draw(r) % 0x7f);
        if (f->scale == SCALE_E8M0)
            m->scale[i] = (uint8_t)(kind == DATA_WIDE ? 10 + draw(r) % 200 : 117 + draw(r) % 12);
        if (f->scale == SCALE_F32) memcpy(m->scale + i * sizeof v, &v, sizeof v);
    }
    m->p.tensor = f->tensor ? 0.01f + fabsf(unit(r)) : 1.0f;
}

static void matrix_new(struct run *r, struct matrix_bytes *m, format_t f, data_t kind)
{
    *m = (struct matrix_bytes){.p = {.format = f, .rows = N, .cols = K}};
    CHECK(format_bytes(f, N, K, &m->data_bytes, &m->scale_bytes));
    m->data = mem_alloc(m->data_bytes);
    m->scale = mem_alloc(m->scale_bytes + sizeof(float));
    m->p.data = m->data;
    m->p.scale = m->scale;
    matrix_fill(r, m, kind);
}

static void matrix_free(struct matrix_bytes *m)
{
    mem_free(m->data);
    mem_free(m->scale);
}

/* Tiles on the device, and a table of one gemm_weight there. */
static devptr_t upload(struct run *r, const struct matrix_bytes *m, devptr_t *tiles, err_t *rc,
                       struct err *e)
{
    size_t bytes;
    CHECK(layout_cuda_bytes(&bytes, m->p.format, N, K));
    *tiles = block(r, NULL, bytes, rc, e);
    devptr_t data = block(r, m->data, m->data_bytes, rc, e);
    devptr_t scale = block(r, m->scale, m->scale_bytes + sizeof(float), rc, e);
    devptr_t tensor = block(r, &m->p.tensor, sizeof(float), rc, e);
    if (*rc != OK) return 0;
    struct layout_args a = {(void *)(uintptr_t)*tiles, (void *)(uintptr_t)data,
                            (void *)(uintptr_t)scale, N, K};
    repack_to_tiles(&r->repack, r->q, m->p.format, &a);
    struct gemm_weight w = {
        (const void *)(uintptr_t)*tiles,
        (const float *)(uintptr_t)(formats[m->p.format].tensor ? tensor : scale)};
    devptr_t table = block(r, &w, sizeof w, rc, e);
    if (*rc == OK) *rc = queue_sync(r->q, e); /* w is gone when this returns */
    return table;
}

static void compare_words(struct selftest_row *row, const uint32_t *got, const uint32_t *want,
                          int rows, int cols, int ld, const char *how)
{
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < cols; c++) {
            uint32_t x = got[i * ld + c], y = want[i * ld + c];
            row->words++;
            if (x == y) continue;
            if (row->differ++ == 0)
                snprintf(row->first, sizeof row->first,
                         "%s: row %d, column %d is 0x%08x, must be 0x%08x", how, i, c, x, y);
        }
}

static void oracle_product(float *want, const struct matrix_bytes *m, const uint16_t *x)
{
    struct oracle_bf16 w[K], *xs = mem_alloc((size_t)X_ROWS * K * sizeof *xs);
    for (size_t i = 0; i < (size_t)X_ROWS * K; i++)
        xs[i] = oracle_split(x[i]);
    for (size_t n = 0; n < N; n++) {
        oracle_weights(w, &m->p, n);
        for (size_t i = 0; i < X_ROWS; i++)
            want[i * LDO + n] = oracle_gemm(&m->p, n, w, xs + i * K, (size_t)gemm_segment(N, K));
    }
    mem_free(xs);
}

static err_t check_product(struct run *r, struct selftest_row *row, format_t f, data_t kind,
                           struct err *e)
{
    static const char *const sizes[GEMM_KERNELS_MAX] = {"strip", "small",  "medium", "large",
                                                        "panel", "panels", "few"};
    enum { OUT = X_ROWS * LDO };
    struct matrix_bytes m;
    err_t rc = OK;
    uint16_t *x = mem_alloc((size_t)X_ROWS * K * sizeof *x);
    float *want = mem_alloc(OUT * sizeof *want), *got = mem_alloc(OUT * sizeof *got), before = 0.0f;
    matrix_new(r, &m, f, kind);
    for (size_t i = 0; i < (size_t)X_ROWS * K; i++)
        x[i] = f32_to_bf16(before = x_number(r, kind, i % K, before));
    oracle_product(want, &m, x);
    devptr_t tiles, table = upload(r, &m, &tiles, &rc, e);
    devptr_t dx = block(r, x, (size_t)X_ROWS * K * sizeof *x, &rc, e);
    devptr_t dout = block(r, NULL, OUT * sizeof *got, &rc, e);
    struct gemm_args a = {.x = (const void *)(uintptr_t)dx,
                          .w = (const struct gemm_weight *)(uintptr_t)table,
                          .out = (void *)(uintptr_t)dout,
                          .ldx = K,
                          .ldo = LDO,
                          .k = K,
                          .n = N,
                          .n_groups = 1,
                          .n_rows = X_ROWS,
                          .out_kind = GEMM_F32};
    for (int size = 0; rc == OK && size < GEMM_KERNELS_MAX; size++) {
        char how[64];
        a.n_rows = X_ROWS;
        if (!gemm_takes(&r->gemm, f, &a, size)) a.n_rows = FEW_ROWS;
        if (!gemm_takes(&r->gemm, f, &a, size)) continue;
        snprintf(how, sizeof how, "kernel %s, data %s", sizes[size], data_names[kind]);
        queue_fill(r->q, dout, 0xAA, OUT * sizeof *got);
        gemm_launch_size(&r->gemm, r->q, f, &a, size, false);
        rc = fetch(r, got, dout, (size_t)a.n_rows * LDO * sizeof *got, e);
        if (rc == OK)
            compare_words(row, (const uint32_t *)(const void *)got,
                          (const uint32_t *)(const void *)want, a.n_rows, N, LDO, how);
    }
    drop_blocks(r);
    matrix_free(&m);
    mem_free(x);
    mem_free(want);
    mem_free(got);
    return rc;
}

static err_t check_gemm(struct run *r, format_t f, struct err *e)
{
    char what[48];
    err_t rc = OK;
    snprintf(what, sizeof what, "GEMM, %s", formats[f].name);
    struct selftest_row *row = row_of(r, what);
    for (data_t kind = 0; rc == OK && kind < DATA_KINDS; kind++)
        rc = check_product(r, row, f, kind, e);
    return rc;
}

/* --- tiles and back */

static err_t check_tiles(struct run *r, struct selftest_row *row, format_t f, struct err *e)
{
    struct matrix_bytes m;
    devptr_t tiles;
    err_t rc = OK;
    matrix_new(r, &m, f, DATA_NORMAL);
    (void)upload(r, &m, &tiles, &rc, e);
    size_t n = (m.data_bytes + 3) / 4;
    uint32_t *got = mem_alloc(n * 4), *want = mem_alloc(n * 4);
    devptr_t back = block(r, NULL, n * 4, &rc, e);
    struct layout_args a = {(void *)(uintptr_t)tiles, (void *)(uintptr_t)back, NULL, N, K};
    if (rc == OK) repack_from_tiles(&r->repack, r->q, f, &a);
    if (rc == OK) rc = fetch(r, got, back, m.data_bytes, e);
    memcpy(want, m.data, m.data_bytes);
    if (rc == OK) compare_words(row, got, want, 1, (int)n, (int)n, formats[f].name);
    drop_blocks(r);
    matrix_free(&m);
    mem_free(got);
    mem_free(want);
    return rc;
}

/* --- combine */

struct combine {
    float x[TOKENS * WIDTH], got[TOKENS * WIDTH];
    uint16_t expert[EXPERT_ROWS * WIDTH], norm[WIDTH];
    int32_t row_of[TOKENS * TOP_K];
    uint32_t packed[TOKENS * TOP_K];
    float rows[TOP_K][WIDTH];
};

static void combine_fill(struct run *r, struct combine *c)
{
    for (int i = 0; i < TOKENS * WIDTH; i++)
        c->x[i] = unit(r) * 2.0f;
    for (int i = 0; i < EXPERT_ROWS * WIDTH; i++)
        c->expert[i] = f32_to_bf16(unit(r) * exp2f(unit(r) * 6.0f));
    for (int i = 0; i < WIDTH; i++)
        c->norm[i] = f32_to_bf16(1.0f);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        c->row_of[i] = draw(r) % 5 == 0 ? -1 : (int32_t)(draw(r) % EXPERT_ROWS);
        c->packed[i] = (uint32_t)f32_to_bf16(fabsf(unit(r)));
    }
}

/* x of a token as the CPU leaves it. */
static void combine_on_cpu(struct combine *c, int token)
{
    const float *used[TOP_K];
    float w[TOP_K];
    size_t n = 0;
    for (int j = 0; j < TOP_K; j++) {
        int32_t row = c->row_of[token * TOP_K + j];
        if (row < 0) continue;
        for (int i = 0; i < WIDTH; i++)
            c->rows[n][i] = bf16_to_f32(c->expert[row * WIDTH + i]);
        used[n] = c->rows[n];
        w[n++] = bf16_to_f32((uint16_t)c->packed[token * TOP_K + j]);
    }
    if (n) cpu_ops_best()->combine(c->x + token * WIDTH, used, w, n, WIDTH);
}

static err_t check_combine(struct run *r, struct err *e)
{
    struct combine *c = mem_alloc(sizeof *c);
    struct selftest_row *row = row_of(r, "combine of experts");
    err_t rc = OK;
    combine_fill(r, c);
    devptr_t x = block(r, c->x, sizeof c->x, &rc, e),
             expert = block(r, c->expert, sizeof c->expert, &rc, e);
    devptr_t norm = block(r, c->norm, sizeof c->norm, &rc, e),
             rows = block(r, c->row_of, sizeof c->row_of, &rc, e);
    devptr_t packed = block(r, c->packed, sizeof c->packed, &rc, e);
    devptr_t out = block(r, NULL, TOKENS * WIDTH * sizeof(uint16_t), &rc, e);
    struct norm_args a = {.x = (float *)(uintptr_t)x,
                          .expert = (const uint16_t *)(uintptr_t)expert,
                          .row_of = (const int32_t *)(uintptr_t)rows,
                          .packed = (const uint32_t *)(uintptr_t)packed,
                          .w = (const uint16_t *)(uintptr_t)norm,
                          .out = (uint16_t *)(uintptr_t)out,
                          .n = WIDTH,
                          .top_k = TOP_K,
                          .eps = 1e-6f};
    if (rc == OK) rc = queue_sync(r->q, e); /* x is what it was before the CPU's turn */
    if (rc == OK) kernels_norm(r->kernels, r->q, NORM_COMBINE, &a, TOKENS, false);
    if (rc == OK) rc = fetch(r, c->got, x, sizeof c->got, e);
    for (int i = 0; i < TOKENS; i++)
        combine_on_cpu(c, i);
    if (rc == OK)
        compare_words(row, (const uint32_t *)(const void *)c->got,
                      (const uint32_t *)(const void *)c->x, TOKENS, WIDTH, WIDTH, "x");
    drop_blocks(r);
    mem_free(c);
    return rc;
}

/* --- speeds */

struct timer {
    struct event *from, *to;
};

/* Bytes a second of a copy, the best of several. */
static err_t speed(double *out, struct run *r, const struct timer *t, uint64_t to, uint64_t from,
                   struct err *e)
{
    for (int i = 0; i < COPY_RUNS; i++) {
        float ms = 0.0f;
        queue_record(r->q, t->from);
        queue_copy(r->q, to, from, COPY_BYTES);
        queue_record(r->q, t->to);
        err_t rc = queue_sync(r->q, e);
        if (rc == OK) rc = event_ms(&ms, t->from, t->to, e);
        if (rc != OK) return rc;
        double s = (double)COPY_BYTES / ((double)ms * 1e-3);
        if (s > *out) *out = s;
    }
    return OK;
}

static err_t speeds(struct run *r, struct err *e)
{
    struct timer t = {0};
    void *host = NULL;
    err_t rc = event_new(&t.from, r->d, true, e);
    if (rc == OK) rc = event_new(&t.to, r->d, true, e);
    if (rc == OK) rc = host_alloc(&host, r->d, COPY_BYTES, e);
    devptr_t a = block(r, NULL, COPY_BYTES, &rc, e), b = block(r, NULL, COPY_BYTES, &rc, e);
    if (rc == OK) rc = speed(&r->t->inside, r, &t, a, b, e);
    if (rc == OK) rc = speed(&r->t->to, r, &t, a, host_addr(host), e);
    if (rc == OK) rc = speed(&r->t->from, r, &t, host_addr(host), b, e);
    r->t->inside *= 2; /* read and written */
    drop_blocks(r);
    host_free(r->d, host);
    event_free(t.from);
    event_free(t.to);
    return rc;
}

static err_t open_all(struct run *r, struct err *e)
{
    const struct kernels_shape shape = {.hidden = WIDTH,
                                        .vocab = 1024,
                                        .n_heads = 8,
                                        .n_kv_heads = 2,
                                        .head_dim = 128,
                                        .n_experts = EXPERT_ROWS,
                                        .top_k = TOP_K};
    err_t rc = queue_new(&r->q, r->d, e);
    if (rc == OK) rc = repack_open(&r->repack, r->d, e);
    if (rc == OK) rc = gemm_open(&r->gemm, r->d, (1u << FORMAT_COUNT) - 1, e);
    return rc == OK ? kernels_new(&r->kernels, r->d, &shape, e) : rc;
}

err_t selftest_run(struct selftest **out, struct device *d, bool spoil, struct err *e)
{
    struct run r = {.t = mem_alloc(sizeof *r.t), .d = d, .spoil = spoil, .seed = 1};
    err_t rc = open_all(&r, e);
    for (format_t f = 0; rc == OK && f < FORMAT_COUNT; f++)
        rc = check_gemm(&r, f, e);
    if (rc == OK) rc = check_combine(&r, e);
    if (rc == OK) {
        struct selftest_row *row = row_of(&r, "tiles and back");
        for (format_t f = 0; rc == OK && f < FORMAT_COUNT; f++)
            rc = check_tiles(&r, row, f, e);
    }
    if (rc == OK) rc = speeds(&r, e);
    drop_blocks(&r);
    if (r.kernels) kernels_free(r.kernels);
    queue_free(r.q);
    if (rc == OK)
        *out = r.t;
    else
        mem_free(r.t);
    return rc;
}
