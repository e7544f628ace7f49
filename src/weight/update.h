/*
 * update.h - change resident weights while the engine serves: all or nothing.
 *
 *     struct update *u = NULL;
 *     if (update_begin(&u, store, e) != OK) ...
 *     if (update_stage_dir(u, dir, n_threads, &progress, e) != OK) goto fail;   // any thread,
 * serving goes on if (update_prepare(u, e) != OK) goto fail;    // complete set, names, shapes,
 * finite update_commit(u);                             // engine thread, between two steps fail:
 *     update_free(u);                               // before a commit: the resident bytes are as
 * before
 *
 * States   OPEN -> PREPARED -> COMMITTED.  Every failure leaves the store untouched.
 * Errors   name the tensor or file: missing (all, up to 8, then a count), unknown to the model
 * (extra), wrong shape or dtype, short read, changed while reading. Dtypes   BF16 is copied; F16
 * and F32 are rounded to BF16 (nearest even). One update is open at a time per store: a second
 * begin is ERR_STATE.
 */
#ifndef WEIGHT_UPDATE_H
#define WEIGHT_UPDATE_H

#include "weight/store.h"
#include <stdatomic.h>

struct update;
struct update_progress {
    _Atomic uint64_t bytes_done, bytes_total;
};

err_t update_begin(struct update **out, struct store *s, struct err *e) MUST_USE;
err_t update_stage_dir(struct update *u, const char *dir, int n_threads,
                       struct update_progress *progress, struct err *e) MUST_USE;
/* One tensor from canonical BF16 bytes (tests, random weights). */
err_t update_stage(struct update *u, const char *name, const uint16_t *bf16, uint64_t rows,
                   uint64_t cols, struct err *e) MUST_USE;
err_t update_prepare(struct update *u, struct err *e) MUST_USE;
void update_commit(struct update *u);
void update_free(struct update *u); /* after a commit it frees the former generation */

#endif
