/* api_pull.c - POST /pull_weights: the local checkpoint of a trainer's versions, brought up to one of them and staged. */
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/pool.h"
#include "engine/updates.h"
#include "server/internal.h"
#include "weight/checkpoint.h"
#include "weight/delta.h"
#include "weight/sync.h"
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define LOCK_S \
    600 /* another server of this host may copy a whole checkpoint into the same folder */
#define PULL_NICE 10 /* steps come first */

struct staged {
    bool done;
    struct update_result r;
    char why_not[600];
};

static err_t step(void *ctx, const char *what, struct err *e)
{
    const struct server *s = ctx;
    (void)what;
    return s->stopping ? err_set(e, ERR_STATE, "the server is stopping") : OK;
}

/* A delta is bound by memory's speed and serving goes on beside it. */
static int pull_threads(void)
{
    int n = pool_cpus() / 2;
    return n < 1 ? 1 : n > 4 ? 4 : n;
}

static err_t parse(const json_t *b, struct sync_options *o, struct err *e)
{
    o->target = -1;
    err_t rc = json_get_str(b, "local_checkpoint_dir", &o->local_dir, e);
    if (rc == OK) rc = json_get_str(b, "source_dir", &o->source_dir, e);
    if (rc == OK) rc = json_get_int(b, "target_version", 0, DELTA_VERSION_MAX, &o->target, e);
    if (rc != OK) return rc;
    const char *missing = o->local_dir == NULL    ? "local_checkpoint_dir"
                          : o->source_dir == NULL ? "source_dir"
                          : o->target < 0         ? "target_version"
                                                  : NULL;
    if (missing == NULL) {
        const struct update_record *u = NULL;
        if (strlen(o->local_dir) < sizeof u->source) return OK;
        return err_set(e, ERR_INPUT, "local_checkpoint_dir: %zu bytes; at most %zu are allowed",
                       strlen(o->local_dir), sizeof u->source - 1);
    }
    return err_set(
        e, ERR_INPUT,
        "%s: missing; local_checkpoint_dir (string), source_dir (string) and target_version "
        "(integer) are needed",
        missing);
}

/* What an earlier pull into this folder staged is of no use any more; true: there was such. */
static bool drop_older(struct server *s, const char *dir)
{
    struct update_status *st = mem_try(sizeof *st);
    if (st == NULL) return false;
    engine_update_status(s->engine, st);
    bool old = st->state == UPDATE_STAGED && strcmp(st->now.source, dir) == 0;
    mem_free(st);
    return old && engine_discard(s->engine, NULL) == OK;
}

/* So that the update that follows has only to commit.  It would do all of it itself: what is refused here is told
 * and no failure of the pull.  Version 0 is what was launched: no trainer loads it. */
static void stage(struct xchg *x, const struct sync_options *o, struct staged *g)
{
    struct err e = {0};
    const struct update_options u = {.flush_cache = true, .caller = x->caller};
    if (o->target == 0) {
        drop_older(x->s, o->local_dir);
        snprintf(g->why_not, sizeof g->why_not, "version 0 is not staged");
        return;
    }
    err_t rc = engine_stage(x->s->engine, o->local_dir, &u, &g->r, &e);
    if (rc == ERR_STATE && drop_older(x->s, o->local_dir))
        rc = engine_stage(x->s->engine, o->local_dir, &u, &g->r, &e);
    g->done = rc == OK;
    if (!g->done) snprintf(g->why_not, sizeof g->why_not, "%.590s", e.msg);
}

static err_t pull(struct xchg *x, struct sync_options *o, struct sync_result *r, struct staged *g,
                  struct err *e)
{
    struct sync *sync = NULL;
    char *launch = NULL;
    const id_t me = (id_t)gettid(); /* a thread of this call alone, and those it starts */
    (void)setpriority(PRIO_PROCESS, me, getpriority(PRIO_PROCESS, me) + PULL_NICE);
    o->threads = pull_threads();
    o->lock_s = LOCK_S;
    o->steps = (struct sync_steps){step, x->s};
    err_t rc = checkpoint_find(&launch, x->s->o.model_path, e);
    o->launch_dir = launch;
    if (rc == OK) rc = sync_begin(&sync, o, e);
    if (rc == OK) rc = sync_pull(sync, r, e);
    if (rc == OK) stage(x, o, g); /* under the folder's lock */
    sync_end(sync);
    mem_free(launch);
    return rc;
}

/* "version 5: 2 deltas, 31 tensors onto version 3" */
static void describe(char *out, size_t n, const struct sync_result *r)
{
    char from[64];
    if (r->seed == 0)
        snprintf(from, sizeof from, "the launch checkpoint");
    else if (r->seed > 0)
        snprintf(from, sizeof from, "the whole version %lld", (long long)r->seed);
    else
        snprintf(from, sizeof from, "version %lld", (long long)r->from);
    if (!r->changed)
        snprintf(out, n, "Success. Version %lld was there already.", (long long)r->version);
    else
        snprintf(out, n, "Success. Version %lld: %s and %d deltas with %zu tensors.",
                 (long long)r->version, from, r->deltas, r->tensors);
}

static void put_result(struct buf *b, const struct sync_result *r, const struct staged *g)
{
    buf_printf(b,
               ",\"version\":%lld,\"deltas\":%d,\"tensors\":%zu,\"bytes\":%llu,\"wire_bytes\":%llu,"
               "\"staged\":%s",
               (long long)r->version, r->deltas, r->tensors, (unsigned long long)r->bytes,
               (unsigned long long)r->wire_bytes, g->done ? "true" : "false");
    if (g->done) {
        buf_printf(b, ",\"stage_s\":%.6f", g->r.stage_s);
        return;
    }
    buf_puts(b, ",\"not_staged\":");
    put_str(b, g->why_not, strlen(g->why_not));
}

void api_pull_weights(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct sync_options o = {0};
    struct sync_result r = {0};
    struct staged g = {0};
    char message[1200];
    if (parse(b, &o, &e) != OK) {
        reply_err(x, &e);
        return;
    }
    int64_t t = clock_ns();
    err_t rc = pull(x, &o, &r, &g, &e);
    double seconds = (double)(clock_ns() - t) * 1e-9;
    if (rc == OK)
        describe(message, sizeof message, &r);
    else
        snprintf(message, sizeof message, "Failed to pull weights: %s", e.msg);
    log_line(rc == OK ? LOG_INFO : LOG_ERROR, "pull_weights %s <- %s: %s (%llu bytes, %.3f s%s%s)",
             o.local_dir, o.source_dir, message, (unsigned long long)r.bytes, seconds,
             g.done     ? "; staged"
             : rc == OK ? "; not staged: "
                        : "",
             g.why_not);
    x->status = rc == OK ? 200 : x->s->stopping ? 503 : 400;
    buf_printf(&x->out, "{\"success\":%s,\"message\":", rc == OK ? "true" : "false");
    put_str(&x->out, message, strlen(message));
    if (rc == OK) put_result(&x->out, &r, &g);
    buf_printf(&x->out, ",\"pull_s\":%.6f}", seconds);
}
