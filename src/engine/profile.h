/*
 * profile.h - what each step of the engine took, as a trace that chrome://tracing and Perfetto read.
 *
 *     profile_start(e, n_steps, err);          // n_steps <= 0: until stopped or PROFILE_STEPS
 *     profile_stop(e, path, &n, err);          // writes the file, in the caller's thread
 *
 * One event a step: begin, duration, tokens (of prompts and of outputs), requests running and waiting, free KV
 * pages; and counters of the same.  A start while one runs, and a stop without one, are ERR_STATE.
 * Threads: both from any; the engine's thread writes a record at the end of a step, a few numbers.
 */
#ifndef ENGINE_PROFILE_H
#define ENGINE_PROFILE_H

#include "engine/engine.h"

#define PROFILE_STEPS 1000000 /* records that are kept at most; later steps are not recorded */

struct profile_record {
    int64_t begin, end; /* clock_ns */
    int32_t prompt_tokens, output_tokens, running, waiting, pages_free;
};

/* The engine's own (struct engine); all of the engine thread. */
struct profile {
    bool on;
    struct profile_record *records;
    int32_t n, cap, limit;
};

err_t profile_start(struct engine *e, int64_t n_steps, struct err *err) MUST_USE;
err_t profile_stop(struct engine *e, const char *path, int32_t *n, struct err *err) MUST_USE;
/* Engine thread. */
void profile_step(struct profile *p, const struct profile_record *r);

#endif
