/*
 * test_moe.c - the routed MoE operator against its definition in float64 (moe_rig.h): every weight
 * format, shapes that do not fit the tiles, routings that nobody would make, slices of experts,
 * replay; and that a token's bits depend on nothing but the token.
 *
 * Tolerance: what is rounded to BF16 on the way (h and each expert's row, 2^-9 each) relative to
 * the sum of absolute products.  Weights are the same numbers on both sides whatever their format,
 * so one bound serves all.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "moe_rig.h"
#include <stdio.h>

#define TOLERANCE 0x1p-7

static struct pool *pool;
static const struct backend_ops *ops;

static int setup(void **state)
{
    (void)state;
    pool = pool_new(2);
    ops = cpu_ops_best();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    pool_free(pool);
    return 0;
}

static struct moe_shape shape_of(const struct moe_rig *g, int32_t k)
{
    return (struct moe_shape){.hidden = g->hidden,
                              .inner = g->inner,
                              .n_experts = g->n_experts,
                              .top_k = k,
                              .n_local = g->n_experts};
}

static struct moe_weights weights_of(const struct moe_rig *g)
{
    return (struct moe_weights){.experts = g->matrix};
}

static struct moe_op *op_new(const struct moe_shape *s, int32_t max_tokens)
{
    struct moe_op *op;
    struct err e = {0};
    if (moe_op_new(&op, s, ops, pool, max_tokens, &e) != OK) fail_msg("%s", e.msg);
    return op;
}

/* Runs choices, returns y [n][hidden]. */
static float *run_taken(const struct moe_rig *g, const struct moe_weights *w,
                        const struct moe_shape *s, const int32_t *ids, const float *weights,
                        const float *x, int32_t n)
{
    struct moe_op *op = op_new(s, n);
    float *y = mem_alloc((size_t)n * (size_t)g->hidden * 4);
    moe_op_take(op, ids, weights, n);
    moe_op_run(op, w, x, n, y);
    moe_op_free(op);
    return y;
}

static void check(const struct moe_rig *g, const struct moe_weights *w, const struct moe_shape *s,
                  const int32_t *ids, const float *weights, const float *x, int32_t n,
                  rig_round *round, const float *y, double tolerance)
{
    size_t len = (size_t)n * (size_t)g->hidden;
    double *expect = mem_alloc(len * sizeof *expect), *size = mem_alloc(len * sizeof *size);
    double square = 0;
    rig_define(g, w, s, ids, weights, x, (size_t)n, round, expect, size);
    for (size_t i = 0; i < len; i++) {
        double off = fabs((double)y[i] - expect[i]);
        if (size[i] > 0) square += off * off / (size[i] * size[i]);
        if (!(off <= tolerance * size[i]))
            fail_msg("%s, token %zu, column %zu: %.9g, expected %.9g (of %.9g)",
                     formats[g->format].name, i / (size_t)g->hidden, i % (size_t)g->hidden,
                     (double)y[i], expect[i], size[i]);
    }
    assert_true(sqrt(square / (double)len) <= tolerance / 4);
    mem_free(expect);
    mem_free(size);
}

/* Choices of n tokens: `kind` 0 random, 1 all to one expert first, 2 only even experts (half
 * empty). */
static void choose(const struct moe_rig *g, int32_t k, int32_t n, int kind, int32_t *ids, float *w)
{
    for (int32_t i = 0; i < n * k; i++) {
        bool again = true;
        while (again) {
            ids[i] = (int32_t)(rig_uniform() * g->n_experts);
            if (kind == 1 && i % k == 0) ids[i] = 3;
            if (kind == 2) ids[i] &= ~1;
            again = false;
            for (int32_t j = i - i % k; j < i; j++)
                again = again || ids[j] == ids[i];
        }
        w[i] = act_round((float)rig_uniform());
    }
}

static void shapes(void **state)
{
    (void)state;
    static const struct {
        int32_t hidden, inner, experts, k, n;
        int kind;
    } cases[] = {
        {64, 32, 4, 2, 1, 0},    {64, 96, 8, 2, 5, 0},    {256, 80, 8, 4, 33, 1},
        {160, 200, 12, 3, 7, 2}, {130, 34, 8, 2, 3, 0},   {2880, 64, 4, 2, 2, 0},
        {64, 2880, 4, 1, 2, 0},  {384, 128, 8, 8, 37, 1}, {96, 144, 8, 1, 70, 1},
    };
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            struct moe_rig g;
            rig_new(&g, (format_t)f, cases[i].hidden, cases[i].inner, cases[i].experts);
            int32_t ids[37 * 8], n = cases[i].n, k = cases[i].k;
            float w[37 * 8], *x = rig_rows((size_t)n, (size_t)g.hidden, 1.0f);
            struct moe_shape s = shape_of(&g, k);
            struct moe_weights mw = weights_of(&g);
            choose(&g, k, n, cases[i].kind, ids, w);
            float *y = run_taken(&g, &mw, &s, ids, w, x, n);
            check(&g, &mw, &s, ids, w, x, n, NULL, y, TOLERANCE);
            mem_free(x);
            mem_free(y);
            rig_free(&g);
        }
}

/* The gpt-oss activation, with and without constants and biases of each expert. */
static void oai(void **state)
{
    (void)state;
    struct moe_rig g;
    rig_new(&g, FORMAT_BF16, 96, 80, 8);
    int32_t ids[9 * 2], n = 9, k = 2;
    float w[9 * 2], *x = rig_rows((size_t)n, (size_t)g.hidden, 6.0f); /* beyond the limit of 7 */
    choose(&g, k, n, 0, ids, w);
    for (int bits = 0; bits < 32; bits++) {
        struct moe_shape s = shape_of(&g, k);
        s.activation = bits & 1 ? MOE_SWIGLU_OAI : MOE_SWIGLU;
        struct moe_weights mw = weights_of(&g);
        if (bits & 2) mw.gate_bias = g.bias[0], mw.up_bias = g.bias[1];
        if (bits & 4) mw.down_bias = g.bias[2];
        if (bits & 8) mw.alpha = g.alpha, mw.beta = g.beta;
        if (bits & 16) mw.limit = g.limit;
        float *y = run_taken(&g, &mw, &s, ids, w, x, n);
        check(&g, &mw, &s, ids, w, x, n, NULL, y, TOLERANCE);
        mem_free(y);
    }
    mem_free(x);
    rig_free(&g);
}

/* Llama 4: the weight goes onto the input, and through the nonlinearity. */
static void weight_on_input(void **state)
{
    (void)state;
    struct moe_rig g;
    rig_new(&g, FORMAT_BF16, 64, 48, 8);
    struct route r = {.method = ROUTE_LLAMA4, .n_experts = 8, .top_k = 1, .scaling = 1};
    struct moe_shape s = shape_of(&g, 1);
    struct moe_weights mw = weights_of(&g);
    s.weigh_input = route_weighs_input(r.method);
    assert_true(s.weigh_input);
    float *x = rig_rows(11, 64, 1.0f), *logits = rig_rows(11, 8, 2.0f), y[11 * 64] = {0};
    struct moe_op *op = op_new(&s, 11);
    moe_op_route(op, &r, logits, 11, NULL);
    moe_op_run(op, &mw, x, 11, y);
    check(&g, &mw, &s, moe_op_ids(op), moe_op_weights(op), x, 11, NULL, y, TOLERANCE);
    moe_op_free(op);
    mem_free(x);
    mem_free(logits);
    rig_free(&g);
}

/* Ids and weights that come from no router: outside, negative, repeated; weights of any size. */
static void foreign_choices(void **state)
{
    (void)state;
    struct moe_rig g;
    rig_new(&g, FORMAT_BF16, 64, 48, 8);
    const int32_t ids[6 * 4] = {0, 0, 0,         0, -1, 5, -32768, 7, 8,  1000, 32767, -5,
                                3, 2, INT32_MIN, 3, 7,  6, 5,      4, -1, -1,   -1,    2};
    const float w[6 * 4] = {0.25f, -0.5f, 1, 2,  9, 1, 9, -1, 9,   9, 9, 9,
                            100,   0,     9, -7, 0, 0, 0, 0,  NAN, 9, 9, 1.0f / 3};
    struct moe_shape s = shape_of(&g, 4);
    struct moe_weights mw = weights_of(&g);
    float *x = rig_rows(6, 64, 1.0f), *y = run_taken(&g, &mw, &s, ids, w, x, 6);
    check(&g, &mw, &s, ids, w, x, 6, NULL, y, TOLERANCE);
    for (int i = 0; i < 64; i++)
        assert_true(y[2 * 64 + i] == 0.0f); /* nobody's token */
    int32_t packed[24];
    for (int i = 0; i < 24; i++)
        packed[i] = route_pack(ids[i] == INT32_MIN ? -1 : ids[i], w[i]);
    struct moe_op *op = op_new(&s, 6);
    float again[6 * 64] = {0};
    moe_op_unpack(op, packed, 6);
    moe_op_run(op, &mw, x, 6, again);
    assert_memory_equal(y, again, sizeof again);
    moe_op_free(op);
    mem_free(x);
    mem_free(y);
    rig_free(&g);
}

/* Slices of the experts, added in order, give the whole within the sum's rounding. */
static void slices(void **state)
{
    (void)state;
    struct moe_rig g;
    rig_new(&g, FORMAT_BF16, 96, 64, 12);
    int32_t ids[15 * 4], n = 15, k = 4, first[] = {0, 5, 6, 12};
    float w[15 * 4], *x = rig_rows(15, 96, 1.0f), sum[15 * 96] = {0};
    choose(&g, k, n, 0, ids, w);
    struct moe_shape s = shape_of(&g, k);
    struct moe_weights mw = weights_of(&g);
    float *whole = run_taken(&g, &mw, &s, ids, w, x, n);
    for (int i = 0; i < 3; i++) {
        s.local_offset = first[i];
        s.n_local = first[i + 1] - first[i];
        mw.experts = g.matrix + first[i] * MOE_MATRICES;
        float *part = run_taken(&g, &mw, &s, ids, w, x, n);
        struct moe_weights all = weights_of(&g);
        check(&g, &all, &s, ids, w, x, n, NULL, part, TOLERANCE);
        for (int j = 0; j < 15 * 96; j++)
            sum[j] += part[j];
        mem_free(part);
    }
    for (int j = 0; j < 15 * 96; j++)
        assert_true(fabsf(sum[j] - whole[j]) <= 1e-6f * (1.0f + fabsf(whole[j])));
    mem_free(whole);
    mem_free(x);
    rig_free(&g);
}

static const route_method_t all_methods[] = {
    ROUTE_DEFAULT, ROUTE_RENORMALIZE,    ROUTE_DEEPSEEK_V3, ROUTE_RENORMALIZE_NAIVE, ROUTE_TOPK,
    ROUTE_SIGMOID, ROUTE_SIGMOID_RENORM, ROUTE_MINIMAX2,    ROUTE_TOPK_SIGMOID};

/* For every method: fused, routed by pack and by ids, and replayed give the same bits; replay ids
 * come out as they went in; the result meets float64. */
static void fused_routed_replayed(void **state)
{
    (void)state;
    struct moe_rig g;
    rig_new(&g, FORMAT_BF16, 64, 48, 16);
    enum { N = 13, K = 4 };
    struct moe_shape s = shape_of(&g, K);
    struct moe_weights mw = weights_of(&g);
    float *x = rig_rows(N, 64, 1.0f), *logits = rig_rows(N, 16, 2.0f);
    for (int i = 0; i < 32; i++)
        logits[i] = 1.0f; /* exact ties */
    for (size_t m = 0; m < sizeof all_methods / sizeof all_methods[0]; m++) {
        struct route r = {.method = all_methods[m], .n_experts = 16, .top_k = K, .scaling = 1};
        float y[4][N * 64] = {{0}}, w[N * K];
        int32_t packed[N * K], ids[N * K];
        int16_t replay[N * K], back[N * K];
        struct moe_op *op = op_new(&s, N);
        moe_op_route(op, &r, logits, N, NULL);
        moe_op_run(op, &mw, x, N, y[0]);
        moe_op_pack(op, packed, N);
        moe_op_replay(op, replay, N);
        memcpy(ids, moe_op_ids(op), sizeof ids);
        memcpy(w, moe_op_weights(op), sizeof w);
        check(&g, &mw, &s, ids, w, x, N, NULL, y[0], TOLERANCE);
        moe_op_unpack(op, packed, N);
        moe_op_run(op, &mw, x, N, y[1]);
        moe_op_take(op, ids, w, N);
        moe_op_run(op, &mw, x, N, y[2]);
        moe_op_route(op, &r, logits, N, replay);
        moe_op_run(op, &mw, x, N, y[3]);
        moe_op_replay(op, back, N);
        assert_memory_equal(replay, back, sizeof back);
        for (int i = 1; i < 4; i++)
            assert_memory_equal(y[0], y[i], sizeof y[0]);
        moe_op_free(op);
    }
    mem_free(x);
    mem_free(logits);
    rig_free(&g);
}

/* Bits of a token alone, among others, in another place, on another instruction set. */
static void invariance(void **state)
{
    (void)state;
    static const char *const isas[] = {"portable", "avx2", "avx512"};
    for (int f = 0; f < FORMAT_COUNT; f++) {
        struct moe_rig g;
        rig_new(&g, (format_t)f, 160, 80, 8);
        enum { N = 70, K = 2 };
        struct moe_shape s = shape_of(&g, K);
        struct moe_weights mw = weights_of(&g);
        int32_t ids[N * K];
        float w[N * K], *x = rig_rows(N, 160, 1.0f), *first = NULL;
        choose(&g, K, N, 1, ids, w);
        for (int i = 0; i < 3; i++) {
            ops = cpu_ops_find(isas[i]);
            if (ops == NULL) {
                print_message("%s: not on this machine or in this build\n", isas[i]);
                continue;
            }
            float *y = run_taken(&g, &mw, &s, ids, w, x, N);
            for (int t = 0; t < N; t += 23) {
                float *one =
                    run_taken(&g, &mw, &s, ids + t * K, w + t * K, x + t * 160, t % 2 ? 1 : 2);
                assert_memory_equal(one, y + t * 160, 160 * 4);
                mem_free(one);
            }
            if (first) assert_memory_equal(y, first, (size_t)N * 160 * 4);
            mem_free(first ? y : NULL);
            if (!first) first = y;
        }
        ops = cpu_ops_best();
        mem_free(first);
        mem_free(x);
        rig_free(&g);
    }
}

static void refusals(void **state)
{
    (void)state;
    const struct moe_shape ok = {
        .hidden = 64, .inner = 32, .n_experts = 8, .top_k = 2, .n_local = 8};
    struct moe_op *op;
#define BAD(field, tokens, ...)                                                          \
    do {                                                                                 \
        struct moe_shape s = ok;                                                         \
        struct err e = {0};                                                              \
        __VA_ARGS__;                                                                     \
        assert_int_equal(moe_op_new(&op, &s, ops, pool, tokens, &e), ERR_INPUT);         \
        if (strncmp(e.msg, field, strlen(field)) != 0) fail_msg("%s: %s", field, e.msg); \
    } while (0)
    BAD("hidden_size", 4, s.hidden = 63);
    BAD("intermediate_size", 4, s.inner = 33);
    BAD("intermediate_size", 4, s.inner = (1 << 20) + 2);
    BAD("num_experts", 4, s.n_experts = 0);
    BAD("top_k", 4, s.top_k = 65);
    BAD("top_k", 4, s.weigh_input = true);
    BAD("local_expert_offset", 4, s.local_offset = 1);
    BAD("local_expert_offset", 4, s.local_offset = -1);
    BAD("local_expert_offset", 4, s.n_local = 0);
    BAD("max_tokens", 0, (void)s);
    BAD("max_tokens", 1 << 30, (void)s);
#undef BAD
    for (long n = 1; n < 100; n++) { /* every allocation fails once */
        mem_fault_at(n);
        err_t rc = moe_op_new(&op, &ok, ops, pool, 4, NULL);
        mem_fault_at(0);
        if (rc == OK) {
            assert_true(n > 5);
            moe_op_free(op);
            return;
        }
        assert_int_equal(rc, ERR_NOMEM);
    }
    fail();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes),          cmocka_unit_test(oai),
        cmocka_unit_test(weight_on_input), cmocka_unit_test(foreign_choices),
        cmocka_unit_test(slices),          cmocka_unit_test(fused_routed_replayed),
        cmocka_unit_test(invariance),      cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
