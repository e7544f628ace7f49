/*
 * added.h - added tokens found in a text.
 *
 * Two tries, as in HF: one over the raw text (normalized false), one over the normalized text
 * between (its patterns normalized too).  Leftmost, then longest; flags are applied to each match
 * in turn.
 */
#ifndef TEXT_ADDED_H
#define TEXT_ADDED_H

#include "text/vocab.h"

#include <jansson.h>

struct added;

/* Id -1: a stretch of text. */
typedef err_t added_sink(void *ctx, int32_t id, const char *text, size_t n, struct err *e);

/* Adds the tokens of `list` that the model lacks to `vocab`, with the ids that HF gives them. */
err_t added_parse(struct added **out, struct vocab *vocab, const json_t *list, bool nfc,
                  struct err *e) MUST_USE;
void added_free(struct added *a);
/* Cut `text` at the tokens; `put` gets stretches of text and tokens in order. */
err_t added_split(const struct added *a, bool normalized, const char *text, size_t n,
                  added_sink *put, void *ctx, struct err *e) MUST_USE;

#endif
