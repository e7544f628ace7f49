/*
 * sync.h - bring a local checkpoint to a published version.
 *
 *     struct sync_options o = {.local_dir = "/nvme/ckpt", .source_dir = "/shared/weights", .launch_dir = model,
 *                              .target = 5, .lock_s = 600};
 *     sync_begin(&s, &o, e)          // the folder's lock, and what a crash left is finished
 *     sync_pull(s, &result, e)       // all of it or nothing
 *     ... load o.local_dir ...       // nobody else pulls into it meanwhile
 *     sync_end(s)
 *
 * source_dir/weight_vNNNNNN holds version N: a delta against N - 1 (delta.h), or a whole checkpoint.  Version 0 is
 * launch_dir.  A pull starts from the newest whole version in (applied, target], else from what the folder holds,
 * else from launch_dir, and applies the deltas after it, in order, each checked against the base it names and each
 * tensor against its checksum.  Target 0, or one below the applied version, forgets what the folder holds.  All of
 * it happens beside the folder and becomes visible in one commit (sync_dir.h): no version in between ever is.
 */
#ifndef WEIGHT_SYNC_H
#define WEIGHT_SYNC_H

#include "weight/sync_dir.h"
#include <stddef.h>

struct sync;

struct sync_options {
    const char *local_dir, *source_dir, *launch_dir;
    int64_t target;
    int threads;   /* of the tensors of a delta; < 1: 1 */
    double lock_s; /* how long to wait for another pull into the folder */
    struct sync_steps steps;
};

struct sync_result {
    int64_t from, version; /* applied before and now; from may be SYNC_NONE */
    int64_t seed; /* the whole version it began with, 0: launch_dir, SYNC_NONE: the folder itself */
    int deltas;
    size_t tensors;      /* changed by them */
    uint64_t bytes;      /* written */
    uint64_t wire_bytes; /* of the deltas' tensors, as published */
    bool changed;        /* false: the folder was there already */
};

err_t sync_begin(struct sync **out, const struct sync_options *o, struct err *e) MUST_USE;
err_t sync_pull(struct sync *s, struct sync_result *r, struct err *e) MUST_USE;
void sync_end(struct sync *s);

#endif
