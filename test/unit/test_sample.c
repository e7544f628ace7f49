/* test_sample.c - filters, penalties and the distribution of draws. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "base/mem.h"
#include "model/sample.h"
#include <math.h>
#include <stdlib.h>
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

/* What the filters leave of W tokens, said again: by counting those before each in double. */
enum { W = 300 };
static int naive_kept(const float *x, const struct sample_params *p, bool *in, double *probability)
{
    double sum = 0.0, max = -1e30;
    int n = 0;
    for (int i = 0; i < W; i++)
        max = fmax(max, (double)x[i]);
    for (int i = 0; i < W; i++)
        sum += probability[i] = exp(((double)x[i] - max) / (double)p->temperature);
    for (int i = 0; i < W; i++) {
        int rank = 0;
        double before = 0.0;
        for (int j = 0; j < W; j++) {
            if (!(x[j] > x[i] || (x[j] == x[i] && j < i))) continue;
            rank++;
            before += probability[j];
        }
        in[i] =
            rank == 0 || ((p->top_k <= 0 || rank < p->top_k) && before / sum <= (double)p->top_p &&
                          probability[i] >= (double)p->min_p);
        n += in[i];
    }
    return n;
}

static void kept_sets(void **state)
{
    (void)state;
    static const struct sample_params rows[] = {
        {.temperature = 1.0f, .top_p = 0.9f},
        {.temperature = 0.6f, .top_p = 0.95f, .top_k = 20},
        {.temperature = 1.0f, .top_p = 1.0f, .top_k = 5},
        {.temperature = 1.3f, .top_p = 1.0f, .min_p = 0.1f},
        {.temperature = 1.0f, .top_p = 0.3f, .min_p = 0.01f},
        {.temperature = 1.0f, .top_p = 0.0001f},
        {.temperature = 2.0f, .top_p = 0.999f},
        {.temperature = 1.0f, .top_p = 1.0f, .top_k = 1},
        {.temperature = 0.0f, .top_p = 0.9f}};
    static const int32_t of[] = {0, 299, 17, 17};
    unsigned seed = 9;
    for (int round = 0; round < 20; round++)
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            struct sample_params p = rows[i];
            float x[W], y[W], scratch[W];
            int32_t ids[W];
            bool want[W];
            double probability[W], sum = 0.0, all = 0.0;
            struct sample_output out, plain;
            p.repetition_penalty = 1.0f;
            p.seed = (uint64_t)round;
            for (int k = 0; k < W; k++)
                x[k] = y[k] = (float)(rand_r(&seed) % 1000) / 100.0f - (float)(k % 3);
            struct sample_input in = {
                .target = -1, .params = &p, .position = 5, .want_kept = true, .n_of = 4, .of = of};
            int n = 1;
            struct sample_params one = p;
            if (p.temperature == 0.0f) one.temperature = 1.0f, one.top_k = 1;
            n = naive_kept(x, &one, want, probability);
            sample_row(&in, &out, x, W, scratch, ids);
            assert_int_equal(out.n_kept, n);
            for (int k = 0; k < n; k++) {
                assert_true(want[out.kept[k]]);
                want[out.kept[k]] = false; /* each once */
                sum += probability[out.kept[k]];
                if (k)
                    assert_true(x[out.kept[k - 1]] >=
                                x[out.kept[k]]); /* divided by the temperature */
            }
            assert_true(fabs((double)out.logprob - log(probability[out.id] / sum)) < 1e-5);
            if (n == 1) assert_true(out.kept[0] == out.id);
            for (int k = 0; k < W; k++)
                all += probability[k];
            for (int k = 0; k < 4; k++)
                assert_true(fabs((double)out.of[k] - log(probability[of[k]] / all)) < 1e-4);
            in.want_kept = false;
            in.n_of = 0;
            sample_row(&in, &plain, y, W, scratch, ids);
            assert_int_equal(plain.id, out.id); /* asking changes no draw */
            assert_true(!plain.kept && !plain.of && plain.n_kept == 0);
            mem_free(out.kept);
            mem_free(out.of);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scored_and_greedy), cmocka_unit_test(draws),
                                       cmocka_unit_test(keyed), cmocka_unit_test(not_finite),
                                       cmocka_unit_test(kept_sets)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
