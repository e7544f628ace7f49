#include "engine/internal.h"

#include "base/clock.h"
#include "base/mem.h"
#include <stdio.h>
#include <string.h>

void engine_post(struct engine *e, struct msg *m)
{
    m->next = NULL;
    if (e->last)
        e->last->next = m;
    else
        e->first = m;
    e->last = m;
    pthread_cond_signal(&e->wake);
}

/* Numbers that others read. */
static void publish(struct engine *e)
{
    int64_t now = clock_ns(), window = now - e->window_began;
    if (window > 2000000000) {
        e->throughput = (double)e->window_tokens * 1e9 / (double)window;
        e->window_tokens = 0;
        e->window_began = now;
    }
    struct engine_stats *st = &e->stats;
    pthread_mutex_lock(&e->lock);
    st->running = e->s.n_running;
    st->waiting = e->s.n_waiting;
    st->retracted = e->s.n_retracted;
    st->paused = e->paused;
    st->held = e->paused || memory_held(e) ? e->s.n_running + e->s.n_waiting : 0;
    st->updates = e->commits;
    st->draining = e->s.draining;
    st->waiting_tokens = e->s.waiting_tokens;
    st->pages_total = pages_total(e->s.pages);
    st->pages_free = pages_available(e->s.pages);
    st->pages_cached = radix_evictable(e->s.tree);
    st->prompt_tokens = e->prompt_tokens + e->s.cached_tokens;
    st->cached_tokens = e->s.cached_tokens;
    st->output_tokens = e->output_tokens;
    st->steps = e->steps;
    st->retractions = e->s.retractions;
    st->finished = e->finished;
    st->aborted = e->aborted;
    st->gen_throughput = e->throughput;
    st->epoch = store_epoch(e->o.store);
    pthread_mutex_unlock(&e->lock);
    atomic_store(&e->beat, now);
}

void engine_answer(struct engine *e, struct msg *m, err_t rc, const char *text)
{
    publish(e); /* who is answered finds the numbers as the call left them */
    pthread_mutex_lock(&e->lock);
    m->rc = rc;
    if (rc != OK) (void)err_set(&m->err, rc, "%s", text);
    m->answered = true; /* from here on m may be gone */
    pthread_cond_broadcast(&e->answer);
    pthread_mutex_unlock(&e->lock);
}

err_t engine_call(struct engine *e, struct msg *m, struct err *err)
{
    pthread_mutex_lock(&e->lock);
    if (e->stopping) {
        pthread_mutex_unlock(&e->lock);
        return err_set(err, ERR_STATE, "the engine is stopping");
    }
    e->blocking++;
    m->t_sent = clock_ns();
    engine_post(e, m);
    while (!m->answered)
        pthread_cond_wait(&e->answer, &e->lock);
    e->blocking--;
    pthread_cond_broadcast(&e->answer);
    pthread_mutex_unlock(&e->lock);
    return m->rc == OK ? OK : err_set(err, m->rc, "%s", m->err.msg);
}

void engine_seq_free(struct seq *q)
{
    if (!q) return;
    output_release(q);
    mem_free(q->mask);
    mem_free(q->ids);
    mem_free(q->pages);
    mem_free(q);
}

/* The experts of what was returned, if all of it is still computed; false: out of memory. */
static bool take_experts(const struct engine *e, const struct seq *q)
{
    struct request *r = q->r;
    int32_t end = r->n_prompt + r->n_output - 1;
    if (!e->routing || !r->want_experts || q->ready < end) return true;
    int32_t n = end > r->experts_start ? end - r->experts_start : 0;
    uint8_t *rows = n ? routing_rows(e->routing, q->pages, r->experts_start, end) : NULL;
    if (n && !rows) return false;
    pthread_mutex_lock(&r->lock);
    r->experts = rows;
    r->n_expert_rows = n;
    r->has_experts = true;
    pthread_mutex_unlock(&r->lock);
    return true;
}

void engine_finish(struct engine *e, struct seq *q, finish_t f, int status, const char *message)
{
    struct request *r = q->r;
    char version[sizeof(r->weight_version)];
    flight_leave(q);
    if (q->queued)
        sched_unqueue(&e->s, q);
    else if (f != FINISH_ABORT)
        sched_share(&e->s, q);
    if (!take_experts(e, q) && f != FINISH_ABORT) {
        f = FINISH_ABORT;
        status = 503;
        message = "out of memory";
    }
    sched_release(&e->s, q);
    e->finished += f != FINISH_ABORT;
    e->aborted += f == FINISH_ABORT;
    pthread_mutex_lock(&e->lock);
    rid_remove(e, r);
    e->in_flight--;
    snprintf(version, sizeof(version), "%s", e->weight_version);
    pthread_mutex_unlock(&e->lock);
    /* Never both: a server thread asks for the names while it holds a request's lock. */
    pthread_mutex_lock(&r->lock);
    r->finish = f;
    r->finish_status = status;
    if (f == FINISH_ABORT) snprintf(r->finish_message, sizeof(r->finish_message), "%s", message);
    snprintf(r->weight_version, sizeof(r->weight_version), "%s", version);
    output_end(q);
    r->t_end = clock_ns();
    r->seq = NULL;
    r->done = true;
    pthread_mutex_unlock(&r->lock);
    engine_seq_free(q);
    if (r->notify) r->notify(r->ctx);
    request_unref(r);
}

static bool matches(const struct seq *q, const char *prefix, const struct request *one)
{
    if (one) return q->r == one;
    return !prefix || strncmp(q->r->rid, prefix, strlen(prefix)) == 0;
}

void engine_abort_where(struct engine *e, const char *prefix, const struct request *one)
{
    for (struct seq *q = e->s.head, *next; q; q = next) {
        next = q->next;
        if (matches(q, prefix, one)) engine_finish(e, q, FINISH_ABORT, 0, "Abort in waiting queue");
    }
    for (int32_t i = e->s.n_running - 1; i >= 0; i--)
        if (matches(e->s.running[i], prefix, one))
            engine_finish(e, e->s.running[i], FINISH_ABORT, 0, "Abort");
}

void engine_fail_all(struct engine *e, int status, const char *message)
{
    while (e->s.head)
        engine_finish(e, e->s.head, FINISH_ABORT, status, message);
    while (e->s.n_running > 0)
        engine_finish(e, e->s.running[e->s.n_running - 1], FINISH_ABORT, status, message);
}

static void handle(struct engine *e, struct msg *m)
{
    struct err err = {0};
    err_t rc;
    if (control_handle(e, m)) return;
    switch (m->kind) {
    case MSG_SUBMIT:
        m->r->seq->arrival = ++e->arrivals;
        sched_queue(&e->s, m->r->seq);
        mem_free(m); /* its reference is now the engine's */
        break;
    case MSG_ABORT:
        engine_abort_where(e, m->prefix, NULL);
        mem_free(m->prefix);
        mem_free(m);
        break;
    case MSG_ABORT_REQUEST:
        engine_abort_where(e, NULL, m->r);
        request_unref(m->r);
        mem_free(m);
        break;
    case MSG_CHECK:
        rc = sched_check(&e->s, &err);
        engine_answer(e, m, rc, err.msg);
        break;
    case MSG_BETWEEN_STEPS:
        rc = m->run(m->ctx, &err);
        engine_answer(e, m, rc, err.msg);
        break;
    default: break;
    }
}

static void sleep_until(struct engine *e, int64_t t) /* lock held */
{
    if (t == 0) {
        pthread_cond_wait(&e->wake, &e->lock);
        return;
    }
    struct timespec ts = {.tv_sec = t / 1000000000, .tv_nsec = t % 1000000000};
    (void)pthread_cond_timedwait(&e->wake, &e->lock, &ts);
}

/* Take the inbox; sleeps while there is nothing at all to do.  False: stopped and empty. */
static bool take_inbox(struct engine *e, bool busy)
{
    int64_t due = control_deadline(e);
    pthread_mutex_lock(&e->lock);
    while (!busy && !e->first && !e->stopping && (due == 0 || clock_ns() < due)) {
        atomic_store(&e->idle, true);
        pace_idle(&e->pace);
        sleep_until(e, due);
    }
    atomic_store(&e->idle, false);
    atomic_store(&e->beat, clock_ns());
    struct msg *m = e->first;
    e->first = e->last = NULL;
    bool stopping = e->stopping, late = stopping && clock_ns() >= e->stop_at;
    pthread_mutex_unlock(&e->lock);
    while (m) {
        struct msg *next = m->next;
        if (m->kind != MSG_SUBMIT) step_drain(e);
        handle(e, m);
        m = next;
    }
    if (late || (stopping && (e->paused || memory_held(e)))) {
        step_drain(e);
        engine_abort_where(e, NULL, NULL);
    }
    control_turn(e);
    updates_refuse_work(e); /* what was on its way when they were lost */
    return !(stopping && e->s.n_running == 0 && e->s.n_waiting == 0);
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    bool busy = false;
    (void)pthread_setname_np(pthread_self(), "engine"); /* for top and perf */
    while (take_inbox(e, busy)) {
        bool open = !e->paused && !memory_held(e);
        if (open && e->s.n_running + e->s.n_waiting > 0) pace_steps(&e->pace);
        busy = open && (step_run(e) || e->s.n_waiting > 0);
        publish(e);
    }
    step_drain(e); /* of requests that have ended */
    pace_idle(&e->pace);
    publish(e);
    return NULL;
}

static void clear_page(void *ctx, int32_t page)
{
    model_kv_clear(ctx, page);
}

static void release(struct engine *e)
{
    for (int i = 0; i < 2; i++)
        flight_free(&e->flights[i]);
    mem_free(e->load.counts);
    mem_free(e->profile.records);
    radix_free(e->s.tree);
    pages_free(e->s.pages);
    mem_free(e->s.running);
    routing_free(e->routing);
    mem_free(e->weight_version);
    mem_free(e->model_path);
    pace_destroy(&e->pace);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->answer);
    pthread_cond_destroy(&e->dog_wake);
    pthread_mutex_destroy(&e->lock);
    mem_free(e);
}

static err_t init_sched(struct engine *e, struct err *err)
{
    struct engine_options *o = &e->o;
    e->s = (struct sched){.page_tokens = KV_PAGE,
                          .max_running = o->max_running,
                          .chunk = o->chunk_tokens > 0 ? o->chunk_tokens : o->max_step_tokens,
                          .max_step = o->max_step_tokens,
                          .no_cache = o->no_prefix_cache};
    e->s.pages = pages_new(o->n_kv_pages, clear_page, o->model);
    if (e->s.pages) e->s.tree = radix_new(e->s.pages, KV_PAGE, UINT64_MAX);
    e->s.running = mem_try_array((size_t)o->max_running, sizeof(struct seq *));
    if (!e->s.tree || !e->s.running)
        return err_set(err, ERR_NOMEM, "no memory for %d KV pages", o->n_kv_pages);
    err_t rc = o->keep_experts ? routing_new(&e->routing, o->config, o->n_kv_pages, err) : OK;
    e->overlap = o->overlap == OVERLAP_ON ||
                 (o->overlap == OVERLAP_AUTO && (model_can(o->model) & MODEL_ASYNC));
    for (int i = 0; rc == OK && i < (e->overlap ? 2 : 1); i++)
        rc = flight_new(&e->flights[i], o, err);
    return rc;
}

err_t engine_new(struct engine **out, const struct engine_options *o, struct err *err)
{
    if (o->n_kv_pages <= 0 || o->max_running <= 0 || o->max_step_tokens <= 0)
        return err_set(err, ERR_INPUT,
                       "n_kv_pages %d, max_running %d and max_step_tokens %d must be positive",
                       o->n_kv_pages, o->max_running, o->max_step_tokens);
    if (o->keep_experts && !(model_can(o->model) & MODEL_EXPERTS))
        return err_set(err, ERR_UNSUPPORTED,
                       "this model does not tell which experts its tokens go to");
    struct engine *e = mem_alloc(sizeof(*e));
    e->o = *o;
    pthread_condattr_t mono;
    CHECK(pthread_condattr_init(&mono) == 0);
    CHECK(pthread_condattr_setclock(&mono, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_mutex_init(&e->lock, NULL) == 0);
    CHECK(pthread_cond_init(&e->wake, &mono) == 0);
    CHECK(pthread_cond_init(&e->answer, NULL) == 0);
    CHECK(pthread_cond_init(&e->dog_wake, &mono) == 0);
    pthread_condattr_destroy(&mono);
    pace_init(&e->pace);
    e->weight_version = mem_dup(o->weight_version ? o->weight_version : "default");
    e->model_path = mem_dup(o->model_path ? o->model_path : "");
    e->o.weight_version = e->o.model_path = NULL;
    err_t rc = init_sched(e, err);
    if (rc == OK) {
        e->window_began = clock_ns();
        publish(e);
        if (pthread_create(&e->thread, NULL, engine_main, e) != 0)
            rc = err_set(err, ERR_SYSTEM, "cannot start the engine thread");
    }
    if (rc != OK) {
        release(e);
        return rc;
    }
    if (o->watchdog_s > 0) e->has_dog = pthread_create(&e->dog, NULL, watchdog_main, e) == 0;
    ready_start(e);
    *out = e;
    return OK;
}

void engine_stop(struct engine *e, double drain_s)
{
    if (!e) return;
    if (!(drain_s > 0)) drain_s = 0;
    if (drain_s > 1e6) drain_s = 1e6;
    ready_stop(e);
    pthread_mutex_lock(&e->lock);
    e->stop_at = clock_ns() + (int64_t)(drain_s * 1e9);
    e->stopping = true;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    pthread_mutex_lock(&e->lock);
    struct msg *m = e->first; /* what came after the thread's last look */
    e->first = e->last = NULL;
    pthread_mutex_unlock(&e->lock);
    for (struct msg *next; m; m = next) {
        next = m->next;
        handle(e, m);
    }
    engine_abort_where(e, NULL, NULL);
    control_turn(e);
    engine_cancel(e);
    pthread_mutex_lock(&e->lock);
    while (e->blocking > 0)
        pthread_cond_wait(&e->answer, &e->lock);
    e->ended = true;
    pthread_cond_signal(&e->dog_wake);
    pthread_mutex_unlock(&e->lock);
    if (e->has_dog) pthread_join(e->dog, NULL);
    updates_release(e);
    release(e);
}

err_t engine_check(struct engine *e, struct err *err)
{
    struct msg m = {.kind = MSG_CHECK};
    return engine_call(e, &m, err);
}

err_t engine_between_steps(struct engine *e, err_t (*run)(void *ctx, struct err *e), void *ctx,
                           struct err *err)
{
    struct msg m = {.kind = MSG_BETWEEN_STEPS, .run = run, .ctx = ctx};
    return engine_call(e, &m, err);
}

const struct store *engine_store(const struct engine *e)
{
    return e->o.store;
}

static void post_abort(struct engine *e, char *prefix, struct request *r)
{
    struct msg *m = mem_alloc(sizeof(*m));
    m->kind = r ? MSG_ABORT_REQUEST : MSG_ABORT;
    m->prefix = prefix;
    m->r = r;
    pthread_mutex_lock(&e->lock);
    engine_post(e, m);
    pthread_mutex_unlock(&e->lock);
}

void engine_abort(struct engine *e, const char *rid_prefix, bool all)
{
    if (!all && (!rid_prefix || !rid_prefix[0])) return;
    post_abort(e, all ? NULL : mem_dup(rid_prefix), NULL);
}

void engine_abort_request(struct engine *e, struct request *r)
{
    request_ref(r);
    post_abort(e, NULL, r);
}

void engine_stat(struct engine *e, struct engine_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    enum update_state u = e->updates.state;
    out->updating = u == UPDATE_STAGING || u == UPDATE_DRAINING || u == UPDATE_COMMITTING;
    out->no_weights = e->no_weights || e->lost;
    out->released = e->released;
    bool inbox = e->first != NULL;
    pthread_mutex_unlock(&e->lock);
    bool idle = atomic_load(&e->idle) && !inbox;
    out->heartbeat_age_s = idle ? 0 : (double)(clock_ns() - atomic_load(&e->beat)) * 1e-9;
    if (out->heartbeat_age_s < 0) out->heartbeat_age_s = 0;
    out->stuck = out->heartbeat_age_s > 10;
}

static void copy_name(struct engine *e, char *const *name, char *out, size_t n)
{
    pthread_mutex_lock(&e->lock);
    snprintf(out, n, "%s", *name);
    pthread_mutex_unlock(&e->lock);
}

void engine_weight_version(struct engine *e, char *out, size_t n)
{
    copy_name(e, &e->weight_version, out, n);
}

void engine_model_path(struct engine *e, char *out, size_t n)
{
    copy_name(e, &e->model_path, out, n);
}
