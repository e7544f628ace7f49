#include "text/detok.h"

#include "text/utf8.h"

#include <string.h>

#define REPLACEMENT "\xEF\xBF\xBD"

void detok_init(struct detok *d, const struct tokenizer *t, bool skip_special)
{
    memset(d, 0, sizeof *d);
    d->tok = t;
    d->skip_special = skip_special;
}

/* Finish the held start of a character with bytes of p; returns how many of them were used. */
static size_t finish_held(struct detok *d, const char *p, size_t n, struct buf *out, bool *ok)
{
    size_t used = 0;
    while (d->n_held > 0 && used < n) {
        d->held[d->n_held] = (unsigned char)p[used];
        int r = utf8_step((const char *)d->held, (size_t)d->n_held + 1);
        if (r < 0) { /* the held bytes are one maximal subpart; the new byte starts over */
            *ok &= buf_puts(out, REPLACEMENT);
            d->n_held = 0;
            break;
        }
        used++;
        d->n_held++;
        if (r > 0) {
            *ok &= buf_put(out, d->held, (size_t)r);
            d->n_held = 0;
        }
    }
    return used;
}

bool detok_push(struct detok *d, int32_t id, struct buf *out)
{
    size_t n;
    const char *p = tokenizer_decoded(d->tok, id, &n);
    if (!p || (d->skip_special && tokenizer_is_special(d->tok, id))) return true;
    bool ok = true;
    size_t at = finish_held(d, p, n, out, &ok);
    while (at < n) {
        size_t good = utf8_valid(p + at, n - at);
        if (good > 0) ok &= buf_put(out, p + at, good);
        at += good;
        if (at == n) break;
        int r = utf8_step(p + at, n - at);
        if (r == 0) {
            memcpy(d->held, p + at, n - at);
            d->n_held = (int)(n - at);
            break;
        }
        ok &= buf_puts(out, REPLACEMENT);
        at += (size_t)-r;
    }
    return ok;
}

bool detok_end(struct detok *d, struct buf *out)
{
    if (d->n_held == 0) return true;
    d->n_held = 0;
    return buf_puts(out, REPLACEMENT);
}
