/*
 * internal.h - the engine's own state, for the files of src/engine alone.
 *
 * Threads: `lock` guards the inbox, the rid table, the names and the published numbers.  Everything
 * under "engine thread" is touched by that thread only, without a lock.
 */
#ifndef ENGINE_INTERNAL_H
#define ENGINE_INTERNAL_H

#include "engine/engine.h"
#include "engine/expert_load.h"
#include "engine/flight.h"
#include "engine/output.h"
#include "engine/pace.h"
#include "engine/routing.h"
#include "engine/profile.h"
#include "engine/sched.h"
#include "engine/updates.h"
#include "weight/bucket.h"
#include "weight/update.h"
#include <limits.h>

#define RID_BUCKETS 4096

struct session; /* session.c */

enum msg_kind {
    MSG_SUBMIT,
    MSG_ABORT,
    MSG_ABORT_REQUEST,
    MSG_FLUSH,
    MSG_PAUSE,
    MSG_CONTINUE,
    MSG_RELABEL,
    MSG_COMMIT,
    MSG_CHECK,
    MSG_BETWEEN_STEPS
};

struct msg {
    struct msg *next;
    enum msg_kind kind;
    struct request *r; /* SUBMIT, ABORT_REQUEST: with a reference */
    char *prefix;      /* ABORT; NULL: all */
    /* The rest is of blocking messages, which live on their sender's stack. */
    struct update *update;
    const struct update_options *options;
    const char *path;
    struct update_result *result;
    err_t (*run)(void *ctx, struct err *e); /* BETWEEN_STEPS */
    void *ctx;
    enum pause_mode mode; /* PAUSE */
    const char *label;    /* RELABEL */
    bool abort_all;
    /* t_end: COMMIT, when the drain is over; FLUSH, until when it waits; 0: never */
    int64_t t_sent, t_end;
    bool answered;
    err_t rc;
    struct err err;
};

struct rid_entry {
    struct rid_entry *next;
    struct request *r;
};

/* Under the lock, but for what belongs to the call that holds the state (updates.c). */
struct updates {
    enum update_state state;
    int64_t since;
    struct update_progress progress;
    struct update_record now, done[UPDATE_RECORDS]; /* a ring */
    uint64_t n_done;
    struct update_totals totals;
    /* the call's: what is staged, where it came from and how closely it was looked at */
    struct update *staged;
    struct update_result result;
    char real[PATH_MAX], manifest[PATH_MAX], stamp[DIGEST_HEX];
    bool any_bf16, path; /* path: its source is a folder */
};

struct engine {
    struct engine_options o;
    pthread_t thread, dog, ready;
    bool has_dog, has_ready;
    _Atomic bool ready_over;

    pthread_mutex_t lock;
    pthread_cond_t wake, answer, dog_wake;
    struct msg *first, *last;
    struct rid_entry *rids[RID_BUCKETS];
    int32_t in_flight; /* submitted and not ended */
    int32_t blocking;  /* callers inside a blocking call */
    bool stopping, ended;
    bool no_weights; /* written by the engine thread */
    struct updates updates;
    struct pace pace; /* of staging and steps, with loaders_yield */
    int64_t stop_at;  /* clock_ns: when a stopping engine aborts what is left */
    char *weight_version, *model_path;
    struct session *session; /* NULL but in UPDATE_SESSION */
    struct engine_stats stats;

    _Atomic int64_t beat;       /* clock_ns of the last step's end or idle moment */
    _Atomic int64_t step_began; /* 0: no step is running */
    _Atomic bool idle;

    /* engine thread */
    struct sched s;
    uint64_t arrivals;
    struct msg *commit;      /* waits for the drain */
    struct routing *routing; /* NULL: not kept */
    unsigned released;       /* enum memory_tag; this and the next are written under `lock` */
    bool lost;               /* weights were released and have not come back */
    struct msg *flush;       /* waits until nothing runs */
    enum pause_mode paused;
    uint64_t labels; /* how often the label has changed */
    int64_t commits, steps, output_tokens, prompt_tokens, finished, aborted;
    int64_t window_began, window_tokens;
    double throughput;
    struct profile profile;
    struct expert_load load;
    struct flight flights[2];
    /* submitted, not collected; NULL: none.  Between two turns there is one at most */
    struct flight *flying;
    bool overlap;   /* a step is left in flight at the end of a turn */
    int64_t landed; /* clock_ns: when the last step's tokens had been handed out */
};

/* engine.c */
void engine_post(struct engine *e, struct msg *m); /* lock held */
void engine_seq_free(struct seq *q);               /* NULL is fine */
void engine_finish(struct engine *e, struct seq *q, finish_t f, int status, const char *message);
/* Send and wait for the answer; ERR_STATE when stopping. */
err_t engine_call(struct engine *e, struct msg *m, struct err *err);
void engine_answer(struct engine *e, struct msg *m, err_t rc, const char *text);
void engine_abort_where(struct engine *e, const char *prefix, const struct request *one);
void engine_fail_all(struct engine *e, int status, const char *message);
void rid_add(struct engine *e, struct rid_entry *x);        /* lock held */
bool rid_known(const struct engine *e, const char *rid);    /* lock held */
void rid_remove(struct engine *e, const struct request *r); /* lock held */
/* control.c: control messages, and what they wait for */
bool control_handle(struct engine *e, struct msg *m); /* false: another kind */
void control_turn(struct engine *e);                  /* after the inbox */
int64_t control_deadline(const struct engine *e);     /* clock_ns when a turn is due; 0: none */
/* step.c */
bool step_run(struct engine *e); /* false: nothing to do, and nothing in flight */
/* Collect what is in flight, as everything does that is not a step or a new request: it finds whole requests. */
void step_drain(struct engine *e);
/* updates.c */
/* What an update is made of: a folder, tensors, or random numbers. */
struct update_source {
    const char *name; /* for the record */
    const char *path; /* of a folder, which is the model's path from then on; else NULL */
    const struct buckets *buckets;
    uint64_t seed; /* without either */
};
#define STATE_BIT(state) (1u << (state))
/* From one of the states `from` (bits) into `to`, which is the caller's until it leaves. */
err_t updates_claim(struct engine *e, unsigned from, enum update_state to, enum update_state *was,
                    struct err *err) MUST_USE;
void updates_leave(struct engine *e, enum update_state s);
void updates_enter(struct engine *e, enum update_state s);     /* lock held */
err_t updates_refuse(const struct engine *e, struct err *err); /* lock held: why, by the state */
/* Stage and commit.  The state is STAGING, the caller's, who leaves it. */
err_t updates_run(struct engine *e, const struct update_source *from,
                  const struct update_options *o, struct update_result *res,
                  struct err *err) MUST_USE;
void updates_commit(struct engine *e, struct msg *m); /* engine thread, between two steps */
void updates_refuse_work(struct engine *e); /* engine thread: answers all if there are no weights */
err_t updates_check_weights(const struct engine *e, struct err *err) MUST_USE; /* lock held */
void updates_release(struct engine *e);
/* updates_record.c */
void record_begin(struct engine *e, const char *source, const struct update_options *o);
void record_staged(struct engine *e, const struct update_result *res);
void record_committed(struct engine *e, const struct update_result *res,
                      const struct update_options *o);
void record_end(struct engine *e, const char *outcome, const char *error);
/* ready.c: the next update's memory, in the background */
void ready_start(struct engine *e);
void ready_stop(struct engine *e);
/* memory.c */
/* Nothing may be computed now; what waits is held. */
static inline bool memory_held(const struct engine *e)
{
    return e->released || e->lost;
}
/* Why; lock held, or engine thread. */
err_t memory_refuse(const struct engine *e, struct err *err);
/* session.c */
void session_free(struct session *s);
struct session *
session_detach(struct engine *e); /* lock held, which it may give up meanwhile; NULL: none */
/* watchdog.c */
void *watchdog_main(void *arg);

#endif
