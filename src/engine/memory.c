/* memory.c - memory given back to the system and taken again, with what that means for requests. */
#include "engine/internal.h"

#include "base/log.h"
#include <stdio.h>
#include <string.h>

static const struct {
    enum memory_tag tag;
    const char *name;
} tag_names[] = {
    {MEMORY_WEIGHTS, "weights"}, {MEMORY_KV, "kv_cache"}, {MEMORY_GRAPHS, "cuda_graph"}};

void memory_tags_name(char out[48], unsigned tags)
{
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < sizeof tag_names / sizeof tag_names[0]; i++)
        if (tags & tag_names[i].tag)
            n += (size_t)snprintf(out + n, 48 - n, "%s%s", n ? ", " : "", tag_names[i].name);
}

err_t memory_refuse(const struct engine *e, struct err *err)
{
    char names[48];
    memory_tags_name(names, e->released);
    if (*names)
        return err_set(err, ERR_BUSY, "memory is released (%s): call /resume_memory_occupation",
                       names);
    return err_set(
        err, ERR_BUSY,
        "no valid weights: they were released, and no update of all of them has come since");
}

struct change {
    struct engine *e;
    unsigned tags;
};

static err_t check_idle(const struct engine *e, struct err *err)
{
    if (e->s.n_running)
        return err_set(
            err, ERR_STATE,
            "memory cannot be released: %d requests hold KV; wait, or abort or retract them",
            e->s.n_running);
    if (e->s.n_waiting && !e->paused)
        return err_set(err, ERR_STATE,
                       "memory cannot be released: %d requests wait; let them end, or pause",
                       e->s.n_waiting);
    return OK;
}

static void set_released(struct engine *e, unsigned tag, bool released)
{
    pthread_mutex_lock(&e->lock);
    if (released)
        e->released |= tag;
    else
        e->released &= ~tag;
    if (tag == MEMORY_WEIGHTS) e->lost = store_lost(e->o.store);
    pthread_mutex_unlock(&e->lock);
}

static err_t release_weights(struct engine *e, struct err *err)
{
    pthread_mutex_lock(&e->lock);
    enum update_state state = e->updates.state;
    if (state == UPDATE_IDLE) e->released |= MEMORY_WEIGHTS; /* from here on no update is let in */
    pthread_mutex_unlock(&e->lock);
    if (state != UPDATE_IDLE)
        return err_set(err, ERR_STATE, "weights cannot be released: a weight update is open (%s)",
                       update_state_name(state));
    err_t rc = store_release(e->o.store, e->o.weights_backup, err);
    set_released(e, MEMORY_WEIGHTS, rc == OK);
    return rc;
}

/* Graphs hold no memory of their own here: their tag is a state and no more. */
static err_t release_now(void *ctx, struct err *err)
{
    const struct change *c = ctx;
    struct engine *e = c->e;
    unsigned tags = c->tags & ~e->released;
    err_t rc = tags ? check_idle(e, err) : OK;
    if (rc == OK && (tags & MEMORY_WEIGHTS)) rc = release_weights(e, err);
    if (rc == OK && (tags & MEMORY_KV)) {
        radix_clear(e->s.tree);
        rc = model_kv_release(e->o.model, err);
        if (rc == OK) set_released(e, MEMORY_KV, true);
    }
    if (rc == OK && (tags & MEMORY_GRAPHS)) set_released(e, MEMORY_GRAPHS, true);
    return rc;
}

static err_t resume_now(void *ctx, struct err *err)
{
    const struct change *c = ctx;
    struct engine *e = c->e;
    unsigned tags = c->tags & e->released;
    err_t rc = OK;
    if (tags & MEMORY_WEIGHTS) {
        rc = store_resume(e->o.store, err);
        if (rc == OK) set_released(e, MEMORY_WEIGHTS, false);
    }
    if (rc == OK && (tags & MEMORY_KV)) {
        rc = model_kv_resume(e->o.model, err);
        if (rc == OK) set_released(e, MEMORY_KV, false);
    }
    if (rc == OK && (tags & MEMORY_GRAPHS)) set_released(e, MEMORY_GRAPHS, false);
    return rc;
}

static err_t change(struct engine *e, unsigned tags, err_t (*now)(void *ctx, struct err *err),
                    const char *what, struct err *err)
{
    struct change c = {e, tags};
    char names[48];
    if (!e->o.memory_saver)
        return err_set(err, ERR_STATE,
                       "memory is not released or resumed by this server: it was started without "
                       "--enable-memory-saver");
    err_t rc = engine_between_steps(e, now, &c, err);
    memory_tags_name(names, tags);
    if (rc == OK) log_line(LOG_INFO, "memory %s: %s", what, names);
    return rc;
}

err_t engine_release(struct engine *e, unsigned tags, struct err *err)
{
    return change(e, tags, release_now, "released", err);
}

err_t engine_resume(struct engine *e, unsigned tags, struct err *err)
{
    return change(e, tags, resume_now, "resumed", err);
}
