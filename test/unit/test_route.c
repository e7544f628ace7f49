/*
 * test_route.c - every routing method against its definition in float64, exact ties, NaN, the
 * limits that are refused, and what a packed choice is.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include "model/route.h"
#include <math.h>
#include <stdio.h>

static uint64_t seed = 1;

static double uniform(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

/* The k largest, ties to the lower index: by counting who comes before. */
static void top(const double *key, int n, int k, int *ids)
{
    for (int i = 0; i < n; i++) {
        int before = 0;
        for (int j = 0; j < n; j++)
            before += key[j] > key[i] || (key[j] == key[i] && j < i);
        if (before < k) ids[before] = i;
    }
}

static void drop_groups(const struct route *r, double *key)
{
    double score[64];
    int kept[4], size = r->n_experts / r->n_group;
    for (int g = 0; g < r->n_group; g++) {
        int two[2];
        top(key + g * size, size, 2, two);
        score[g] = key[g * size + two[0]] + key[g * size + two[1]];
    }
    top(score, r->n_group, r->topk_group, kept);
    for (int i = 0; i < r->n_experts; i++) {
        bool in = false;
        for (int g = 0; g < r->topk_group; g++)
            in = in || kept[g] == i / size;
        if (!in) key[i] = -HUGE_VAL;
    }
}

/* moe-formats 1.6, in float64. */
static void define(const struct route *r, const float *x, int *ids, double *w)
{
    static double p[ROUTE_EXPERTS_MAX], s[ROUTE_EXPERTS_MAX], b[ROUTE_EXPERTS_MAX],
        raw[ROUTE_EXPERTS_MAX];
    double sum = 0, chosen = 0, chosen_s = 0, chosen_e = 0, max = -HUGE_VAL;
    int n = r->n_experts, k = r->top_k;
    for (int i = 0; i < n; i++)
        max = fmax(max, (double)x[i]);
    for (int i = 0; i < n; i++)
        sum += exp((double)x[i] - max);
    for (int i = 0; i < n; i++) {
        raw[i] = (double)x[i];
        p[i] = exp(raw[i] - max) / sum;
        s[i] = sigmoid(raw[i]);
        b[i] = s[i] + (r->bias ? (double)r->bias[i] : 0.0);
    }
    const double *key[ROUTE_COUNT] = {p, raw, b, raw, p, raw, s, b, s, raw};
    if (r->method == ROUTE_DEEPSEEK_V3 && r->n_group > 1) drop_groups(r, b);
    top(key[r->method], n, k, ids);
    for (int j = 0; j < k; j++) {
        chosen += p[ids[j]];
        chosen_s += s[ids[j]];
        chosen_e += exp(raw[ids[j]] - max);
    }
    for (int j = 0; j < k; j++) {
        int i = ids[j];
        double scaled = s[i] * (double)r->scaling / (chosen_s + 1e-20);
        const double out[ROUTE_COUNT] = {p[i],
                                         exp(raw[i] - max) / chosen_e,
                                         scaled,
                                         s[i],
                                         p[i] / chosen,
                                         raw[i],
                                         r->norm ? s[i] / fmax(chosen_s, 1e-20) : s[i],
                                         scaled,
                                         s[i],
                                         s[i]};
        w[j] = out[r->method];
    }
}

static bool is_bf16(float f)
{
    return bf16_to_f32(f32_to_bf16(f)) == f;
}

/* Nearest even from float64, in one rounding. */
static double to_bf16(double x)
{
    int e;
    double m = frexp(x, &e);
    return ldexp(nearbyint(ldexp(m, 8)), e - 8);
}

static int compare(const struct route *r, const float *x)
{
    float scratch[2 * ROUTE_EXPERTS_MAX], w[ROUTE_TOP_K_MAX];
    int32_t ids[ROUTE_TOP_K_MAX];
    int expect[ROUTE_TOP_K_MAX], off = 0;
    double weight[ROUTE_TOP_K_MAX];
    route_token(r, cpu_ops_best(), x, scratch, ids, w);
    define(r, x, expect, weight);
    for (int j = 0; j < r->top_k; j++) {
        assert_int_equal(ids[j], expect[j]);
        assert_true(is_bf16(w[j]));
        assert_true(fabs((double)w[j] - weight[j]) <= 0x1.01p-8 * fabs(weight[j]));
        off += (double)w[j] != to_bf16(weight[j]);
    }
    return off;
}

static const struct route routes[] = {
    {.method = ROUTE_DEFAULT, .n_experts = 128, .top_k = 8, .scaling = 1},
    {.method = ROUTE_DEFAULT, .n_experts = 512, .top_k = 32, .scaling = 1},
    {.method = ROUTE_RENORMALIZE, .n_experts = 32, .top_k = 4, .scaling = 1},
    {.method = ROUTE_RENORMALIZE, .n_experts = 128, .top_k = 1, .scaling = 1},
    {.method = ROUTE_DEEPSEEK_V3,
     .n_experts = 256,
     .top_k = 8,
     .n_group = 8,
     .topk_group = 4,
     .scaling = 2.5f},
    {.method = ROUTE_DEEPSEEK_V3,
     .n_experts = 160,
     .top_k = 8,
     .n_group = 1,
     .topk_group = 1,
     .scaling = 2.5f},
    {.method = ROUTE_DEEPSEEK_V3,
     .n_experts = 512,
     .top_k = 22,
     .n_group = 4,
     .topk_group = 2,
     .scaling = 5},
    {.method = ROUTE_LLAMA4, .n_experts = 16, .top_k = 1, .scaling = 1},
    {.method = ROUTE_RENORMALIZE_NAIVE, .n_experts = 128, .top_k = 8, .scaling = 1},
    {.method = ROUTE_TOPK, .n_experts = 64, .top_k = 6, .scaling = 1},
    {.method = ROUTE_SIGMOID_RENORM, .n_experts = 128, .top_k = 8, .scaling = 1, .norm = true},
    {.method = ROUTE_SIGMOID_RENORM, .n_experts = 128, .top_k = 8, .scaling = 1, .norm = false},
    {.method = ROUTE_MINIMAX2, .n_experts = 256, .top_k = 8, .scaling = 1.5f},
    {.method = ROUTE_SIGMOID, .n_experts = 128, .top_k = 3, .scaling = 1},
    {.method = ROUTE_TOPK_SIGMOID, .n_experts = 1024, .top_k = 8, .scaling = 1},
};
enum { N_ROUTES = sizeof routes / sizeof routes[0] };

/* Distinct by more than f32 loses in a sigmoid, in random order. */
static void logits(float *x, int n)
{
    for (int j = 0; j < n; j++)
        x[j] = (float)(j - n / 2) * 8.0f / (float)n;
    for (int j = n - 1; j > 0; j--) {
        int i = (int)(uniform() * (j + 1));
        float t = x[j];
        x[j] = x[i];
        x[i] = t;
    }
}

static void methods(void **state)
{
    (void)state;
    float x[ROUTE_EXPERTS_MAX], bias[ROUTE_EXPERTS_MAX];
    for (int i = 0; i < N_ROUTES; i++) {
        struct route r = routes[i];
        assert_int_equal(route_check(&r, NULL), OK);
        int off = 0;
        for (int t = 0; t < 50; t++) {
            logits(x, r.n_experts);
            for (int j = 0; j < r.n_experts; j++)
                bias[j] = (float)(uniform() * 0.5);
            if (r.method == ROUTE_DEEPSEEK_V3 || r.method == ROUTE_MINIMAX2) r.bias = bias;
            off += compare(&r, x);
        }
        /* f32 arithmetic before the one rounding moves few of them to a neighbour. */
        assert_true(off <= 50 * r.top_k / 50 + 1);
    }
}

/* Equal logits: the lowest indices win, whatever the method; BF16 logits tie often. */
static void ties(void **state)
{
    (void)state;
    float x[ROUTE_EXPERTS_MAX], scratch[2 * ROUTE_EXPERTS_MAX], w[ROUTE_TOP_K_MAX];
    int32_t ids[ROUTE_TOP_K_MAX];
    for (int i = 0; i < N_ROUTES; i++) {
        struct route r = routes[i];
        for (int j = 0; j < r.n_experts; j++)
            x[j] = 0.5f;
        route_token(&r, cpu_ops_best(), x, scratch, ids, w);
        for (int j = 0; j < r.top_k; j++) {
            assert_int_equal(ids[j], j);
            assert_true(w[j] == w[0]);
        }
        for (int t = 0; t < 20; t++) {
            for (int j = 0; j < r.n_experts; j++)
                x[j] = (float)floor(uniform() * 8.0) - 4.0f;
            compare(&r, x);
        }
    }
}

/* sigmoid saturates: topk-sigmoid still orders, sigmoid goes by index. */
static void saturation(void **state)
{
    (void)state;
    float x[8] = {20, 30, 40, 50, 60, 70, 80, 85}, scratch[16], w[2];
    int32_t ids[2];
    struct route r = {.method = ROUTE_TOPK_SIGMOID, .n_experts = 8, .top_k = 2, .scaling = 1};
    route_token(&r, cpu_ops_best(), x, scratch, ids, w);
    assert_int_equal(ids[0], 7);
    assert_int_equal(ids[1], 6);
    assert_true(w[0] == 1.0f && w[1] == 1.0f);
    r.method = ROUTE_SIGMOID;
    route_token(&r, cpu_ops_best(), x, scratch, ids, w);
    assert_int_equal(ids[0], 0);
    assert_int_equal(ids[1], 1);
}

static void not_numbers(void **state)
{
    (void)state;
    float scratch[16], w[4], x[8] = {1, NAN, 3, NAN, 2, NAN, NAN, NAN};
    int32_t ids[4];
    struct route r = {.method = ROUTE_TOPK, .n_experts = 8, .top_k = 4, .scaling = 1};
    route_token(&r, cpu_ops_best(), x, scratch, ids, w);
    const int32_t expect[4] = {2, 4, 0, 1};
    assert_memory_equal(ids, expect, sizeof ids);
    assert_true(w[0] == 3.0f && isnan(w[3]));
    for (int m = 0; m < ROUTE_COUNT; m++) { /* no method repeats an expert or leaves the range */
        r.method = (route_method_t)m;
        for (int j = 0; j < 8; j++)
            x[j] = NAN;
        route_token(&r, cpu_ops_best(), x, scratch, ids, w);
        for (int j = 0; j < 4; j++) {
            assert_int_equal(ids[j], j);
            assert_true(isnan(w[j]));
        }
    }
}

static void refused(const struct route *r, const char *field)
{
    struct err e = {0};
    assert_int_equal(route_check(r, &e), ERR_INPUT);
    if (strncmp(e.msg, field, strlen(field)) != 0) fail_msg("%s: %s", field, e.msg);
}

static void limits(void **state)
{
    (void)state;
    float bias[256] = {0};
    const struct route ok = routes[4], plain = routes[0];
#define BAD(base, field, ...)  \
    do {                       \
        struct route r = base; \
        __VA_ARGS__;           \
        refused(&r, field);    \
    } while (0)
    BAD(plain, "num_experts", r.n_experts = 126);
    BAD(plain, "num_experts", r.n_experts = 1028);
    BAD(plain, "num_experts", r.n_experts = 0);
    BAD(plain, "top_k", r.n_experts = 8); /* E > K */
    BAD(plain, "top_k", r.top_k = 0);
    BAD(plain, "top_k", r.top_k = 33);
    BAD(plain, "n_group", r.n_group = 2, r.topk_group = 1);
    BAD(plain, "routed_scaling_factor", r.scaling = 2.5f);
    BAD(plain, "routing_bias", r.bias = bias);
    BAD(plain, "routing_method", r.method = ROUTE_COUNT);
    BAD(ok, "routed_scaling_factor", r.scaling = NAN);
    BAD(ok, "n_group", r.n_group = 7);
    BAD(ok, "topk_group", r.topk_group = 5);
    BAD(ok, "topk_group", r.topk_group = 0);
    BAD(ok, "topk_group", r.n_group = 2, r.topk_group = 3);
    BAD(ok, "topk_group", r.n_group = 1, r.topk_group = 2);
    BAD(ok, "top_k", r.top_k = 9);
    BAD(ok, "top_k", r.n_experts = 512, r.top_k = 23);
    BAD(ok, "top_k", r.n_experts = 32, r.topk_group = 2); /* 8 of 8 */
    BAD(routes[7], "top_k", r.top_k = 2);
#undef BAD
}

/* Ids given from outside get the method's weights; those of nobody get 0. */
static void weigh_given(void **state)
{
    (void)state;
    float x[ROUTE_EXPERTS_MAX], scratch[2 * ROUTE_EXPERTS_MAX], w[ROUTE_TOP_K_MAX],
        again[ROUTE_TOP_K_MAX];
    int32_t ids[ROUTE_TOP_K_MAX];
    for (int i = 0; i < N_ROUTES; i++) {
        struct route r = routes[i];
        logits(x, r.n_experts);
        route_token(&r, cpu_ops_best(), x, scratch, ids, w);
        route_weigh(&r, cpu_ops_best(), x, scratch, ids, again);
        assert_memory_equal(w, again, sizeof(float) * (size_t)r.top_k);
    }
    struct route r = {.method = ROUTE_RENORMALIZE, .n_experts = 8, .top_k = 4, .scaling = 1};
    const int32_t given[4] = {-1, 3, 8, 3};
    for (int j = 0; j < 8; j++)
        x[j] = (float)j;
    route_weigh(&r, cpu_ops_best(), x, scratch, given, w);
    assert_true(w[0] == 0 && w[1] == 0.5f && w[2] == 0 && w[3] == 0.5f);
}

static void packed(void **state)
{
    (void)state;
    const float weights[] = {0.0f,     -0.0f, 1.0f,     -1.0f,    0.3333f,
                             -2.5e-7f, 3e38f, INFINITY, -INFINITY};
    const int32_t ids[] = {0, 1, 127, 1023, 32767, -1, -32768};
    for (size_t i = 0; i < sizeof ids / 4; i++)
        for (size_t j = 0; j < sizeof weights / 4; j++) {
            int32_t p = route_pack(ids[i], weights[j]);
            float w = bf16_to_f32(f32_to_bf16(weights[j])), got = route_packed_weight(p);
            assert_int_equal(route_packed_id(p), ids[i]);
            assert_memory_equal(&got, &w, 4);
        }
    /* A negative weight does not reach into the id. */
    assert_int_equal((uint32_t)route_pack(5, -1.0f), 0x0005bf80u);
    assert_true(isnan(route_packed_weight(route_pack(5, NAN))));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(methods),     cmocka_unit_test(ties),   cmocka_unit_test(saturation),
        cmocka_unit_test(not_numbers), cmocka_unit_test(limits), cmocka_unit_test(weigh_given),
        cmocka_unit_test(packed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
