/*
 * buf.h - a growing byte string with a stated maximum.
 *
 * A zeroed struct is a valid empty buffer whose maximum is BUF_MAX.  `data` is NUL-terminated after
 * the first successful call, so it can be used as a C string; it is NULL before.  An append that
 * fails (over `max`, or no memory) changes nothing and latches `failed`, so that a writer may
 * append many times and look once at the end.
 */
#ifndef BASE_BUF_H
#define BASE_BUF_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>

#define BUF_MAX ((size_t)1 << 31)

struct buf {
    char *data;
    size_t len, cap;
    size_t max; /* 0 means BUF_MAX */
    bool failed;
};

bool buf_put(struct buf *b, const void *p, size_t n);
bool buf_puts(struct buf *b, const char *s);
bool buf_putc(struct buf *b, char c);
bool buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_clear(struct buf *b); /* empty, keeps the memory */
void buf_release(struct buf *b);
char *buf_take(struct buf *b); /* the string (never NULL unless failed); caller frees; b empty */

#endif
