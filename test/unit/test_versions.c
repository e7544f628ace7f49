/* Labels of weights, and moves at random: what an answer says of its versions is so. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "control_rig.h"

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
    assert_int_equal(engine_update(g.e, DIR_FINAL,
                                   &(struct update_options){.weight_version = longest}, &res, &err),
                     ERR_INPUT);
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
        {"default", "3", OK, NULL},
        {"3", "3", OK, NULL},
        {"3", "2", ERR_STATE, "older than 3"},
        {"9", "10", OK, NULL},
        {"10", "9", ERR_STATE, "older"},
        {"007", "7", OK, NULL},
        {"7", "0006", ERR_STATE, "older"},
        {"99999999999999999999999", "100000000000000000000000", OK, NULL},
        {"3", "x4", ERR_INPUT, "decimal number"},
        {"3", "-1", ERR_INPUT, "decimal number"},
        {"3", "", ERR_INPUT, "decimal number"},
        {"3", NULL, ERR_INPUT, "none"},
        {"v2", "3", ERR_INPUT, "v2"},
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
    struct request *want = run_one(g.e, make(1, LEN, NEW)),
                   *r = start_at(g.e, make(1, LEN, NEW), 1);
    wait_output(r, 1);
    struct later l = {
        .e = g.e, .dir = DIR_FINAL, .o = {.weight_version = "6", .refuse_older = true}};
    pthread_create(&l.t, NULL, update_main, &l);
    for (struct engine_stats s = {0}; !s.draining; usleep(100))
        engine_stat(g.e, &s);
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
    _Atomic int lived, ended, spanned;
    char wrong[200]; /* cmocka asserts in its own thread alone */
    pthread_t t;
};

/* A span of the first weights is the beginning of the answer that these alone give. */
static void check_answer(struct fuzz *f, struct request *r, int salt)
{
    int32_t n = 0;
    for (int32_t i = 0; i < r->n_spans; i++)
        n += r->spans[i].n;
    if (n != r->n_output)
        snprintf(f->wrong, sizeof f->wrong, "%d tokens, %d in spans", r->n_output, n);
    if (r->n_output == 0) return;
    const struct request *want = f->want[strcmp(r->spans[0].version, "final") == 0][salt];
    n = r->spans[0].n < want->n_output ? r->spans[0].n : want->n_output;
    if (memcmp(r->output_ids, want->output_ids, (size_t)n * 4) != 0 ||
        memcmp(r->output_logprobs, want->output_logprobs, (size_t)n * 4) != 0)
        snprintf(f->wrong, sizeof f->wrong, "the first %d tokens, under %s, are not its own", n,
                 r->spans[0].version);
    if (r->finish == FINISH_ABORT) {
        f->ended++;
        return;
    }
    f->lived++;
    f->spanned += r->n_spans > 1;
    if (r->n_output != r->max_new_tokens)
        snprintf(f->wrong, sizeof f->wrong, "%d tokens", r->n_output);
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
    struct update_options o = {.in_flight = (enum in_flight)(rand_r(seed) % 4),
                               .drain_timeout_s = rand_r(seed) % 2 ? 0.01 : 0};
    bool to_final = rand_r(seed) % 2;
    o.weight_version = to_final ? "final" : "early";
    switch (rand_r(seed) % 8) {
    case 0:
    case 1: must(engine_pause(g->e, every_mode[rand_r(seed) % 3], &err), &err); break;
    case 2:
    case 3:
    case 4: go_on(g->e); break;
    case 5: (void)!engine_flush(g->e, rand_r(seed) % 2 ? 0.005 : 0, &err); break;
    case 6:
        must(engine_update(g->e, to_final ? DIR_FINAL : DIR_EARLY, &o, &res, &err), &err);
        break;
    case 7:
        if (rand_r(seed) % 4 == 0) engine_abort(g->e, "", true);
        break;
    }
    must(engine_check(g->e, &err), &err);
}

/* Has each of the things that this test is about happened somewhere? */
static bool seen_all(const struct fuzz *f, int n)
{
    int lived = 0, ended = 0, spanned = 0;
    for (int i = 0; i < n; i++) {
        lived += f[i].lived;
        ended += f[i].ended;
        spanned += f[i].spanned;
    }
    return lived && ended && spanned;
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
        for (int s = 0; s < 4; s++)
            f[0].want[v][s] = run_one(g.e, make(s, LEN, NEW));
        rig_close(&g);
    }
    rig_open(&g, DIR_EARLY,
             (struct engine_options){
                 .n_kv_pages = 48, .max_running = 3, .chunk_tokens = 16, .retract_every = 50});
    struct err err = {0};
    must(engine_relabel(g.e, "early", false, &err), &err);
    for (int i = 0; i < N; i++) {
        memcpy(f[i].want, f[0].want, sizeof f[0].want);
        f[i].g = &g;
        f[i].seed = 100u + (unsigned)i;
        f[i].over = &over;
        pthread_create(&f[i].t, NULL, ask_main, &f[i]);
    }
    for (int i = 0; i < TURNS || (i < 20 * TURNS && !seen_all(f, N)); i++) {
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
    print_message("%d answers, %d of them of several spans, %d ended early\n", lived, spanned,
                  ended);
    assert_true(lived > 0 && ended > 0 && spanned > 0);
    for (int v = 0; v < 2; v++)
        for (int s = 0; s < 4; s++)
            request_unref(f[0].want[v][s]);
    check_idle(g.e);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_labels),
                                       cmocka_unit_test(test_refuse_older),
                                       cmocka_unit_test(test_moves_at_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
