/*
 * expert_load.h - how many tokens each expert of each layer got, for the page at /.
 *
 *     engine_expert_load(e, &counts, err);      // [n_layers][n_experts], fresh memory; dense layers have zeros
 *
 * Counts only grow; they are kept from the first call until EXPERT_LOAD_S after the last one, so that a server
 * nobody looks at counts nothing.  ERR_UNSUPPORTED: the model does not tell (model_can).
 */
#ifndef ENGINE_EXPERT_LOAD_H
#define ENGINE_EXPERT_LOAD_H

#include "engine/engine.h"

#define EXPERT_LOAD_S 10

/* The engine's own, of its thread. */
struct expert_load {
    uint64_t *counts; /* NULL before the first call */
    int64_t until;    /* clock_ns */
};

err_t engine_expert_load(struct engine *e, uint64_t **counts, struct err *err) MUST_USE;
/* Engine thread: is anybody looking?  Then a step is to tell them. */
bool expert_load_wanted(const struct expert_load *l);
void expert_load_count(struct expert_load *l, const struct config *c,
                       const int16_t *ids); /* a token's */

#endif
