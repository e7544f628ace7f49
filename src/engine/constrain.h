/*
 * constrain.h - the grammar of a request (text/grammar.h) as ids that may not be drawn.
 *
 * Before a step is planned, every running sequence with a grammar gets its mask: the tokens that
 * its output may go on with, and the end tokens where it may end.  A mask depends on the output ids
 * alone, so retraction and batch do not show.  Bars work as all bars do (model/sample.h): logprobs
 * are those of what is left.
 */
#ifndef ENGINE_CONSTRAIN_H
#define ENGINE_CONSTRAIN_H

#include "engine/sched.h"
#include "model/config.h"

/* Called by the submitting thread; false: out of memory. */
bool constrain_init(struct seq *q, const struct config *c);
/* The mask after the ids so far.  ERR_INPUT: no token is left; the request cannot go on. */
err_t constrain_step(struct seq *q, const struct config *c, struct err *e) MUST_USE;
/* Appends what the mask bars to `to` (room for the vocabulary); returns how many. */
int32_t constrain_barred(const struct seq *q, const struct config *c, int32_t *to);

#endif
