/* updates.c - the calls and states of an update; updates_record.c keeps the record. */
#include "engine/updates.h"
#include "engine/internal.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "weight/checkpoint.h"
#include "weight/dummy.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOADERS_MOST 8
#define NO_WEIGHTS   "no valid weights: an update in place failed half-way; update again"

static int loader_threads(const struct engine *e, const struct update_options *o)
{
    int n = o->loader_threads > 0 ? o->loader_threads : e->o.loader_threads;
    if (n > 0) return n;
    int cpus = pool_cpus();
    return cpus > LOADERS_MOST ? LOADERS_MOST : cpus;
}

/* ---- states ---- */

void updates_enter(struct engine *e, enum update_state s) /* lock held */
{
    e->updates.state = s;
    e->updates.since = clock_ns();
    pthread_cond_broadcast(&e->answer);
}

err_t updates_refuse(const struct engine *e, struct err *err) /* lock held */
{
    const struct updates *u = &e->updates;
    if (e->stopping) return err_set(err, ERR_STATE, "the engine is stopping");
    if (u->state == UPDATE_IDLE) return err_set(err, ERR_STATE, "no weights are staged");
    if (u->state == UPDATE_SESSION)
        return err_set(
            err, ERR_STATE,
            "another weight update is in progress: a session of /begin_weight_update is open");
    if (u->state == UPDATE_STAGED)
        return err_set(err, ERR_STATE, "%s is staged: commit or discard it first", u->now.source);
    return err_set(err, ERR_STATE, "another weight update is in progress: %s is %s", u->now.source,
                   update_state_name(u->state));
}

err_t updates_claim(struct engine *e, unsigned from, enum update_state to, enum update_state *was,
                    struct err *err)
{
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    *was = e->updates.state;
    if (e->released & MEMORY_WEIGHTS) {
        rc = memory_refuse(e, err);
    } else if (e->stopping || !(from & STATE_BIT(*was))) {
        rc = updates_refuse(e, err);
    } else {
        e->blocking++;
        atomic_store(&e->updates.progress.cancel, false);
        updates_enter(e, to);
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

static void move(struct engine *e, enum update_state s)
{
    pthread_mutex_lock(&e->lock);
    updates_enter(e, s);
    pthread_mutex_unlock(&e->lock);
}

void updates_leave(struct engine *e, enum update_state s)
{
    pthread_mutex_lock(&e->lock);
    e->blocking--;
    updates_enter(e, s);
    pthread_mutex_unlock(&e->lock);
}

/* ---- staging ---- */

static err_t find_folder(char real[PATH_MAX], const char *model, struct err *err)
{
    char *dir = NULL;
    err_t rc = checkpoint_find(&dir, model, err);
    if (rc == OK && realpath(dir, real) == NULL)
        rc = err_set(err, ERR_NOTFOUND, "%s: no such folder", dir);
    mem_free(dir);
    return rc;
}

struct staging {
    struct engine *e;
    const struct update_source *from;
    const struct update_options *o;
    struct update *u;
    struct update_result r;
};

static err_t check_folder(struct engine *e, const char *model, struct err *err)
{
    struct updates *us = &e->updates;
    struct config next;
    err_t rc = find_folder(us->real, model, err);
    if (rc == OK) rc = checkpoint_stamp(us->stamp, us->real, err);
    if (rc == OK) rc = config_load(&next, us->real, err);
    return rc == OK ? config_same_forward(e->o.config, &next, err) : rc;
}

static err_t read_random(struct engine *e, struct update *u, uint64_t seed, int threads,
                         struct err *err)
{
    if (e->o.in_place) /* which reads twice */
        return err_set(err, ERR_STATE,
                       "random weights need memory for a second generation (--update-staging)");
    return dummy_stage(u, seed, threads, &e->updates.progress, err);
}

static err_t read_source(struct staging *s, struct err *err)
{
    struct engine *e = s->e;
    const struct update_source *from = s->from;
    struct updates *us = &e->updates;
    const struct stage_options so = {.n_threads = loader_threads(e, s->o),
                                     .manifest = s->o->manifest,
                                     .any_bf16 = s->o->any_bf16};
    err_t rc = from->path ? check_folder(e, from->path, err) : OK;
    if (rc == OK)
        rc = e->o.in_place ? update_begin_in_place(&s->u, e->o.store, err)
                           : update_begin(&s->u, e->o.store, err);
    if (rc != OK) return rc;
    rc = from->path      ? update_stage_folder(s->u, us->real, &so, &us->progress, err)
         : from->buckets ? update_stage_part(s->u, from->buckets->files, from->buckets->n, &so,
                                             &us->progress, err)
                         : read_random(e, s->u, from->seed, so.n_threads, err);
    if (rc == OK) rc = update_prepare(s->u, err);
    if (rc == OK) rc = model_check_update(e->o.model, s->u, err);
    if (rc == OK) update_checksum(s->u, s->r.checksum);
    if (rc == OK && from->path && e->o.compare)
        e->o.compare(e->o.compare_ctx, us->real, s->r.warning, sizeof s->r.warning);
    return rc;
}

struct apart {
    struct staging *s;
    struct err *err;
    err_t rc;
};

static void *apart_main(void *arg)
{
    struct apart *a = arg;
    (void)pthread_setname_np(pthread_self(), "stage");
    pace_yield(&a->s->e->pace);
    a->rc = read_source(a->s, a->err);
    return NULL;
}

/* What loaders do not share, the plan above all, yields as they do: in a thread that may become nice. */
static err_t read_apart(struct staging *s, struct err *err)
{
    struct apart a = {.s = s, .err = err};
    pthread_t t;
    if (!s->e->o.loaders_yield || pthread_create(&t, NULL, apart_main, &a) != 0)
        return read_source(s, err);
    pthread_join(t, NULL);
    return a.rc;
}

/* The state is STAGING, the caller's. */
static err_t stage(struct engine *e, const struct update_source *from,
                   const struct update_options *o, struct err *err)
{
    struct updates *us = &e->updates;
    struct staging s = {.e = e, .from = from, .o = o};
    struct err why = {0};
    int64_t t0 = clock_ns();
    us->path = from->path != NULL;
    us->progress.turn = e->o.loaders_yield ? pace_wait : NULL;
    us->progress.turn_ctx = &e->pace;
    record_begin(e, from->name, o);
    atomic_store(&us->progress.bytes_done, 0);
    atomic_store(&us->progress.bytes_total, 0);
    err_t rc = read_apart(&s, &why);
    s.r.stage_s = (double)(clock_ns() - t0) * 1e-9;
    s.r.bytes = atomic_load(&us->progress.bytes_done);
    record_staged(e, &s.r);
    if (rc == OK) {
        us->staged = s.u;
        us->result = s.r;
        us->any_bf16 = o->any_bf16;
        snprintf(us->manifest, sizeof us->manifest, "%s", o->manifest ? o->manifest : "");
        return OK;
    }
    update_free(s.u);
    record_end(e, atomic_load(&us->progress.cancel) ? "cancelled" : "failed", why.msg);
    return err_set(err, rc, "%s", why.msg);
}

/* Is what is staged this folder as it is now, looked at as closely as `o` asks? */
static bool is_staged(struct engine *e, const char *model, const struct update_options *o)
{
    const struct updates *us = &e->updates;
    char real[PATH_MAX], stamp[DIGEST_HEX];
    if (us->any_bf16 && (o == NULL || !o->any_bf16)) return false;
    if (o && o->manifest && strcmp(o->manifest, us->manifest) != 0) return false;
    return find_folder(real, model, NULL) == OK && strcmp(real, us->real) == 0 &&
           checkpoint_stamp(stamp, real, NULL) == OK && strcmp(stamp, us->stamp) == 0;
}

static void drop(struct engine *e, const char *outcome, const char *why)
{
    update_free(e->updates.staged);
    e->updates.staged = NULL;
    record_end(e, outcome, why);
}

err_t engine_stage(struct engine *e, const char *model, const struct update_options *o,
                   struct update_result *res, struct err *err)
{
    enum update_state was;
    err_t rc = engine_version_check(e, o, err);
    if (rc == OK)
        rc = updates_claim(e, STATE_BIT(UPDATE_IDLE) | STATE_BIT(UPDATE_STAGED), UPDATE_STAGING,
                           &was, err);
    if (rc != OK) return rc;
    bool again = was == UPDATE_STAGED;
    const struct update_source from = {.name = model, .path = model};
    if (!again)
        rc = stage(e, &from, o, err);
    else if (!is_staged(e, model, o))
        rc = err_set(err, ERR_STATE, "%s is staged: commit or discard it first",
                     e->updates.now.source);
    if (rc == OK) {
        *res = e->updates.result;
        res->was_staged = again;
    }
    updates_leave(e, rc == OK || again ? UPDATE_STAGED : UPDATE_IDLE);
    return rc;
}

/* ---- commit ---- */

static void beat(void *ctx)
{
    struct engine *e = ctx;
    atomic_store(&e->beat, clock_ns());
}

static err_t overwrite(struct engine *e, struct msg *m, struct err *err)
{
    struct update_progress *p = &e->updates.progress;
    p->ctx = e;
    p->tick = beat;
    err_t rc = update_overwrite(m->update, loader_threads(e, m->options), p, err);
    p->tick = NULL;
    return rc;
}

void updates_commit(struct engine *e, struct msg *m)
{
    int64_t t0 = clock_ns();
    struct err err = {0};
    err_t rc = OK;
    move(e, UPDATE_COMMITTING);
    m->result->drain_s = (double)(t0 - m->t_sent) * 1e-9;
    m->result->num_paused = e->s.n_running + e->s.n_waiting;
    if (!update_in_place(m->update))
        update_commit(m->update);
    else
        rc = overwrite(e, m, &err);
    if (rc != OK && !update_touched(m->update)) {
        engine_answer(e, m, rc, err.msg);
        return;
    }
    /* Entries of the former epoch can never be hit again, flush_cache or not. */
    radix_clear(e->s.tree);
    m->result->epoch = store_epoch(e->o.store);
    pthread_mutex_lock(&e->lock);
    e->no_weights = rc != OK;
    e->lost = false; /* released or ruined: no_weights tells */
    if (rc == OK && m->options->weight_version) {
        mem_free(e->weight_version);
        e->weight_version = mem_dup(m->options->weight_version);
    }
    if (rc == OK && m->path) {
        mem_free(e->model_path);
        e->model_path = mem_dup(m->path);
    }
    pthread_mutex_unlock(&e->lock);
    m->result->swap_s = (double)(clock_ns() - t0) * 1e-9;
    e->commits += rc == OK;
    updates_refuse_work(e);
    engine_answer(e, m, rc, err.msg);
}

void updates_refuse_work(struct engine *e)
{
    if (e->no_weights) engine_fail_all(e, err_http(ERR_BUSY), NO_WEIGHTS);
}

err_t updates_check_weights(const struct engine *e, struct err *err)
{
    return e->no_weights ? err_set(err, ERR_BUSY, NO_WEIGHTS) : OK;
}

/* The state is the caller's: the label is the commit's, else that of staging, into `version`. */
static struct update_options with_label(const struct engine *e, const struct update_options *o,
                                        char version[WEIGHT_VERSION_MAX + 1])
{
    struct update_options mine = *o;
    snprintf(version, WEIGHT_VERSION_MAX + 1, "%s", e->updates.now.version);
    if (mine.weight_version == NULL && version[0]) mine.weight_version = version;
    return mine;
}

/* The state is DRAINING, the caller's. */
static err_t commit(struct engine *e, const struct update_options *o, struct update_result *res,
                    struct err *err)
{
    struct updates *us = &e->updates;
    char version[WEIGHT_VERSION_MAX + 1], source[sizeof us->now.source];
    struct update_options mine = with_label(e, o, version);
    struct update_result r = us->result;
    struct err why = {0};
    snprintf(source, sizeof source, "%s", us->now.source);
    struct msg m = {.kind = MSG_COMMIT,
                    .update = us->staged,
                    .options = &mine,
                    .path = us->path ? source : NULL,
                    .result = &r};
    err_t rc = engine_call(e, &m, &why);
    bool ruined = rc != OK && update_touched(us->staged);
    record_committed(e, &r, &mine);
    drop(e, rc == OK ? "committed" : ruined ? "ruined" : "failed", why.msg);
    if (rc == OK)
        *res = r;
    else if (ruined)
        (void)err_set(err, rc, "%s; there are no valid weights now: update again", why.msg);
    else
        (void)err_set(err, rc, "%s", why.msg);
    return rc;
}

err_t engine_commit(struct engine *e, const char *model, const struct update_options *o,
                    struct update_result *res, struct err *err)
{
    enum update_state was;
    char real[PATH_MAX];
    err_t rc = model ? find_folder(real, model, err) : OK;
    if (rc == OK) rc = updates_claim(e, STATE_BIT(UPDATE_STAGED), UPDATE_DRAINING, &was, err);
    if (rc != OK) return rc;
    char version[WEIGHT_VERSION_MAX + 1];
    const struct update_options mine = with_label(e, o, version);
    if (model && strcmp(real, e->updates.real) != 0)
        rc = err_set(err, ERR_STATE, "%s is staged, not %s", e->updates.now.source, model);
    if (rc == OK) rc = engine_version_check(e, &mine, err);
    if (rc != OK) { /* it stays */
        updates_leave(e, UPDATE_STAGED);
        return rc;
    }
    rc = commit(e, o, res, err);
    updates_leave(e, UPDATE_IDLE);
    return rc;
}

err_t engine_update(struct engine *e, const char *model, const struct update_options *o,
                    struct update_result *res, struct err *err)
{
    enum update_state was;
    err_t rc = engine_version_check(e, o, err);
    if (rc == OK)
        rc = updates_claim(e, STATE_BIT(UPDATE_IDLE) | STATE_BIT(UPDATE_STAGED), UPDATE_STAGING,
                           &was, err);
    if (rc != OK) return rc;
    bool ready = was == UPDATE_STAGED && is_staged(e, model, o);
    if (was == UPDATE_STAGED && !ready) {
        char why[600];
        snprintf(why, sizeof why, "an update from %.500s came", model);
        drop(e, "replaced", why);
    }
    const struct update_source from = {.name = model, .path = model};
    if (!ready) rc = stage(e, &from, o, err);
    if (rc == OK) {
        move(e, UPDATE_DRAINING);
        rc = commit(e, o, res, err);
        if (rc == OK) res->was_staged = ready;
    }
    updates_leave(e, UPDATE_IDLE);
    return rc;
}

err_t updates_run(struct engine *e, const struct update_source *from,
                  const struct update_options *o, struct update_result *res, struct err *err)
{
    err_t rc = engine_version_check(e, o, err);
    if (rc == OK) rc = stage(e, from, o, err);
    if (rc == OK) {
        move(e, UPDATE_DRAINING);
        rc = commit(e, o, res, err);
    }
    return rc;
}

/* ---- the end of an update without a commit ---- */

err_t engine_discard(struct engine *e, struct err *err)
{
    struct updates *us = &e->updates;
    bool cancelled = false;
    pthread_mutex_lock(&e->lock);
    e->blocking++;
    while (us->state == UPDATE_STAGING) {
        cancelled = true;
        atomic_store(&us->progress.cancel, true);
        pthread_cond_wait(&e->answer, &e->lock);
    }
    bool staged = us->state == UPDATE_STAGED && !e->stopping;
    err_t rc = staged || (cancelled && us->state == UPDATE_IDLE) ? OK : updates_refuse(e, err);
    if (staged) updates_enter(e, UPDATE_STAGING); /* nobody else takes it */
    struct session *session = rc == OK ? NULL : session_detach(e);
    if (session) rc = OK;
    pthread_mutex_unlock(&e->lock);
    if (staged) drop(e, "discarded", "");
    session_free(session);
    pthread_mutex_lock(&e->lock);
    e->blocking--;
    if (staged) updates_enter(e, UPDATE_IDLE);
    pthread_cond_broadcast(&e->answer);
    pthread_mutex_unlock(&e->lock);
    return rc;
}

void engine_cancel(struct engine *e)
{
    atomic_store(&e->updates.progress.cancel, true); /* each staging begins with false */
}

void updates_release(struct engine *e)
{
    if (e->updates.staged) drop(e, "discarded", "the server stopped");
    session_free(e->session);
}
