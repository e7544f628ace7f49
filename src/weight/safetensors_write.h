/*
 * safetensors_write.h - a checkpoint's weight files, written in any order.
 *
 *     struct st_writer *w;
 *     st_writer_open(&w, dir, tensors, n, max_shard_bytes, e)   // all places are known now
 *     st_writer_put(w, tensor, offset, data, bytes, e)          // any thread, any order
 *     st_writer_finish(w, e)                                    // syncs, writes the index
 *     st_writer_free(w)
 *
 * One shard is model.safetensors; several are model-00001-of-0000N.safetensors, with
 * model.safetensors.index.json.  A shard takes tensors in the order given and ends before the one
 * that would exceed the maximum; a tensor larger than that has a shard of its own.  Inside a shard
 * wider types come first, so that every tensor is aligned.  The files get their size at once, so
 * that a disk without room says so before any work.  Equal inputs give equal bytes.
 */
#ifndef WEIGHT_SAFETENSORS_WRITE_H
#define WEIGHT_SAFETENSORS_WRITE_H

#include "weight/safetensors.h"

struct st_out {
    char name[160];
    st_dtype_t dtype;
    int n_dims;
    uint64_t shape[ST_MAX_DIMS];
};

struct st_writer;

/* `tensors` is borrowed until the writer is freed.  ERR_INPUT: a name twice, a size over 64 bits;
 * ERR_IO: the system's reason ("... No space left on device"). */
err_t st_writer_open(struct st_writer **out, const char *dir, const struct st_out *tensors,
                     size_t n, uint64_t max_shard_bytes, struct err *e) MUST_USE;
uint64_t st_writer_bytes(const struct st_writer *w); /* of all data */
err_t st_writer_put(struct st_writer *w, size_t tensor, uint64_t offset, const void *data,
                    size_t bytes, struct err *e) MUST_USE;
/* Every byte must have been put. */
err_t st_writer_finish(struct st_writer *w, struct err *e) MUST_USE;
void st_writer_free(struct st_writer *w);

#endif
