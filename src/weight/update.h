/*
 * update.h - change resident weights while the engine serves: all or nothing.
 *
 *     struct update *u = NULL;
 *     if (update_begin(&u, store, e) != OK) ...
 *     if (update_stage_dir(u, dir, n_threads, &progress, e) != OK) goto fail;   // any thread, while
 *                                                                               // serving goes on
 *     if (update_prepare(u, e) != OK) goto fail;    // complete, and every value can be used
 *     update_commit(u);                             // engine thread, between two steps
 *     fail: update_free(u);                         // before a commit: the store is as it was
 *
 * States    OPEN -> PREPARED -> COMMITTED.  Every failure leaves the store untouched.
 * In place  without memory for a second generation: update_begin_in_place, then the same, but staging
 *           is a reading that keeps nothing but a checksum of each slot, and in place of the commit
 *           update_overwrite reads the same open files again, into the resident generation, and
 *           compares.  It refuses before the first byte if a file has changed since; what fails
 *           later leaves no generation at all (update_touched): nobody may compute with the store
 *           until an update has succeeded.
 * Cancel    `cancel` in the progress ends staging at its next piece (some MiB), with ERR_STATE.
 * Manifest  checked before anything is staged (manifest.h).
 * Checksum  xxh3-128 of the tensors' canonical bytes, names and order (update_checksum): the same for
 *           the same values on every machine and device, taken while they pass through.
 * Formats   each module has its resident format; another is refused by name (plan.h).  Slots marked
 *           `encode` (store.h) take BF16 and encode it, with the default rule of format/encode.h;
 *           neighbours that share an amax are then read twice.
 * Dtypes    BF16, F8, U8 and F32 scales are copied; F16 and F32 weights are rounded to BF16
 *           (nearest even); BF16 and F16 scales widen; inverse scales are turned around (1 / x).
 * Refused   whatever plan_open refuses; short reads, files that change while they are read; by
 *           name and index, lowest first: BF16 that is not finite, E4M3 NaN codes, scales that
 *           format_check_scales refuses, tensor scales that are NaN, infinite, negative, or zero
 *           with codes that are not, K or V scales that are not positive and finite.  A subnormal
 *           tensor scale is exact and fine.  An input scale that is missing, zero, negative or not
 *           finite means "none".
 * Memory    some MiB a thread; a transposed source up to 32 MiB.
 * One update is open at a time per store: a second begin is ERR_STATE.
 */
#ifndef WEIGHT_UPDATE_H
#define WEIGHT_UPDATE_H

#include "weight/safetensors.h"
#include "base/digest.h"
#include "weight/store.h"
#include <stdatomic.h>

struct update;
struct update_progress {
    _Atomic uint64_t bytes_done, bytes_total;
    _Atomic bool cancel;     /* set by any thread */
    void (*tick)(void *ctx); /* NULL, or called by loader threads after each piece */
    void *ctx;
    /* NULL, or called by a thread before each piece of weights that it reads or makes (some 100 us): returns
     * when that may be done; and with `more` false when it has done its last.  An overwrite does not ask. */
    void (*turn)(void *ctx, bool more);
    void *turn_ctx;
};

/* Asks for the turn, where there are turns; `p` may be NULL. */
void update_turn(const struct update_progress *p, bool more);

struct stage_options {
    int n_threads;
    const char *manifest; /* NULL: none; a name without '/' lies in the folder */
    bool any_bf16;        /* as-stored BF16 is taken without a look for NaN and infinity */
};

err_t update_begin(struct update **out, struct store *s, struct err *e) MUST_USE;
/* The store must have weights. */
err_t update_begin_in_place(struct update **out, struct store *s, struct err *e) MUST_USE;
err_t update_stage_dir(struct update *u, const char *dir, int n_threads,
                       struct update_progress *progress, struct err *e) MUST_USE;
/* The same with a manifest and so on. */
err_t update_stage_folder(struct update *u, const char *dir, const struct stage_options *o,
                          struct update_progress *progress, struct err *e) MUST_USE;
/* Part of a checkpoint, in place of update_stage_dir: the tensors of files in memory (safetensors.h,
 * st_open_memory), with all their scales; every other slot keeps its resident bytes, which are copied
 * (in place: left alone; the files stay open until the update is freed).
 * (Without resident weights nothing is kept: prepare names what is missing.)  An input scale that is
 * not given becomes "none", as in a whole checkpoint; scales of K and V come alone. */
err_t update_stage_part(struct update *u, const struct st_file *files, size_t n_files,
                        const struct stage_options *o, struct update_progress *progress,
                        struct err *e) MUST_USE;
/* One tensor from canonical BF16 bytes (tests, random weights); a slot of another format gets it
 * encoded, with an amax of its own; an f32 slot widened. */
err_t update_stage(struct update *u, const char *name, const uint16_t *bf16, uint64_t rows,
                   uint64_t cols, struct err *e) MUST_USE;
err_t update_prepare(struct update *u, struct err *e) MUST_USE;
/* Once prepared: the input scale of a quantized matrix; NaN: none. */
float update_input_scale(const struct update *u, size_t slot);
/* Of all staged tensors, once prepared. */
void update_checksum(const struct update *u, char hex[DIGEST_HEX]);
void update_commit(struct update *u);
bool update_in_place(const struct update *u);
/* The commit of an update in place: nobody reads the store meanwhile. */
err_t update_overwrite(struct update *u, int n_threads, struct update_progress *progress,
                       struct err *e) MUST_USE;
bool update_touched(const struct update *u); /* resident bytes have been changed */
void update_free(struct update *u);          /* after a commit it frees the former generation */

#endif
