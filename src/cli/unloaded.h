/*
 * unloaded.h - what of an update's folder will not take effect.
 *
 * Tokenizer, chat template and the defaults of generation_config.json are those of the start, as in
 * SGLang; a trainer that changed them must know.  The tokenizer is compared by the bytes of
 * tokenizer.json; what a folder lacks does not differ.
 */
#ifndef CLI_UNLOADED_H
#define CLI_UNLOADED_H

#include "base/digest.h"
#include "cli/textconf.h"
#include "model/config.h"

struct unloaded {
    char tokenizer[DIGEST_HEX];     /* "": no file */
    char chat_template[DIGEST_HEX]; /* "": none */
    struct config config;           /* as the folder has it */
};

/* Of the start: the tokenizer's folder, and the model's config before anything was added to it. */
void unloaded_note(struct unloaded *u, const char *tokenizer_dir, const struct textconf *text,
                   const struct config *config);
/* "tokenizer.json, eos_token_id of this folder: not those of the start, which stay in use", or "". */
void unloaded_compare(const struct unloaded *u, const char *dir, char *warning, size_t n);

#endif
