/*
 * routing.h - which experts each token with KV went to: one row a token, kept by KV page.
 *
 *     routing_new(&t, config, n_pages, e);
 *     routing_put(t, pages, position, ids);             // after a step, of each of its tokens
 *     routing_rows(t, pages, from, to);                 // of a sequence; NULL: no memory
 *
 * A row lives as long as what its page holds, so a prefix hit finds the rows that were computed with
 * its K and V; nothing has to be taken out when a page is given back.  A row is [n_layers][top_k] ids
 * in the order they were chosen, zeros for dense layers; an id is one byte if all fit in it, else
 * two, little-endian.
 */
#ifndef ENGINE_ROUTING_H
#define ENGINE_ROUTING_H

#include "base/err.h"
#include "model/config.h"
#include <stddef.h>
#include <stdint.h>

struct routing;

size_t routing_id_bytes(const struct config *c);  /* of one id */
size_t routing_row_bytes(const struct config *c); /* of a token */
err_t routing_new(struct routing **out, const struct config *c, int32_t n_pages,
                  struct err *e) MUST_USE;
void routing_free(struct routing *t);
void routing_put(struct routing *t, const int32_t *pages, int32_t position, const int16_t *ids);
/* Rows of positions [from, to), to > from, in fresh memory. */
uint8_t *routing_rows(const struct routing *t, const int32_t *pages, int32_t from, int32_t to);

#endif
