/*
 * session.c - updates from tensors: one call, or the buckets of a session.
 *
 * An open session holds no claim: nothing of it works between two calls, so a stop need not wait for it.  What it
 * does is to keep other updates out (weights_claim) and the buckets' bytes in memory.  Its end takes it off the
 * engine and the claim in one step, so that nothing gets in between.
 */
#include "engine/internal.h"

#include "base/mem.h"
#include "weight/dummy.h"

struct session {
    struct buckets b;
    char *weight_version; /* NULL: none was given */
    bool abort_all;
    bool busy; /* a call adds to it */
};

void session_free(struct session *s)
{
    if (!s) return;
    buckets_release(&s->b);
    mem_free(s->weight_version);
    mem_free(s);
}

static err_t stage_buckets(struct engine *e, const struct weights_source *from, struct update *u, int threads,
                           struct update_progress *progress, struct err *err)
{
    (void)e;
    return update_stage_part(u, from->buckets->files, from->buckets->n, threads, progress, err);
}

static err_t update_from_buckets(struct engine *e, const struct buckets *b, const struct update_options *o,
                                 struct update_result *res, struct err *err)
{
    const struct weights_source from = {.stage = stage_buckets, .name = "tensors", .buckets = b};
    return weights_update(e, &from, o, res, err);
}

uint64_t engine_tensor_limit(const struct engine *e)
{
    return buckets_limit(e->o.store);
}

err_t engine_update_tensors(struct engine *e, void *bytes, size_t n, const struct update_options *o,
                            struct update_result *res, struct err *err)
{
    struct buckets b = {0};
    err_t rc = buckets_add(&b, bytes, n, engine_tensor_limit(e), err);
    if (rc != OK) {
        mem_free(bytes);
        return rc;
    }
    rc = weights_claim(e, err);
    if (rc == OK) {
        rc = update_from_buckets(e, &b, o, res, err);
        weights_release(e);
    }
    buckets_release(&b);
    return rc;
}

static err_t stage_random(struct engine *e, const struct weights_source *from, struct update *u, int threads,
                          struct update_progress *progress, struct err *err)
{
    (void)e;
    return dummy_stage(u, from->seed, threads, progress, err);
}

err_t engine_update_random(struct engine *e, uint64_t seed, const struct update_options *o,
                           struct update_result *res, struct err *err)
{
    const struct weights_source from = {.stage = stage_random, .name = "random numbers", .seed = seed};
    err_t rc = weights_claim(e, err);
    if (rc != OK) return rc;
    rc = weights_update(e, &from, o, res, err);
    weights_release(e);
    return rc;
}

static err_t no_session(struct err *err)
{
    return err_set(err, ERR_STATE, "no session is open: call /begin_weight_update");
}

static err_t busy_session(struct err *err)
{
    return err_set(err, ERR_STATE, "another call adds tensors to the session");
}

err_t engine_session_begin(struct engine *e, bool restart, struct err *err)
{
    struct session *s = mem_try(sizeof *s), *old = NULL;
    if (!s) return err_set(err, ERR_NOMEM, "no memory for a session");
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (e->stopping) rc = err_set(err, ERR_STATE, "the engine is stopping");
    else if (e->updating) rc = err_set(err, ERR_STATE, "another weight update is in progress");
    else if (e->released & MEMORY_WEIGHTS) rc = memory_refuse(e, err);
    else if (e->session && e->session->busy) rc = busy_session(err);
    else if (e->session && !restart)
        rc = err_set(err, ERR_STATE, "a session is open already, with %zu tensors: end it, discard it, or send "
                     "\"restart\": true", e->session->b.n_tensors);
    if (rc == OK) {
        old = e->session;
        e->session = s;
    }
    pthread_mutex_unlock(&e->lock);
    session_free(rc == OK ? old : s);
    return rc;
}

bool engine_session_open(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool open = e->session != NULL;
    pthread_mutex_unlock(&e->lock);
    return open;
}

/* The session for this caller alone until session_leave. */
static err_t session_enter(struct engine *e, struct session **out, struct err *err)
{
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (!e->session) rc = no_session(err);
    else if (e->session->busy) rc = busy_session(err);
    else {
        *out = e->session;
        e->session->busy = true;
        e->blocking++;
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

static void session_leave(struct engine *e, struct session *s)
{
    pthread_mutex_lock(&e->lock);
    s->busy = false;
    e->blocking--;
    pthread_cond_broadcast(&e->answer);
    pthread_mutex_unlock(&e->lock);
}

err_t engine_session_add(struct engine *e, void *bytes, size_t n, const struct update_options *o, struct err *err)
{
    struct session *s = NULL;
    char *version = o->weight_version ? mem_dup(o->weight_version) : NULL;
    err_t rc = session_enter(e, &s, err);
    if (rc == OK) {
        rc = buckets_add(&s->b, bytes, n, engine_tensor_limit(e), err);
        if (rc == OK) {
            bytes = NULL;
            s->abort_all = s->abort_all || o->in_flight == IN_FLIGHT_ABORT;
            if (version) {
                mem_free(s->weight_version);
                s->weight_version = version;
                version = NULL;
            }
        }
        session_leave(e, s);
    }
    mem_free(version);
    mem_free(bytes);
    return rc;
}

/* The session off the engine, and the claim. */
static err_t session_take(struct engine *e, struct session **out, struct err *err)
{
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (e->stopping) rc = err_set(err, ERR_STATE, "the engine is stopping");
    else if (!e->session) rc = no_session(err);
    else if (e->session->busy) rc = busy_session(err);
    else {
        *out = e->session;
        e->session = NULL;
        e->updating = true; /* no update can have it while a session is open */
        e->blocking++;
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

err_t engine_session_end(struct engine *e, const struct update_options *o, struct update_result *res,
                         struct err *err)
{
    struct session *s = NULL;
    struct update_options all = *o;
    err_t rc = session_take(e, &s, err);
    if (rc != OK) return rc;
    if (!all.weight_version) all.weight_version = s->weight_version;
    if (s->abort_all) all.in_flight = IN_FLIGHT_ABORT;
    if (s->b.n == 0) rc = err_set(err, ERR_STATE, "the session has no tensors");
    else rc = update_from_buckets(e, &s->b, &all, res, err);
    session_free(s);
    weights_release(e);
    return rc;
}

err_t engine_session_drop(struct engine *e, struct err *err)
{
    struct session *s = NULL;
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (!e->session) rc = no_session(err);
    else if (e->session->busy) rc = busy_session(err);
    else {
        s = e->session;
        e->session = NULL;
    }
    pthread_mutex_unlock(&e->lock);
    session_free(s);
    return rc;
}

err_t engine_session_end_at_continue(struct engine *e, struct update_result *res, struct err *err)
{
    const struct update_options o = {0};
    pthread_mutex_lock(&e->lock);
    bool open = e->session != NULL, empty = open && !e->session->busy && e->session->b.n == 0;
    pthread_mutex_unlock(&e->lock);
    if (empty) return engine_session_drop(e, err);
    return open ? engine_session_end(e, &o, res, err) : OK;
}
