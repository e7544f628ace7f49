/*
 * bucket.h - tensors that arrive in pieces, kept until they are an update.
 *
 *     struct buckets b = {0};
 *     if (buckets_add(&b, bytes, n, limit, e) != OK) mem_free(bytes);     // any number of times
 *     rc = update_stage_part(u, b.files, b.n, n_threads, &progress, e);   // update.h
 *     buckets_release(&b);
 *
 * A bucket is the bytes of a safetensors file in memory.  Nothing is derived of a bucket alone: a
 * weight and its scales may come in different ones, in any order.  Refused by name: a tensor that an
 * earlier bucket had; a bucket without tensors, or beyond `limit` bytes of all.
 * Threads: one at a time.
 */
#ifndef WEIGHT_BUCKET_H
#define WEIGHT_BUCKET_H

#include "weight/safetensors.h"
#include "weight/store.h"

struct buckets {
    size_t n, cap;
    struct st_file *files; /* [n]; their bytes belong to this struct */
    size_t n_tensors;
    uint64_t bytes;
    const char **names; /* a hash table of the tensors' names, at most half full */
    size_t n_places;    /* a power of two, or 0 */
};

/* Takes `bytes` (of mem_*) if it succeeds; after a failure everything is as before. */
err_t buckets_add(struct buckets *b, void *bytes, uint64_t n, uint64_t limit,
                  struct err *e) MUST_USE;
/* What a whole update of a store can need at most: every element as F32, and room for headers. */
uint64_t buckets_limit(const struct store *s);
void buckets_release(struct buckets *b);

#endif
