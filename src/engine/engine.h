/*
 * engine.h - the step loop: one thread that owns scheduler, KV, prefix tree, store and model.
 *
 *     struct engine_options o = {...};
 *     engine_new(&e, &o, err);                  // starts the engine thread
 *     engine_submit(e, r, err);                 // any thread
 *     engine_abort(e, rid, false);              // any thread
 *     engine_update(e, dir, &opt, &result, err) // any thread, blocks until committed or refused (updates.h)
 *     engine_stop(e, drain_s);                  // answers everything, joins, frees nothing of requests
 *
 * Each turn: take the inbox (new requests, aborts, control work), admit, build one step (decodes first,
 * then prefill chunks up to max_step_tokens), model_submit, model_collect, hand out tokens.
 *
 * Overlap      with a model that computes beside its caller (MODEL_ASYNC) the step that is collected is the one
 *              before: the host is a step behind, and the device never waits for it.  A request that ended then has
 *              one token too many in flight, which nobody sees or counts.  A step waits for the one before where the
 *              host must know its ids first (step.c, may_follow) or something must be retracted; aborts and control
 *              work collect what is in flight before they begin.  The same bits as without.
 * Scheduling   by priority, then arrival.  A request that could never fit an empty pool is refused at
 *              submit (ERR_INPUT); one whose max_new_tokens would not fit is capped to the pool (finish
 *              reason length).  When pages run out, first the tree's unused leaves are evicted (LRU), then the
 *              youngest running request is retracted: it loses its KV, keeps its ids, and runs again.
 * Prefix cache a radix tree over whole pages, keyed by (weight epoch, extra_key) and token ids; a hit is by
 *              comparison of tokens, never by hash alone; at least one prompt token is always computed; capped at
 *              logprob_start.  A page enters only if it and all before it were computed under one epoch.
 * Update       stage and prepare run in the caller's thread while serving goes on.  Then the requests that run
 *              are dealt with (enum in_flight); new ones wait; the commit is a swap at a step boundary; the epoch
 *              moves.  A refused update touches no request.
 * Experts      with keep_experts the routing of each token lies beside its KV; a request that wants it gets a row
 *              for every token it computed or found in the cache.  Experts given with a prompt (request.h, forced)
 *              make KV that is that request's alone: it neither uses the prefix cache nor adds to it.
 * Pause        nothing is admitted and no step runs until engine_continue; new requests are taken and held, aborts
 *              end held ones.  An update of a paused engine commits at once: what still holds KV keeps it, as with
 *              IN_FLIGHT_CONTINUE.  A stop ends what is held.  docs/control.md has every combination.
 * Versions     a request's tokens are told apart by the weights that drew them (request.h, spans).
 * Determinism  results of a request do not depend on what else runs (model.h).
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/request.h"
#include "model/model.h"
#include "text/tokenizer.h"

struct engine;

enum overlap {
    OVERLAP_AUTO, /* with a model that computes beside its caller */
    OVERLAP_OFF,
    OVERLAP_ON /* tests, with any */
};

struct engine_options {
    const struct config *config;       /* borrowed, as all here */
    const struct tokenizer *tokenizer; /* NULL: no text, no stop strings */
    struct store *store;               /* with weights */
    struct model *model;
    int32_t n_kv_pages;
    int32_t max_running;     /* requests */
    int32_t max_queued;      /* 0: unlimited; above: ERR_BUSY */
    int32_t chunk_tokens;    /* prefill tokens of one request in one step; <= 0: max_step_tokens */
    int32_t max_step_tokens; /* as given to model_new */
    int32_t context_len;
    bool no_prefix_cache;
    bool keep_experts; /* requests may ask which experts their tokens went to (routing.h) */
    enum overlap overlap;
    /* tests: retract the youngest running request every n-th step; 0: never */
    int32_t retract_every;
    const char *weight_version;
    const char *model_path; /* as given */
    bool memory_saver;      /* engine_release is allowed */
    bool weights_backup;    /* released weights are kept in host memory */
    double watchdog_s;      /* a step longer than this ends the process non-zero; 0: off */
    bool in_place;          /* updates have no memory for a second generation (updates.h) */
    int loader_threads;     /* of an update; 0: as many as cores, at most 8 */
    bool ready;             /* the next update's memory is made ready from the start on (store.h) */
    bool loaders_yield;     /* they run where steps are computed (pace.h) */
    /* NULL, or: what of a new folder will not take effect, into `warning` ("": nothing). */
    void (*compare)(void *ctx, const char *dir, char *warning, size_t n);
    void *compare_ctx;
};

/* What a pause does with requests that run: ends them (those that wait, too), takes their KV, or leaves it. */
enum pause_mode { PAUSE_NONE, PAUSE_ABORT, PAUSE_RETRACT, PAUSE_IN_PLACE };

struct engine_stats {
    int32_t running, waiting; /* in a pause in place, running: holds KV */
    int32_t retracted;        /* those that wait and have run before */
    enum pause_mode paused;   /* of the last pause; PAUSE_NONE: serving */
    int32_t held;             /* running and waiting, while paused or without memory */
    int64_t updates;          /* commits */
    int64_t waiting_tokens;
    int32_t pages_total, pages_free, pages_cached; /* cached: held by the tree alone */
    /* prompt tokens computed or found in the cache; those found */
    int64_t prompt_tokens, cached_tokens;
    int64_t output_tokens, steps, retractions, finished, aborted;
    double gen_throughput; /* tokens/s over the last seconds */
    uint64_t epoch;
    double heartbeat_age_s; /* since a step ended or the loop was last idle */
    unsigned released;      /* enum memory_tag */
    bool draining;          /* an update waits for running requests to end */
    /* updating: an update is at work; stuck: work waits and no step ended for 10 s */
    bool updating, stuck;
    /* an update in place failed half-way, or weights were released: nothing is served */
    bool no_weights;
};

/* What a commit does with requests that run: lets them end; ends them; takes their KV, so that they run again
 * under the new weights from the ids they have; or lets them go on with the KV of the old ones (what is still at its prompt is retracted).  (Those that wait are
 * ended by ABORT alone.)  While paused DRAIN is CONTINUE, since nothing would end. */
enum in_flight { IN_FLIGHT_DRAIN, IN_FLIGHT_ABORT, IN_FLIGHT_RETRACT, IN_FLIGHT_CONTINUE };

bool in_flight_parse(const char *name, enum in_flight *out); /* "drain", ...; false: no such name */

#define WEIGHT_VERSION_MAX 127 /* bytes of a label */

struct update_options {
    const char *weight_version; /* NULL: unchanged */
    bool refuse_older;          /* engine_version_check */
    bool flush_cache;
    enum in_flight in_flight;
    double drain_timeout_s; /* > 0: what still runs after it is retracted */
    int loader_threads;     /* 0: engine_options.loader_threads */
    const char *manifest;   /* NULL, or a file of checksums that must be met (weight/manifest.h) */
    bool any_bf16;          /* BF16 weights are not searched for NaN and infinity */
    const char *caller;     /* for the record; may be NULL */
};
struct update_result {
    double stage_s, drain_s, swap_s;
    uint64_t bytes;
    uint64_t epoch;
    int32_t num_paused; /* requests that lived through the swap */
    char warning[256];
    char checksum[65]; /* update_checksum */
    bool was_staged;   /* the folder had been staged before: nothing was read */
};

err_t engine_new(struct engine **out, const struct engine_options *o, struct err *e) MUST_USE;
/* Drain at most drain_s seconds, then abort what is left; joins the thread and frees the engine. */
void engine_stop(struct engine *e, double drain_s);

/* Takes its own reference on success.  ERR_INPUT: can never fit, or a rid in flight ("Duplicate request ID
 * detected: R"); ERR_BUSY: queue full; ERR_STATE: stopping. */
err_t engine_submit(struct engine *e, struct request *r, struct err *err) MUST_USE;
void engine_abort(struct engine *e, const char *rid_prefix,
                  bool all); /* empty prefix without all: nothing */
void engine_abort_request(struct engine *e, struct request *r); /* this one (client left) */
/* OK once nothing running holds KV, which is waited for at most `timeout_s` (0: not at all): the tree is emptied.
 * ERR_STATE otherwise, or when another call waits already.  Blocks for a turn at least. */
err_t engine_flush(struct engine *e, double timeout_s, struct err *err) MUST_USE;
/* A pause of a paused engine does what its mode says to what still runs, and the mode is the new one.  Continue of
 * one that serves does nothing. */
err_t engine_pause(struct engine *e, enum pause_mode mode, struct err *err) MUST_USE;
err_t engine_continue(struct engine *e, struct err *err) MUST_USE;
/* The label of the weights in use from the next token on; with `abort_all` everything in flight is ended first. */
err_t engine_relabel(struct engine *e, const char *weight_version, bool abort_all,
                     struct err *err) MUST_USE;
/* ERR_INPUT: a label that is too long; or, with refuse_older, none, or one that cannot be told to be as new as that
 * of the weights in use: both are decimal numbers, or the one in use is "default".  ERR_STATE: it is older. */
err_t engine_version_check(struct engine *e, const struct update_options *o,
                           struct err *err) MUST_USE;
err_t engine_update(struct engine *e, const char *model, const struct update_options *o,
                    struct update_result *res, struct err *err) MUST_USE;

/* Tensors instead of a folder (session.c): the bytes of safetensors files in memory.  What they do not name keeps
 * its value; a tensor without all its scales, or a scale without its weight, is refused.
 *
 * In one call, without a session; `bytes` (of mem_*) is taken, whatever comes of it. */
err_t engine_update_tensors(struct engine *e, void *bytes, size_t n, const struct update_options *o,
                            struct update_result *res, struct err *err) MUST_USE;
/* In a session: begin, any number of adds, end, which is stage, prepare and commit of all of it or of nothing;
 * either way the session is over then.  While one is open every other update is refused; a second begin is
 * too, unless `restart` drops the first.  An add that is refused leaves the session as it was;
 * adds at the same time take their turns. */
err_t engine_session_begin(struct engine *e, bool restart, struct err *err) MUST_USE;
bool engine_session_open(struct engine *e);
/* Takes `bytes`, whatever comes of it.  Of the options the label and `IN_FLIGHT_ABORT` are kept for the end, where
 * they can be given too. */
err_t engine_session_add(struct engine *e, void *bytes, size_t n, const struct update_options *o,
                         struct err *err) MUST_USE;
err_t engine_session_end(struct engine *e, const struct update_options *o,
                         struct update_result *res, struct err *err) MUST_USE;
/* Before generation goes on: a session with tensors is ended as above; one without is dropped; none: nothing. */
err_t engine_session_end_at_continue(struct engine *e, const struct update_options *o,
                                     struct update_result *res, struct err *err) MUST_USE;
/* Random weights (weight/dummy.h), as an update like any other. */
err_t engine_update_random(struct engine *e, uint64_t seed, const struct update_options *o,
                           struct update_result *res, struct err *err) MUST_USE;
/* Largest number of bytes of all tensors of an update. */
uint64_t engine_tensor_limit(const struct engine *e);

/* Memory that a trainer on the same machine borrows (memory.c).  Released: given back to the system, addresses kept;
 * the prefix cache is emptied, weights are lost unless `weights_backup`.  Until everything is resumed, and the weights
 * are valid (an update of all of them after a loss), engine_submit gives ERR_BUSY and what waits is held.  Tags
 * that are in that state already count as done.  ERR_STATE: not allowed, requests hold KV or wait, an update is
 * open. */
enum memory_tag { MEMORY_WEIGHTS = 1, MEMORY_KV = 2, MEMORY_GRAPHS = 4, MEMORY_ALL = 7 };
err_t engine_release(struct engine *e, unsigned tags, struct err *err) MUST_USE;
err_t engine_resume(struct engine *e, unsigned tags, struct err *err) MUST_USE;
/* "weights, kv_cache" of a set of tags; "" of none. */
void memory_tags_name(char out[48], unsigned tags);

/* Run a function on the engine thread between two steps: it may read the store (engine_options) there.  Serving
 * waits for it, so it is short.  Blocks; the function's result is returned. */
err_t engine_between_steps(struct engine *e, err_t (*run)(void *ctx, struct err *e), void *ctx,
                           struct err *err) MUST_USE;
/* Its specs at any time, its bytes and epoch between steps. */
const struct store *engine_store(const struct engine *e);
/* For tests: conservation of all pages, checked between two steps. */
err_t engine_check(struct engine *e, struct err *err) MUST_USE;
void engine_stat(struct engine *e, struct engine_stats *out);
/* Copies, since an update may change them at any time. */
void engine_weight_version(struct engine *e, char *out, size_t n);
void engine_model_path(struct engine *e, char *out, size_t n);

#endif
