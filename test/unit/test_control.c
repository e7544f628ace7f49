/* Pause, continue, flush, labels and updates with requests in flight: one outcome each (docs/control.md), and
 * whatever happened to a request, its bits are those of the weights that its spans name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/clock.h"
#include "engine_rig.h"
#include <stdlib.h>

#ifdef __SANITIZE_THREAD__
enum { LEN = 40, NEW = 60, AT = 20, LONG = 400, TURNS = 40 };
#elif defined(__SANITIZE_ADDRESS__)
enum { LEN = 40, NEW = 60, AT = 20, LONG = 1500, TURNS = 60 };
#else
enum { LEN = 40, NEW = 80, AT = 24, LONG = 3000, TURNS = 100 };
#endif

static struct update_result res;
static const enum pause_mode every_mode[] = {PAUSE_ABORT, PAUSE_RETRACT, PAUSE_IN_PLACE};

/* Requests begin fast and are slow from this token on, until the test lets go: so that what is to happen in their
 * middle does, however busy the machine is. */
static _Atomic int slow_from = INT32_MAX;

static void slow(void *ctx)
{
    const struct request *r = ctx; /* this thread alone writes n_output */
    for (int ms = 0; ms < 30 && r->n_output >= slow_from; ms++) usleep(1000);
}

static struct request *start_at(struct engine *e, struct request *r, int32_t from)
{
    struct err err = {0};
    slow_from = from;
    r->notify = slow;
    r->ctx = r;
    if (engine_submit(e, r, &err) != OK) fail_msg("%s", err.msg);
    return r;
}

static struct request *start(struct engine *e, struct request *r)
{
    return start_at(e, r, slow_from);
}

/* Waits until r has drawn n tokens, from where on everything is slow. */
static void wait_output(struct request *r, int32_t n)
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

static void wait_end(struct request *r)
{
    slow_from = INT32_MAX;
    wait_done(r);
}

static bool is_done(struct request *r)
{
    pthread_mutex_lock(&r->lock);
    bool done = r->done;
    pthread_mutex_unlock(&r->lock);
    return done;
}

static void must(err_t rc, const struct err *err)
{
    if (rc != OK) fail_msg("%s", err->msg);
}

static void pause_in(struct engine *e, enum pause_mode mode)
{
    struct err err = {0};
    must(engine_pause(e, mode, &err), &err);
}

static void go_on(struct engine *e)
{
    struct err err = {0};
    slow_from = INT32_MAX;
    must(engine_continue(e, &err), &err);
}

static void update_to(struct engine *e, const char *dir, struct update_options o)
{
    struct err err = {0};
    must(engine_update(e, dir, &o, &res, &err), &err);
}

/* Published after the turn, so it may be a moment late. */
static struct engine_stats stat_when(struct engine *e, int32_t running, int32_t waiting)
{
    struct engine_stats s;
    for (int i = 0; i < 20000; i++) {
        engine_stat(e, &s);
        if (s.running == running && s.waiting == waiting) return s;
        usleep(200);
    }
    fail_msg("%d running and %d waiting; %d and %d are expected", s.running, s.waiting, running, waiting);
    return s;
}

static void spans_add_up(const struct request *r)
{
    int32_t n = 0;
    for (int32_t i = 0; i < r->n_spans; i++) {
        assert_true(r->spans[i].n > 0);
        if (i) assert_true(r->spans[i].id > r->spans[i - 1].id);
        n += r->spans[i].n;
    }
    assert_int_equal(n, r->n_output);
}

static void same_part(const struct request *a, int32_t from_a, const struct request *b, int32_t from_b, int32_t n)
{
    assert_true(from_a + n <= a->n_output && from_b + n <= b->n_output);
    assert_memory_equal(a->output_ids + from_a, b->output_ids + from_b, (size_t)n * 4);
    assert_memory_equal(a->output_logprobs + from_a, b->output_logprobs + from_b, (size_t)n * 4);
}

/* A request for what follows the first n outputs of r. */
static struct request *rest_of(const struct request *r, int32_t n)
{
    struct request *q = make(0, r->n_prompt + n, r->max_new_tokens - n);
    memcpy(q->prompt, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    memcpy(q->prompt + r->n_prompt, r->output_ids, (size_t)n * sizeof(int32_t));
    return q;
}

/* ---- pauses ---- */

static void test_pause_keeps_bits(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { N = 6 };
    static const enum pause_mode modes[] = {PAUSE_RETRACT, PAUSE_IN_PLACE};
    struct rig g = {0};
    struct request *want[N], *r[N];
    rig_open(&g, DIR_FINAL, (struct engine_options){.max_running = 4, .chunk_tokens = 16});
    for (int i = 0; i < N; i++) want[i] = run_one(g.e, make(i, LEN, NEW));
    for (int m = 0; m < 2; m++) {
        for (int i = 0; i < N; i++) r[i] = start_at(g.e, make(i, LEN, NEW), AT);
        wait_output(r[0], AT);
        pause_in(g.e, modes[m]);
        int32_t running = modes[m] == PAUSE_RETRACT ? 0 : 4;
        struct engine_stats a = stat_when(g.e, running, N - running);
        assert_int_equal(a.paused, modes[m]);
        assert_int_equal(a.held, N);
        assert_int_equal(a.retracted, 4 - running);
        struct request *late = start(g.e, make(9, LEN, 3));
        usleep(30000);
        struct engine_stats b = stat_when(g.e, running, N - running + 1);
        assert_int_equal(a.steps, b.steps); /* nothing ran */
        assert_int_equal(b.held, N + 1);
        assert_false(b.stuck);
        assert_true(b.heartbeat_age_s < 0.1); /* however long the pause is */
        assert_false(is_done(late));
        go_on(g.e);
        int32_t retracted = 0;
        for (int i = 0; i < N; i++) {
            wait_end(r[i]);
            same(want[i], r[i]);
            spans_add_up(r[i]);
            assert_int_equal(r[i]->n_spans, 1);
            retracted += r[i]->num_retractions;
            request_unref(r[i]);
        }
        assert_int_equal(retracted, 4 - running);
        wait_end(late);
        assert_int_equal(late->finish, FINISH_LENGTH);
        request_unref(late);
        check_idle(g.e);
    }
    for (int i = 0; i < N; i++) request_unref(want[i]);
    rig_close(&g);
}

static void test_pause_abort(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){.max_running = 1});
    struct request *want = run_one(g.e, make(1, LEN, NEW));
    struct request *r = start_at(g.e, make(1, LEN, LONG), 3), *queued = start(g.e, make(2, LEN, LONG));
    wait_output(r, 3);
    pause_in(g.e, PAUSE_ABORT);
    assert_true(is_done(r) && is_done(queued)); /* when the call returns */
    assert_int_equal(r->finish, FINISH_ABORT);
    assert_int_equal(r->finish_status, 0);
    int32_t n = r->n_output < want->n_output ? r->n_output : want->n_output;
    same_part(want, 0, r, 0, n);
    assert_int_equal(queued->finish, FINISH_ABORT);
    assert_int_equal(queued->n_output, 0);
    assert_int_equal(queued->n_spans, 0);
    assert_string_equal(queued->weight_version, "v0");
    struct request *late = start(g.e, make(1, LEN, NEW));
    usleep(20000);
    assert_false(is_done(late));
    assert_int_equal(stat_when(g.e, 0, 1).held, 1);
    go_on(g.e);
    wait_end(late);
    same(want, late);
    request_unref(want);
    request_unref(r);
    request_unref(queued);
    request_unref(late);
    check_idle(g.e);
    rig_close(&g);
}

/* Second pauses do what they say to what still runs; continue without a pause does nothing. */
static void test_pause_upon_pause(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){0});
    struct request *want = run_one(g.e, make(1, LEN, NEW));
    go_on(g.e);
    for (int a = 0; a < 3; a++) {
        for (int b = 0; b < 3; b++) {
            struct request *r = start_at(g.e, make(1, LEN, NEW), 5);
            wait_output(r, 5);
            pause_in(g.e, every_mode[a]);
            pause_in(g.e, every_mode[b]);
            bool aborted = a == 0 || b == 0, kept = a == 2 && b == 2;
            struct engine_stats s = stat_when(g.e, kept, !aborted && !kept);
            assert_int_equal(s.paused, every_mode[b]);
            assert_int_equal(is_done(r), aborted);
            go_on(g.e);
            go_on(g.e);
            wait_end(r);
            if (!aborted) same(want, r);
            assert_int_equal(r->num_retractions, a == 1 || (a == 2 && b == 1));
            request_unref(r);
        }
    }
    request_unref(want);
    check_idle(g.e);
    rig_close(&g);
}

/* Aborts find held requests; a full queue counts those alone that never ran; a stop ends what is held. */
static void test_held_requests(void **state)
{
    (void)state;
    if (no_model()) skip();
    for (int m = 1; m < 3; m++) {
        struct rig g = {0};
        struct err err = {0};
        struct request *r[4];
        rig_open(&g, DIR_FINAL, (struct engine_options){.max_queued = 2, .max_running = 2});
        for (int i = 0; i < 2; i++) r[i] = start_at(g.e, make(i, LEN, LONG), 2);
        wait_output(r[1], 2);
        pause_in(g.e, every_mode[m]);
        stat_when(g.e, m == 2 ? 2 : 0, m == 2 ? 0 : 2);
        for (int i = 2; i < 4; i++) r[i] = start(g.e, make(i, LEN, 5));
        stat_when(g.e, m == 2 ? 2 : 0, m == 2 ? 2 : 4);
        struct request *late = make(7, LEN, 1);
        assert_int_equal(engine_submit(g.e, late, &err), ERR_BUSY);
        engine_abort_request(g.e, r[0]);
        engine_abort(g.e, r[2]->rid, false);
        wait_end(r[0]);
        wait_end(r[2]);
        assert_true(r[0]->n_output > 0 && r[0]->n_spans == 1);
        assert_int_equal(r[2]->n_output, 0);
        stat_when(g.e, m == 2, m == 2 ? 1 : 2);
        must(engine_check(g.e, &err), &err);
        start(g.e, late); /* there is room again */
        rig_close(&g);    /* stops while paused */
        for (int i = 0; i < 4; i++) {
            assert_true(r[i]->done);
            assert_int_equal(r[i]->finish, FINISH_ABORT);
            request_unref(r[i]);
        }
        assert_true(late->done);
        request_unref(late);
    }
}

/* ---- flush ---- */

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

static void *flush_main(void *arg)
{
    struct later *l = arg;
    int64_t t = clock_ns();
    l->rc = engine_flush(l->e, l->timeout, &l->err);
    l->took = clock_ns() - t;
    return NULL;
}

static void *update_main(void *arg)
{
    struct later *l = arg;
    l->rc = engine_update(l->e, l->dir, &l->o, &l->res, &l->err);
    return NULL;
}

static void test_flush(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct engine_stats s;
    rig_open(&g, DIR_FINAL, (struct engine_options){0});
    struct request *r = start_at(g.e, make(1, LEN, LONG), 20);
    wait_output(r, 20);
    assert_int_equal(engine_flush(g.e, 0, &err), ERR_STATE);
    assert_non_null(strstr(err.msg, "running"));
    int64_t t = clock_ns();
    pause_in(g.e, PAUSE_IN_PLACE);
    assert_int_equal(engine_flush(g.e, 0.1, &err), ERR_STATE); /* the engine sleeps meanwhile */
    assert_true(clock_ns() - t >= 100000000);
    assert_non_null(strstr(err.msg, "paused in place"));
    struct later l = {.e = g.e, .timeout = 60};
    pthread_create(&l.t, NULL, flush_main, &l);
    usleep(50000);
    assert_int_equal(engine_flush(g.e, 5, &err), ERR_STATE); /* one waits already */
    assert_non_null(strstr(err.msg, "another flush"));
    must(engine_check(g.e, &err), &err);
    pause_in(g.e, PAUSE_RETRACT); /* lets go of the KV */
    pthread_join(l.t, NULL);
    assert_int_equal(l.rc, OK);
    must(engine_flush(g.e, 0, &err), &err);
    usleep(20000);
    engine_stat(g.e, &s);
    assert_int_equal(s.pages_free, s.pages_total);
    assert_int_equal(s.waiting, 1); /* the request lives */
    go_on(g.e);
    l = (struct later){.e = g.e, .timeout = 60};
    wait_output(r, 21);
    pthread_create(&l.t, NULL, flush_main, &l);
    usleep(20000);
    engine_abort(g.e, "", true);
    pthread_join(l.t, NULL);
    assert_int_equal(l.rc, OK);
    wait_end(r);
    request_unref(r);
    check_idle(g.e);
    rig_close(&g);
}

/* ---- updates ---- */

struct tellers {
    struct rig early, final; /* fresh starts */
};

static struct request *fresh(struct rig *g, struct request *r)
{
    return run_one(g->e, r);
}

/* What a request drew whose KV was thrown away at the update. */
static void check_retracted(struct tellers *t, struct request *r)
{
    spans_add_up(r);
    assert_int_equal(r->n_spans, 2);
    assert_int_equal(r->num_retractions, 1);
    int32_t n = r->spans[0].n;
    struct request *a = make(0, r->n_prompt, n);
    memcpy(a->prompt, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    fresh(&t->early, a);
    same_part(r, 0, a, 0, n);
    struct request *b = fresh(&t->final, rest_of(r, n));
    same_part(r, n, b, 0, r->n_output - n);
    assert_int_equal(r->n_output, r->max_new_tokens);
    assert_string_equal(r->spans[0].version, "v0");
    assert_string_equal(r->spans[1].version, "v1");
    assert_string_equal(r->weight_version, "v1");
    request_unref(a);
    request_unref(b);
}

static void test_update_retracts(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct tellers t = {0};
    struct err err = {0};
    rig_open(&t.early, DIR_EARLY, (struct engine_options){0});
    rig_open(&t.final, DIR_FINAL, (struct engine_options){0});
    /* by option; by a pause before; by the end of the drain; by a pause in the drain */
    for (int how = 0; how < 4; how++) {
        struct rig g = {0};
        struct request *r[3];
        rig_open(&g, DIR_EARLY, (struct engine_options){.chunk_tokens = 16});
        for (int i = 0; i < 3; i++) r[i] = start_at(g.e, make(i, LEN, NEW), 5);
        wait_output(r[2], 5);
        struct later l = {.e = g.e, .dir = DIR_FINAL, .o = {.weight_version = "v1"}};
        if (how == 0) l.o.in_flight = IN_FLIGHT_RETRACT;
        if (how == 1) pause_in(g.e, PAUSE_RETRACT);
        if (how == 2) l.o.drain_timeout_s = 0.02;
        pthread_create(&l.t, NULL, update_main, &l);
        if (how == 3) {
            for (struct engine_stats s = {0}; !s.draining; usleep(100)) engine_stat(g.e, &s);
            pause_in(g.e, PAUSE_RETRACT);
        }
        pthread_join(l.t, NULL);
        if (how == 1 || how == 3) {
            assert_int_equal(engine_flush(g.e, 0, &err), OK);
            go_on(g.e);
        }
        must(l.rc, &l.err);
        assert_true(l.res.num_paused >= 3);
        if (how == 2) assert_true(l.res.drain_s >= 0.02);
        for (int i = 0; i < 3; i++) {
            wait_end(r[i]);
            check_retracted(&t, r[i]);
            request_unref(r[i]);
        }
        check_idle(g.e);
        rig_close(&g);
    }
    rig_close(&t.early);
    rig_close(&t.final);
}

/* By hand, without an engine: n tokens under the weights in use, the rest after an update, over the same KV. */
static void by_hand(struct rig *g, struct request *r, int32_t n, int32_t total)
{
    enum { PAGES = 256 };
    int32_t pages[PAGES], ids[4096], pos[4096], of[4096] = {0};
    struct err err = {0};
    for (int32_t i = 0; i < PAGES; i++) model_kv_clear(g->model, pages[i] = i);
    memcpy(ids, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    r->output_ids = mem_alloc((size_t)total * sizeof(int32_t));
    r->output_logprobs = mem_alloc((size_t)total * sizeof(float));
    for (int32_t i = 0; i < 4096; i++) pos[i] = i;
    for (int32_t at = 0, end = r->n_prompt; r->n_output < total; at = end++) {
        if (r->n_output == n) update_to(g->e, DIR_FINAL, (struct update_options){0});
        struct sample_input in = {.target = -1, .params = &r->sp, .output_ids = r->output_ids, .n_output = r->n_output,
                                  .position = (uint64_t)end};
        static struct sample_output out;
        struct step_row row = {.token = end - at - 1, .in = &in, .out = &out};
        struct step_seq seq = {pages, PAGES};
        struct step st = {.n_tokens = end - at, .ids = ids + at, .pos = pos + at, .seq = of, .n_seqs = 1, .seqs = &seq,
                          .n_rows = 1, .rows = &row};
        model_submit(g->model, &st);
        must(model_collect(g->model, &st, &err), &err);
        ids[end] = r->output_ids[r->n_output] = out.id;
        r->output_logprobs[r->n_output++] = out.logprob;
    }
}

/* C09, second half: KV kept over an update is used by its own request alone. */
static void test_update_continues(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig final = {0};
    rig_open(&final, DIR_FINAL, (struct engine_options){0});
    for (int how = 0; how < 3; how++) { /* by option; by a pause in place; that, and retracted later */
        struct rig g = {0}, hand = {0};
        struct err err = {0};
        rig_open(&g, DIR_EARLY, (struct engine_options){0});
        rig_open(&hand, DIR_EARLY, (struct engine_options){0});
        struct request *twin = start_at(g.e, make(1, LEN, NEW), AT), *r = start(g.e, make(1, LEN, NEW));
        wait_output(r, AT); /* the two share pages of the tree */
        if (how == 0) update_to(g.e, DIR_FINAL, (struct update_options){.weight_version = "v1", .in_flight = IN_FLIGHT_CONTINUE});
        if (how > 0) {
            pause_in(g.e, PAUSE_IN_PLACE);
            update_to(g.e, DIR_FINAL, (struct update_options){.weight_version = "v1"});
            must(engine_check(g.e, &err), &err);
            assert_int_equal(engine_flush(g.e, 0, &err), ERR_STATE);
            must(engine_continue(g.e, &err), &err);
        }
        int32_t n2 = NEW;
        if (how == 2) {
            wait_output(r, r->n_output + 3);
            pause_in(g.e, PAUSE_RETRACT);
            must(engine_check(g.e, &err), &err);
            n2 = r->n_output; /* nothing writes it now */
            assert_true(n2 < NEW);
            struct engine_stats s = stat_when(g.e, 0, is_done(twin) ? 1 : 2);
            assert_int_equal(s.pages_cached, 0); /* mixed KV left nothing behind */
            go_on(g.e);
        }
        wait_end(r);
        wait_end(twin);
        spans_add_up(r);
        assert_int_equal(r->n_spans, 2);
        assert_int_equal(r->num_retractions, how == 2);
        int32_t n = r->spans[0].n;
        assert_true(n >= AT && n < NEW);
        struct request *want = make(1, LEN, NEW);
        by_hand(&hand, want, n, n2);
        same_part(r, 0, want, 0, n2);
        if (how == 2) {
            struct request *rest = fresh(&final, rest_of(r, n2));
            same_part(r, n2, rest, 0, NEW - n2);
            request_unref(rest);
        } else { /* nothing entered the tree, before or after */
            struct engine_stats s = stat_when(g.e, 0, 0);
            assert_int_equal(s.pages_cached, 0);
            assert_int_equal(s.pages_free, s.pages_total);
        }
        for (int again = 0; again < 2; again++) { /* the prompt and all that followed, cold or hit: as fresh */
            struct request *a = make(0, LEN + NEW, 4), *b = make(0, LEN + NEW, 4);
            memcpy(a->prompt, r->prompt, LEN * sizeof(int32_t));
            memcpy(a->prompt + LEN, r->output_ids, NEW * sizeof(int32_t));
            memcpy(b->prompt, a->prompt, (LEN + NEW) * sizeof(int32_t));
            run_one(g.e, a);
            same(a, fresh(&final, b));
            if (how < 2) assert_int_equal(a->cached_tokens >= KV_PAGE, again);
            request_unref(a);
            request_unref(b);
        }
        request_unref(r);
        request_unref(twin);
        request_unref(want);
        check_idle(g.e);
        rig_close(&g);
        rig_close(&hand);
    }
    rig_close(&final);
}

/* An update in the middle of a prompt: prompt logprobs and all tokens are of one version, kept KV or not. */
static void test_prompts_begin_again(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { PROMPT = 1500 };
    struct rig g = {0}, final = {0};
    rig_open(&g, DIR_EARLY, (struct engine_options){.chunk_tokens = 32});
    rig_open(&final, DIR_FINAL, (struct engine_options){0});
    struct request *want = make(3, PROMPT, 2);
    want->logprob_start = 0;
    want->n_top = 2;
    fresh(&final, want);
    for (int m = 1; m < 3; m++) {
        struct request *r = make(3, PROMPT, 2);
        r->logprob_start = 0;
        r->n_top = 2;
        update_to(g.e, DIR_EARLY, (struct update_options){0});
        start(g.e, r);
        for (bool go = true; go; usleep(50)) {
            pthread_mutex_lock(&r->lock);
            go = r->n_chunks < 3 && !r->done;
            pthread_mutex_unlock(&r->lock);
        }
        pause_in(g.e, every_mode[m]);
        assert_false(r->prompt_done); /* else the event did not happen */
        update_to(g.e, DIR_FINAL, (struct update_options){0});
        go_on(g.e);
        wait_end(r);
        same(want, r);
        assert_int_equal(r->n_spans, 1);
        assert_int_equal(r->num_retractions, 1);
        assert_memory_equal(want->prompt_logprobs + 1, r->prompt_logprobs + 1, (PROMPT - 1) * 4);
        request_unref(r);
    }
    request_unref(want);
    check_idle(g.e);
    rig_close(&g);
    rig_close(&final);
}

/* Every pause with every in_flight: the commit comes at once; and every pause into a drain ends the drain. */
static void test_update_while_paused(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    rig_open(&g, DIR_EARLY, (struct engine_options){0});
    for (int m = 0; m < 3; m++) {
        for (int f = IN_FLIGHT_DRAIN; f <= IN_FLIGHT_CONTINUE; f++) {
            struct request *r = start_at(g.e, make(1, LEN, LONG), 3);
            wait_output(r, 3);
            pause_in(g.e, every_mode[m]);
            struct request *late = start(g.e, make(2, LEN, 2));
            update_to(g.e, (m + f) % 2 ? DIR_EARLY : DIR_FINAL, (struct update_options){.in_flight = (enum in_flight)f});
            assert_true(res.drain_s < 1);
            bool kept = m == 2 && (f == IN_FLIGHT_DRAIN || f == IN_FLIGHT_CONTINUE);
            bool ended = m == 0 || f == IN_FLIGHT_ABORT;
            stat_when(g.e, kept, (f != IN_FLIGHT_ABORT) + (!kept && !ended));
            assert_int_equal(is_done(r), ended);
            assert_int_equal(is_done(late), f == IN_FLIGHT_ABORT);
            must(engine_check(g.e, &err), &err);
            engine_abort_request(g.e, r);
            go_on(g.e);
            wait_end(late);
            wait_end(r);
            request_unref(r);
            request_unref(late);
        }
        struct request *r = start_at(g.e, make(1, LEN, LONG), 3);
        wait_output(r, 3);
        struct later l = {.e = g.e, .dir = DIR_EARLY};
        pthread_create(&l.t, NULL, update_main, &l);
        for (struct engine_stats s = {0}; !s.updating; usleep(100)) engine_stat(g.e, &s);
        assert_int_equal(engine_update(g.e, DIR_FINAL, &(struct update_options){0}, &res, &err), ERR_STATE);
        assert_non_null(strstr(err.msg, "another weight update"));
        for (struct engine_stats s = {0}; !s.draining; usleep(100)) engine_stat(g.e, &s);
        pause_in(g.e, every_mode[m]);
        pthread_join(l.t, NULL); /* while paused */
        must(l.rc, &l.err);
        engine_abort(g.e, "", true);
        go_on(g.e);
        wait_end(r);
        request_unref(r);
        check_idle(g.e);
    }
    rig_close(&g);
}

/* A stop in the middle of a drain, of a pause, and of a flush that waits: all are answered. */
static void test_stop_answers_all(void **state)
{
    (void)state;
    if (no_model()) skip();
    for (int how = 0; how < 3; how++) {
        struct rig g = {0};
        rig_open(&g, DIR_EARLY, (struct engine_options){0});
        struct request *r = start_at(g.e, make(1, LEN, LONG), 3);
        wait_output(r, 3);
        struct later u = {.e = g.e, .dir = DIR_FINAL}, f = {.e = g.e, .timeout = 100};
        if (how == 1) pause_in(g.e, PAUSE_IN_PLACE);
        pthread_create(&f.t, NULL, flush_main, &f);
        usleep(10000);
        if (how != 1) {
            pthread_create(&u.t, NULL, update_main, &u);
            for (struct engine_stats s = {0}; how == 0 ? !s.draining : !s.updating; usleep(100)) engine_stat(g.e, &s);
        }
        rig_close(&g); /* how 2: while it is staged, most likely */
        pthread_join(f.t, NULL);
        if (how != 1) pthread_join(u.t, NULL);
        assert_true(r->done);
        request_unref(r);
    }
}

/* ---- labels ---- */

static void test_labels(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    char now[128], longest[200];
    rig_open(&g, DIR_EARLY, (struct engine_options){0});
    struct request *want = run_one(g.e, make(1, LEN, NEW));
    struct request *r = start_at(g.e, make(1, LEN, NEW), 5);
    wait_output(r, 5);
    must(engine_relabel(g.e, "v0", false, &err), &err); /* no other label: no other span */
    must(engine_relabel(g.e, "8", false, &err), &err);
    wait_end(r);
    same(want, r);
    spans_add_up(r);
    assert_int_equal(r->n_spans, 2);
    assert_string_equal(r->spans[0].version, "v0");
    assert_string_equal(r->spans[1].version, "8");
    assert_string_equal(r->weight_version, "8");
    request_unref(r);
    r = start_at(g.e, make(1, LEN, LONG), 5);
    wait_output(r, 5);
    must(engine_relabel(g.e, "9", true, &err), &err);
    assert_true(is_done(r));
    assert_int_equal(r->finish, FINISH_ABORT);
    request_unref(r);
    memset(longest, 'x', sizeof longest);
    longest[WEIGHT_VERSION_MAX + 1] = 0;
    assert_int_equal(engine_relabel(g.e, longest, false, &err), ERR_INPUT);
    assert_int_equal(engine_update(g.e, DIR_FINAL, &(struct update_options){.weight_version = longest}, &res, &err), ERR_INPUT);
    longest[WEIGHT_VERSION_MAX] = 0;
    must(engine_relabel(g.e, longest, false, &err), &err);
    engine_weight_version(g.e, now, sizeof now);
    assert_string_equal(now, longest);
    /* an update without a label is a span of its own under the same one */
    r = start_at(g.e, make(1, LEN, NEW), 5);
    wait_output(r, 5);
    update_to(g.e, DIR_FINAL, (struct update_options){.in_flight = IN_FLIGHT_RETRACT});
    wait_end(r);
    assert_int_equal(r->n_spans, 2);
    assert_string_equal(r->spans[0].version, longest);
    assert_string_equal(r->spans[1].version, longest);
    spans_add_up(r);
    request_unref(r);
    request_unref(want);
    check_idle(g.e);
    rig_close(&g);
}

static void test_refuse_older(void **state)
{
    (void)state;
    if (no_model()) skip();
    static const struct {
        const char *now, *next;
        err_t rc;
        const char *says;
    } rows[] = {
        {"default", "3", OK, NULL},     {"3", "3", OK, NULL},          {"3", "2", ERR_STATE, "older than 3"},
        {"9", "10", OK, NULL},          {"10", "9", ERR_STATE, "older"}, {"007", "7", OK, NULL},
        {"7", "0006", ERR_STATE, "older"}, {"99999999999999999999999", "100000000000000000000000", OK, NULL},
        {"3", "x4", ERR_INPUT, "decimal number"}, {"3", "-1", ERR_INPUT, "decimal number"},
        {"3", "", ERR_INPUT, "decimal number"}, {"3", NULL, ERR_INPUT, "none"}, {"v2", "3", ERR_INPUT, "v2"},
    };
    struct rig g = {0};
    struct err err = {0};
    char now[128];
    rig_open(&g, DIR_EARLY, (struct engine_options){0});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct update_options o = {.weight_version = rows[i].next, .refuse_older = true};
        must(engine_relabel(g.e, rows[i].now, false, &err), &err);
        err_t rc = engine_update(g.e, DIR_EARLY, &o, &res, &err);
        if (rc != rows[i].rc) fail_msg("row %zu: %d, %s", i, rc, err.msg);
        if (rows[i].says && !strstr(err.msg, rows[i].says)) fail_msg("row %zu: %s", i, err.msg);
        engine_weight_version(g.e, now, sizeof now);
        assert_string_equal(now, rc == OK ? rows[i].next : rows[i].now);
    }
    /* the label moves on while the update drains: refused, and the request is untouched */
    must(engine_relabel(g.e, "5", false, &err), &err);
    struct request *want = run_one(g.e, make(1, LEN, NEW)), *r = start_at(g.e, make(1, LEN, NEW), 1);
    wait_output(r, 1);
    struct later l = {.e = g.e, .dir = DIR_FINAL, .o = {.weight_version = "6", .refuse_older = true}};
    pthread_create(&l.t, NULL, update_main, &l);
    for (struct engine_stats s = {0}; !s.draining; usleep(100)) engine_stat(g.e, &s);
    must(engine_relabel(g.e, "7", false, &err), &err);
    slow_from = INT32_MAX;
    pthread_join(l.t, NULL);
    assert_int_equal(l.rc, ERR_STATE);
    wait_end(r);
    same(want, r);
    request_unref(want);
    request_unref(r);
    check_idle(g.e);
    rig_close(&g);
}

/* ---- all of it at once ---- */

struct fuzz {
    struct rig *g;
    unsigned seed;
    _Atomic bool *over;
    struct request *want[2][4]; /* under early and final */
    int lived, ended, spanned;
    char wrong[200]; /* cmocka asserts in its own thread alone */
    pthread_t t;
};

/* A span of the first weights is the beginning of the answer that these alone give. */
static void check_answer(struct fuzz *f, struct request *r, int salt)
{
    int32_t n = 0;
    for (int32_t i = 0; i < r->n_spans; i++) n += r->spans[i].n;
    if (n != r->n_output) snprintf(f->wrong, sizeof f->wrong, "%d tokens, %d in spans", r->n_output, n);
    if (r->n_output == 0) return;
    const struct request *want = f->want[strcmp(r->spans[0].version, "final") == 0][salt];
    n = r->spans[0].n < want->n_output ? r->spans[0].n : want->n_output;
    if (memcmp(r->output_ids, want->output_ids, (size_t)n * 4) != 0 ||
        memcmp(r->output_logprobs, want->output_logprobs, (size_t)n * 4) != 0)
        snprintf(f->wrong, sizeof f->wrong, "the first %d tokens, under %s, are not its own", n, r->spans[0].version);
    if (r->finish == FINISH_ABORT) {
        f->ended++;
        return;
    }
    f->lived++;
    f->spanned += r->n_spans > 1;
    if (r->n_output != r->max_new_tokens) snprintf(f->wrong, sizeof f->wrong, "%d tokens", r->n_output);
}

static void *ask_main(void *arg)
{
    struct fuzz *f = arg;
    while (!atomic_load(f->over)) {
        int salt = rand_r(&f->seed) % 4;
        struct request *r = start(f->g->e, make(salt, LEN, 1 + rand_r(&f->seed) % NEW));
        if (rand_r(&f->seed) % 5 == 0) {
            usleep((useconds_t)rand_r(&f->seed) % 5000);
            engine_abort_request(f->g->e, r);
        }
        wait_done(r);
        check_answer(f, r, salt);
        request_unref(r);
    }
    return NULL;
}

static void control_move(struct rig *g, unsigned *seed)
{
    struct err err = {0};
    struct update_options o = {.in_flight = (enum in_flight)(rand_r(seed) % 4), .drain_timeout_s = rand_r(seed) % 2 ? 0.01 : 0};
    bool to_final = rand_r(seed) % 2;
    o.weight_version = to_final ? "final" : "early";
    switch (rand_r(seed) % 8) {
    case 0: case 1: must(engine_pause(g->e, every_mode[rand_r(seed) % 3], &err), &err); break;
    case 2: case 3: case 4: go_on(g->e); break;
    case 5: (void)!engine_flush(g->e, rand_r(seed) % 2 ? 0.005 : 0, &err); break;
    case 6: must(engine_update(g->e, to_final ? DIR_FINAL : DIR_EARLY, &o, &res, &err), &err); break;
    case 7: if (rand_r(seed) % 4 == 0) engine_abort(g->e, "", true); break;
    }
    must(engine_check(g->e, &err), &err);
}

static void test_moves_at_random(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { N = 4 };
    struct rig g = {0};
    struct fuzz f[N] = {0};
    _Atomic bool over = false;
    unsigned seed = 4711;
    int lived = 0, ended = 0, spanned = 0;
    for (int v = 0; v < 2; v++) {
        rig_open(&g, v ? DIR_FINAL : DIR_EARLY, (struct engine_options){0});
        for (int s = 0; s < 4; s++) f[0].want[v][s] = run_one(g.e, make(s, LEN, NEW));
        rig_close(&g);
    }
    rig_open(&g, DIR_EARLY, (struct engine_options){.n_kv_pages = 48, .max_running = 3, .chunk_tokens = 16, .retract_every = 50});
    struct err err = {0};
    must(engine_relabel(g.e, "early", false, &err), &err);
    for (int i = 0; i < N; i++) {
        memcpy(f[i].want, f[0].want, sizeof f[0].want);
        f[i].g = &g;
        f[i].seed = 100u + (unsigned)i;
        f[i].over = &over;
        pthread_create(&f[i].t, NULL, ask_main, &f[i]);
    }
    for (int i = 0; i < TURNS; i++) {
        control_move(&g, &seed);
        usleep((useconds_t)rand_r(&seed) % 8000);
    }
    atomic_store(&over, true);
    go_on(g.e);
    for (int i = 0; i < N; i++) {
        pthread_join(f[i].t, NULL);
        if (f[i].wrong[0]) fail_msg("%s", f[i].wrong);
        lived += f[i].lived;
        ended += f[i].ended;
        spanned += f[i].spanned;
    }
    print_message("%d answers, %d of them of several spans, %d ended early\n", lived, spanned, ended);
    assert_true(lived > 0 && ended > 0 && spanned > 0);
    for (int v = 0; v < 2; v++)
        for (int s = 0; s < 4; s++) request_unref(f[0].want[v][s]);
    check_idle(g.e);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pause_keeps_bits), cmocka_unit_test(test_pause_abort),
        cmocka_unit_test(test_pause_upon_pause), cmocka_unit_test(test_held_requests),
        cmocka_unit_test(test_flush), cmocka_unit_test(test_update_retracts),
        cmocka_unit_test(test_update_continues), cmocka_unit_test(test_prompts_begin_again),
        cmocka_unit_test(test_update_while_paused), cmocka_unit_test(test_stop_answers_all),
        cmocka_unit_test(test_labels), cmocka_unit_test(test_refuse_older),
        cmocka_unit_test(test_moves_at_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
