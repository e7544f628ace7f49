/*
 * test_route.c - routing on the GPU gives the ids, weight bits and plan of model/moe.c, whose rules
 * are written out again here over the CPU's exp_sum; and plans for ids that no router gave.
 */
#include "backend/cpu/cpu.h"
#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include <math.h>

static struct gpu gpu;

struct routing {
    int32_t tokens, experts, top_k, first, n_local;
    int normalise;
    float *logits;
    int32_t *seq;
    uint32_t *packed; /* expected or given */
    int32_t *offsets, *token_of, *row_of;
};

static void cpu_route(const struct routing *r, int32_t t)
{
    float p[ROUTE_EXPERTS_MAX], w[ROUTE_TOP_K_MAX], total = 0.0f;
    const float *x = r->logits + (size_t)t * (size_t)r->experts;
    float max = x[0];
    for (int e = 1; e < r->experts; e++)
        if (x[e] > max) max = x[e];
    float sum = (float)cpu_ops_best()->exp_sum(p, x, max, (size_t)r->experts);
    for (int j = 0; j < r->top_k; j++) {
        int best = -1;
        for (int e = 0; e < r->experts; e++)
            if (p[e] >= 0.0f && (best < 0 || p[e] > p[best])) best = e;
        w[j] = best < 0 ? NAN : p[best] / sum;
        if (best >= 0) p[best] = -1.0f;
        r->packed[t * r->top_k + j] = (uint32_t)(best < 0 ? j : best);
        total += w[j];
    }
    for (int j = 0; j < r->top_k; j++) {
        uint32_t id = r->seq[t] < 0 ? 0xffff : r->packed[t * r->top_k + j];
        uint16_t bits = f32_to_bf16(r->normalise ? w[j] / total : w[j]);
        r->packed[t * r->top_k + j] = id << 16 | bits;
    }
}

static void cpu_plan(const struct routing *r)
{
    int32_t n = 0;
    for (int32_t i = 0; i < r->tokens * r->top_k; i++)
        r->row_of[i] = -1;
    for (int32_t e = 0; e <= r->n_local; e++) {
        r->offsets[e] = n;
        for (int32_t i = 0; e < r->n_local && i < r->tokens * r->top_k; i++)
            if ((int16_t)(r->packed[i] >> 16) == r->first + e) {
                r->token_of[n] = i / r->top_k;
                r->row_of[i] = n++;
            }
    }
}

static bool is_nan(uint32_t packed)
{
    return (packed & 0x7fff) > 0x7f80;
}

static void check(struct routing *r, const char *what)
{
    size_t n = (size_t)(r->tokens * r->top_k), rows;
    uint32_t zero = 0, *packed = mem_alloc(n * 4);
    int32_t *got = mem_alloc(n * 4), *offsets = mem_alloc((size_t)(r->n_local + 1) * 4);
    struct kernels_shape s = {.hidden = 256,
                              .vocab = 1000,
                              .n_heads = 8,
                              .n_kv_heads = 2,
                              .head_dim = 128,
                              .n_experts = r->experts,
                              .top_k = r->top_k};
    struct kernels *k = NULL;
    MUST(kernels_new(&k, gpu.d, &s, &must_e));
    devptr_t dev[] = {r->logits ? gpu_new(&gpu, r->logits, (size_t)(r->tokens * r->experts) * 4)
                                : 0,
                      gpu_new(&gpu, r->seq, (size_t)r->tokens * 4),
                      gpu_new(&gpu, r->logits ? NULL : r->packed, n * 4),
                      gpu_new(&gpu, NULL, (size_t)(r->n_local + 1) * 4),
                      gpu_new(&gpu, NULL, n * 4),
                      gpu_new(&gpu, NULL, n * 4),
                      gpu_new(&gpu, &zero, 4)};
    struct route_args a = {(const float *)dev[0],
                           (const int32_t *)dev[1],
                           (uint32_t *)dev[2],
                           (int32_t *)dev[3],
                           (int32_t *)dev[4],
                           (int32_t *)dev[5],
                           (uint32_t *)dev[6],
                           r->tokens,
                           r->experts,
                           r->top_k,
                           r->first,
                           r->n_local,
                           r->normalise,
                           0,
                           0};
    if (r->logits)
        for (int32_t t = 0; t < r->tokens; t++)
            cpu_route(r, t);
    cpu_plan(r);
    for (int twice = 0; twice < 2; twice++) /* the ticket is as it was */
        kernels_route(k, gpu.q, &a, true);
    gpu_read(&gpu, packed, dev[2], n * 4);
    for (size_t i = 0; i < n; i++)
        if (packed[i] != r->packed[i] &&
            !(is_nan(packed[i]) && is_nan(r->packed[i]) && packed[i] >> 16 == r->packed[i] >> 16))
            fail_msg("%s: entry %zu is %08x, must be %08x", what, i, packed[i], r->packed[i]);
    gpu_read(&gpu, offsets, dev[3], (size_t)(r->n_local + 1) * 4);
    assert_memory_equal(offsets, r->offsets, (size_t)(r->n_local + 1) * 4);
    gpu_read(&gpu, got, dev[5], n * 4);
    assert_memory_equal(got, r->row_of, n * 4);
    gpu_read(&gpu, got, dev[4], n * 4);
    rows = (size_t)offsets[r->n_local];
    assert_memory_equal(got, r->token_of, rows * 4);
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(packed), mem_free(got), mem_free(offsets);
    kernels_free(k);
}

static void routing_new(struct routing *r)
{
    size_t n = (size_t)(r->tokens * r->top_k);
    r->seq = mem_alloc((size_t)r->tokens * 4);
    r->packed = mem_alloc(n * 4);
    r->offsets = mem_alloc((size_t)(r->n_local + 1) * 4);
    r->token_of = mem_alloc(n * 4);
    r->row_of = mem_alloc(n * 4);
}

static void routing_free(struct routing *r)
{
    void *all[] = {r->logits, r->seq, r->packed, r->offsets, r->token_of, r->row_of};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
}

/* Random, with ties (steps of 1/4), all equal, falls of hundreds, infinities, NaN first and
 * elsewhere. */
static void fill_logits(struct routing *r, uint64_t start)
{
    uint64_t seed = start;
    r->logits = mem_alloc((size_t)(r->tokens * r->experts) * 4);
    for (int32_t t = 0; t < r->tokens; t++) {
        float *x = r->logits + (size_t)t * (size_t)r->experts;
        int kind = (int)(((uint64_t)t + (r->tokens > 20 ? 0 : start)) % 16);
        for (int32_t e = 0; e < r->experts; e++) {
            x[e] = noise_f32(&seed) * (kind == 3 ? 300.0f : 4.0f);
            if (kind == 1) x[e] = floorf(x[e] * 4.0f) / 4.0f;
            if (kind == 2) x[e] = -1.5f;
            if (kind == 4 && noise_u32(&seed) % 2) x[e] = -INFINITY;
        }
        if (kind == 5) x[0] = NAN;
        if (kind == 6) x[r->experts / 2] = NAN;
        if (kind == 7) x[r->experts - 1] = INFINITY;
        if (kind == 8)
            for (int32_t e = 0; e < r->experts; e++)
                x[e] = e % 2 ? 0.0f : -0.0f;
        r->seq[t] = kind == 9 ? -1 : t;
    }
}

static void routed_by_logits(void **state)
{
    (void)state;
    static const int32_t tokens[] = {1, 2, 5, 8, 9, 33, 100, 300, 1209, 2000, 8200},
                         shapes[][2] = {{128, 8}, {16, 4},   {1, 1},   {100, 7},
                                        {200, 8}, {512, 10}, {128, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (size_t j = 0; j < (gpu.few ? 3 : sizeof tokens / sizeof tokens[0]); j++) {
            struct routing r = {.tokens = tokens[j],
                                .experts = shapes[i][0],
                                .top_k = shapes[i][1],
                                .n_local = shapes[i][0],
                                .normalise = (int)(i + j) % 3 != 0};
            char what[80];
            if (r.tokens > 2000 && r.top_k > 8) continue; /* seconds on the host */
            if (tokens[j] == 33 && r.experts > 16) {      /* a slice */
                r.first = r.experts / 4;
                r.n_local = r.experts / 2;
            }
            snprintf(what, sizeof what, "%d tokens, %d of %d", r.tokens, r.top_k, r.experts);
            routing_new(&r);
            fill_logits(&r, (uint64_t)(i * 10 + j));
            check(&r, what);
            routing_free(&r);
        }
}

static void routed_by_ids(void **state)
{
    (void)state;
    static const int32_t tokens[] = {1, 5, 129, 16384};
    for (size_t i = 0; i < (gpu.few ? 3 : sizeof tokens / sizeof tokens[0]); i++)
        for (int kind = 0; kind < 3; kind++) {
            struct routing r = {.tokens = tokens[i],
                                .experts = 128,
                                .top_k = 8,
                                .first = kind ? 32 : 0,
                                .n_local = kind ? 64 : 128};
            uint64_t seed = i;
            routing_new(&r);
            for (int32_t j = 0; j < r.tokens * r.top_k;
                 j++) { /* negative, repeated, elsewhere; or all to one */
                int32_t id = kind == 2 ? 40 : (int32_t)(noise_u32(&seed) % 150) - 10;
                r.packed[j] = (uint32_t)id << 16 | (noise_u32(&seed) & 0x3fff);
            }
            check(&r, "given ids");
            routing_free(&r);
        }
}

int main(void)
{
    if (!gpu_open(&gpu)) return 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(routed_by_logits),
                                       cmocka_unit_test(routed_by_ids)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
