/*
 * quantize_run.h - carries a plan out: reads, encodes and writes the weights.
 *
 * Work goes through the checkpoint in batches of about 256 MiB of source.  In a batch a pool first
 * takes the largest magnitude of what needs it, then encodes; a job is a range of rows of one
 * weight, which it reads and writes in pieces.  So memory is a few MiB a thread, a batch is read
 * again from the page cache, and the bytes written do not depend on the number of threads.
 *
 * A value that is not finite or a scale that no GEMM could use fails the run by the weight's name.
 */
#ifndef CLI_QUANTIZE_RUN_H
#define CLI_QUANTIZE_RUN_H

#include "base/pool.h"
#include "cli/quantize_plan.h"

struct quantize_progress {
    void (*report)(void *ctx, uint64_t done, uint64_t total); /* from any thread, one at a time */
    bool (*stop)(void *ctx); /* true: give up, ERR_STATE "interrupted" */
    void *ctx;
};

err_t quantize_run(const struct quantize_plan *p, struct st_writer *w, struct pool *pool,
                   const struct quantize_progress *progress, struct err *e) MUST_USE;

#endif
