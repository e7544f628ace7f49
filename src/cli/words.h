/*
 * words.h - flags from a file and from the environment, put in front of those of the command line.
 *
 *     struct words w;
 *     if (words_gather(&w, &serve_command, argc, argv, e) == OK) options_parse(&serve_command, w.n, w.v, ...);
 *     words_release(&w);          // when nothing parsed from it is used any more
 *
 * Later words win, so the command line goes before the environment, and that before the file.
 * File         --config FILE (or $MOULT_CONFIG): a line is `name: value`, `name = value`, or `name` for a flag without
 *              a value; `name: true` is that too and `name: false` nothing.  # begins a comment line; names are those
 *              of the flags, without dashes in front, with - or _ inside.  Quotes around a value are taken off.
 * Environment  MOULT_ and the name in capitals with _ for -: MOULT_API_KEY.  Variables that no flag has are left alone.
 * Errors       ERR_IO: the file cannot be read; ERR_INPUT, with file and line: not such a line, or no such flag.
 */
#ifndef CLI_WORDS_H
#define CLI_WORDS_H

#include "cli/options.h"

struct words {
    char **v;
    int n, cap;
    int owned; /* the first words, which belong to the list */
};

err_t words_gather(struct words *w, const struct opt_command *c, int argc, char **argv,
                   struct err *e) MUST_USE;
void words_release(struct words *w);

#endif
