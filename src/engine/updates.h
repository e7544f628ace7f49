/*
 * updates.h - weight updates: staged beside serving, committed by a short stop, and a record of each.
 *
 *     engine_stage(e, "/ckpt/v7", &o, &res, err)    // blocks until it is staged; serving goes on
 *     engine_commit(e, NULL, &o, &res, err)         // requests in flight as `o` says, then the swap
 *     engine_discard(e, err)                        // in place of the commit, or while it is staged
 *     engine_update(e, "/ckpt/v7", &o, &res, err)   // both in one call
 *
 * States    idle -> staging -> staged -> draining -> committing -> idle.  One update is open at a time.
 *
 *             while        stage              update             commit     discard
 *             idle         stages             stages, commits    refused    refused
 *             staging      refused            refused            refused    cancels it, then OK
 *             staged       refused; OK if     commits, if        commits    frees it
 *                          it is the same     the same; else
 *                                             replaces it
 *             draining,
 *             committing   refused            refused            refused    refused
 *
 *           Refused is ERR_STATE.  "The same" is the same real path, in which no file has changed (name,
 *           size, time, inode), and no check asked for that staging left out.  What is staged stays
 *           until one of these calls ends it, whatever happens to the folder.
 *           Tensors in one call: idle only.  A session of tensors is a state, too, which a stop need not wait for:
 *           stage, update and commit are refused, discard drops it, its end stages and commits.
 * Cancel    discard, engine_cancel and engine_stop end staging at its next piece; its caller gets ERR_STATE.
 * Memory    a second generation while staging and staged; with engine_options.in_place none (update.h): then
 *           the commit reads the files a second time, while serving stands still.  If that fails after
 *           the first byte, there are no valid weights: what waits and what comes is answered 503 until
 *           an update has succeeded (engine_stats.no_weights).
 * Threads   staging runs in the caller's thread and in loader threads; with loaders_yield these become nice
 *           and one works at a time beside steps (pace.h), so that steps keep their pace.  All calls may come from any thread.
 * Record    of every update that began, the last UPDATE_RECORDS; each is one line in the log too.
 */
#ifndef ENGINE_UPDATES_H
#define ENGINE_UPDATES_H

#include "base/digest.h"
#include "base/histogram.h"
#include "engine/engine.h"

#define UPDATE_RECORDS 32

enum update_state {
    UPDATE_IDLE,
    UPDATE_STAGING,
    UPDATE_STAGED,
    UPDATE_DRAINING,
    UPDATE_COMMITTING,
    UPDATE_SESSION,   /* tensors come in buckets (engine.h, engine_session_begin) */
    UPDATE_NO_WEIGHTS /* as a name: idle, without valid weights */
};
const char *update_state_name(enum update_state s);

struct update_record {
    char source[1024];                    /* as the caller gave it */
    char version[WEIGHT_VERSION_MAX + 1]; /* "": unchanged */
    char caller[64];
    char outcome[16]; /* one of update_outcomes; "" while open */
    char error[512];
    char checksum[DIGEST_HEX]; /* update_checksum; "" before it is staged */
    uint64_t bytes, epoch;
    double stage_s, drain_s, swap_s;
    int64_t ended; /* seconds since 1970 */
};

/* Of all updates that ended.  Any thread may read it at any time. */
#define UPDATE_OUTCOMES 6
/* committed, discarded, replaced, cancelled, failed, ruined */
extern const char *const update_outcomes[UPDATE_OUTCOMES];
struct update_totals {
    _Atomic uint64_t ended[UPDATE_OUTCOMES];
    struct histogram stage;       /* of those that were staged */
    struct histogram drain, swap; /* of those that were committed */
    struct histogram whole[2];    /* the same, all three together: from tensors, from a folder */
};

struct update_status {
    enum update_state state;
    bool no_weights;
    uint64_t bytes_done, bytes_total;
    double seconds;           /* since the state was entered */
    struct update_record now; /* of an open update */
    int n_done;
    struct update_record done[UPDATE_RECORDS]; /* the latest first */
};

err_t engine_stage(struct engine *e, const char *model, const struct update_options *o,
                   struct update_result *res, struct err *err) MUST_USE;
/* `model`: NULL, or what must have been staged (a name as stage takes it). */
err_t engine_commit(struct engine *e, const char *model, const struct update_options *o,
                    struct update_result *res, struct err *err) MUST_USE;
err_t engine_discard(struct engine *e, struct err *err) MUST_USE;
void engine_cancel(struct engine *e); /* staging, if there is any */
void engine_update_status(struct engine *e, struct update_status *out);
const struct update_totals *engine_update_totals(const struct engine *e);

#endif
