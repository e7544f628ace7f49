/* The step loop on the tiny model: whatever happens to a request on its way, its bits are the same. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "engine_rig.h"
#include <stdlib.h>

#ifdef __SANITIZE_THREAD__
enum { N_BATCH = 16, LEN = 75, NEW = 24, N_PROMPTS = 8 }; /* ten times slower */
#elif defined(__SANITIZE_ADDRESS__)
enum { N_BATCH = 32, LEN = 75, NEW = 24, N_PROMPTS = 10 };
#else
enum { N_BATCH = 64, LEN = 75, NEW = 24, N_PROMPTS = 150 };
#endif

static void tell_case(struct engine *e, const struct engine_options *o, int32_t i)
{
    struct engine_stats s;
    engine_stat(e, &s);
    print_error("chunk_tokens %d, retract_every %d, n_kv_pages %d, prefix cache %s: request %d of "
                "%d, after %d steps, %d run, %d wait\n",
                o->chunk_tokens, o->retract_every, o->n_kv_pages, o->no_prefix_cache ? "off" : "on",
                i, N_BATCH, (int)s.steps, (int)s.running, (int)s.waiting);
}

/* All of them before the first step: whether pages run out depends on who runs beside whom. */
static void submit_at_once(struct engine *e, struct request *r[])
{
    struct err err = {0};
    assert_int_equal(engine_pause(e, PAUSE_IN_PLACE, &err), OK);
    for (int32_t i = 0; i < N_BATCH; i++)
        assert_int_equal(engine_submit(e, r[i], &err), OK);
    assert_int_equal(engine_continue(e, &err), OK);
}

static void batch(struct rig *g, struct request *want[], struct engine_options o, bool retracts,
                  bool hits)
{
    struct request *r[N_BATCH];
    struct err err = {0};
    int32_t retracted = 0, cached = 0;
    rig_open(g, DIR_FINAL, o);
    if (hits) request_unref(run_one(g->e, make(0, LEN, 1)));
    for (int32_t i = 0; i < N_BATCH; i++)
        r[i] = make(i / 8, LEN, NEW);
    if (o.n_kv_pages)
        submit_at_once(g->e, r);
    else
        for (int32_t i = 0; i < N_BATCH; i++)
            assert_int_equal(engine_submit(g->e, r[i], &err), OK);
    for (int32_t i = 0; i < N_BATCH; i++) {
        wait_done(r[i]);
        if (differ_at(want[i / 8], r[i]) >= 0 || r[i]->finish != FINISH_LENGTH)
            tell_case(g->e, &o, i);
        same(want[i / 8], r[i]);
        assert_int_equal(r[i]->finish, FINISH_LENGTH);
        retracted += r[i]->num_retractions;
        cached += r[i]->cached_tokens;
        if (o.chunk_tokens == 7) assert_true(r[i]->n_chunks > 1 || r[i]->cached_tokens > 0);
        request_unref(r[i]);
    }
    if (retracts && retracted == 0) tell_case(g->e, &o, N_BATCH);
    if (retracts) assert_true(retracted > 0);
    if (hits) assert_true(cached >= KV_PAGE);
    check_idle(g->e);
    rig_close(g);
}

static void test_same_bits(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct request *want[N_BATCH / 8];
    rig_open(&g, DIR_FINAL, (struct engine_options){.no_prefix_cache = true});
    for (int32_t i = 0; i < N_BATCH / 8; i++)
        want[i] = run_one(g.e, make(i, LEN, NEW));
    rig_close(&g);
    batch(&g, want, (struct engine_options){0}, false, true);
    batch(&g, want, (struct engine_options){.chunk_tokens = 7}, false, true);
    batch(&g, want, (struct engine_options){.chunk_tokens = 64, .no_prefix_cache = true}, false,
          false);
    batch(&g, want, (struct engine_options){.retract_every = 5}, true, true);
    batch(&g, want, (struct engine_options){.n_kv_pages = 13, .no_prefix_cache = true}, true,
          false);
    for (int32_t i = 0; i < N_BATCH / 8; i++)
        request_unref(want[i]);
}

/* Two engines at once: on a GPU their kernels run beside each other, and those of a step begin and
 * end when they otherwise would not. */
static void test_neighbours(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { N = N_BATCH / 8 };
    struct rig g[2];
    struct request *want[N], *r[2][N];
    struct err err = {0};
    memset(g, 0, sizeof g);
    rig_open(&g[0], DIR_FINAL, (struct engine_options){.no_prefix_cache = true});
    for (int32_t i = 0; i < N; i++)
        want[i] = run_one(g[0].e, make(i, 10 + 37 * i, NEW));
    rig_close(&g[0]);
    rig_open(&g[0], DIR_FINAL, (struct engine_options){.max_running = 3});
    rig_open(&g[1], DIR_FINAL, (struct engine_options){.chunk_tokens = 24});
    for (int32_t i = 0; i < N; i++)
        for (int k = 0; k < 2; k++) {
            r[k][i] = make(i, 10 + 37 * i, NEW);
            assert_int_equal(engine_submit(g[k].e, r[k][i], &err), OK);
        }
    for (int k = 0; k < 2; k++) {
        for (int32_t i = 0; i < N; i++) {
            wait_done(r[k][i]);
            same(want[i], r[k][i]);
            request_unref(r[k][i]);
        }
        check_idle(g[k].e);
        rig_close(&g[k]);
    }
    for (int32_t i = 0; i < N; i++)
        request_unref(want[i]);
}

static void test_fit_and_rid(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){.n_kv_pages = 4});
    struct request *r = make(1, 65, 1);
    assert_int_equal(engine_submit(g.e, r, &err), ERR_INPUT);
    request_unref(r);
    r = run_one(g.e, make(1, 10, 1000));
    assert_int_equal(r->n_output, 55);
    assert_int_equal(r->finish, FINISH_LENGTH);
    request_unref(r);
    r = run_one(g.e, make(1, 64, 0));
    assert_int_equal(r->n_output, 0);
    assert_int_equal(r->finish, FINISH_LENGTH);
    request_unref(r);
    check_idle(g.e);
    rig_close(&g);
}

static void test_abort(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct request *r[12];
    rig_open(&g, DIR_FINAL, (struct engine_options){.max_running = 4, .chunk_tokens = 5});
    for (int i = 0; i < 12; i++) {
        r[i] = make(i, 40, i % 2 ? 5 : 3000);
        snprintf(r[i]->rid, sizeof(r[i]->rid), "%s-%d", i % 2 ? "keep" : "kill", i);
        assert_int_equal(engine_submit(g.e, r[i], &err), OK);
    }
    struct request *twin = make(0, 40, 5);
    memcpy(twin->rid, r[0]->rid, sizeof(twin->rid));
    assert_int_equal(engine_submit(g.e, twin, &err), ERR_INPUT);
    request_unref(twin);
    engine_abort(g.e, "", false);
    engine_abort(g.e, "kill", false);
    for (int i = 0; i < 12; i++) {
        wait_done(r[i]);
        assert_int_equal(r[i]->finish, i % 2 ? FINISH_LENGTH : FINISH_ABORT);
        request_unref(r[i]);
    }
    check_idle(g.e);
    rig_close(&g);
}

static void test_prompt_logprobs(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){.chunk_tokens = 9});
    struct request *a = make(3, 50, 2), *b = make(3, 50, 2);
    a->logprob_start = 0;
    b->logprob_start = 33;
    run_one(g.e, a);
    run_one(g.e, b);
    assert_int_equal(b->cached_tokens, 32);
    assert_true(a->prompt_done && b->prompt_done);
    assert_memory_equal(a->prompt_logprobs + 34, b->prompt_logprobs + 1, 16 * 4);
    same(a, b);
    request_unref(a);
    request_unref(b);
    rig_close(&g);
}

static void test_update(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0}, h = {0};
    struct err err = {0};
    struct update_result res;
    struct update_options o = {.weight_version = "v1"};
    rig_open(&g, DIR_EARLY, (struct engine_options){0});
    rig_open(&h, DIR_FINAL, (struct engine_options){0});
    struct request *before = run_one(g.e, make(1, LEN, NEW));
    assert_int_not_equal(engine_update(g.e, "/nonexistent", &o, &res, &err), OK);
    struct request *again = run_one(g.e, make(1, LEN, NEW));
    same(before, again);
    assert_int_equal(engine_update(g.e, DIR_FINAL, &o, &res, &err), OK);
    struct request *after = run_one(g.e, make(1, LEN, NEW));
    struct request *fresh = run_one(h.e, make(1, LEN, NEW));
    same(after, fresh);
    assert_int_equal(after->cached_tokens, 0);
    assert_string_equal(after->weight_version, "v1");
    request_unref(before);
    request_unref(again);
    request_unref(after);
    request_unref(fresh);
    check_idle(g.e);
    rig_close(&g);
    rig_close(&h);
}

/* A prompt over several KV chunks has the same bits in one piece and in many. */
static void test_chunks(void **state)
{
    (void)state;
    if (no_model()) skip();
    static const int32_t chunks[] = {2048, 64, 7};
    struct request *want = NULL;
    for (int i = 0; i < 3; i++) {
        struct rig g = {0};
        rig_open(&g, DIR_FINAL,
                 (struct engine_options){.chunk_tokens = chunks[i], .max_step_tokens = 2048});
        struct request *r = run_one(g.e, make(5, 900, 8));
        assert_int_equal(r->n_chunks, (900 + chunks[i] - 1) / chunks[i]);
        if (want) same(want, r);
        struct request *hit = run_one(g.e, make(5, 900, 8));
        assert_true(hit->cached_tokens >= KV_PAGE);
        same(r, hit);
        request_unref(hit);
        if (want)
            request_unref(r);
        else
            want = r;
        check_idle(g.e);
        rig_close(&g);
    }
    request_unref(want);
}

/* What the fast kernels and the portable ones each promise holds for chunked and whole prompts alike. */
static void test_each_isa(void **state)
{
    (void)state;
    if (no_model() || test_on_gpu()) skip();
    static const char *const isas[] = {"portable", "avx2", "neon"};
    for (int i = 0; i < 3; i++) {
        if (cpu_ops_find(isas[i]) == NULL) continue;
        struct request *r[2];
        for (int k = 0; k < 2; k++) {
            struct rig g = {.isa = isas[i]};
            rig_open(&g, DIR_FINAL, (struct engine_options){.chunk_tokens = k ? 5 : 0});
            assert_string_equal(model_isa(g.model), isas[i]);
            r[k] = run_one(g.e, make(2, 20, 4));
            rig_close(&g);
        }
        same(r[0], r[1]);
        request_unref(r[0]);
        request_unref(r[1]);
    }
}

/* Random lengths around the chunk, random aborts: every page comes back. */
static void test_random_life(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { CHUNK = 24, CASES = 100, AT_ONCE = 20 };
    static const int32_t lens[] = {1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7};
    static const int32_t news[] = {0, 1, 5};
    struct rig g = {0};
    struct err err = {0};
    unsigned seed = 61;
    rig_open(&g, DIR_FINAL,
             (struct engine_options){
                 .chunk_tokens = CHUNK, .n_kv_pages = 24, .max_running = 8, .retract_every = 7});
    for (int done = 0; done < CASES; done += AT_ONCE) {
        struct request *r[AT_ONCE];
        bool aborted[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            r[i] = make(rand_r(&seed) % 3, lens[rand_r(&seed) % 5], news[rand_r(&seed) % 3]);
            assert_int_equal(engine_submit(g.e, r[i], &err), OK);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            aborted[i] = rand_r(&seed) % 3 == 0;
            if (!aborted[i]) continue;
            usleep((useconds_t)rand_r(&seed) % 3000);
            engine_abort_request(g.e, r[i]);
            if (engine_check(g.e, &err) != OK) fail_msg("%s", err.msg);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            wait_done(r[i]);
            if (r[i]->finish != FINISH_ABORT || !aborted[i]) {
                assert_int_equal(r[i]->finish, FINISH_LENGTH);
                assert_int_equal(r[i]->n_output, r[i]->max_new_tokens);
            }
            request_unref(r[i]);
        }
    }
    check_idle(g.e);
    rig_close(&g);
}

/* C61: at the borders of a chunk and of a page, a prompt in chunks has the bits of one in a piece; aborted after
 * any number of chunks it leaves nothing behind. */
static void test_border_lengths(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { CHUNK = 24, N = 9 };
    static const int32_t lens[N] = {1,     15,        16,        17,           CHUNK - 1,
                                    CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7};
    struct rig whole = {0}, cut = {0};
    struct err err = {0};
    rig_open(&whole, DIR_FINAL, (struct engine_options){.no_prefix_cache = true});
    rig_open(&cut, DIR_FINAL,
             (struct engine_options){.chunk_tokens = CHUNK, .no_prefix_cache = true});
    for (int i = 0; i < N; i++) {
        struct request *a = run_one(whole.e, make(i, lens[i], 5)),
                       *b = run_one(cut.e, make(i, lens[i], 5));
        assert_int_equal(b->n_chunks, (lens[i] + CHUNK - 1) / CHUNK);
        same(a, b);
        struct request *end = make(i, lens[i], 5); /* its first token ends it */
        end->stop_ids = mem_alloc(sizeof(int32_t));
        end->stop_ids[0] = a->output_ids[0];
        end->n_stop_ids = 1;
        run_one(cut.e, end);
        assert_int_equal(end->finish, FINISH_STOP_ID);
        assert_int_equal(end->n_output, 1);
        request_unref(a);
        request_unref(b);
        request_unref(end);
        check_idle(cut.e);
    }
    for (int32_t chunks = 0; chunks < 12; chunks++) {
        struct request *r = make(3, 12 * CHUNK, 5);
        assert_int_equal(engine_submit(cut.e, r, &err), OK);
        for (bool go = true; go; usleep(100)) {
            pthread_mutex_lock(&r->lock);
            go = r->n_chunks < chunks && !r->done;
            pthread_mutex_unlock(&r->lock);
        }
        engine_abort_request(cut.e, r);
        if (engine_check(cut.e, &err) != OK) fail_msg("%s", err.msg);
        wait_done(r);
        request_unref(r);
        check_idle(cut.e);
    }
    rig_close(&whole);
    rig_close(&cut);
}

/* C63: whole pages of equal tokens under the same key, and at least one token is computed. */
static void test_prefix_hits(void **state)
{
    (void)state;
    if (no_model()) skip();
    static const struct {
        /* tokens of the first prompt, equal ones, tokens of the second */
        int32_t first, same, second;
        const char *key[2];
        int32_t hit;
    } rows[] = {
        {40, 15, 40, {NULL, NULL}, 0},  {40, 16, 40, {NULL, NULL}, 16},
        {40, 17, 40, {NULL, NULL}, 16}, {40, 31, 40, {NULL, NULL}, 16},
        {40, 32, 40, {NULL, NULL}, 32}, {40, 40, 40, {NULL, NULL}, 32},
        {48, 48, 48, {NULL, NULL}, 32}, {49, 49, 49, {NULL, NULL}, 48},
        {40, 13, 13, {NULL, NULL}, 0},  {40, 16, 16, {NULL, NULL}, 0},
        {40, 17, 17, {NULL, NULL}, 16}, {17, 17, 40, {NULL, NULL}, 16},
        {40, 40, 40, {"a", "a"}, 32},   {40, 40, 40, {"a", "b"}, 0},
        {40, 40, 40, {"a", NULL}, 0},   {40, 40, 40, {NULL, "a"}, 0},
        {40, 40, 40, {"", NULL}, 0},    {40, 0, 40, {NULL, NULL}, 0},
    };
    struct rig g = {0}, cold = {0};
    struct err err = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){0});
    rig_open(&cold, DIR_FINAL, (struct engine_options){.no_prefix_cache = true});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct request *a = make(1, rows[i].first, 1), *b = make(2, rows[i].second, 3),
                       *c = make(2, rows[i].second, 3);
        memcpy(b->prompt, a->prompt, (size_t)rows[i].same * sizeof(int32_t));
        memcpy(c->prompt, b->prompt, (size_t)rows[i].second * sizeof(int32_t));
        if (rows[i].key[0]) a->extra_key = mem_dup(rows[i].key[0]);
        if (rows[i].key[1]) b->extra_key = mem_dup(rows[i].key[1]);
        assert_int_equal(engine_flush(g.e, 0, &err), OK);
        run_one(g.e, a);
        run_one(g.e, b);
        run_one(cold.e, c);
        if (b->cached_tokens != rows[i].hit)
            fail_msg("row %zu: %d cached, want %d", i, b->cached_tokens, rows[i].hit);
        same(b, c);
        request_unref(a);
        request_unref(b);
        request_unref(c);
    }
    unsigned seed = 63; /* many prompts over few tokens, so that most share a part */
    for (int i = 0; i < N_PROMPTS; i++) {
        int32_t n = 1 + rand_r(&seed) % 60;
        struct request *a = make(0, n, 1), *b = make(0, n, 1);
        for (int32_t k = 0; k < n; k++)
            a->prompt[k] = b->prompt[k] = 100 + (k < 40 ? k / 16 * (int)(rand_r(&seed) % 2) : k);
        same(run_one(g.e, a), run_one(cold.e, b));
        request_unref(a);
        request_unref(b);
    }
    check_idle(g.e);
    rig_close(&g);
    rig_close(&cold);
}

/* Samples of one prompt: told apart by their seeds alone, each the same as when it runs by itself. */
static void test_seeds(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { N = 4 };
    struct rig g = {0};
    struct err err = {0};
    struct request *r[N], *lone;
    bool differ = false;
    rig_open(&g, DIR_FINAL, (struct engine_options){0});
    for (int i = 0; i < N; i++) {
        r[i] = make(4, 40, 16);
        r[i]->sp.seed = 7 + (uint64_t)i;
        assert_int_equal(engine_submit(g.e, r[i], &err), OK);
    }
    for (int i = 0; i < N; i++) {
        wait_done(r[i]);
        differ = differ || memcmp(r[i]->output_ids, r[0]->output_ids, 16 * 4) != 0;
    }
    assert_true(differ);
    for (int i = 0; i < N; i++) {
        lone = make(4, 40, 16);
        lone->sp.seed = 7 + (uint64_t)i;
        same(run_one(g.e, lone), r[i]);
        request_unref(lone);
        request_unref(r[i]);
    }
    check_idle(g.e);
    rig_close(&g);
}

/* Refused, drained and aborting updates while requests run; retraction goes on in a drain. */
static void test_update_under_load(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { N = 8 };
    struct rig g = {0}, early = {0};
    struct err err = {0};
    struct update_result res;
    struct update_options o = {.weight_version = "v1"}, kill = {.in_flight = IN_FLIGHT_ABORT};
    struct request *r[N], *want[N];
    rig_open(&early, DIR_EARLY, (struct engine_options){0});
    for (int i = 0; i < N; i++)
        want[i] = run_one(early.e, make(i, 40, 150));
    rig_close(&early);
    rig_open(&g, DIR_EARLY, (struct engine_options){.retract_every = 3});
    for (int i = 0; i < N; i++) {
        r[i] = make(i, 40, 150);
        assert_int_equal(engine_submit(g.e, r[i], &err), OK);
    }
    wait_running(g.e, N - 1);
    assert_int_not_equal(engine_update(g.e, "/nonexistent", &o, &res, &err), OK);
    assert_int_equal(engine_update(g.e, DIR_FINAL, &o, &res, &err), OK);
    for (int i = 0; i < N; i++) {
        wait_done(r[i]);
        assert_string_equal(r[i]->weight_version, "v0");
        same(want[i], r[i]);
        request_unref(r[i]);
        request_unref(want[i]);
    }
    for (int i = 0; i < N; i++) {
        r[i] = make(i, 40, 3000);
        assert_int_equal(engine_submit(g.e, r[i], &err), OK);
    }
    assert_int_equal(engine_update(g.e, DIR_EARLY, &kill, &res, &err), OK);
    for (int i = 0; i < N; i++) {
        wait_done(r[i]);
        assert_int_equal(r[i]->finish, FINISH_ABORT);
        request_unref(r[i]);
    }
    check_idle(g.e);
    rig_close(&g);
}

static void test_max_queued(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct request *r[3];
    rig_open(&g, DIR_FINAL, (struct engine_options){.max_running = 1, .max_queued = 2});
    for (int i = 0; i < 3; i++) {
        r[i] = make(i, 20, 3000);
        assert_int_equal(engine_submit(g.e, r[i], &err), OK);
        if (i == 0) wait_running(g.e, 1);
    }
    struct request *late = make(9, 20, 1);
    assert_int_equal(engine_submit(g.e, late, &err), ERR_BUSY);
    request_unref(late);
    engine_abort(g.e, NULL, true);
    for (int i = 0; i < 3; i++) {
        wait_done(r[i]);
        request_unref(r[i]);
    }
    check_idle(g.e);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits),
                                       cmocka_unit_test(test_neighbours),
                                       cmocka_unit_test(test_fit_and_rid),
                                       cmocka_unit_test(test_abort),
                                       cmocka_unit_test(test_prompt_logprobs),
                                       cmocka_unit_test(test_update),
                                       cmocka_unit_test(test_chunks),
                                       cmocka_unit_test(test_each_isa),
                                       cmocka_unit_test(test_random_life),
                                       cmocka_unit_test(test_seeds),
                                       cmocka_unit_test(test_update_under_load),
                                       cmocka_unit_test(test_max_queued),
                                       cmocka_unit_test(test_border_lengths),
                                       cmocka_unit_test(test_prefix_hits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
