/* Pause, continue, flush, labels and updates with requests in flight: one outcome each (docs/control.md), and
 * whatever happened to a request, its bits are those of the weights that its spans name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "control_rig.h"

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
    for (int i = 0; i < N; i++)
        want[i] = run_one(g.e, make(i, LEN, NEW));
    for (int m = 0; m < 2; m++) {
        for (int i = 0; i < N; i++)
            r[i] = start_at(g.e, make(i, LEN, NEW), AT);
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
    for (int i = 0; i < N; i++)
        request_unref(want[i]);
    rig_close(&g);
}

static void test_pause_abort(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    rig_open(&g, DIR_FINAL, (struct engine_options){.max_running = 1});
    struct request *want = run_one(g.e, make(1, LEN, NEW));
    struct request *r = start_at(g.e, make(1, LEN, LONG), 3),
                   *queued = start(g.e, make(2, LEN, LONG));
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
        for (int i = 0; i < 2; i++)
            r[i] = start_at(g.e, make(i, LEN, LONG), 2);
        wait_output(r[1], 2);
        pause_in(g.e, every_mode[m]);
        stat_when(g.e, m == 2 ? 2 : 0, m == 2 ? 0 : 2);
        for (int i = 2; i < 4; i++)
            r[i] = start(g.e, make(i, LEN, 5));
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

static void *flush_main(void *arg)
{
    struct later *l = arg;
    int64_t t = clock_ns();
    l->rc = engine_flush(l->e, l->timeout, &l->err);
    l->took = clock_ns() - t;
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
        for (int i = 0; i < 3; i++)
            r[i] = start_at(g.e, make(i, LEN, NEW), 5);
        wait_output(r[2], 5);
        struct later l = {.e = g.e, .dir = DIR_FINAL, .o = {.weight_version = "v1"}};
        if (how == 0) l.o.in_flight = IN_FLIGHT_RETRACT;
        if (how == 1) pause_in(g.e, PAUSE_RETRACT);
        if (how == 2) l.o.drain_timeout_s = 0.02;
        pthread_create(&l.t, NULL, update_main, &l);
        if (how == 3) {
            for (struct engine_stats s = {0}; !s.draining; usleep(100))
                engine_stat(g.e, &s);
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
    for (int32_t i = 0; i < PAGES; i++)
        model_kv_clear(g->model, pages[i] = i);
    memcpy(ids, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    r->output_ids = mem_alloc((size_t)total * sizeof(int32_t));
    r->output_logprobs = mem_alloc((size_t)total * sizeof(float));
    for (int32_t i = 0; i < 4096; i++)
        pos[i] = i;
    for (int32_t at = 0, end = r->n_prompt; r->n_output < total; at = end++) {
        if (r->n_output == n) update_to(g->e, DIR_FINAL, (struct update_options){0});
        struct sample_input in = {.target = -1,
                                  .params = &r->sp,
                                  .output_ids = r->output_ids,
                                  .n_output = r->n_output,
                                  .position = (uint64_t)end};
        static struct sample_output out;
        struct step_row row = {.token = end - at - 1, .in = &in, .out = &out};
        struct step_seq seq = {pages, PAGES};
        struct step st = {.n_tokens = end - at,
                          .ids = ids + at,
                          .pos = pos + at,
                          .seq = of,
                          .n_seqs = 1,
                          .seqs = &seq,
                          .n_rows = 1,
                          .rows = &row};
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
    for (int how = 0; how < 3;
         how++) { /* by option; by a pause in place; that, and retracted later */
        struct rig g = {0}, hand = {0};
        struct err err = {0};
        rig_open(&g, DIR_EARLY, (struct engine_options){0});
        rig_open(&hand, DIR_EARLY, (struct engine_options){0});
        struct request *twin = start_at(g.e, make(1, LEN, NEW), AT),
                       *r = start(g.e, make(1, LEN, NEW));
        wait_output(r, AT); /* the two share pages of the tree */
        if (how == 0)
            update_to(
                g.e, DIR_FINAL,
                (struct update_options){.weight_version = "v1", .in_flight = IN_FLIGHT_CONTINUE});
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
        for (int again = 0; again < 2;
             again++) { /* the prompt and all that followed, cold or hit: as fresh */
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
            update_to(g.e, (m + f) % 2 ? DIR_EARLY : DIR_FINAL,
                      (struct update_options){.in_flight = (enum in_flight)f});
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
        for (struct engine_stats s = {0}; !s.updating; usleep(100))
            engine_stat(g.e, &s);
        assert_int_equal(engine_update(g.e, DIR_FINAL, &(struct update_options){0}, &res, &err),
                         ERR_STATE);
        assert_non_null(strstr(err.msg, "another weight update"));
        for (struct engine_stats s = {0}; !s.draining; usleep(100))
            engine_stat(g.e, &s);
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
            for (struct engine_stats s = {0}; how == 0 ? !s.draining : !s.updating; usleep(100))
                engine_stat(g.e, &s);
        }
        rig_close(&g); /* how 2: while it is staged, most likely */
        pthread_join(f.t, NULL);
        if (how != 1) pthread_join(u.t, NULL);
        assert_true(r->done);
        request_unref(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_pause_keeps_bits),
                                       cmocka_unit_test(test_pause_abort),
                                       cmocka_unit_test(test_pause_upon_pause),
                                       cmocka_unit_test(test_held_requests),
                                       cmocka_unit_test(test_flush),
                                       cmocka_unit_test(test_update_retracts),
                                       cmocka_unit_test(test_update_continues),
                                       cmocka_unit_test(test_prompts_begin_again),
                                       cmocka_unit_test(test_update_while_paused),
                                       cmocka_unit_test(test_stop_answers_all)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
