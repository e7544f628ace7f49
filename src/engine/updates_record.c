/* updates_record.c - what is known of updates: the open one, and the last of those that ended. */
#include "engine/internal.h"
#include "engine/updates.h"

#include "base/clock.h"
#include "base/log.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *const state_names[] = {
    [UPDATE_IDLE] = "idle",
    [UPDATE_STAGING] = "staging",
    [UPDATE_STAGED] = "staged",
    [UPDATE_DRAINING] = "draining",
    [UPDATE_COMMITTING] = "committing",
    [UPDATE_SESSION] = "session",
    [UPDATE_NO_WEIGHTS] = "no_valid_weights",
};

const char *update_state_name(enum update_state s)
{
    return state_names[s];
}

void record_begin(struct engine *e, const char *source, const struct update_options *o)
{
    pthread_mutex_lock(&e->lock);
    struct update_record *r = &e->updates.now;
    *r = (struct update_record){0};
    snprintf(r->source, sizeof r->source, "%s", source);
    snprintf(r->version, sizeof r->version, "%s", o->weight_version ? o->weight_version : "");
    snprintf(r->caller, sizeof r->caller, "%s", o->caller ? o->caller : "");
    pthread_mutex_unlock(&e->lock);
}

void record_staged(struct engine *e, const struct update_result *res)
{
    pthread_mutex_lock(&e->lock);
    struct update_record *r = &e->updates.now;
    r->stage_s = res->stage_s;
    r->bytes = res->bytes;
    snprintf(r->checksum, sizeof r->checksum, "%s", res->checksum);
    pthread_mutex_unlock(&e->lock);
}

void record_committed(struct engine *e, const struct update_result *res,
                      const struct update_options *o)
{
    pthread_mutex_lock(&e->lock);
    struct update_record *r = &e->updates.now;
    r->drain_s = res->drain_s;
    r->swap_s = res->swap_s;
    r->epoch = res->epoch;
    snprintf(r->version, sizeof r->version, "%s", o->weight_version ? o->weight_version : "");
    if (o->caller) snprintf(r->caller, sizeof r->caller, "%s", o->caller);
    pthread_mutex_unlock(&e->lock);
}

const char *const update_outcomes[UPDATE_OUTCOMES] = {"committed", "discarded", "replaced",
                                                      "cancelled", "failed",    "ruined"};

static void count(struct update_totals *t, const struct update_record *r, bool folder)
{
    for (size_t i = 0; i < UPDATE_OUTCOMES; i++)
        if (strcmp(r->outcome, update_outcomes[i]) == 0) atomic_fetch_add(&t->ended[i], 1);
    if (r->checksum[0]) histogram_add(&t->stage, r->stage_s, 1);
    if (strcmp(r->outcome, "committed") != 0) return;
    histogram_add(&t->drain, r->drain_s, 1);
    histogram_add(&t->swap, r->swap_s, 1);
    histogram_add(&t->whole[folder], r->stage_s + r->drain_s + r->swap_s, 1);
}

const struct update_totals *engine_update_totals(const struct engine *e)
{
    return &e->updates.totals;
}

/* One line: who changed the weights to what, when, and how it went. */
static void audit(const struct update_record *r)
{
    bool well = strcmp(r->outcome, "committed") == 0 || strcmp(r->outcome, "discarded") == 0;
    log_line(well ? LOG_INFO : LOG_WARN,
             "update %s: from %s, version %s, by %s: %llu bytes, xxh3-128 %s, staged in %.3f s, "
             "drained in %.3f s, swapped in %.6f s, epoch %llu%s%s",
             r->outcome, r->source, r->version[0] ? r->version : "unchanged",
             r->caller[0] ? r->caller : "this process", (unsigned long long)r->bytes,
             r->checksum[0] ? r->checksum : "-", r->stage_s, r->drain_s, r->swap_s,
             (unsigned long long)r->epoch, r->error[0] ? ": " : "", r->error);
}

void record_end(struct engine *e, const char *outcome, const char *error)
{
    struct updates *us = &e->updates;
    pthread_mutex_lock(&e->lock);
    snprintf(us->now.outcome, sizeof us->now.outcome, "%s", outcome);
    snprintf(us->now.error, sizeof us->now.error, "%s", error);
    us->now.ended = (int64_t)time(NULL);
    us->done[us->n_done++ % UPDATE_RECORDS] = us->now;
    struct update_record r = us->now;
    us->now = (struct update_record){0};
    count(&us->totals, &r, us->path);
    pthread_mutex_unlock(&e->lock);
    audit(&r);
}

void engine_update_status(struct engine *e, struct update_status *out)
{
    const struct updates *us = &e->updates;
    pthread_mutex_lock(&e->lock);
    out->no_weights = e->no_weights;
    out->state = us->state == UPDATE_IDLE && e->no_weights ? UPDATE_NO_WEIGHTS : us->state;
    out->seconds = us->since ? (double)(clock_ns() - us->since) * 1e-9 : 0;
    out->bytes_done = atomic_load(&us->progress.bytes_done);
    out->bytes_total = atomic_load(&us->progress.bytes_total);
    out->now = us->now;
    out->n_done = us->n_done < UPDATE_RECORDS ? (int)us->n_done : UPDATE_RECORDS;
    for (int i = 0; i < out->n_done; i++)
        out->done[i] = us->done[(us->n_done - 1 - (uint64_t)i) % UPDATE_RECORDS];
    pthread_mutex_unlock(&e->lock);
}
