/*
 * sched.h - which request runs: admission, step plan, retraction.  Policy and page accounting only.
 *
 * Two sets: `waiting`, a list in scheduling order (higher priority, then earlier arrival), and
 * `running`, an array in order of admission.  A running sequence holds a reference of each page of
 * its table and a lock on its deepest tree node; a waiting one holds nothing.
 * A step in flight (flight.h) counts as done in `computed` and `ahead`, so that the next one can be planned;
 * what goes into the tree, or to a client, is what has been collected: `ready`, `n_ids`.
 * Invariant: a sequence alone always fits (sched_fits at submit), so the plan is never empty
 * while something runs.
 */
#ifndef ENGINE_SCHED_H
#define ENGINE_SCHED_H

#include "engine/request.h"
#include "kv/radix.h"

struct flight;

struct seq {
    struct request *r;
    struct seq *prev, *next; /* waiting */
    bool queued;             /* in `waiting` */
    uint64_t arrival, epoch; /* epoch: under which all its KV was computed */
    int32_t *ids;            /* prompt, then outputs */
    int32_t n_ids, cap_ids;
    int32_t n_prompt;
    int32_t max_new;  /* capped to pool and context */
    int32_t computed; /* tokens with KV, or in a step in flight */
    int32_t ready;    /* tokens with KV, of collected steps */
    int32_t ahead;    /* ids that steps in flight draw: they follow those of n_ids */
    /* the last step it was in, its place there, the row that draws its next id */
    struct flight *flight;
    int32_t place, row;
    int32_t *pages;
    int32_t n_pages, cap_pages;
    struct radix_node *node; /* locked */
    int32_t in_tree;         /* first pages of the table that the tree holds */
    int32_t next_score;      /* next prompt position to be scored; n_prompt: none */
    bool admitted;           /* at least once */
    bool drew;               /* a token since it was admitted */
    bool mixed;              /* its KV is of more than one epoch: none of it enters the tree */
    bool no_memory;          /* its page table could not grow: to be ended */
    int32_t plan;            /* tokens in this step */
    int32_t *fail;           /* stop automata: failure links of all stops, one after the other */
    int32_t *fail_at;        /* [n_stops] where each begins */
    int32_t *stop_state;     /* [n_stops] bytes matched so far */
    size_t fed;              /* text bytes the automata have seen */
    struct grammar_run run;  /* constrain.h */
    uint32_t *mask;          /* bits of the ids that may come; NULL: no grammar */
    int32_t mask_at;         /* output ids that the mask follows; -1: none yet */
    size_t searched;         /* text bytes the patterns have seen */
    size_t pattern_at;       /* where a pattern's match may still begin; all of the text: nowhere */
    char stop_error[160];    /* why a pattern could not be searched for; empty: it could */
};

struct sched {
    struct pages *pages;
    struct radix *tree;
    int32_t page_tokens, max_running, chunk, max_step;
    bool no_cache;
    bool draining;                  /* only what has begun is admitted (an update waits) */
    struct seq *head, *tail;        /* waiting */
    int32_t n_waiting, n_retracted; /* retracted: those of them that have run before */
    int64_t waiting_tokens;         /* ids of those that wait */
    struct seq **running;           /* [max_running] */
    int32_t n_running;
    int64_t retractions, cached_tokens;
};

/* Tokens it wants computed; none if its last one is being drawn. */
static inline int32_t seq_todo(const struct seq *q)
{
    if (q->ahead > 0 && q->r->n_output + q->ahead >= q->max_new) return 0;
    return q->n_ids + q->ahead - q->computed;
}

/* Highest max_new_tokens with this prompt in an empty pool; negative: the prompt alone is too long. */
int64_t sched_room(const struct sched *s, int32_t n_prompt);
void sched_queue(struct sched *s, struct seq *q);
void sched_unqueue(struct sched *s, struct seq *q);
void sched_admit(struct sched *s, uint64_t epoch);
/* First waiting sequence that may be admitted now; NULL: none. */
struct seq *sched_first(const struct sched *s);
/* Fills plan of every running sequence and takes the pages.  Returns tokens planned; -1: one must be retracted
 * first, and that is not allowed since a step is in flight. */
int32_t sched_plan(struct sched *s, bool may_retract);
/* Of a sequence that is in no step in flight. */
void sched_retract(struct sched *s, struct seq *q);
void sched_retract_all(struct sched *s);
/* What runs keeps its KV over a change of the weights: the tree has no part in it any more.  What has not drawn a
 * token from it yet would gain nothing, and its first token would be of two versions: it is retracted. */
void sched_keep_all(struct sched *s);
struct seq *sched_youngest(const struct sched *s);
/* Full pages that are ready enter the tree. */
void sched_share(struct sched *s, struct seq *q);
/* Gives back pages and lock; takes it out of running. */
void sched_release(struct sched *s, struct seq *q);
/* Conservation of every page. */
err_t sched_check(const struct sched *s, struct err *e) MUST_USE;

#endif
