/*
 * internal.h - the engine's own state, for the files of src/engine alone.
 *
 * Threads: `lock` guards the inbox, the rid table, the names and the published numbers.  Everything
 * under "engine thread" is touched by that thread only, without a lock.
 */
#ifndef ENGINE_INTERNAL_H
#define ENGINE_INTERNAL_H

#include "engine/engine.h"
#include "engine/output.h"
#include "engine/sched.h"
#include "weight/bucket.h"
#include "weight/update.h"

#define RID_BUCKETS 4096

struct session; /* session.c */

enum msg_kind {
    MSG_SUBMIT,
    MSG_ABORT,
    MSG_ABORT_REQUEST,
    MSG_FLUSH,
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
    int64_t t_sent;
    bool answered;
    err_t rc;
    struct err err;
};

struct rid_entry {
    struct rid_entry *next;
    struct request *r;
};

struct engine {
    struct engine_options o;
    pthread_t thread, dog;
    bool has_dog;

    pthread_mutex_t lock;
    pthread_cond_t wake, answer, dog_wake;
    struct msg *first, *last;
    struct rid_entry *rids[RID_BUCKETS];
    int32_t in_flight; /* submitted and not ended */
    int32_t blocking;  /* callers inside a blocking call */
    bool updating, stopping, ended;
    int64_t stop_at; /* clock_ns: when a stopping engine aborts what is left */
    char *weight_version, *model_path;
    struct session *session; /* open; while it is, no other update is let in */
    struct engine_stats stats;

    _Atomic int64_t beat;       /* clock_ns of the last step's end or idle moment */
    _Atomic int64_t step_began; /* 0: no step is running */
    _Atomic bool idle;

    /* engine thread */
    struct sched s;
    uint64_t arrivals;
    struct msg *commit; /* waits for the drain */
    unsigned released;  /* enum memory_tag; written under `lock` */
    bool no_weights;
    int64_t steps, output_tokens, prompt_tokens, finished, aborted;
    int64_t window_began, window_tokens;
    double throughput;
    /* one step, [max_step_tokens] or [max_running] */
    int32_t *ids, *pos, *seq_of;
    struct step_row *rows;
    struct sample_input *in;
    struct sample_output *out;
    int32_t *row_pos; /* prompt position that the row scores; -1: it samples */
    struct step_seq *seqs;
    struct seq **planned;
    int32_t *barred; /* grows */
    int32_t cap_barred;
};

/* engine.c */
void engine_finish(struct engine *e, struct seq *q, finish_t f, int status, const char *message);
/* Send and wait for the answer; ERR_STATE when stopping. */
err_t engine_call(struct engine *e, struct msg *m, struct err *err);
void engine_answer(struct engine *e, struct msg *m, err_t rc, const char *text);
void engine_abort_where(struct engine *e, const char *prefix, const struct request *one);
void rid_add(struct engine *e, struct rid_entry *x);        /* lock held */
bool rid_known(const struct engine *e, const char *rid);    /* lock held */
void rid_remove(struct engine *e, const struct request *r); /* lock held */
/* step.c */
err_t step_buffers(struct engine *e, struct err *err);
void step_release(struct engine *e);
bool step_run(struct engine *e); /* false: nothing to do */
/* weights.c */
/* What an update is made of.  `stage` runs in the caller's thread. */
struct weights_source {
    err_t (*stage)(struct engine *e, const struct weights_source *from, struct update *u, int threads,
                   struct update_progress *progress, struct err *err);
    const char *path; /* the model's from then on; NULL: unchanged */
    const char *name; /* for the log */
    const struct buckets *buckets;
    uint64_t seed;
};
/* One update at a time: the claim is for the whole of it.  ERR_STATE: another has it, or a session is open. */
err_t weights_claim(struct engine *e, struct err *err) MUST_USE;
void weights_release(struct engine *e);
/* Stage, prepare and commit, with the claim. */
err_t weights_update(struct engine *e, const struct weights_source *from, const struct update_options *o,
                     struct update_result *res, struct err *err) MUST_USE;
void weights_commit(struct engine *e, struct msg *m);
/* memory.c */
/* Nothing may be computed now. */
static inline bool memory_held(const struct engine *e)
{
    return e->released || e->no_weights;
}
/* Why; lock held, or engine thread. */
err_t memory_refuse(const struct engine *e, struct err *err);
/* session.c */
void session_free(struct session *s);
/* watchdog.c */
void *watchdog_main(void *arg);

#endif
