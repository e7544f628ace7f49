/*
 * control.c - pause, continue, flush, labels, and what an update does with requests in flight.
 *
 * Everything but the callers' side runs on the engine thread between two steps, so each message sees and leaves
 * whole requests; docs/control.md is the table of what meets what.  Two messages may wait: one commit (for the
 * drain) and one flush (until nothing runs); control_turn looks whether they can be answered.  A pause never waits
 * and an update of a paused engine never waits, so the two cannot wait for each other.
 */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/mem.h"
#include <string.h>

bool in_flight_parse(const char *name, enum in_flight *out)
{
    static const char *const names[] = {"drain", "abort", "retract",
                                        "continue"}; /* enum in_flight */
    for (int i = 0; i < 4; i++) {
        if (strcmp(names[i], name) != 0) continue;
        *out = (enum in_flight)i;
        return true;
    }
    return false;
}

static bool is_number(const char *s)
{
    return *s && strspn(s, "0123456789") == strlen(s);
}

/* Of decimal numbers of any length. */
static int compare_numbers(const char *a, const char *b)
{
    a += strspn(a, "0");
    b += strspn(b, "0");
    size_t na = strlen(a), nb = strlen(b);
    return na != nb ? (na > nb) - (na < nb) : strcmp(a, b);
}

static err_t check_label(const char *label, struct err *err)
{
    size_t n = strlen(label);
    if (n <= WEIGHT_VERSION_MAX) return OK;
    return err_set(err, ERR_INPUT, "weight_version: %zu bytes are not allowed; at most %d", n,
                   WEIGHT_VERSION_MAX);
}

err_t engine_version_check(struct engine *e, const struct update_options *o, struct err *err)
{
    char now[WEIGHT_VERSION_MAX + 1];
    const char *v = o->weight_version;
    err_t rc = v ? check_label(v, err) : OK;
    if (rc != OK || !o->refuse_older) return rc;
    if (!v || !is_number(v))
        return err_set(
            err, ERR_INPUT,
            "weight_version: %s is not allowed with refuse_older_version; must be a decimal number",
            v ? v : "none");
    engine_weight_version(e, now, sizeof(now));
    if (strcmp(now, "default") == 0) return OK; /* nobody labelled these */
    if (!is_number(now))
        return err_set(
            err, ERR_INPUT,
            "refuse_older_version: cannot compare %s with the version in use, %s; it must be a "
            "decimal number or \"default\"",
            v, now);
    if (compare_numbers(v, now) >= 0) return OK;
    return err_set(err, ERR_STATE,
                   "weight_version: %s is older than %s, which is in use; refuse_older_version "
                   "allows %s and above",
                   v, now, now);
}

/* ---- engine thread ---- */

static void pause_now(struct engine *e, struct msg *m)
{
    e->paused = m->mode;
    if (m->mode == PAUSE_ABORT) engine_abort_where(e, NULL, NULL);
    if (m->mode == PAUSE_RETRACT) sched_retract_all(&e->s);
    engine_answer(e, m, OK, NULL);
}

static void relabel(struct engine *e, struct msg *m)
{
    if (m->abort_all) engine_abort_where(e, NULL, NULL);
    if (strcmp(e->weight_version, m->label) != 0) {
        e->labels++;
        pthread_mutex_lock(&e->lock);
        mem_free(e->weight_version);
        e->weight_version = mem_dup(m->label);
        pthread_mutex_unlock(&e->lock);
    }
    engine_answer(e, m, OK, NULL);
}

static void begin_flush(struct engine *e, struct msg *m)
{
    if (e->flush) {
        engine_answer(e, m, ERR_STATE, "another flush waits for running requests");
        return;
    }
    e->flush = m; /* control_turn comes before the next step */
}

static void begin_commit(struct engine *e, struct msg *m)
{
    struct err err = {0};
    double s = m->options->drain_timeout_s;
    err_t rc = engine_version_check(
        e, m->options, &err); /* the label may have changed since the update was let in */
    if (rc != OK) {
        engine_answer(e, m, rc, err.msg);
        return;
    }
    m->t_end = s > 0 ? m->t_sent + (int64_t)((s < 1e6 ? s : 1e6) * 1e9) : 0;
    e->commit = m;
    if (m->options->in_flight == IN_FLIGHT_ABORT) engine_abort_where(e, NULL, NULL);
    if (m->options->in_flight == IN_FLIGHT_RETRACT) sched_retract_all(&e->s);
}

bool control_handle(struct engine *e, struct msg *m)
{
    switch (m->kind) {
    case MSG_PAUSE: pause_now(e, m); return true;
    case MSG_CONTINUE:
        e->paused = PAUSE_NONE;
        engine_answer(e, m, OK, NULL);
        return true;
    case MSG_RELABEL: relabel(e, m); return true;
    case MSG_FLUSH: begin_flush(e, m); return true;
    case MSG_COMMIT: begin_commit(e, m); return true;
    default: return false;
    }
}

static bool past(int64_t t)
{
    return t != 0 && clock_ns() >= t;
}

/* Whether what runs is let end before the commit. */
static bool drains(const struct engine *e)
{
    return !e->paused && !memory_held(e) && e->commit->options->in_flight == IN_FLIGHT_DRAIN;
}

static bool commit_due(const struct engine *e)
{
    if (!e->commit) return false;
    if (!drains(e) || past(e->commit->t_end)) return true;
    return e->s.n_running == 0 && !sched_first(&e->s);
}

static void commit_now(struct engine *e)
{
    struct err err = {0};
    struct msg *m = e->commit;
    step_drain(e);
    if (drains(e)) sched_retract_all(&e->s); /* it took too long */
    e->commit = NULL;
    e->s.draining = false;
    err_t rc = engine_version_check(e, m->options, &err); /* nor may it have done in the drain */
    if (rc != OK) {
        engine_answer(e, m, rc, err.msg);
        return;
    }
    sched_keep_all(&e->s);
    for (struct seq *q = e->s.head; q; q = q->next)
        output_rescore(q);
    updates_commit(e, m);
}

void control_turn(struct engine *e)
{
    e->s.draining = e->commit != NULL;
    if (commit_due(e)) commit_now(e);
    struct msg *f = e->flush;
    if (!f) return;
    bool idle = e->s.n_running == 0;
    if (!idle && !past(f->t_end)) return;
    e->flush = NULL;
    step_drain(e);
    if (idle) radix_clear(e->s.tree);
    engine_answer(e, f, idle ? OK : ERR_STATE,
                  e->paused ? "the cache cannot be flushed: requests paused in place hold KV; "
                              "continue, abort or retract them"
                            : "the cache cannot be flushed while requests are running");
}

int64_t control_deadline(const struct engine *e)
{
    return e->flush ? e->flush->t_end : 0;
}

/* ---- callers ---- */

err_t engine_flush(struct engine *e, double timeout_s, struct err *err)
{
    double s = timeout_s > 0 ? timeout_s < 1e6 ? timeout_s : 1e6 : 0;
    struct msg m = {.kind = MSG_FLUSH, .t_end = clock_ns() + (int64_t)(s * 1e9)};
    return engine_call(e, &m, err);
}

err_t engine_pause(struct engine *e, enum pause_mode mode, struct err *err)
{
    struct msg m = {.kind = MSG_PAUSE, .mode = mode};
    return engine_call(e, &m, err);
}

err_t engine_continue(struct engine *e, struct err *err)
{
    struct msg m = {.kind = MSG_CONTINUE};
    return engine_call(e, &m, err);
}

err_t engine_relabel(struct engine *e, const char *weight_version, bool abort_all, struct err *err)
{
    struct msg m = {.kind = MSG_RELABEL, .label = weight_version, .abort_all = abort_all};
    err_t rc = check_label(weight_version, err);
    return rc == OK ? engine_call(e, &m, err) : rc;
}
