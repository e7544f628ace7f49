#include "base/buf.h"

#include "base/mem.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool reserve(struct buf *b, size_t more)
{
    size_t need, max = b->max ? b->max : BUF_MAX;
    if (b->failed || !add_size(&need, b->len, more) || need > max) {
        b->failed = true;
        return false;
    }
    if (need + 1 <= b->cap) return true;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need + 1)
        cap *= 2;
    char *p = mem_retry(b->data, b->len, cap);
    if (!p) {
        b->failed = true;
        return false;
    }
    b->data = p;
    b->cap = cap;
    b->data[b->len] = 0;
    return true;
}

bool buf_put(struct buf *b, const void *p, size_t n)
{
    if (!reserve(b, n)) return false;
    if (n) memcpy(b->data + b->len, p, n);
    b->len += n;
    b->data[b->len] = 0;
    return true;
}

bool buf_puts(struct buf *b, const char *s)
{
    return buf_put(b, s, strlen(s));
}

bool buf_putc(struct buf *b, char c)
{
    return buf_put(b, &c, 1);
}

bool buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    bool ok = n >= 0 && reserve(b, (size_t)n);
    if (ok) {
        vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
    return ok;
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    b->failed = false;
    if (b->data) b->data[0] = 0;
}

void buf_release(struct buf *b)
{
    mem_free(b->data);
    *b = (struct buf){.max = b->max};
}

char *buf_take(struct buf *b)
{
    if (!reserve(b, 0)) return NULL;
    char *p = b->data;
    *b = (struct buf){.max = b->max};
    return p;
}
