/* api_pull.c - POST /pull_weights: the local checkpoint of a trainer's versions, brought up to one of them. */
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/internal.h"
#include "weight/checkpoint.h"
#include "weight/delta.h"
#include "weight/sync.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LOCK_S 600 /* another server of this host may copy a whole checkpoint into the same folder */

static err_t step(void *ctx, const char *what, struct err *e)
{
    const struct server *s = ctx;
    (void)what;
    return s->stopping ? err_set(e, ERR_STATE, "the server is stopping") : OK;
}

/* A delta is bound by memory's speed and serving goes on beside it. */
static int pull_threads(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN) / 2;
    return n < 1 ? 1 : n > 4 ? 4 : (int)n;
}

static err_t parse(const json_t *b, struct sync_options *o, struct err *e)
{
    o->target = -1;
    err_t rc = json_get_str(b, "local_checkpoint_dir", &o->local_dir, e);
    if (rc == OK) rc = json_get_str(b, "source_dir", &o->source_dir, e);
    if (rc == OK) rc = json_get_int(b, "target_version", 0, DELTA_VERSION_MAX, &o->target, e);
    if (rc != OK) return rc;
    const char *missing = o->local_dir == NULL ? "local_checkpoint_dir" : o->source_dir == NULL ? "source_dir"
                          : o->target < 0 ? "target_version" : NULL;
    if (missing == NULL) return OK;
    return err_set(e, ERR_INPUT, "%s: missing; local_checkpoint_dir (string), source_dir (string) and target_version "
                   "(integer) are needed", missing);
}

static err_t pull(struct server *s, struct sync_options *o, struct sync_result *r, struct err *e)
{
    struct sync *sync = NULL;
    char *launch = NULL;
    o->threads = pull_threads();
    o->lock_s = LOCK_S;
    o->steps = (struct sync_steps){step, s};
    err_t rc = checkpoint_find(&launch, s->o.model_path, e);
    o->launch_dir = launch;
    if (rc == OK) rc = sync_begin(&sync, o, e);
    if (rc == OK) rc = sync_pull(sync, r, e);
    sync_end(sync);
    mem_free(launch);
    return rc;
}

/* "version 5: 2 deltas, 31 tensors onto version 3" */
static void describe(char *out, size_t n, const struct sync_result *r)
{
    char from[64];
    if (r->seed == 0) snprintf(from, sizeof from, "the launch checkpoint");
    else if (r->seed > 0) snprintf(from, sizeof from, "the whole version %lld", (long long)r->seed);
    else snprintf(from, sizeof from, "version %lld", (long long)r->from);
    if (!r->changed) snprintf(out, n, "Success. Version %lld was there already.", (long long)r->version);
    else snprintf(out, n, "Success. Version %lld: %s and %d deltas with %zu tensors.", (long long)r->version, from,
                  r->deltas, r->tensors);
}

void api_pull_weights(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct sync_options o = {0};
    struct sync_result r = {0};
    char message[1200];
    if (parse(b, &o, &e) != OK) {
        reply_err(x, &e);
        return;
    }
    int64_t t = clock_ns();
    err_t rc = pull(x->s, &o, &r, &e);
    double seconds = (double)(clock_ns() - t) * 1e-9;
    if (rc == OK) describe(message, sizeof message, &r);
    else snprintf(message, sizeof message, "Failed to pull weights: %s", e.msg);
    log_line(rc == OK ? LOG_INFO : LOG_ERROR, "pull_weights %s <- %s: %s (%llu bytes, %.3f s)", o.local_dir, o.source_dir,
             message, (unsigned long long)r.bytes, seconds);
    x->status = rc == OK ? 200 : 400;
    buf_printf(&x->out, "{\"success\":%s,\"message\":", rc == OK ? "true" : "false");
    put_str(&x->out, message, strlen(message));
    if (rc == OK)
        buf_printf(&x->out, ",\"version\":%lld,\"deltas\":%d,\"tensors\":%zu,\"bytes\":%llu,\"wire_bytes\":%llu",
                   (long long)r.version, r.deltas, r.tensors, (unsigned long long)r.bytes,
                   (unsigned long long)r.wire_bytes);
    buf_printf(&x->out, ",\"pull_s\":%.6f}", seconds);
}
