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
#include <string.h>
#include <unistd.h>

#define DIR_FINAL "../shared/models/tiny-moe/final"
#define DIR_EARLY "../shared/models/tiny-moe/early"

struct rig {
    struct config c;
    struct store *store;
    struct pool *pool;
    struct model *model;
    struct engine *e;
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
    assert_int_equal(store_new(&g->store, specs, n, &e), OK);
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
                               o.max_step_tokens, NULL, &e), OK);
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
    for (int i = 0; i < 60000; i++) {
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

enum { N_BATCH = 24, LEN = 75, NEW = 24 };

static void batch(struct rig *g, struct request *want[], struct engine_options o, bool retracts,
                  bool hits)
{
    struct request *r[N_BATCH];
    struct err err = {0};
    int32_t retracted = 0, cached = 0;
    rig_open(g, DIR_FINAL, o);
    if (hits) request_unref(run_one(g->e, make(0, LEN, 1)));
    for (int32_t i = 0; i < N_BATCH; i++) {
        r[i] = make(i / 4, LEN, NEW);
        assert_int_equal(engine_submit(g->e, r[i], &err), OK);
    }
    for (int32_t i = 0; i < N_BATCH; i++) {
        wait_done(r[i]);
        same(want[i / 4], r[i]);
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
    struct rig g;
    struct request *want[N_BATCH / 4];
    rig_open(&g, DIR_FINAL, (struct engine_options){.no_prefix_cache = true});
    for (int32_t i = 0; i < N_BATCH / 4; i++) want[i] = run_one(g.e, make(i, LEN, NEW));
    rig_close(&g);
    batch(&g, want, (struct engine_options){0}, false, true);
    batch(&g, want, (struct engine_options){.chunk_tokens = 7}, false, true);
    batch(&g, want, (struct engine_options){.chunk_tokens = 64, .no_prefix_cache = true}, false,
          false);
    batch(&g, want, (struct engine_options){.retract_every = 5}, true, true);
    batch(&g, want, (struct engine_options){.n_kv_pages = 13, .no_prefix_cache = true}, true,
          false);
    for (int32_t i = 0; i < N_BATCH / 4; i++) request_unref(want[i]);
}

static void test_fit_and_rid(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g;
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
    struct rig g;
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
    struct rig g;
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
    struct rig g, h;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_fit_and_rid),
        cmocka_unit_test(test_abort), cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_update)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
