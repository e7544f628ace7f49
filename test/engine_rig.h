/* engine_rig.h - an engine on the models of the repository, and requests for it.  After cmocka.h.
 * MOULT_TEST_OVERLAP=1: with a step in flight while the host works, whatever the model (engine.h, Overlap). */
#ifndef TEST_ENGINE_RIG_H
#define TEST_ENGINE_RIG_H

#include "base/file.h"
#include "base/mem.h"
#include "device.h"
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
    struct test_device t;
    struct store *store;
    struct pool *pool;
    struct model *model;
    struct engine *e;
    const char *isa;     /* NULL: best */
    struct model *outer; /* NULL, or what the engine gets in the model's place: made by `wrap` */
    struct model *(*wrap)(struct model *inner);
};

static inline void rig_open(struct rig *g, const char *dir, struct engine_options o)
{
    struct err e = {0};
    struct slot_spec *specs;
    size_t n;
    struct update *u;
    struct update_progress pr = {0};
    test_device_open(&g->t);
    assert_int_equal(config_load(&g->c, dir, &e), OK);
    assert_int_equal(model_specs(&g->c, &specs, &n, &e), OK);
    assert_int_equal(store_new(&g->store, specs, n, g->t.memory, &e), OK);
    test_device_stage(&g->t, g->store);
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
    assert_int_equal(test_model_new(&g->t, &g->model, &g->c, g->store, g->pool, o.n_kv_pages,
                                    KV_BF16, o.max_step_tokens, g->isa, &e),
                     OK);
    const char *overlap =
        getenv("MOULT_TEST_OVERLAP"); /* set: the host is a step behind, with any model */
    if (overlap && o.overlap == OVERLAP_AUTO) o.overlap = OVERLAP_ON;
    o.config = &g->c;
    o.store = g->store;
    g->outer = g->wrap ? g->wrap(g->model) : NULL;
    o.model = g->outer ? g->outer : g->model;
    o.context_len = 4096;
    o.weight_version = "v0";
    assert_int_equal(engine_new(&g->e, &o, &e), OK);
}

static inline void rig_close(struct rig *g)
{
    engine_stop(g->e, 0);
    model_free(g->model);
    pool_free(g->pool);
    store_free(g->store);
    test_device_close(&g->t);
}

static inline struct request *make(int32_t salt, int32_t n, int32_t max_new)
{
    static _Atomic int serial;
    struct request *r = request_new();
    snprintf(r->rid, sizeof(r->rid), "r%d", ++serial);
    r->prompt = mem_alloc((size_t)n * sizeof(int32_t));
    for (int32_t i = 0; i < n; i++)
        r->prompt[i] = (salt * 37 + i * 11 + i * i % 7) % 2000;
    r->n_prompt = n;
    r->max_new_tokens = max_new;
    r->ignore_eos = true;
    r->want_logprobs = true;
    r->sp.seed = 42;
    return r;
}

static inline void wait_done(struct request *r)
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

static inline struct request *run_one(struct engine *e, struct request *r)
{
    struct err err = {0};
    if (engine_submit(e, r, &err) != OK) fail_msg("%s", err.msg);
    wait_done(r);
    return r;
}

/* Where outputs begin to differ: a position, -1: nowhere. */
static inline int32_t differ_at(const struct request *a, const struct request *b)
{
    int32_t n = a->n_output < b->n_output ? a->n_output : b->n_output;
    for (int32_t i = 0; i < n; i++)
        if (a->output_ids[i] != b->output_ids[i] ||
            memcmp(a->output_logprobs + i, b->output_logprobs + i, sizeof(float)) != 0)
            return i;
    return a->n_output == b->n_output ? -1 : n;
}

static inline void tell_request(const char *name, const struct request *r, int32_t at)
{
    print_error("%s: request %s, prompt of %d from id %d in %d pieces, %d cached, %d retractions, "
                "%d tokens; from position %d:",
                name, r->rid, r->n_prompt, r->n_prompt ? r->prompt[0] : -1, r->n_chunks,
                r->cached_tokens, r->num_retractions, r->n_output, at);
    for (int32_t i = at; i < r->n_output && i < at + 8; i++)
        print_error(" %d (%a)", r->output_ids[i], (double)r->output_logprobs[i]);
    print_error("\n");
}

/* The same ids and bits of logprobs; else says what there was. */
static inline void same(const struct request *a, const struct request *b)
{
    int32_t at = differ_at(a, b);
    if (at < 0) return;
    tell_request("want", a, at);
    tell_request("got", b, at);
    fail_msg("outputs differ from position %d on", at);
}

static inline bool no_model(void)
{
    if (file_exists(DIR_FINAL "/config.json")) return false;
    print_message("no %s: skipped\n", DIR_FINAL);
    return true;
}

static inline void check_idle(struct engine *e)
{
    struct engine_stats s;
    struct err err = {0};
    if (engine_check(e, &err) != OK) fail_msg("%s", err.msg);
    assert_int_equal(engine_flush(e, 0, &err), OK);
    /* the numbers are those of the end of a turn, which may be on its way still */
    for (int i = 0; i < 2000; i++) {
        engine_stat(e, &s);
        if (s.running + s.waiting == 0 && s.pages_free == s.pages_total) return;
        usleep(5000);
    }
    fail_msg("10 s later %d run, %d wait, %d of %d pages are free", (int)s.running, (int)s.waiting,
             (int)s.pages_free, (int)s.pages_total);
}

static inline void wait_running(struct engine *e, int32_t n)
{
    struct engine_stats s;
    for (int i = 0; i < 20000; i++) {
        engine_stat(e, &s);
        if (s.running >= n) return;
        usleep(500);
    }
    fail_msg("%d requests never ran", n);
}

#endif
