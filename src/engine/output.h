/*
 * output.h - what a drawn token does to its request: ids, logprobs, text, stop or go on.
 *
 * Stop strings run as one automaton each (Knuth, Morris, Pratt) over the bytes of the text, so a
 * token costs its bytes times the number of stops, whatever their length; the longest partial match
 * is what is held back from the client.  Of several matches the one that ends first wins, then the
 * longest.
 */
#ifndef ENGINE_OUTPUT_H
#define ENGINE_OUTPUT_H

#include "engine/sched.h"
#include "model/config.h"

/* Called by the submitting thread; false: out of memory. */
bool output_init(struct seq *q, const struct tokenizer *tok);
void output_release(struct seq *q);
/* Append the token (request's lock is taken inside).  The finish reason is returned and already
 * stored with its match; `done` is not set.  FINISH_ABORT: out of memory. */
finish_t output_token(struct seq *q, const struct sample_output *o, const struct config *c);
/* The next token is drawn under this version.  False: out of memory. */
bool output_version(struct seq *q, uint64_t id, const char *version);
/* Forget an unfinished scoring of the prompt: it begins again, under other weights. */
void output_rescore(struct seq *q);
/* Store the score of prompt position p. */
bool output_score(struct seq *q, int32_t p, const struct sample_output *o);
/* The text as it ends: tail of the decoder, cut at the stop, all of it sendable.  Lock held. */
void output_end(struct seq *q);
/* Ids that may not be drawn now, into `to` (room for all); returns how many. */
int32_t output_barred(const struct seq *q, const struct config *c, int32_t *to);

#endif
