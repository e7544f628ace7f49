/* sync_internal.h - a chain of deltas applied to copies in next/. */
#ifndef WEIGHT_SYNC_INTERNAL_H
#define WEIGHT_SYNC_INTERNAL_H

#include "weight/checkpoint.h"
#include "weight/delta.h"
#include "weight/sync.h"

struct sync_chain {
    const struct sync_dir *dir;
    /* the checkpoint lies in next/ already; else files are copied there when a delta first changes
       them */
    bool seeded;
    int threads;
    struct json_t *files; /* names in next/; chain_apply adds to it */
    struct sync_result *result;

    struct checkpoint base; /* where each tensor lies: the same place in both folders */
    int *fds;               /* of base's files in next/; -1: not opened */
};

err_t chain_open(struct sync_chain *c, struct err *e) MUST_USE;
/* The delta in folder `path`, which must be `version` on top of the one before it. */
err_t chain_apply(struct sync_chain *c, const char *path, int64_t version, struct err *e) MUST_USE;
/* All that lies in next/ reaches the disk. */
err_t chain_sync(const struct sync_chain *c, struct err *e) MUST_USE;
void chain_close(struct sync_chain *c); /* also after a failure */

#endif
