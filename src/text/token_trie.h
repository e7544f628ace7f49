/*
 * token_trie.h - the tokens of a vocabulary by their bytes, in depth-first order.
 *
 * Node i is a byte below its parent; the nodes below it are i + 1 .. end[i] - 1, so a walk that
 * cannot go on at i continues at end[i].  Tokens whose bytes end at node i are id[first[i] ..
 * first[i + 1]).  Special tokens, tokens without bytes and those longer than TRIE_MAX_BYTES are not
 * in it.
 *
 * Immutable; counted references; the tokenizer is borrowed.
 */
#ifndef TEXT_TOKEN_TRIE_H
#define TEXT_TOKEN_TRIE_H

#include "text/tokenizer.h"
#include <stdatomic.h>

#define TRIE_MAX_BYTES 512

struct token_trie {
    _Atomic int refs;
    const struct tokenizer *tok;
    int32_t n_nodes, n_ids;
    uint8_t *byte;  /* [n_nodes] */
    int32_t *end;   /* [n_nodes] */
    int32_t *first; /* [n_nodes + 1] */
    int32_t *id;    /* [n_ids] */
};

err_t token_trie_new(struct token_trie **out, const struct tokenizer *t, struct err *e) MUST_USE;
void token_trie_ref(struct token_trie *t);
void token_trie_unref(struct token_trie *t);

#endif
