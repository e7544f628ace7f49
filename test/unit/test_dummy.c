/* dummy.c: random weights are the same for any number of threads, and a model of any format computes with them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/model.h"
#include "weight/dummy.h"
#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { TOKENS = 8, VOCAB = 320 };

static _Atomic int asked, ended;

static void turn(void *ctx, bool more)
{
    (void)ctx;
    atomic_fetch_add(more ? &asked : &ended, 1);
}

static struct store *make(struct config *c, format_t f, int threads, uint64_t seed)
{
    static const char json[] =
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":320,\"hidden_size\":256,\"intermediate_"
        "size\":512,"
        "\"moe_intermediate_size\":128,\"num_hidden_layers\":3,\"num_attention_heads\":4,"
        "\"num_key_value_heads\":2,\"head_dim\":64,\"num_experts\":8,\"num_experts_per_tok\":2,"
        "\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,\"rope_theta\":10000,"
        "\"max_position_embeddings\":64,\"tie_word_embeddings\":true}";
    struct err e = {0};
    struct slot_spec *specs;
    struct store *s;
    struct update *u;
    size_t n;
    assert_int_equal(config_parse(c, json, strlen(json), &e), OK);
    assert_int_equal(model_specs(c, &specs, &n, &e), OK);
    for (size_t i = 0; i < n; i++)
        if (specs[i].linear) specs[i].shape.format = f;
    assert_int_equal(store_new(&s, specs, n, memory_host, &e), OK);
    assert_in_range(store_bytes(s), dummy_bytes(specs, n), dummy_bytes(specs, n) * 2);
    assert_int_equal(update_begin(&u, s, &e), OK);
    struct update_progress progress = {.turn = turn};
    asked = ended = 0;
    assert_int_equal(dummy_stage(u, seed, threads, &progress, &e), OK);
    assert_true(asked > 0); /* every thread yields to steps (engine/pace.h) */
    assert_int_equal(ended, threads);
    if (update_prepare(u, &e) != OK) fail_msg("%s: %s", formats[f].name, e.msg);
    update_commit(u);
    update_free(u);
    mem_free(specs);
    return s;
}

static void computes(const struct config *c, struct store *s)
{
    struct err e = {0};
    struct model *m;
    struct pool *pool = pool_new(2);
    static float logits[TOKENS * VOCAB];
    int32_t ids[TOKENS], pos[TOKENS], seq[TOKENS] = {0}, rows[TOKENS], page = 0;
    struct step_seq one = {&page, 1};
    for (int i = 0; i < TOKENS; i++)
        ids[i] = i * 37 % VOCAB, pos[i] = rows[i] = i;
    struct step st = {
        .n_tokens = TOKENS, .ids = ids, .pos = pos, .seq = seq, .n_seqs = 1, .seqs = &one};
    assert_int_equal(model_new(&m, c, s, pool, 2, KV_BF16, 16, NULL, &e), OK);
    assert_int_equal(model_logits(m, &st, rows, TOKENS, logits, &e), OK);
    double sum = 0, square = 0;
    for (int i = 0; i < TOKENS * VOCAB; i++) {
        assert_true(isfinite(logits[i]));
        sum += (double)logits[i];
        square += (double)logits[i] * (double)logits[i];
    }
    double size = sqrt(square / (TOKENS * VOCAB));
    assert_true(size > 0.05 && size < 20.0); /* neither vanished nor exploded */
    model_free(m);
    pool_free(pool);
}

static void every_format(void **state)
{
    (void)state;
    for (format_t f = 0; f < FORMAT_COUNT; f++) {
        struct config c;
        struct store *one = make(&c, f, 1, 7), *four = make(&c, f, 4, 7),
                     *other = make(&c, f, 4, 8);
        assert_true(store_hash(one) == store_hash(four));
        assert_true(store_hash(one) != store_hash(other));
        computes(&c, one);
        store_free(one);
        store_free(four);
        store_free(other);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_format)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
