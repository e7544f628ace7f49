/* test_sample.c - filters, penalties and the distribution of draws. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "model/sample.h"
#include <math.h>
#include <string.h>

enum { V = 8 };
static const float base[V] = {1.0f, 2.0f, 0.0f, 2.0f, -1.0f, 0.5f, 1.5f, -3.0f};

static struct sample_output go(const struct sample_params *p, uint64_t position, int32_t target)
{
    static const int32_t history[] = {1, 1, 4};
    static const int32_t barred[] = {6};
    float x[V], scratch[V];
    int32_t ids[V];
    struct sample_output out;
    struct sample_input in = {.target = target,
                              .n_top = 3,
                              .params = p,
                              .output_ids = history,
                              .n_output = 3,
                              .position = position,
                              .barred = barred,
                              .n_barred = p && p->n_bias ? 1 : 0};
    memcpy(x, base, sizeof x);
    sample_row(&in, &out, x, V, scratch, ids);
    return out;
}

static double log_softmax(const double *x, int id)
{
    double sum = 0.0;
    for (int i = 0; i < V; i++)
        sum += exp(x[i]);
    return x[id] - log(sum);
}

static void scored_and_greedy(void **state)
{
    (void)state;
    double x[V];
    for (int i = 0; i < V; i++)
        x[i] = (double)base[i];
    struct sample_output o = go(NULL, 0, 5);
    assert_true(o.finite && o.id == 5 && fabs((double)o.logprob - log_softmax(x, 5)) < 1e-6);
    assert_true(o.n_top == 3 && o.top_ids[0] == 1 && o.top_ids[1] == 3 && o.top_ids[2] == 6);
    struct sample_params p = {.top_p = 1.0f, .repetition_penalty = 1.0f};
    assert_int_equal(go(&p, 0, -1).id, 1); /* the lower of two equals */
    p.frequency_penalty = 0.5f;
    p.presence_penalty = 0.25f;
    p.repetition_penalty = 2.0f;
    static const int32_t bias_id[] = {2};
    static const float bias[] = {4.0f};
    p.n_bias = 1;
    p.bias_ids = bias_id;
    p.bias = bias;
    x[1] = (2.0 - 1.0 - 0.25) / 2.0;
    x[4] = (-1.0 - 0.5 - 0.25) * 2.0;
    x[2] += 4.0;
    x[6] = -INFINITY;
    o = go(&p, 0, -1);
    assert_int_equal(o.id, 2);
    assert_true(fabs((double)o.logprob - log_softmax(x, 2)) < 1e-6);
}

/* Counts of draws against the probabilities of the kept tokens. */
static void distribution(const struct sample_params *p, unsigned kept)
{
    enum { N = 20000 };
    double want[V], sum = 0.0, chi = 0.0;
    int count[V] = {0}, cells = 0;
    for (int i = 0; i < V; i++)
        sum += want[i] = kept >> i & 1 ? exp((double)base[i] / (double)p->temperature) : 0.0;
    for (uint64_t i = 0; i < N; i++) {
        int32_t id = go(p, i, -1).id;
        assert_true(kept >> id & 1);
        count[id]++;
    }
    for (int i = 0; i < V; i++)
        if (want[i] > 0.0) {
            double e = N * want[i] / sum;
            chi += (count[i] - e) * (count[i] - e) / e;
            cells++;
        }
    assert_true(chi < 10.0 + 3.0 * cells);
}

static void draws(void **state)
{
    (void)state;
    struct sample_params p = {
        .temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f, .seed = 7};
    distribution(&p, 0xff);
    p.temperature = 0.7f;
    distribution(&p, 0xff);
    p.top_k = 3;
    distribution(&p, 1u << 1 | 1u << 3 | 1u << 6);
    p.top_k = 0;
    p.min_p = 0.5f; /* logits within 0.7 ln 2 = 0.485 of the largest */
    distribution(&p, 1u << 1 | 1u << 3);
    p.min_p = 0.0f;
    p.top_p = 0.5f; /* p(1) < 0.5 <= p(1) + p(3) */
    distribution(&p, 1u << 1 | 1u << 3);
}

static void keyed(void **state)
{
    (void)state;
    struct sample_params p = {.temperature = 5.0f, .top_p = 1.0f, .repetition_penalty = 1.0f},
                         q = p;
    int differ = 0;
    q.sample_index = 1;
    for (uint64_t i = 0; i < 64; i++) {
        assert_int_equal(go(&p, i, -1).id, go(&p, i, -1).id);
        differ += go(&p, i, -1).id != go(&q, i, -1).id;
    }
    assert_true(differ > 16);
}

static void not_finite(void **state)
{
    (void)state;
    float x[V] = {0.0f, NAN}, scratch[V];
    int32_t ids[V];
    struct sample_output out;
    struct sample_input in = {.target = 1};
    sample_row(&in, &out, x, V, scratch, ids);
    assert_true(!out.finite && out.id == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scored_and_greedy), cmocka_unit_test(draws),
                                       cmocka_unit_test(keyed), cmocka_unit_test(not_finite)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
