/*
 * test_norm_route.c - the kernel of few tokens leaves what kernels_norm, gemm_launch and
 * kernels_route leave one after another, each of which has its own test against the CPU.
 */
#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include "cuda/matrices.h"

static struct gpu gpu;
static struct gemm_kernels gemm;

/* What a token's kernels read and write. */
struct buffers {
    devptr_t x, y, w, out, seq, packed, offsets, token_of, row_of, logits, ticket;
};
enum { RESULTS = 6 };

struct shape {
    int32_t hidden, experts, top_k;
    bool normalise;
};

static struct norm_route_args args_of(const struct buffers *b, const struct shape *s,
                                      int32_t tokens, devptr_t router)
{
    return (struct norm_route_args){.norm = {.x = (float *)b->x,
                                             .y = (const float *)b->y,
                                             .w = (const uint16_t *)b->w,
                                             .out = (uint16_t *)b->out,
                                             .n = s->hidden,
                                             .eps = 1e-6f},
                                    .route = {.seq = (const int32_t *)b->seq,
                                              .packed = (uint32_t *)b->packed,
                                              .offsets = (int32_t *)b->offsets,
                                              .token_of = (int32_t *)b->token_of,
                                              .row_of = (int32_t *)b->row_of,
                                              .ticket = (uint32_t *)b->ticket,
                                              .n_tokens = tokens,
                                              .n_experts = s->experts,
                                              .top_k = s->top_k,
                                              .n_local = s->experts,
                                              .normalise = s->normalise},
                                    .router = (const struct gemm_weight *)router};
}

static void three_kernels(const struct kernels *k, const struct norm_route_args *a, devptr_t logits)
{
    struct gemm_args g = {.x = a->norm.out,
                          .w = a->router,
                          .out = (void *)logits,
                          .ldx = a->norm.n,
                          .ldo = a->route.n_experts,
                          .k = a->norm.n,
                          .n = a->route.n_experts,
                          .n_groups = 1,
                          .n_rows = a->route.n_tokens,
                          .out_kind = GEMM_F32};
    struct route_args r = a->route;
    r.logits = (const float *)logits;
    kernels_norm(k, gpu.q, NORM_ADD, &a->norm, a->route.n_tokens, false);
    gemm_launch(&gemm, gpu.q, FORMAT_BF16, &g, a->route.n_tokens, false);
    kernels_route(k, gpu.q, &r, false);
}

static struct buffers buffers_new(const struct shape *s, int32_t tokens, uint64_t seed, int kind)
{
    size_t n = (size_t)(tokens * s->hidden), entries = (size_t)(tokens * s->top_k);
    float *x = mem_alloc(n * 4), *y = mem_alloc(n * 4);
    uint16_t *w = mem_alloc((size_t)s->hidden * 2);
    int32_t seq[NORM_ROUTE_TOKENS];
    uint32_t zero = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = noise_f32(&seed) * 3.0f;
        y[i] = noise_f32(&seed) * (i % 97 ? 0.5f : 50.0f);
    }
    for (int32_t i = 0; i < s->hidden; i++)
        w[i] = f32_to_bf16(1.0f + noise_f32(&seed));
    for (int32_t t = 0; t < tokens; t++)
        seq[t] = kind == 1 && t % 3 == 1 ? -1 : t;
    if (kind == 2) y[n - 1] = NAN;
    struct buffers b = {gpu_new(&gpu, x, n * 4),
                        gpu_new(&gpu, y, n * 4),
                        gpu_new(&gpu, w, (size_t)s->hidden * 2),
                        gpu_new(&gpu, NULL, n * 2),
                        gpu_new(&gpu, seq, (size_t)tokens * 4),
                        gpu_new(&gpu, NULL, entries * 4),
                        gpu_new(&gpu, NULL, (size_t)(s->experts + 1) * 4),
                        gpu_new(&gpu, NULL, entries * 4),
                        gpu_new(&gpu, NULL, entries * 4),
                        gpu_new(&gpu, NULL, (size_t)(tokens * s->experts) * 4),
                        gpu_new(&gpu, &zero, 4)};
    mem_free(x), mem_free(y), mem_free(w);
    return b;
}

static void buffers_free(const struct buffers *b)
{
    const devptr_t all[] = {b->x,       b->y,        b->w,      b->out,    b->seq,   b->packed,
                            b->offsets, b->token_of, b->row_of, b->logits, b->ticket};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(&gpu, all[i]);
}

static void compare(const struct buffers *b, const struct buffers *want, const struct shape *s,
                    int32_t tokens, const char *what)
{
    size_t n = (size_t)(tokens * s->hidden), entries = (size_t)(tokens * s->top_k) * 4;
    const struct {
        const char *name;
        devptr_t got, must;
        size_t bytes;
    } all[RESULTS] = {{"x", b->x, want->x, n * 4},
                      {"out", b->out, want->out, n * 2},
                      {"packed", b->packed, want->packed, entries},
                      {"offsets", b->offsets, want->offsets, (size_t)(s->experts + 1) * 4},
                      {"token_of", b->token_of, want->token_of, entries},
                      {"row_of", b->row_of, want->row_of, entries}};
    for (int i = 0; i < RESULTS; i++) {
        char *x = mem_alloc(all[i].bytes), *y = mem_alloc(all[i].bytes);
        gpu_read(&gpu, x, all[i].got, all[i].bytes);
        gpu_read(&gpu, y, all[i].must, all[i].bytes);
        for (size_t at = 0; at < all[i].bytes; at++)
            if (x[at] != y[at])
                fail_msg("%s, %d tokens: %s differs at byte %zu of %zu", what, tokens, all[i].name,
                         at, all[i].bytes);
        mem_free(x), mem_free(y);
    }
}

static void check(const struct shape *s, int32_t tokens, uint64_t seed, int kind)
{
    struct kernels_shape shape = {.hidden = s->hidden,
                                  .vocab = 1000,
                                  .n_heads = 8,
                                  .n_kv_heads = 2,
                                  .head_dim = 128,
                                  .n_experts = s->experts,
                                  .top_k = s->top_k};
    struct kernels *k = NULL;
    MUST(kernels_new(&k, gpu.d, &shape, &must_e));
    assert_true(kernels_norm_routes(k, tokens));
    struct test_matrix m =
        matrix_new(FORMAT_BF16, (size_t)s->experts, (size_t)s->hidden, DATA_NORMAL, &seed);
    matrix_upload(&gpu, &m);
    struct gemm_weight w = matrix_weight(&m);
    devptr_t router = gpu_new(&gpu, &w, sizeof w);
    struct buffers b = buffers_new(s, tokens, seed, kind),
                   want = buffers_new(s, tokens, seed, kind);
    struct norm_route_args a = args_of(&b, s, tokens, router),
                           one = args_of(&want, s, tokens, router);
    char what[80];
    snprintf(what, sizeof what, "%d, %d of %d, kind %d", s->hidden, s->top_k, s->experts, kind);
    for (int twice = 0; twice < 2; twice++) {
        kernels_norm_route(k, gpu.q, &a, twice);
        three_kernels(k, &one, want.logits);
        compare(&b, &want, s, tokens, what);
    }
    buffers_free(&b), buffers_free(&want);
    gpu_free(&gpu, router);
    matrix_free(&gpu, &m);
    kernels_free(k);
}

static void one_kernel_or_three(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{2048, 128, 8, true},  {256, 16, 4, false},
                                          {1024, 100, 7, true},  {512, 1, 1, false},
                                          {2048, 128, 64, true}, {512, 33, 33, true}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int32_t tokens = 1; tokens <= NORM_ROUTE_TOKENS; tokens += gpu.few ? 4 : 1)
            for (int kind = 0; kind < 3; kind++)
                check(&shapes[i], tokens, i * 100 + (uint64_t)tokens, kind);
}

static void which_shapes(void **state)
{
    (void)state;
    struct kernels_shape shape = {.hidden = 2048,
                                  .vocab = 1000,
                                  .n_heads = 8,
                                  .n_kv_heads = 2,
                                  .head_dim = 128,
                                  .n_experts = 128,
                                  .top_k = 8};
    static const int32_t hidden[] = {2048, 768, 4096, 264};
    for (size_t i = 0; i < sizeof hidden / sizeof hidden[0]; i++) {
        struct kernels *k = NULL;
        shape.hidden = hidden[i];
        MUST(kernels_new(&k, gpu.d, &shape, &must_e));
        assert_int_equal(kernels_norm_routes(k, NORM_ROUTE_TOKENS), i == 0);
        assert_false(kernels_norm_routes(k, NORM_ROUTE_TOKENS + 1));
        kernels_free(k);
    }
}

int main(void)
{
    struct err e = {0};
    if (!gpu_open(&gpu)) return 0;
    if (gemm_open(&gemm, gpu.d, 1u << FORMAT_BF16, &e) != OK ||
        repack_open(&matrix_repack, gpu.d, &e) != OK) {
        printf("%s\n", e.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_kernel_or_three),
                                       cmocka_unit_test(which_shapes)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
