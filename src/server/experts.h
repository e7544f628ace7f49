/*
 * experts.h - the routing of a request's tokens, in and out (SGLang's rollout routing replay).
 *
 * Out: `return_routed_experts` and `routed_experts_start_len` (0 .. prompt tokens); nothing is told unless the server
 * keeps it (--enable-return-routed-experts), nor of a request that ended before all its rows were there.  In: `routed_experts`, the experts
 * of the prompt's first tokens, from position 0 on: what was returned, or the numbers in lists.  Both ways
 * [tokens][num_hidden_layers][num_experts_per_tok] ids in the order they were chosen, as little-endian int32 in
 * base64; the rows of dense layers are zeros (and not looked at).  The weights of given experts are those that the
 * router's logits give them, normalised as the model does.
 */
#ifndef SERVER_EXPERTS_H
#define SERVER_EXPERTS_H

#include "engine/request.h"
#include "model/config.h"
#include "server/json.h"

/* The three fields of one prompt, which `r` has already. */
err_t experts_read(const json_t *o, const struct config *c, struct request *r,
                   struct err *e) MUST_USE;
/* The text of a done request's rows, without quotes. */
void experts_put(struct buf *b, const struct config *c, const struct request *r);

#endif
