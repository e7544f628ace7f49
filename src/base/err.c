#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

err_t err_set(struct err *e, err_t code, const char *fmt, ...)
{
    if (e) {
        va_list ap;
        va_start(ap, fmt);
        e->code = code;
        vsnprintf(e->msg, sizeof e->msg, fmt, ap);
        va_end(ap);
    }
    return code;
}

err_t err_wrap(struct err *e, err_t code, const char *fmt, ...)
{
    if (!e) return code;
    char head[512], old[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    snprintf(old, sizeof old, "%s", e->msg);
    return err_set(e, e->code ? e->code : code, "%s: %s", head, old);
}

static const struct {
    const char *name;
    int http;
} err_tab[] = {
#define X(id, name, http) [id] = {name, http},
    ERR_LIST(X)
#undef X
};

const char *err_name(err_t code)
{
    return err_tab[code].name;
}

int err_http(err_t code)
{
    return err_tab[code].http;
}

void check_failed(const char *what, const char *file, int line)
{
    fprintf(stderr, "moult: bug: %s:%d: %s does not hold\n", file, line, what);
    abort();
}
