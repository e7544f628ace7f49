/*
 * vocab.h - the tokens of a tokenizer: id to strings and back.
 *
 * Each id has a content (as tokenizer.json spells it) and the bytes it decodes to: the content
 * through the byte-level alphabet, or the content itself when a character is outside that alphabet.
 */
#ifndef TEXT_VOCAB_H
#define TEXT_VOCAB_H

#include "base/buf.h"

#include <stdint.h>

/* Ids are below this: the table by id must not grow with a number in a file alone. */
#define VOCAB_MAX_ID (1 << 24)

struct token {
    uint32_t content, content_len; /* offset in the arena, bytes */
    uint32_t bytes, bytes_len;
    bool used, added, special;
    bool mapped; /* every character is in the byte-level alphabet */
};

/* Open addressing from a string to an id; the strings are the caller's tokens. */
struct string_map {
    int32_t *slot; /* -1 empty */
    size_t mask, n;
};

struct vocab {
    struct token *token; /* by id */
    int32_t n, cap;      /* n: highest id + 1 */
    int32_t count;       /* tokens in use */
    struct buf arena;
    struct string_map by_content;
    struct string_map by_bytes; /* only ids put there by vocab_index_bytes */
};

/* ERR_INPUT when the id is out of range or taken. */
err_t vocab_put(struct vocab *v, int64_t id, const char *content, size_t n, struct err *e) MUST_USE;
/* From now on the id decodes as if `text` were its content.  False: no memory. */
bool vocab_decode_as(struct vocab *v, int32_t id, const char *text, size_t n) MUST_USE;
int32_t vocab_find(const struct vocab *v, const char *content, size_t n); /* -1 none */
bool vocab_index_bytes(struct vocab *v, int32_t id);                      /* false: no memory */
int32_t vocab_find_bytes(const struct vocab *v, const char *bytes, size_t n);
const struct token *vocab_token(const struct vocab *v, int32_t id); /* NULL when unused */
void vocab_release(struct vocab *v);

/* The byte that a character of the byte-level alphabet stands for, or -1. */
int byte_level_byte(uint32_t c);

#endif
