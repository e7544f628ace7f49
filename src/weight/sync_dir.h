/*
 * sync_dir.h - the local checkpoint folder that pulls keep up to date, and how it changes.
 *
 *     LOCAL/                     the checkpoint that is served
 *     LOCAL/.weight_sync/lock         flock: one pull at a time, of any process
 *     LOCAL/.weight_sync/state.json   {"version": "000005"}: what the checkpoint is
 *     LOCAL/.weight_sync/next/        files to come, written and synced there
 *     LOCAL/.weight_sync/commit.json  the decision: which of next's files replace which, which go, the new version
 *
 * A change is: fill next/, write commit.json (from here on it will happen), rename next's files over the old ones,
 * write state.json, remove commit.json.  A crash before commit.json leaves the old checkpoint; one after it is
 * finished by the next sync_dir_open.  In between checkpoint_open refuses the folder (two versions' files may lie
 * side by side in it), so a mixture is never loaded.  No file is ever half written under its final name.
 */
#ifndef WEIGHT_SYNC_DIR_H
#define WEIGHT_SYNC_DIR_H

#include "base/err.h"
#include <stdbool.h>
#include <stdint.h>

#define SYNC_JOURNAL ".weight_sync/commit.json"
#define SYNC_NONE    (-1) /* no version: nothing was pulled yet */

/* Called between steps, by any thread of a pull; an error ends the pull while nothing is decided yet. */
struct sync_steps {
    err_t (*step)(void *ctx, const char *what, struct err *e); /* NULL: not called */
    void *ctx;
};

struct sync_dir {
    char *path, *next;
    int lock;
    int64_t applied; /* or SYNC_NONE */
    const struct sync_steps *steps;
};

/* What a commit does, by plain names. */
struct sync_change {
    int64_t version;
    struct json_t *files;   /* array: from next/ into the folder */
    struct json_t *removed; /* array: files of the folder that go */
};

err_t sync_step(const struct sync_steps *s, const char *what, struct err *e) MUST_USE;
/* "DIR/NAME" in fresh memory; NULL: none left. */
char *sync_join(const char *dir, const char *name);

/* Makes the folder if it is absent, waits at most lock_s seconds for the lock, finishes what a crash left, reads the
 * state.  Refused: a folder with files of its own that is no checkpoint (a pull removes what the new version has
 * not), and a state.json that cannot be read, unless `reseed`. */
err_t sync_dir_open(struct sync_dir *d, const char *path, double lock_s, bool reseed,
                    const struct sync_steps *steps, struct err *e) MUST_USE;
err_t sync_dir_clear(struct sync_dir *d, struct err *e) MUST_USE; /* next/ is there and empty */
err_t sync_dir_commit(struct sync_dir *d, const struct sync_change *c, struct err *e) MUST_USE;
void sync_dir_close(struct sync_dir *d);

/* Copies a whole file; `to` must not exist. */
err_t sync_copy(const char *from, const char *to, uint64_t *bytes, struct err *e) MUST_USE;
/* Appends the names of the regular files (links are followed) of a folder to a JSON array. */
err_t sync_list(struct json_t *names, const char *dir, struct err *e) MUST_USE;

#endif
