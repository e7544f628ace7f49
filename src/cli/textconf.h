/*
 * textconf.h - what tokenizer_config.json says beside the tokenizer: chat template, special tokens.
 *
 * The template is chat_template.jinja if that file is there, else `chat_template` (a string, or a
 * list of {name, template}, of which `default` is taken).  Token fields may be strings or objects
 * with `content`. A folder without tokenizer_config.json is fine: no template, no special tokens.
 */
#ifndef CLI_TEXTCONF_H
#define CLI_TEXTCONF_H

#include "base/digest.h"
#include "base/err.h"
#include "text/template.h"
#include <stdbool.h>

struct textconf {
    struct tmpl *chat; /* NULL: none */
    char *bos, *eos;   /* NULL: none */
    bool add_bos;
    char chat_sum[DIGEST_HEX]; /* xxh3-128 of the template's text; "": none */
};

err_t textconf_load(struct textconf *t, const char *dir, struct err *e) MUST_USE;
void textconf_release(struct textconf *t);

#endif
