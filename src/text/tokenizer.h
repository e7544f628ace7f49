/*
 * tokenizer.h - text to token ids and back, as Hugging Face `tokenizers` does it for byte-level
 * BPE.
 *
 *     struct tokenizer *t = NULL;
 *     if (tokenizer_load(&t, "model/tokenizer.json", e) != OK) ...
 *     struct ids ids = {0};
 *     tokenizer_encode(t, &ids, text, bytes, e);
 *
 * Read from tokenizer.json: normalizer (null, NFC, Sequence), pre_tokenizer (Split by regex or
 * string, behavior Isolated, ByteLevel, Sequence), model BPE (vocab, merges in both spellings,
 * ignore_merges), added_tokens with all flags, decoder ByteLevel.  Anything else in the file that
 * would change ids is refused by name.  No special tokens are added by a post processor here
 * (add_bos is the caller's: tokenizer_config's add_bos_token).
 *
 * A tokenizer is immutable after load and may be used by any number of threads.  Encoding takes
 * time n log n in the bytes of the text, whatever they are (cases C29).
 */
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include "base/buf.h"
#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tokenizer;

/* A growing list of token ids; zeroed is empty. */
struct ids {
    int32_t *v;
    size_t n, cap;
};
bool ids_push(struct ids *l, int32_t id); /* false: out of memory */
void ids_release(struct ids *l);

err_t tokenizer_load(struct tokenizer **out, const char *path, struct err *e) MUST_USE;
/* The same from the bytes of a tokenizer.json (tests, fuzzing). */
err_t tokenizer_parse(struct tokenizer **out, const char *json, size_t n, struct err *e) MUST_USE;
void tokenizer_free(struct tokenizer *t);

/* Append the ids of `text` (n bytes of UTF-8, else ERR_INPUT naming the byte offset).  Special
 * tokens written in the text are recognised, as HF does with add_special_tokens=False. */
err_t tokenizer_encode(const struct tokenizer *t, struct ids *out, const char *text, size_t n,
                       struct err *e) MUST_USE;
/* Append the bytes of the ids, exactly HF's decode(): invalid UTF-8 becomes U+FFFD as Rust's
 * from_utf8_lossy has it.  Ids outside the vocabulary are skipped.  False: out of memory. */
bool tokenizer_decode(const struct tokenizer *t, struct buf *out, const int32_t *ids, size_t n,
                      bool skip_special);

int32_t tokenizer_vocab_size(const struct tokenizer *t); /* highest id + 1 */
int32_t tokenizer_id(const struct tokenizer *t,
                     const char *content); /* added or vocab; -1 if none */
bool tokenizer_is_special(const struct tokenizer *t, int32_t id);
/* The raw bytes of one token (not NUL-terminated; may be part of a character); NULL for an unknown
 * id.  An added token gives its content.  Borrowed from `t`. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *n);
/* What the decoder appends for the id: as above, but an added token whose characters are all in the
 * byte-level alphabet is mapped through it, as HF's decoder does. */
const char *tokenizer_decoded(const struct tokenizer *t, int32_t id, size_t *n);

#endif
