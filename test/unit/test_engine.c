/* The step loop on the tiny model: whatever happens to a request on its way, its bits are the same. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "weight/update.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DIR_FINAL "models/tiny-moe"
#define DIR_EARLY "models/tiny-moe-early"

struct rig {
    struct config c;
    struct store *store;
    struct pool *pool;
    struct model *model;
    struct engine *e;
    const char *isa; /* NULL: best */
};

static void rig_open(struct rig *g, const char *dir, struct engine_options o)
{
    struct err e = {0};
    struct slot_spec *specs;
    size_t n;
    struct update *u;
    struct update_progress pr = {0};
    assert_int_equal(config_load(&g->c, dir, &e), OK);
    assert_int_equal(model_specs(&g->c, &specs, &n, &e), OK);
    assert_int_equal(store_new(&g->store, specs, n, memory_host, &e), OK);
    mem_free(specs);
    assert_int_equal(update_begin(&u, g->store, &e), OK);
    assert_int_equal(update_stage_dir(u, dir, 2, &pr, &e), OK);
    assert_int_equal(update_prepare(u, &e), OK);
    update_commit(u);
    update_free(u);
    g->pool = pool_new(2);
    if (!o.n_kv_pages) o.n_kv_pages = 512;
    if (!o.max_running) o.max_running = 64;
    if (!o.max_step_tokens) o.max_step_tokens = 256;
    assert_int_equal(model_new(&g->model, &g->c, g->store, g->pool, o.n_kv_pages,
                               KV_BF16, o.max_step_tokens, g->isa, &e), OK);
    o.config = &g->c;
    o.store = g->store;
    o.model = g->model;
    o.context_len = 4096;
    o.weight_version = "v0";
    assert_int_equal(engine_new(&g->e, &o, &e), OK);
}

static void rig_close(struct rig *g)
{
    engine_stop(g->e, 0);
    model_free(g->model);
    pool_free(g->pool);
    store_free(g->store);
}

static struct request *make(int32_t salt, int32_t n, int32_t max_new)
{
    static _Atomic int serial;
    struct request *r = request_new();
    snprintf(r->rid, sizeof(r->rid), "r%d", ++serial);
    r->prompt = mem_alloc((size_t)n * sizeof(int32_t));
    for (int32_t i = 0; i < n; i++) r->prompt[i] = (salt * 37 + i * 11 + i * i % 7) % 2000;
    r->n_prompt = n;
    r->max_new_tokens = max_new;
    r->ignore_eos = true;
    r->want_logprobs = true;
    r->sp.seed = 42;
    return r;
}

static void wait_done(struct request *r)
{
    for (int i = 0; i < 240000; i++) {
        pthread_mutex_lock(&r->lock);
        bool done = r->done;
        pthread_mutex_unlock(&r->lock);
        if (done) return;
        usleep(500);
    }
    fail_msg("request %s did not end", r->rid);
}

static struct request *run_one(struct engine *e, struct request *r)
{
    struct err err = {0};
    if (engine_submit(e, r, &err) != OK) fail_msg("%s", err.msg);
    wait_done(r);
    return r;
}

static void same(const struct request *a, const struct request *b)
{
    assert_int_equal(a->n_output, b->n_output);
    assert_memory_equal(a->output_ids, b->output_ids, (size_t)a->n_output * 4);
    assert_memory_equal(a->output_logprobs, b->output_logprobs, (size_t)a->n_output * 4);
}

static bool no_model(void)
{
    if (file_exists(DIR_FINAL "/config.json")) return false;
    print_message("no %s: skipped\n", DIR_FINAL);
    return true;
}

static void check_idle(struct engine *e)
{
    struct engine_stats s;
    struct err err = {0};
    if (engine_check(e, &err) != OK) fail_msg("%s", err.msg);
    assert_int_equal(engine_flush(e, &err), OK);
    usleep(20000);
    engine_stat(e, &s);
    assert_int_equal(s.running + s.waiting, 0);
    assert_int_equal(s.pages_free, s.pages_total);
}

#ifdef __SANITIZE_THREAD__
enum { N_BATCH = 16, LEN = 75, NEW = 24 }; /* ten times slower */
#else
enum { N_BATCH = 64, LEN = 75, NEW = 24 };
#endif

static void batch(struct rig *g, struct request *want[], struct engine_options o, bool retracts,
                  bool hits)
{
    struct request *r[N_BATCH];
    struct err err = {0};
    int32_t retracted = 0, cached = 0;
    rig_open(g, DIR_FINAL, o);
    if (hits) request_unref(run_one(g->e, make(0, LEN, 1)));
    for (int32_t i = 0; i < N_BATCH; i++) {
        r[i] = make(i / 8, LEN, NEW);
        assert_int_equal(engine_submit(g->e, r[i], &err), OK);
    }
    for (int32_t i = 0; i < N_BATCH; i++) {
        wait_done(r[i]);
        same(want[i / 8], r[i]);
        assert_int_equal(r[i]->finish, FINISH_LENGTH);
        retracted += r[i]->num_retractions;
        cached += r[i]->cached_tokens;
        if (o.chunk_tokens == 7) assert_true(r[i]->n_chunks > 1 || r[i]->cached_tokens > 0);
        request_unref(r[i]);
    }
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
    for (int32_t i = 0; i < N_BATCH / 8; i++) want[i] = run_one(g.e, make(i, LEN, NEW));
    rig_close(&g);
    batch(&g, want, (struct engine_options){0}, false, true);
    batch(&g, want, (struct engine_options){.chunk_tokens = 7}, false, true);
    batch(&g, want, (struct engine_options){.chunk_tokens = 64, .no_prefix_cache = true}, false,
          false);
    batch(&g, want, (struct engine_options){.retract_every = 5}, true, true);
    batch(&g, want, (struct engine_options){.n_kv_pages = 13, .no_prefix_cache = true}, true,
          false);
    for (int32_t i = 0; i < N_BATCH / 8; i++) request_unref(want[i]);
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
        if (want) request_unref(r);
        else want = r;
        check_idle(g.e);
        rig_close(&g);
    }
    request_unref(want);
}

/* What the fast kernels and the portable ones each promise holds for chunked and whole prompts alike. */
static void test_each_isa(void **state)
{
    (void)state;
    if (no_model()) skip();
    static const char *const isas[] = {"portable", "avx2"};
    for (int i = 0; i < 2; i++) {
        if (i == 1 && !__builtin_cpu_supports("avx2")) continue;
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
    rig_open(&g, DIR_FINAL, (struct engine_options){.chunk_tokens = CHUNK, .n_kv_pages = 24,
                                                    .max_running = 8, .retract_every = 7});
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

static void wait_running(struct engine *e, int32_t n)
{
    struct engine_stats s;
    for (int i = 0; i < 20000; i++) {
        engine_stat(e, &s);
        if (s.running >= n) return;
        usleep(500);
    }
    fail_msg("%d requests never ran", n);
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
    struct update_options o = {.weight_version = "v1"}, kill = {.abort_all = true};
    struct request *r[N], *want[N];
    rig_open(&early, DIR_EARLY, (struct engine_options){0});
    for (int i = 0; i < N; i++) want[i] = run_one(early.e, make(i, 40, 150));
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_fit_and_rid),
        cmocka_unit_test(test_abort), cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_update), cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_each_isa), cmocka_unit_test(test_random_life),
        cmocka_unit_test(test_seeds), cmocka_unit_test(test_update_under_load),
        cmocka_unit_test(test_max_queued)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
