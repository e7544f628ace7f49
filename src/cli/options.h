/*
 * options.h - command lines from tables.
 *
 *     struct serve_args a;
 *     switch (options_parse(&serve_command, argc, argv, &a, e)) ...
 *
 * One row of a table is one flag: it drives parsing, range checks, --help and the nearest-name hint
 * for an unknown flag.  `--flag value` and `--flag=value` mean the same.  A row has one class:
 *
 *     OPT_HONOURED   stored in the struct that the command owns, at `offset`
 *     OPT_IGNORED    changes only speed elsewhere; accepted, and named in one joint warning
 *     OPT_REFUSED    would change meaning and is not there: an error with the reason, unless the
 *                    value given is the one that asks for nothing (`neutral`)
 *
 * Ignored flags take a value unless their kind is OPT_FLAG.
 */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "base/buf.h"
#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { OPT_HONOURED, OPT_IGNORED, OPT_REFUSED } opt_class_t;
typedef enum { OPT_FLAG, OPT_INT, OPT_REAL, OPT_STRING, OPT_CHOICE, OPT_STRINGS } opt_kind_t;

/* What OPT_STRINGS fills: a flag that may be given several times. */
#define OPT_STRINGS_MAX 64
struct opt_strings {
    const char *v[OPT_STRINGS_MAX];
    size_t n;
};

struct opt {
    const char *name;  /* without dashes */
    const char *alias; /* comma-separated further names, or NULL */
    opt_class_t cls;
    opt_kind_t kind;
    size_t offset;       /* bool, int64_t, double, const char * or struct opt_strings in the
                            command's struct */
    const char *preset;  /* default, parsed like a value; NULL: zero, or unset */
    double min, max;     /* numbers; both 0: any */
    const char *choices; /* "a|b|c" */
    const char *help;    /* honoured: what it does; refused: why; NULL hides the row from --help */
    const char *neutral; /* refused: "a|b" values that ask for nothing */
};

struct opt_command {
    const char *name;  /* "serve" */
    const char *about; /* lines of --help before the flags */
    const struct opt *opts;
    size_t n_opts;
};

typedef enum { OPTIONS_RUN, OPTIONS_HELP, OPTIONS_ERROR } options_t;

/* argv[0] is the first word after the command.  Strings are borrowed from argv.  Names of ignored
 * flags are appended to `ignored`, separated by spaces. */
options_t options_parse(const struct opt_command *c, int argc, char **argv, void *into,
                        struct buf *ignored, struct err *e) MUST_USE;
/* The row of a name or alias, without dashes; NULL: none. */
const struct opt *options_find(const struct opt_command *c, const char *name);
void options_help(const struct opt_command *c, struct buf *out);
/* Number of edits (insert, delete, replace, swap) between two names. */
int options_distance(const char *a, const char *b);

#endif
