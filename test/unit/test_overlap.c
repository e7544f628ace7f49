/* A step in flight while the host works (engine.h, Overlap): the same bits as without, nothing
 * looked at before it is collected, nothing of a token too many left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_rig.h"
#include "model/ops.h"
#include "text/grammar.h"

/* A model that lets nobody see a step's results before they are collected, on any device: until
 * then the rows hold nonsense. */
struct hidden {
    struct step st; /* as given, but its results go to memory of this */
    struct step_row *rows;
    struct sample_output *out;
    int16_t *experts;
};

struct late {
    struct model base;
    struct model *inner;
    struct hidden steps[2];
    uint32_t n_submitted, n_collected;
    int64_t behind;    /* steps submitted while one was in flight */
    int64_t draws;     /* rows that drew a token */
    size_t row;        /* of experts, a token */
    _Atomic bool fail; /* the step that is collected next has no memory */
};

static struct late *late_of(const struct model *m)
{
    return (struct late *)(uintptr_t)m;
}

static const char *late_isa(const struct model *m)
{
    return model_isa(late_of(m)->inner);
}

static unsigned late_can(const struct model *m)
{
    return model_can(late_of(m)->inner);
}

static void late_clear(struct model *m, int32_t page)
{
    model_kv_clear(late_of(m)->inner, page);
}

static err_t late_check_update(const struct model *m, const struct update *u, struct err *e)
{
    return model_check_update(late_of(m)->inner, u, e);
}

static void late_submit(struct model *m, const struct step *st)
{
    struct late *l = late_of(m);
    uint32_t in_flight = l->n_submitted - l->n_collected;
    assert_true(in_flight < 2);
    l->behind += in_flight;
    struct hidden *h = &l->steps[l->n_submitted++ % 2];
    size_t rows = (size_t)st->n_rows + 1, tokens = (size_t)st->n_tokens;
    h->st = *st;
    h->rows = mem_alloc(rows * sizeof *h->rows);
    h->out = mem_alloc(rows * sizeof *h->out);
    h->experts = st->experts ? mem_alloc(tokens * l->row * sizeof *h->experts) : NULL;
    for (int32_t i = 0; i < st->n_rows; i++) {
        h->rows[i] = (struct step_row){st->rows[i].token, st->rows[i].in, &h->out[i]};
        h->out[i] = *st->rows[i].out;
        st->rows[i].out->id = -7777;
        st->rows[i].out->finite = false; /* who reads it ends with 500 */
        l->draws += st->rows[i].in->target < 0;
    }
    h->st.rows = h->rows;
    h->st.experts = h->experts;
    model_submit(l->inner, &h->st);
    for (size_t i = 0; st->experts && i < tokens * l->row; i++)
        st->experts[i] = 0x7fff;
}

static err_t late_collect(struct model *m, const struct step *st, struct err *e)
{
    struct late *l = late_of(m);
    assert_true(l->n_submitted != l->n_collected);
    struct hidden *h = &l->steps[l->n_collected++ % 2];
    assert_int_equal(h->st.n_rows, st->n_rows);
    err_t rc = model_collect(l->inner, &h->st, e);
    for (int32_t i = 0; i < st->n_rows; i++)
        *st->rows[i].out = h->out[i];
    if (st->experts)
        memcpy(st->experts, h->experts, (size_t)st->n_tokens * l->row * sizeof *h->experts);
    if (rc == OK && atomic_exchange(&l->fail, false))
        rc = err_set(e, ERR_NOMEM, "out of memory, says the test");
    mem_free(h->rows);
    mem_free(h->out);
    mem_free(h->experts);
    return rc;
}

static const struct model_ops late_ops = {.isa = late_isa,
                                          .can = late_can,
                                          .check_update = late_check_update,
                                          .kv_clear = late_clear,
                                          .submit = late_submit,
                                          .collect = late_collect};

static struct model *wrap(struct model *inner)
{
    struct late *l = mem_alloc(sizeof *l);
    *l = (struct late){.base = {&late_ops}, .inner = inner};
    return &l->base;
}

static void open_late(struct rig *g, const char *dir, struct engine_options o)
{
    *g = (struct rig){.wrap = wrap};
    if (o.overlap == OVERLAP_AUTO) o.overlap = OVERLAP_ON;
    rig_open(g, dir, o);
    late_of(g->outer)->row = (size_t)g->c.n_layers * (size_t)g->c.top_k;
}

static void close_late(struct rig *g)
{
    struct late *l = late_of(g->outer);
    rig_close(g);
    assert_int_equal(l->n_submitted, l->n_collected);
    mem_free(l);
}

static struct tokenizer *tokenizer;
static struct grammar *grammar;

static void load_text(void)
{
    struct err e = {0};
    struct token_trie *trie;
    const char *pattern = "[a-c]+(-[0-9]{2,4})*";
    const struct grammar_spec spec = {.pattern = pattern, .n_pattern = strlen(pattern)};
    assert_int_equal(tokenizer_load(&tokenizer, DIR_FINAL "/tokenizer.json", &e), OK);
    assert_int_equal(token_trie_new(&trie, tokenizer, &e), OK);
    if (grammar_compile(&grammar, trie, &spec, &e) != OK) fail_msg("%s", e.msg);
    token_trie_unref(trie);
}

/* --- many requests of all kinds */

enum kind {
    PLAIN,
    STOP_ID,
    STOP_STRING,
    PENALTY,
    GRAMMAR,
    LEAST,
    SCORED,
    EXPERTS,
    ONE,
    NONE,
    KINDS
};
#ifdef __SANITIZE_THREAD__
enum { N = 2 * KINDS, PROMPT = 37, NEW = 40 };
#else
enum { N = 6 * KINDS, PROMPT = 37, NEW = 40 };
#endif

/* `plain`: the request of kind PLAIN with this prompt, once it has ended; NULL: it is not needed.
 */
static struct request *request_of(int i, const struct request *plain)
{
    int32_t salt = i / KINDS;
    struct request *r = make(salt, PROMPT + salt, NEW);
    enum kind kind = (enum kind)(i % KINDS);
    r->sp.seed = 42 + (uint64_t)salt;
    if (kind == STOP_ID || kind == LEAST) { /* an id of the middle; LEAST bars it so early */
        r->n_stop_ids = 1;
        r->stop_ids = mem_alloc(sizeof(int32_t));
        r->stop_ids[0] = plain->output_ids[NEW / 2 + salt % 5];
        if (kind == LEAST) r->min_new_tokens = NEW - 5;
    }
    if (kind == STOP_STRING) {
        size_t at = plain->text.len / 2;
        while (at > 0 && ((unsigned char)plain->text.data[at] & 0xC0) == 0x80)
            at--;
        r->n_stops = 1;
        r->stops = mem_alloc(sizeof *r->stops);
        r->stop_bytes = mem_alloc(sizeof *r->stop_bytes);
        r->stop_bytes[0] = plain->text.len - at < 6 ? plain->text.len - at : 6;
        r->stops[0] = mem_dup("123456");
        memcpy(r->stops[0], plain->text.data + at, r->stop_bytes[0]);
    }
    if (kind == PENALTY) {
        r->sp.frequency_penalty = 0.3f;
        r->sp.repetition_penalty = 1.1f;
    }
    if (kind == GRAMMAR) {
        grammar_ref(grammar);
        r->grammar = grammar;
        r->ignore_eos = false;
    }
    if (kind == SCORED) {
        r->logprob_start = 0;
        r->n_top = 3;
    }
    if (kind == EXPERTS) r->want_experts = true;
    if (kind == ONE || kind == NONE) r->max_new_tokens = kind == ONE;
    return r;
}

static void same_all(const struct request *a, const struct request *b, size_t row_bytes)
{
    same(a, b);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->matched_id, b->matched_id);
    assert_int_equal(a->text.len, b->text.len);
    if (a->text.len) assert_memory_equal(a->text.data, b->text.data, a->text.len);
    assert_int_equal(b->n_spans, b->n_output > 0);
    if (b->n_output > 0) assert_int_equal(b->spans[0].n, b->n_output);
    if (a->logprob_start >= 0)
        assert_memory_equal(a->prompt_logprobs + 1, b->prompt_logprobs + 1,
                            (size_t)(a->n_prompt - 1) * sizeof(float));
    assert_int_equal(a->has_experts, b->has_experts);
    assert_int_equal(a->n_expert_rows, b->n_expert_rows);
    if (a->has_experts)
        assert_memory_equal(a->experts, b->experts, (size_t)a->n_expert_rows * row_bytes);
}

static void run_all(struct engine *e, struct request *r[N], struct request *const want[N])
{
    struct err err = {0};
    for (int i = 0; i < N; i++) {
        r[i] = request_of(i, want ? want[i / KINDS * KINDS] : r[i / KINDS * KINDS]);
        if (engine_submit(e, r[i], &err) != OK) fail_msg("%s", err.msg);
        if (!want) wait_done(r[i]);
    }
    for (int i = 0; i < N; i++)
        wait_done(r[i]);
}

static void compare(struct request *const want[N], struct engine_options o, bool retracts)
{
    struct rig g;
    struct request *r[N];
    struct engine_stats s;
    int32_t retracted = 0, stopped = 0;
    int64_t tokens = 0;
    o.tokenizer = tokenizer;
    o.keep_experts = true;
    open_late(&g, DIR_FINAL, o);
    run_all(g.e, r, want);
    for (int i = 0; i < N; i++) {
        same_all(want[i], r[i],
                 (size_t)g.c.n_layers * (size_t)g.c.top_k * (g.c.n_experts > 256 ? 2 : 1));
        retracted += r[i]->num_retractions;
        stopped += r[i]->finish == FINISH_STOP_ID || r[i]->finish == FINISH_STOP_STRING;
        tokens += r[i]->n_output;
        request_unref(r[i]);
    }
    check_idle(g.e);
    engine_stat(g.e, &s);
    assert_int_equal(s.output_tokens, tokens);
    assert_int_equal(s.finished, N);
    assert_true(stopped >= N / KINDS * 2);
    assert_true(!retracts || retracted > 0);
    struct late *l = late_of(g.outer);
    if (o.overlap == OVERLAP_OFF)
        assert_int_equal(l->behind, 0);
    else
        assert_true(l->behind > 0);
    close_late(&g);
}

static void test_same_bits(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g;
    struct request *want[N] = {0};
    load_text();
    open_late(&g, DIR_FINAL,
              (struct engine_options){.overlap = OVERLAP_OFF,
                                      .tokenizer = tokenizer,
                                      .keep_experts = true,
                                      .no_prefix_cache = true});
    run_all(g.e, want, NULL); /* one after the other */
    close_late(&g);
    compare(want, (struct engine_options){0}, false);
    compare(want, (struct engine_options){.overlap = OVERLAP_OFF}, false);
    compare(want, (struct engine_options){.chunk_tokens = 7, .max_running = 5}, false);
    compare(want, (struct engine_options){.retract_every = 5}, true);
    compare(want, (struct engine_options){.n_kv_pages = 13, .no_prefix_cache = true}, true);
    compare(want,
            (struct engine_options){.n_kv_pages = 13, .chunk_tokens = 16, .max_step_tokens = 48},
            false);
    for (int i = 0; i < N; i++)
        request_unref(want[i]);
    grammar_unref(grammar);
    tokenizer_free(tokenizer);
}

/* --- one at a time: which steps follow, and what the last one leaves */

/* Steps behind another, and tokens drawn, of one request that ends as it is told. */
static void alone(struct request *r, int64_t behind, int64_t draws)
{
    struct rig g;
    struct engine_stats s;
    open_late(&g, DIR_FINAL, (struct engine_options){.tokenizer = tokenizer});
    run_one(g.e, r);
    check_idle(g.e);
    engine_stat(g.e, &s);
    assert_int_equal(s.output_tokens, r->n_output);
    assert_int_equal(late_of(g.outer)->behind, behind);
    assert_int_equal(late_of(g.outer)->draws, draws);
    request_unref(r);
    close_late(&g);
}

static void test_who_follows(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g;
    load_text();
    open_late(&g, DIR_FINAL, (struct engine_options){.tokenizer = tokenizer});
    struct request *plain = run_one(g.e, request_of(PLAIN, NULL));
    close_late(&g);
    int32_t first = 0, stop = plain->output_ids[NEW / 2];
    while (plain->output_ids[first] != stop)
        first++;
    alone(request_of(PLAIN, NULL), NEW - 1, NEW); /* its length is known: nothing too many */
    alone(request_of(ONE, NULL), 0, 1);
    alone(request_of(NONE, NULL), 0, 0);
    alone(request_of(STOP_ID, plain), first + 1, first + 2); /* one too many */
    alone(request_of(PENALTY, NULL), 0, NEW);
    struct request *bound = request_of(GRAMMAR, NULL);
    bound->max_new_tokens = 3;
    bound->min_new_tokens = 3;
    alone(bound, 0, 3);
    request_unref(plain);
    grammar_unref(grammar);
    tokenizer_free(tokenizer);
}

/* What a request that stopped has in the tree is what it would have without a step in flight:
 * nothing of the token too many.  A prompt of one page more than it left finds whole pages of its
 * ids and no more. */
static void test_tree_after_stop(void **state)
{
    (void)state;
    if (no_model()) skip();
    for (int32_t len = 2 * KV_PAGE - 2; len <= 2 * KV_PAGE + 1; len++) {
        int32_t cached[2], pages[2];
        for (int on = 0; on < 2; on++) {
            struct rig g;
            struct engine_stats s;
            open_late(&g, DIR_FINAL,
                      (struct engine_options){.overlap = on ? OVERLAP_ON : OVERLAP_OFF});
            struct request *plain = run_one(g.e, make(3, len, 8));
            assert_int_equal(engine_flush(g.e, 0, NULL), OK);
            struct request *stops = make(3, len, 8);
            stops->n_stop_ids = 1;
            stops->stop_ids = mem_alloc(sizeof(int32_t));
            stops->stop_ids[0] =
                plain->output_ids[0]; /* at its first token, or later if min_new_tokens says */
            run_one(g.e, stops);
            assert_int_equal(stops->finish, FINISH_STOP_ID);
            assert_int_equal(engine_check(g.e, NULL), OK);
            engine_stat(g.e, &s);
            pages[on] = s.pages_cached;
            struct request *next = make(3, len, 1);
            next->prompt = mem_retry(next->prompt, (size_t)len * 4, (size_t)(len + 20) * 4);
            next->prompt[len] = plain->output_ids[0];
            for (int32_t i = 1; i < 20; i++)
                next->prompt[len + i] = 5;
            next->n_prompt = len + 20;
            run_one(g.e, next);
            cached[on] = next->cached_tokens;
            assert_int_equal(cached[on], len / KV_PAGE * KV_PAGE);
            request_unref(plain);
            request_unref(stops);
            request_unref(next);
            check_idle(g.e);
            close_late(&g);
        }
        assert_int_equal(cached[0], cached[1]);
        assert_int_equal(pages[0], pages[1]);
    }
}

/* Aborts, pauses and updates at any moment find whole requests. */
static void test_random_control(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { ROUNDS = 12, AT_ONCE = 8 };
    struct rig g;
    struct err err = {0};
    struct update_result res;
    unsigned seed = 17;
    open_late(&g, DIR_FINAL,
              (struct engine_options){.chunk_tokens = 24, .n_kv_pages = 40, .max_running = 6});
    struct request *want[3];
    for (int i = 0; i < 3; i++)
        want[i] = run_one(g.e, make(i, 50, 30));
    for (int round = 0; round < ROUNDS; round++) {
        struct request *r[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            r[i] = make(i % 3, 50, 30);
            assert_int_equal(engine_submit(g.e, r[i], &err), OK);
        }
        usleep((useconds_t)rand_r(&seed) % 8000);
        switch (round % 4) {
        case 0: engine_abort_request(g.e, r[rand_r(&seed) % AT_ONCE]); break;
        case 1:
            assert_int_equal(
                engine_pause(g.e, rand_r(&seed) % 2 ? PAUSE_RETRACT : PAUSE_IN_PLACE, &err), OK);
            assert_int_equal(engine_check(g.e, &err), OK);
            assert_int_equal(engine_continue(g.e, &err), OK);
            break;
        case 2: /* the same weights under another label */
            if (engine_update(g.e, DIR_FINAL,
                              &(struct update_options){.in_flight = IN_FLIGHT_RETRACT}, &res,
                              &err) != OK)
                fail_msg("%s", err.msg);
            break;
        default:
            if (engine_update(g.e, DIR_FINAL,
                              &(struct update_options){.in_flight = IN_FLIGHT_DRAIN}, &res,
                              &err) != OK)
                fail_msg("%s", err.msg);
        }
        assert_int_equal(engine_check(g.e, &err), OK);
        for (int i = 0; i < AT_ONCE; i++) {
            wait_done(r[i]);
            if (r[i]->finish != FINISH_ABORT) same(want[i % 3], r[i]);
            request_unref(r[i]);
        }
    }
    check_idle(g.e);
    assert_true(late_of(g.outer)->behind > 0);
    for (int i = 0; i < 3; i++)
        request_unref(want[i]);
    close_late(&g);
}

/* A step that fails takes its own requests with it, in the step behind it too, and nothing else. */
static void test_step_fails(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g;
    struct err err = {0};
    struct request *r[6];
    open_late(&g, DIR_FINAL, (struct engine_options){.max_running = 4});
    struct request *want = run_one(g.e, make(5, 20, 12));
    for (int i = 0; i < 6; i++)
        assert_int_equal(engine_submit(g.e, r[i] = make(i, 20, i < 4 ? 2000 : 12), &err), OK);
    wait_running(g.e, 4);
    late_of(g.outer)->fail = true;
    for (int i = 0; i < 6; i++) {
        wait_done(r[i]);
        assert_int_equal(r[i]->finish, i < 4 ? FINISH_ABORT : FINISH_LENGTH);
        if (i < 4) assert_int_equal(r[i]->finish_status, 503);
        if (i == 5) same(want, r[i]);
        request_unref(r[i]);
    }
    request_unref(want);
    check_idle(g.e);
    close_late(&g);
}

/* Stopped in the middle, with steps in flight, it ends whole. */
static void test_stop(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct err err = {0};
    for (int round = 0; round < 5; round++) {
        struct rig g;
        struct request *r[4];
        open_late(&g, DIR_FINAL, (struct engine_options){0});
        for (int i = 0; i < 4; i++)
            assert_int_equal(engine_submit(g.e, r[i] = make(i, 20, 2000), &err), OK);
        wait_running(g.e, 4);
        usleep((useconds_t)round * 1500);
        close_late(&g);
        for (int i = 0; i < 4; i++) {
            assert_true(r[i]->done);
            assert_int_equal(r[i]->finish, FINISH_ABORT);
            request_unref(r[i]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),       cmocka_unit_test(test_who_follows),
        cmocka_unit_test(test_tree_after_stop), cmocka_unit_test(test_random_control),
        cmocka_unit_test(test_step_fails),      cmocka_unit_test(test_stop)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
