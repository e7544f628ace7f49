/* control_rig.h - requests that are slow where a test wants them to be, and calls of the engine that must not fail.
 * After cmocka.h. */
#ifndef TEST_CONTROL_RIG_H
#define TEST_CONTROL_RIG_H

#include "base/clock.h"
#include "engine_rig.h"
#include <stdlib.h>

#ifdef __SANITIZE_THREAD__
enum { LEN = 40, NEW = 60, AT = 20, LONG = 400, TURNS = 40 };
#elif defined(__SANITIZE_ADDRESS__)
enum { LEN = 40, NEW = 60, AT = 20, LONG = 1000, TURNS = 40 };
#else
enum { LEN = 40, NEW = 80, AT = 24, LONG = 3000, TURNS = 100 };
#endif

static struct update_result res;
static const enum pause_mode every_mode[] = {PAUSE_ABORT, PAUSE_RETRACT, PAUSE_IN_PLACE};

/* Requests begin fast and are slow from this token on, until the test lets go: so that what is to happen in their
 * middle does, however busy the machine is. */
static _Atomic int slow_from = INT32_MAX;

static inline void slow(void *ctx)
{
    const struct request *r = ctx; /* this thread alone writes n_output */
    for (int ms = 0; ms < 30 && r->n_output >= slow_from; ms++)
        usleep(1000);
}

static inline struct request *start_at(struct engine *e, struct request *r, int32_t from)
{
    struct err err = {0};
    slow_from = from;
    r->notify = slow;
    r->ctx = r;
    if (engine_submit(e, r, &err) != OK) fail_msg("%s", err.msg);
    return r;
}

static inline struct request *start(struct engine *e, struct request *r)
{
    return start_at(e, r, slow_from);
}

/* Waits until r has drawn n tokens, from where on everything is slow. */
static inline void wait_output(struct request *r, int32_t n)
{
    slow_from = n;
    for (int i = 0; i < 400000; i++) {
        pthread_mutex_lock(&r->lock);
        bool there = r->n_output >= n || r->done;
        pthread_mutex_unlock(&r->lock);
        if (there) return;
        usleep(100);
    }
    fail_msg("request %s never drew %d tokens", r->rid, n);
}

static inline void wait_end(struct request *r)
{
    slow_from = INT32_MAX;
    wait_done(r);
}

static inline bool is_done(struct request *r)
{
    pthread_mutex_lock(&r->lock);
    bool done = r->done;
    pthread_mutex_unlock(&r->lock);
    return done;
}

static inline void must(err_t rc, const struct err *err)
{
    if (rc != OK) fail_msg("%s", err->msg);
}

static inline void pause_in(struct engine *e, enum pause_mode mode)
{
    struct err err = {0};
    must(engine_pause(e, mode, &err), &err);
}

static inline void go_on(struct engine *e)
{
    struct err err = {0};
    slow_from = INT32_MAX;
    must(engine_continue(e, &err), &err);
}

static inline void update_to(struct engine *e, const char *dir, struct update_options o)
{
    struct err err = {0};
    must(engine_update(e, dir, &o, &res, &err), &err);
}

/* Published after the turn, so it may be a moment late. */
static inline struct engine_stats stat_when(struct engine *e, int32_t running, int32_t waiting)
{
    struct engine_stats s;
    for (int i = 0; i < 20000; i++) {
        engine_stat(e, &s);
        if (s.running == running && s.waiting == waiting) return s;
        usleep(200);
    }
    fail_msg("%d running and %d waiting; %d and %d are expected", s.running, s.waiting, running,
             waiting);
    return s;
}

static inline void spans_add_up(const struct request *r)
{
    int32_t n = 0;
    for (int32_t i = 0; i < r->n_spans; i++) {
        assert_true(r->spans[i].n > 0);
        if (i) assert_true(r->spans[i].id > r->spans[i - 1].id);
        n += r->spans[i].n;
    }
    assert_int_equal(n, r->n_output);
}

static inline void same_part(const struct request *a, int32_t from_a, const struct request *b,
                             int32_t from_b, int32_t n)
{
    assert_true(from_a + n <= a->n_output && from_b + n <= b->n_output);
    assert_memory_equal(a->output_ids + from_a, b->output_ids + from_b, (size_t)n * 4);
    assert_memory_equal(a->output_logprobs + from_a, b->output_logprobs + from_b, (size_t)n * 4);
}

/* A request for what follows the first n outputs of r. */
static inline struct request *rest_of(const struct request *r, int32_t n)
{
    struct request *q = make(0, r->n_prompt + n, r->max_new_tokens - n);
    memcpy(q->prompt, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    memcpy(q->prompt + r->n_prompt, r->output_ids, (size_t)n * sizeof(int32_t));
    return q;
}

struct later {
    struct engine *e;
    const char *dir;
    struct update_options o;
    double timeout;
    int64_t took;
    err_t rc;
    struct err err;
    struct update_result res;
    pthread_t t;
};

static inline void *update_main(void *arg)
{
    struct later *l = arg;
    l->rc = engine_update(l->e, l->dir, &l->o, &l->res, &l->err);
    return NULL;
}

#endif
