/*
 * Case C69: the experts that are chosen are those of float64, whatever the step's size and the
 * instruction set.
 *
 * The model makes its choice visible: the router's input is exact (every embedding has mean square
 * 1, so the norm leaves it alone), expert e writes its weight to a dimension of its own, and the
 * head reads those dimensions.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/model.h"
#include "random_model.h"
#include "weight/update.h"
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { ROUNDS = 2 };
#else
enum { ROUNDS = 16 };
#endif
enum { HIDDEN = 2048, EXPERTS = 128, TOP = 8, VOCAB = 512, GROUPS = 239 };
/* Dimensions: experts' outputs, then the random part, then two that only fill up the mean square.
 */
enum { FIRST = EXPERTS, END = FIRST + 8 * GROUPS, FILL = END };

static uint16_t bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16); /* all values here are exact */
}

static float value(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Eight values of square sum 8, in random order and sign; the fill-up makes 136 of the missing
 * squares. */
static void embed_row(uint16_t *row, uint64_t seed)
{
    static const float eight[] = {1, 2, 3, 4, 5, 6, 14, 15};
    for (int g = 0; g < GROUPS; g++) {
        uint64_t r = mix(seed * 1000 + (uint64_t)g);
        int order[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        for (int i = 7; i > 0; i--, r /= 9) {
            int j = (int)(r % (uint64_t)(i + 1)), t = order[i];
            order[i] = order[j];
            order[j] = t;
        }
        for (int i = 0; i < 8; i++) {
            float v = eight[order[i]] / 8;
            row[FIRST + g * 8 + i] = bf16(r >> i & 1 ? v : -v);
        }
    }
    row[FILL] = bf16(10);
    row[FILL + 1] = bf16(6);
}

static void fill(uint16_t *w, const struct slot_spec *s, uint64_t round)
{
    int e = 0;
    if (s->n_dims == 1) {
        for (uint64_t i = 0; i < s->shape.cols; i++)
            w[i] = bf16(1);
    } else if (strstr(s->name, "embed_tokens")) {
        for (uint64_t i = 0; i < VOCAB; i++)
            embed_row(w + i * HIDDEN, round * VOCAB + i + 1);
    } else if (strstr(s->name, "lm_head")) {
        for (int i = 0; i < EXPERTS; i++)
            w[i * HIDDEN + i] = bf16(1);
    } else if (strstr(s->name, "mlp.gate.weight")) {
        random_bf16(w, EXPERTS * HIDDEN, HIDDEN, 7);
        for (int i = 0; i < EXPERTS; i++)
            for (int k = 0; k < HIDDEN; k++)
                if (k < FIRST || k >= END) w[i * HIDDEN + k] = 0;
    } else if (sscanf(s->name, "model.layers.0.mlp.experts.%d.", &e) == 1) {
        if (strstr(s->name, "down"))
            w[(size_t)e * s->shape.cols] = bf16(1);
        else
            w[FILL] = bf16(1);
    }
}

static void stage(struct store *store, const struct slot_spec *specs, size_t n, uint64_t round)
{
    struct err e = {0};
    struct update *u;
    assert_int_equal(update_begin(&u, store, &e), OK);
    for (size_t i = 0; i < n; i++) {
        uint16_t *w = mem_alloc(specs[i].shape.rows * specs[i].shape.cols * 2);
        fill(w, &specs[i], round);
        if (update_stage(u, specs[i].name, w, specs[i].shape.rows, specs[i].shape.cols, &e))
            fail_msg("%s", e.msg);
        mem_free(w);
    }
    assert_int_equal(update_prepare(u, &e), OK);
    update_commit(u);
    update_free(u);
}

/* The sets of the first n tokens, each a sequence of its own, `size` a step; experts in rising
 * order. */
static void chosen(struct model *m, int n_tokens, int size, uint8_t (*sets)[TOP],
                   float (*weights)[TOP])
{
    static int32_t ids[VOCAB], zero[VOCAB], seq[VOCAB], pages[VOCAB], tokens[VOCAB];
    static struct step_seq seqs[VOCAB];
    float *logits = mem_alloc((size_t)size * VOCAB * sizeof(float));
    for (int t = 0; t < n_tokens; t += size) {
        for (int i = 0; i < size; i++) {
            ids[i] = t + i;
            seq[i] = tokens[i] = pages[i] = i;
            seqs[i] = (struct step_seq){&pages[i], 1};
        }
        struct step st = {
            .n_tokens = size, .ids = ids, .pos = zero, .seq = seq, .n_seqs = size, .seqs = seqs};
        assert_int_equal(model_logits(m, &st, tokens, size, logits, NULL), OK);
        for (int i = 0; i < size; i++) {
            int n = 0;
            for (int e = 0; e < EXPERTS; e++) {
                float l = logits[(size_t)i * VOCAB + (size_t)e];
                if (l == 0) continue;
                assert_true(n < TOP);
                weights[t + i][n] = l;
                sets[t + i][n++] = (uint8_t)e;
            }
            assert_int_equal(n, TOP);
        }
    }
    mem_free(logits);
}

struct score {
    double logit;
    int expert;
};

static int by_logit(const void *a, const void *b)
{
    const struct score *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->expert - y->expert;
}

/* 1 if the set differs from float64's; adds how far the weights (of sum 1) are. */
static int differs(const double *router, uint64_t token, const uint8_t *set, const float *weights,
                   double *off)
{
    static uint16_t row[HIDDEN];
    struct score s[EXPERTS];
    double sum = 0, got = 0;
    embed_row(row, token);
    for (int e = 0; e < EXPERTS; e++) {
        double part[8] = {0};
        for (int k = FIRST; k < END; k += 8)
            for (int i = 0; i < 8; i++)
                part[i] += router[e * HIDDEN + k + i] * (double)value(row[k + i]);
        s[e] = (struct score){0, e};
        for (int i = 0; i < 8; i++)
            s[e].logit += part[i];
    }
    qsort(s, EXPERTS, sizeof *s, by_logit);
    for (int j = 0; j < TOP; j++) {
        sum += exp(s[j].logit - s[0].logit);
        got += (double)weights[j];
    }
    for (int j = 0; j < TOP; j++) {
        int at = 0;
        while (at < TOP && set[at] != s[j].expert)
            at++;
        if (at == TOP) return 1;
        *off += fabs((double)weights[at] / got - exp(s[j].logit - s[0].logit) / sum);
    }
    return 0;
}

static void test_router(void **state)
{
    (void)state;
    static const int sizes[] = {512, 64, 8, 1};
    static uint8_t want[VOCAB][TOP], sets[VOCAB][TOP];
    static float weights[VOCAB][TOP];
    static const char *const isas[] = {NULL, "portable", "avx2"};
    char json[700];
    struct config c;
    struct err e = {0};
    struct store *store;
    struct slot_spec *specs;
    size_t n;
    snprintf(json, sizeof json,
             "{\"model_type\":\"qwen3_moe\",\"vocab_size\":%d,\"hidden_size\":%d,\"moe_"
             "intermediate_size\":16,"
             "\"num_hidden_layers\":1,\"num_attention_heads\":1,\"num_key_value_heads\":1,\"head_"
             "dim\":16,"
             "\"num_experts\":%d,\"num_experts_per_tok\":%d,\"norm_topk_prob\":true,\"rms_norm_"
             "eps\":1e-12,"
             "\"rope_theta\":10000,\"max_position_embeddings\":64,\"tie_word_embeddings\":false}",
             VOCAB, HIDDEN, EXPERTS, TOP);
    if (config_parse(&c, json, strlen(json), &e)) fail_msg("%s", e.msg);
    assert_int_equal(model_specs(&c, &specs, &n, &e), OK);
    assert_int_equal(store_new(&store, specs, n, memory_host, &e), OK);
    struct pool *pool = pool_new(1);
    uint16_t *bits = mem_alloc((size_t)EXPERTS * HIDDEN * 2);
    double *router = mem_alloc((size_t)EXPERTS * HIDDEN * sizeof *router);
    random_bf16(bits, EXPERTS * HIDDEN, HIDDEN, 7);
    for (int i = 0; i < EXPERTS * HIDDEN; i++)
        router[i] = (double)value(bits[i]);
    int wrong = 0;
    double off = 0;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        stage(store, specs, n, round);
        for (int i = 0; i < 3; i++) {
            struct model *m;
            if (isas[i] && (round || (i == 2 && !__builtin_cpu_supports("avx2")))) continue;
            assert_int_equal(model_new(&m, &c, store, pool, VOCAB, KV_BF16, VOCAB, isas[i], &e),
                             OK);
            int count = i ? 64 : VOCAB;                         /* the portable kernels are slow */
            for (int k = i ? 1 : 0; k < (round ? 1 : 4); k++) { /* the other rounds: more tokens */
                chosen(m, count, sizes[k], sets, weights);
                if (i || k)
                    assert_memory_equal(sets, want, (size_t)count * TOP);
                else
                    memcpy(want, sets, sizeof sets);
            }
            model_free(m);
        }
        for (uint64_t t = 0; t < VOCAB; t++) /* after round 0's other sizes, which gave the same */
            wrong +=
                differs(router, round * VOCAB + t + 1, (round ? sets : want)[t], weights[t], &off);
    }
    print_message("%d of %d sets differ from float64; the weights by %.2g\n", wrong, ROUNDS * VOCAB,
                  off / (ROUNDS * VOCAB * TOP));
    assert_true(wrong <= ROUNDS * VOCAB / 5000);      /* 0.02 % */
    assert_true(off / (ROUNDS * VOCAB * TOP) < 3e-4); /* they are rounded to BF16 */
    mem_free(router);
    mem_free(bits);
    mem_free(specs);
    pool_free(pool);
    store_free(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_router)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
