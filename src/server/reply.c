#include "server/internal.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

void put_chars(struct buf *b, const char *s, size_t n)
{
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        buf_put(b, s + from, i - from);
        if (c == '\n')
            buf_puts(b, "\\n");
        else if (c == '"' || c == '\\')
            buf_putc(b, '\\'), buf_putc(b, (char)c);
        else
            buf_printf(b, "\\u%04x", c);
        from = i + 1;
    }
    if (n > from) buf_put(b, s + from, n - from);
}

void put_str(struct buf *b, const char *s, size_t n)
{
    buf_putc(b, '"');
    put_chars(b, s, n);
    buf_putc(b, '"');
}

void put_real(struct buf *b, double d)
{
    if (isfinite(d))
        buf_printf(b, "%.9g", d);
    else
        buf_puts(b, isnan(d) ? "null" : d < 0 ? "-3e38" : "3e38");
}

void put_spans(struct buf *b, const struct request *r)
{
    buf_putc(b, '[');
    for (int32_t i = 0; i < r->n_spans; i++) {
        const struct version_span *v = &r->spans[i];
        buf_puts(b, i ? ",[" : "[");
        put_str(b, v->version, strlen(v->version));
        buf_printf(b, ",%d]", v->n);
    }
    buf_putc(b, ']');
}

void reply_text(struct xchg *x, int status, const char *type, const char *text)
{
    x->status = status;
    x->type = type;
    buf_puts(&x->out, text);
}

void put_id(char *out, size_t n, const char *prefix)
{
    uint64_t r[2] = {0, 0};
    if (getrandom(r, sizeof r, 0) < 0) r[0] = (uint64_t)(uintptr_t)out;
    snprintf(out, n, "%s%016llx%016llx", prefix, (unsigned long long)r[0],
             (unsigned long long)r[1]);
}
