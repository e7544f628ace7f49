/*
 * grammar.h - what a text may be, as a set of tokens that may come next.
 *
 *     struct grammar_spec s = {.pattern = "(yes|no)", .n_pattern = 8};
 *     grammar_compile(&g, trie, &s, err);                  // names the construct that is not taken
 *     struct grammar_run run = {0};                        // one output
 *     grammar_mask(g, &run, output_ids, n, bits, vocab, &whole, err);
 *
 * A grammar is an automaton over bytes with calls: nested JSON needs a stack.  It is made
 * deterministic as it is used; states and masks are kept, so a mask costs a walk of the token trie
 * once for each state and a copy afterwards.  What is kept has a limit: beyond it everything is
 * dropped, and outputs are read again from their ids.  Masks depend on the spec, the tokenizer and
 * the ids alone.
 *
 * Regular expressions match the whole text.  Taken: literals, . [...] [^...], \d \D \w \W \s \S
 * (ASCII), \t \n \r \f \v \a \0 \xHH \uHHHH, ( ) (?: ) (?P<name> ), |, ? * + {m} {m,n} with or
 * without a lazy ?, and ^ and $ at the ends.  Refused by name: back references, lookaround, \b,
 * flags, possessive and atomic groups, \p.
 *
 * JSON schemas: docs/openai.md lists the keywords.  Text is one JSON value: properties in the order
 * of the schema, between tokens nothing, one space, or a new line and up to 32 blanks; numbers have
 * at most 18 digits before and after the point and 2 in the exponent.  Properties that a schema
 * with `properties` does not name are generated only where additionalProperties asks for them.
 * Nesting beyond GRAMMAR_MAX_DEPTH calls is not generated.
 *
 * Any thread may use a grammar (it has a lock); a run belongs to one.
 */
#ifndef TEXT_GRAMMAR_H
#define TEXT_GRAMMAR_H

#include "base/err.h"
#include "text/token_trie.h"
#include <jansson.h>

#define GRAMMAR_MAX_NODES (1 << 18) /* of the automaton, before it is deterministic */
#define GRAMMAR_MAX_DEPTH 160       /* calls in calls */

struct grammar;

/* `before`, a value of `schema`, `after`. */
struct grammar_call {
    const char *before, *after;
    const json_t *schema; /* NULL: any object */
};

/* One of pattern, schema, any_object and calls. */
struct grammar_spec {
    /* Free text that ends with `until` comes first, then up to two new lines (NULL: none); with `if_begins` only where
     * the output begins with that. */
    const char *until, *if_begins;
    const char *pattern;
    size_t n_pattern;
    const json_t *schema;
    bool any_object;
    /* open, one of the calls, then as many as may come, each after `between`, close */
    const struct grammar_call *calls;
    int n_calls;
    bool one_call;
    const char *open, *between, *close;
};

/* One reference is the caller's; the trie is shared. */
err_t grammar_compile(struct grammar **out, struct token_trie *trie, const struct grammar_spec *s,
                      struct err *e) MUST_USE;
void grammar_ref(struct grammar *g);
void grammar_unref(struct grammar *g);

/* How far an output was read; zeroed at its beginning. */
struct grammar_run {
    uint64_t era;
    int32_t state, n;
};

/* Bits of the ids below `vocab` that may follow the ids: ceil(vocab / 32) words.  *whole: the text
 * may end here.  No bit and not whole is a dead end.  ERR_INPUT: the ids are not of the grammar.
 * ERR_TOOBIG: more states at once than are kept. */
err_t grammar_mask(struct grammar *g, struct grammar_run *run, const int32_t *ids, int32_t n_ids,
                   uint32_t *bits, int32_t vocab, bool *whole, struct err *e) MUST_USE;
/* Whether the bytes are a text of the grammar, or the beginning of one (*prefix). */
err_t grammar_match(struct grammar *g, const char *text, size_t n, bool *whole, bool *prefix,
                    struct err *e) MUST_USE;

#endif
