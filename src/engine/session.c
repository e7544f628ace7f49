/*
 * session.c - updates from tensors: one call, or the buckets of a session.
 *
 * A session is a state of the updates (updates.h) in which nothing works between two calls, so that a stop need not
 * wait for it; it keeps other updates out and the buckets' bytes in memory.  Its end takes the session off the engine
 * and the state in one step.
 */
#include "engine/internal.h"

#include "base/mem.h"

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

static err_t update_from_buckets(struct engine *e, const struct buckets *b,
                                 const struct update_options *o, struct update_result *res,
                                 struct err *err)
{
    const struct update_source from = {.name = "tensors", .buckets = b};
    return updates_run(e, &from, o, res, err);
}

uint64_t engine_tensor_limit(const struct engine *e)
{
    return buckets_limit(e->o.store);
}

err_t engine_update_tensors(struct engine *e, void *bytes, size_t n, const struct update_options *o,
                            struct update_result *res, struct err *err)
{
    struct buckets b = {0};
    enum update_state was;
    err_t rc = buckets_add(&b, bytes, n, engine_tensor_limit(e), err);
    if (rc != OK) {
        mem_free(bytes);
        return rc;
    }
    rc = updates_claim(e, STATE_BIT(UPDATE_IDLE), UPDATE_STAGING, &was, err);
    if (rc == OK) {
        rc = update_from_buckets(e, &b, o, res, err);
        updates_leave(e, UPDATE_IDLE);
    }
    buckets_release(&b);
    return rc;
}

err_t engine_update_random(struct engine *e, uint64_t seed, const struct update_options *o,
                           struct update_result *res, struct err *err)
{
    const struct update_source from = {.name = "random numbers", .seed = seed};
    enum update_state was;
    err_t rc = updates_claim(e, STATE_BIT(UPDATE_IDLE), UPDATE_STAGING, &was, err);
    if (rc != OK) return rc;
    rc = updates_run(e, &from, o, res, err);
    updates_leave(e, UPDATE_IDLE);
    return rc;
}

static err_t no_session(struct err *err)
{
    return err_set(err, ERR_STATE, "no session is open: call /begin_weight_update");
}

/* Lock held: until no call adds to the session.  An add is short. */
static void wait_adds(struct engine *e)
{
    e->blocking++;
    while (e->session && e->session->busy)
        pthread_cond_wait(&e->answer, &e->lock);
    e->blocking--;
    pthread_cond_broadcast(&e->answer);
}

/* Lock held: may a session begin now? */
static err_t check_begin(const struct engine *e, bool restart, struct err *err)
{
    if (e->stopping) return err_set(err, ERR_STATE, "the engine is stopping");
    if (e->released & MEMORY_WEIGHTS) return memory_refuse(e, err);
    if (e->updates.state == UPDATE_IDLE) return OK;
    if (!e->session) return updates_refuse(e, err);
    if (restart) return OK;
    return err_set(err, ERR_STATE,
                   "a session is open already, with %zu tensors: end it, discard it, or send "
                   "\"restart\": true",
                   e->session->b.n_tensors);
}

err_t engine_session_begin(struct engine *e, bool restart, struct err *err)
{
    struct session *s = mem_try(sizeof *s), *old = NULL;
    if (!s) return err_set(err, ERR_NOMEM, "no memory for a session");
    pthread_mutex_lock(&e->lock);
    wait_adds(e);
    err_t rc = check_begin(e, restart, err);
    if (rc == OK) {
        old = e->session;
        e->session = s;
        updates_enter(e, UPDATE_SESSION);
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
    wait_adds(e);
    if (e->stopping)
        rc = err_set(err, ERR_STATE, "the engine is stopping");
    else if (!e->session)
        rc = no_session(err);
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

err_t engine_session_add(struct engine *e, void *bytes, size_t n, const struct update_options *o,
                         struct err *err)
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

struct session *session_detach(struct engine *e)
{
    wait_adds(e);
    struct session *s = e->session;
    if (!s) return NULL;
    e->session = NULL;
    updates_enter(e, UPDATE_IDLE);
    return s;
}

/* The session off the engine, and the state: STAGING. */
static err_t session_take(struct engine *e, struct session **out, struct err *err)
{
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (e->stopping)
        rc = err_set(err, ERR_STATE, "the engine is stopping");
    else if (!(*out = session_detach(e)))
        rc = no_session(err);
    else {
        updates_enter(e, UPDATE_STAGING);
        atomic_store(&e->updates.progress.cancel, false);
        e->blocking++;
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

err_t engine_session_end(struct engine *e, const struct update_options *o,
                         struct update_result *res, struct err *err)
{
    struct session *s = NULL;
    struct update_options all = *o;
    err_t rc = session_take(e, &s, err);
    if (rc != OK) return rc;
    if (!all.weight_version) all.weight_version = s->weight_version;
    if (s->abort_all) all.in_flight = IN_FLIGHT_ABORT;
    if (s->b.n == 0)
        rc = err_set(err, ERR_STATE, "the session has no tensors");
    else
        rc = update_from_buckets(e, &s->b, &all, res, err);
    session_free(s);
    updates_leave(e, UPDATE_IDLE);
    return rc;
}

err_t engine_session_end_at_continue(struct engine *e, const struct update_options *o,
                                     struct update_result *res, struct err *err)
{
    struct session *empty = NULL;
    pthread_mutex_lock(&e->lock);
    wait_adds(e);
    bool open = e->session != NULL;
    if (open && e->session->b.n == 0) empty = session_detach(e);
    pthread_mutex_unlock(&e->lock);
    session_free(empty);
    return open && !empty ? engine_session_end(e, o, res, err) : OK;
}
