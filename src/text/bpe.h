/*
 * bpe.h - byte pair merging of one piece.
 *
 * The pair with the lowest rank merges first, the leftmost of equals.  Short pieces scan; long ones
 * use a heap over a linked list, n log n.  A piece that is a whole token is found by one look-up:
 * the table holds the tokens that merging their own bytes gives back (all, with ignore_merges).
 */
#ifndef TEXT_BPE_H
#define TEXT_BPE_H

#include "text/tokenizer.h"
#include "text/vocab.h"

#include <jansson.h>

struct merge_slot {
    uint64_t pair; /* left << 32 | right; UINT64_MAX empty */
    uint32_t rank;
    int32_t id;
};

struct bpe {
    struct vocab *vocab;  /* borrowed */
    int32_t byte_id[256]; /* -1: the byte is not in the vocabulary and is dropped */
    struct merge_slot *merge;
    size_t mask;
    int shift;
};

/* `model` is tokenizer.json's; fills `vocab` from it. */
err_t bpe_parse(struct bpe *b, struct vocab *vocab, const json_t *model, struct err *e) MUST_USE;
void bpe_release(struct bpe *b);
bool bpe_encode(const struct bpe *b, struct ids *out, const char *piece,
                size_t n); /* false: no memory */

#endif
