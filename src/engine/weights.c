/* weights.c - engine_update: stage beside serving, then a short stop for the swap. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "weight/checkpoint.h"
#include <string.h>
#include <unistd.h>

static int loader_threads(const struct update_options *o)
{
    if (o->loader_threads > 0) return o->loader_threads;
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > 8 ? 8 : (int)n;
}

/* Engine thread, nothing running. */
void weights_commit(struct engine *e, struct msg *m)
{
    int64_t t0 = clock_ns();
    m->result->drain_s = (double)(t0 - m->t_sent) * 1e-9;
    m->result->num_paused = e->s.n_waiting;
    update_commit(m->update);
    pthread_mutex_lock(&e->lock);
    e->no_weights = e->stats.no_weights = false;
    pthread_mutex_unlock(&e->lock);
    /* Entries of the former epoch can never be hit again, flush_cache or not. */
    radix_clear(e->s.tree);
    m->result->epoch = store_epoch(e->o.store);
    pthread_mutex_lock(&e->lock);
    if (m->options->weight_version) {
        mem_free(e->weight_version);
        e->weight_version = mem_dup(m->options->weight_version);
    }
    if (m->path) {
        mem_free(e->model_path);
        e->model_path = mem_dup(m->path);
    }
    pthread_mutex_unlock(&e->lock);
    m->result->swap_s = (double)(clock_ns() - t0) * 1e-9;
    engine_answer(e, m, OK, NULL);
}

err_t weights_claim(struct engine *e, struct err *err)
{
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (e->stopping) rc = err_set(err, ERR_STATE, "the engine is stopping");
    else if (e->updating) rc = err_set(err, ERR_STATE, "another weight update is in progress");
    else if (e->released & MEMORY_WEIGHTS) rc = memory_refuse(e, err);
    else if (e->session)
        rc = err_set(err, ERR_STATE, "another weight update is in progress: a session of /begin_weight_update is open");
    if (rc == OK) {
        e->updating = true;
        e->blocking++;
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

void weights_release(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->updating = false;
    e->blocking--;
    pthread_cond_broadcast(&e->answer);
    pthread_mutex_unlock(&e->lock);
}

err_t weights_update(struct engine *e, const struct weights_source *from, const struct update_options *o,
                     struct update_result *res, struct err *err)
{
    struct update_result r = {0};
    struct update_progress progress = {0};
    struct update *u = NULL;
    int64_t t0 = clock_ns();
    err_t rc = update_begin(&u, e->o.store, err);
    if (rc == OK) rc = from->stage(e, from, u, loader_threads(o), &progress, err);
    if (rc == OK) rc = update_prepare(u, err);
    if (rc == OK) rc = model_check_update(e->o.model, u, err);
    r.bytes = atomic_load(&progress.bytes_done);
    r.stage_s = (double)(clock_ns() - t0) * 1e-9;
    if (rc == OK) {
        struct msg m = {.kind = MSG_COMMIT, .update = u, .options = o, .path = from->path, .result = &r};
        rc = engine_call(e, &m, err);
    }
    if (u) update_free(u);
    if (rc != OK) return rc;
    *res = r;
    log_line(LOG_INFO, "weights updated from %s: staged in %.3f s, drained in %.3f s, epoch %llu",
             from->name, r.stage_s, r.drain_s, (unsigned long long)r.epoch);
    return OK;
}

static err_t stage_folder(struct engine *e, const struct weights_source *from, struct update *u, int threads,
                          struct update_progress *progress, struct err *err)
{
    struct config next;
    char *dir = NULL;
    err_t rc = checkpoint_find(&dir, from->path, err);
    if (rc != OK) return rc;
    if ((rc = config_load(&next, dir, err)) == OK && (rc = config_same_forward(e->o.config, &next, err)) == OK)
        rc = update_stage_dir(u, dir, threads, progress, err);
    mem_free(dir);
    return rc;
}

err_t engine_update(struct engine *e, const char *model, const struct update_options *o,
                    struct update_result *res, struct err *err)
{
    const struct weights_source from = {.stage = stage_folder, .path = model, .name = model};
    err_t rc = weights_claim(e, err);
    if (rc != OK) return rc;
    rc = weights_update(e, &from, o, res, err);
    weights_release(e);
    return rc;
}
