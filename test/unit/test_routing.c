/* Experts of tokens: kept by page, handed out with the answer, and given with a prompt (case C71). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/routing.h"
#include "engine_rig.h"

enum { LEN = 75, NEW = 24, N = 12 };

/* Ids of one byte and of two, pages in any order, ranges over page borders. */
static void test_rows(void **state)
{
    (void)state;
    static const int32_t experts[] = {16, 256, 257, 1024}, pages[] = {7, 0, 3};
    for (int i = 0; i < 4; i++) {
        struct config c = {.n_layers = 3, .top_k = 2, .n_experts = experts[i]};
        struct routing *t = NULL;
        struct err e = {0};
        size_t elem = routing_id_bytes(&c), row = routing_row_bytes(&c);
        assert_int_equal(row, 6 * (experts[i] <= 256 ? 1 : 2));
        assert_int_equal(routing_new(&t, &c, 8, &e), OK);
        for (int32_t p = 0; p < 3 * KV_PAGE; p++) {
            int16_t ids[6];
            for (int k = 0; k < 6; k++)
                ids[k] = (int16_t)((p * 131 + k * 17) % experts[i]);
            routing_put(t, pages, p, ids);
        }
        static const int32_t ranges[][2] = {{0, 48}, {0, 1}, {15, 17}, {16, 32}, {47, 48}, {3, 40}};
        for (int j = 0; j < 6; j++) {
            uint8_t *rows = routing_rows(t, pages, ranges[j][0], ranges[j][1]);
            for (int32_t p = ranges[j][0]; p < ranges[j][1]; p++)
                for (int k = 0; k < 6; k++) {
                    const uint8_t *at = rows + (size_t)(p - ranges[j][0]) * row + (size_t)k * elem;
                    int32_t id = at[0] | (elem == 2 ? at[1] << 8 : 0);
                    assert_int_equal(id, (p * 131 + k * 17) % experts[i]);
                }
            mem_free(rows);
        }
        routing_free(t);
    }
}

static struct request *asking(int32_t salt, int32_t n, int32_t max_new, int32_t start)
{
    struct request *r = make(salt, n, max_new);
    r->want_experts = true;
    r->experts_start = start;
    return r;
}

static size_t row_bytes(const struct rig *g)
{
    return routing_row_bytes(&g->c);
}

/* As they were when each prompt ran alone, without a cache, in one piece. */
static void batch(struct request *want[], struct engine_options o, bool retracts, bool hits)
{
    struct rig g = {0};
    struct request *r[N];
    struct err err = {0};
    int32_t retracted = 0, cached = 0;
    o.keep_experts = true;
    rig_open(&g, DIR_FINAL, o);
    if (hits) request_unref(run_one(g.e, make(0, LEN, 1)));
    for (int i = 0; i < N; i++) {
        r[i] = asking(i / 3, LEN, NEW, i % 3 * 30);
        r[i]->want_experts = i % 4 != 3;
        assert_int_equal(engine_submit(g.e, r[i], &err), OK);
    }
    for (int i = 0; i < N; i++) {
        wait_done(r[i]);
        same(want[i / 3], r[i]);
        assert_int_equal(r[i]->has_experts, i % 4 != 3);
        retracted += r[i]->num_retractions;
        cached += r[i]->cached_tokens;
        if (r[i]->has_experts) {
            int32_t n = LEN + NEW - 1 - i % 3 * 30;
            assert_int_equal(r[i]->n_expert_rows, n);
            assert_memory_equal(r[i]->experts,
                                want[i / 3]->experts + (size_t)(i % 3) * 30 * row_bytes(&g),
                                (size_t)n * row_bytes(&g));
        } else {
            assert_null(r[i]->experts);
        }
        request_unref(r[i]);
    }
    assert_true(!retracts || retracted > 0);
    assert_true(!hits || cached >= KV_PAGE);
    check_idle(g.e);
    rig_close(&g);
}

static void test_same_experts(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct request *want[N / 3];
    rig_open(&g, DIR_FINAL, (struct engine_options){.no_prefix_cache = true, .keep_experts = true});
    for (int i = 0; i < N / 3; i++)
        want[i] = run_one(g.e, asking(i, LEN, NEW, 0));
    assert_memory_not_equal(want[0]->experts, want[1]->experts, (size_t)LEN * row_bytes(&g));
    rig_close(&g);
    batch(want, (struct engine_options){0}, false, true);
    batch(want, (struct engine_options){.chunk_tokens = 7}, false, true);
    batch(want, (struct engine_options){.chunk_tokens = 64, .no_prefix_cache = true}, false, false);
    batch(want, (struct engine_options){.retract_every = 5}, true, true);
    batch(want, (struct engine_options){.n_kv_pages = 13, .no_prefix_cache = true}, true, false);
    for (int i = 0; i < N / 3; i++)
        request_unref(want[i]);
}

/* Nothing was computed of a request that ends in the queue; a score has a row less than tokens. */
static void test_ends(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){.max_running = 1, .keep_experts = true});
    struct request *first = asking(1, 20, 3000, 0), *queued = asking(2, 20, 5, 0);
    assert_int_equal(engine_submit(g.e, first, &err), OK);
    wait_running(g.e, 1);
    assert_int_equal(engine_submit(g.e, queued, &err), OK);
    engine_abort(g.e, NULL, true);
    wait_done(first);
    wait_done(queued);
    assert_false(queued->has_experts);
    if (first->n_output) assert_int_equal(first->n_expert_rows, 20 + first->n_output - 1);
    request_unref(first);
    request_unref(queued);
    static const int32_t rows[][4] = {
        {20, 0, 0, 19}, {20, 0, 20, 0}, {1, 0, 0, 0}, {1, 3, 0, 3}, {20, 4, 20, 3}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct request *r = run_one(g.e, asking(3, rows[i][0], rows[i][1], rows[i][2]));
        assert_true(r->has_experts);
        assert_int_equal(r->n_expert_rows, rows[i][3]);
        request_unref(r);
    }
    struct request *bad = asking(3, 20, 1, 21);
    assert_int_equal(engine_submit(g.e, bad, &err), ERR_INPUT);
    request_unref(bad);
    check_idle(g.e);
    rig_close(&g);
}

/* Experts given with a prompt: its own change nothing, others do, and neither is left in the cache. */
static void test_forced(void **state)
{
    (void)state;
    if (no_model() || test_on_gpu()) skip();
    struct rig g = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){.keep_experts = true, .chunk_tokens = 24});
    size_t row = row_bytes(&g);
    struct request *free_run = asking(5, LEN, NEW, 0);
    free_run->logprob_start = 0;
    run_one(g.e, free_run);
    for (int change = 0; change < 2; change++) {
        for (int32_t n = LEN; n > 0; n -= 37) {
            struct request *r = asking(5, LEN, NEW, 0);
            r->logprob_start = 0;
            r->n_forced = n;
            r->forced = mem_alloc((size_t)n * row * sizeof(int16_t));
            for (size_t i = 0; i < (size_t)n * row; i++)
                r->forced[i] = (int16_t)((free_run->experts[i] + change) % g.c.n_experts);
            run_one(g.e, r);
            assert_int_equal(r->cached_tokens, 0);
            for (size_t i = 0; i < (size_t)n * row; i++)
                assert_int_equal(r->experts[i], r->forced[i]);
            bool equal =
                memcmp(r->prompt_logprobs + 1, free_run->prompt_logprobs + 1, (LEN - 1) * 4) == 0;
            assert_int_equal(equal, !change);
            if (!change) same(free_run, r);
            request_unref(r);
        }
        struct request *again = run_one(g.e, asking(5, LEN, NEW, 0));
        same(free_run, again);
        assert_true(again->cached_tokens >= KV_PAGE);
        assert_memory_equal(again->experts, free_run->experts, (LEN + NEW - 1) * row);
        request_unref(again);
    }
    request_unref(free_run);
    check_idle(g.e);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows),
                                       cmocka_unit_test(test_same_experts),
                                       cmocka_unit_test(test_ends), cmocka_unit_test(test_forced)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
