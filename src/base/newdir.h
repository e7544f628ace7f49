/*
 * newdir.h - a folder that appears whole or not at all.
 *
 *     newdir_begin(&d, "out", e)       // "out" must not exist; work goes to "out.partial-XXXXXX"
 *     newdir_put(&d, "a.json", p, n, e)    // or open files under d.temp
 *     newdir_commit(&d, e)             // syncs the folder, renames it to "out", syncs the parent
 *     newdir_abort(&d)                 // removes what was written; nothing after a commit
 *
 * Files that the caller wrote itself must be synced before the commit.
 */
#ifndef BASE_NEWDIR_H
#define BASE_NEWDIR_H

#include "base/err.h"
#include <stddef.h>

struct newdir {
    char *path; /* as it will be */
    char *temp; /* as it is now; NULL when zeroed, committed or aborted */
};

/* ERR_STATE if `path` exists; ERR_IO with the reason of the system. */
err_t newdir_begin(struct newdir *d, const char *path, struct err *e) MUST_USE;
err_t newdir_put(struct newdir *d, const char *name, const void *data, size_t n,
                 struct err *e) MUST_USE;
err_t newdir_commit(struct newdir *d, struct err *e) MUST_USE;
void newdir_abort(struct newdir *d);

#endif
