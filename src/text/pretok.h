/*
 * pretok.h - the pre_tokenizer of a tokenizer.json: text to pieces.
 *
 * A list of Split stages and one ByteLevel at the end; each stage sees one piece of the stage
 * before as a text of its own (look-around ends there), and matches and the gaps between them are
 * pieces.
 */
#ifndef TEXT_PRETOK_H
#define TEXT_PRETOK_H

#include "base/buf.h"

#include <jansson.h>

struct pretok;

typedef err_t pretok_sink(void *ctx, const char *piece, size_t n, struct err *e);

err_t pretok_parse(struct pretok **out, const json_t *spec, struct err *e) MUST_USE;
void pretok_free(struct pretok *p);
/* Call `put` for each piece of `text` (valid UTF-8) in order. */
err_t pretok_run(const struct pretok *p, const char *text, size_t n, pretok_sink *put, void *ctx,
                 struct err *e) MUST_USE;

#endif
