/* sampling.h - sampling parameters of a request, native and OpenAI spelling, into struct request.
 */
#ifndef SERVER_SAMPLING_H
#define SERVER_SAMPLING_H

#include "engine/request.h"
#include "model/config.h"
#include "server/json.h"

#define SAMPLING_MAX_N       128
#define SAMPLING_MAX_STOPS   1024
#define SAMPLING_MAX_REGEXES 8

enum sampling_api { SAMPLING_NATIVE, SAMPLING_COMPLETION, SAMPLING_CHAT };

/* `o` may be NULL (all defaults).  Fills the sampling part of `r`; *n: samples wanted.
 * max_new_tokens is INT32_MAX for "up to the context".  Draws a seed if none was given.  Native
 * refuses unknown keys. The logit_bias map holds at most vocab_size entries, since its ids are
 * distinct. */
err_t sampling_parse(const json_t *o, enum sampling_api api, const struct config *cfg,
                     struct request *r, int *n, struct err *e) MUST_USE;

#endif
