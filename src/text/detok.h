/*
 * detok.h - the text of a growing token sequence, never a split character.
 *
 *     struct detok d;
 *     detok_init(&d, tokenizer, skip_special);
 *     for each id: detok_push(&d, id, &text);     // appends what is complete
 *     detok_end(&d, &text);                       // an unfinished tail becomes U+FFFD
 *
 * The text appended in all equals tokenizer_decode of all ids (case C27).  Bytes that can still
 * become a character are held back (at most 3); invalid ones become U+FFFD as soon as they are
 * known to be.
 */
#ifndef TEXT_DETOK_H
#define TEXT_DETOK_H

#include "text/tokenizer.h"

struct detok {
    const struct tokenizer *tok;
    bool skip_special;
    unsigned char held[4];
    int n_held;
};

void detok_init(struct detok *d, const struct tokenizer *t, bool skip_special);
bool detok_push(struct detok *d, int32_t id, struct buf *out); /* false: out of memory */
bool detok_end(struct detok *d, struct buf *out);

#endif
