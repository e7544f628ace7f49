/*
 * docs.h - the manual page and bash's completion, written from the tables of commands and flags, so
 * that neither can say what the program does not do (moult help --man, moult help --bash).
 */
#ifndef CLI_DOCS_H
#define CLI_DOCS_H

#include "base/buf.h"
#include "cli/options.h"

struct doc_command {
    const char *name, *about;          /* "serve", one line */
    const struct opt_command *options; /* NULL: it has no flags; .name "bench gsm8k": two words */
};

/* roff(7) with man(7)'s macros. */
void docs_man(const struct doc_command *c, size_t n, const char *version, struct buf *out);
/* A script for bash's `complete`. */
void docs_bash(const struct doc_command *c, size_t n, struct buf *out);

#endif
