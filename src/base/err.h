/*
 * err.h - how failures travel.
 *
 * A function that can fail returns err_t (OK is 0) and takes a `struct err *e`, which may be NULL.
 * On failure it fills `e` with the code and a message that names the thing at fault (field, value,
 * what is allowed); on success it leaves `e` alone.  Callees add context with err_wrap; only the
 * edges (server, cli) print.  Outputs are written only on success.
 *
 * Bugs are not errors: CHECK aborts, always on.  Never CHECK input.
 */
#ifndef BASE_ERR_H
#define BASE_ERR_H

/*       id           name            HTTP status */
#define ERR_LIST(X)                        \
    X(OK, "ok", 200)                       \
    X(ERR_INPUT, "bad input", 400)         \
    X(ERR_NOTFOUND, "not found", 404)      \
    X(ERR_TOOBIG, "too large", 413)        \
    X(ERR_STATE, "wrong state", 400)       \
    X(ERR_IO, "input/output", 400)         \
    X(ERR_UNSUPPORTED, "unsupported", 400) \
    X(ERR_NOMEM, "out of memory", 503)     \
    X(ERR_BUSY, "busy", 503)               \
    X(ERR_SYSTEM, "system", 500)

typedef enum {
#define X(id, name, http) id,
    ERR_LIST(X)
#undef X
} err_t;

struct err {
    err_t code;
    char msg[1024]; /* always terminated; a longer text is cut */
};

#define MUST_USE __attribute__((warn_unused_result))

/* Fill `e` (if not NULL) and return `code`. */
err_t err_set(struct err *e, err_t code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Put "context: " in front of the message already in `e`; returns e's code (or `code`, e NULL). */
err_t err_wrap(struct err *e, err_t code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
const char *err_name(err_t code);
int err_http(err_t code);

void check_failed(const char *what, const char *file, int line) __attribute__((noreturn));
#define CHECK(x) ((x) ? (void)0 : check_failed(#x, __FILE__, __LINE__))

#endif
