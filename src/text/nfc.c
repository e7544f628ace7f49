#include "text/nfc.h"

#include "base/mem.h"
#include "text/utf8.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* One decomposed character; the order key makes the sort of combining marks stable. */
struct mark {
    uint32_t ccc, order;
    int32_t c;
};

/*
 * HF's normalizer has the tables of Unicode 9: a character assigned later is a plain starter there,
 * and does not decompose.  These are the later ones that the library knows as combining marks.
 */
static const struct range {
    int32_t lo, hi;
} later_marks[] = {
    {0x07FD, 0x07FD},   {0x0898, 0x089F},   {0x08CA, 0x08D3},   {0x09FE, 0x09FE},
    {0x0C3C, 0x0C3C},   {0x0D3B, 0x0D3C},   {0x0EBA, 0x0EBA},   {0x1715, 0x1715},
    {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
    {0x10EAB, 0x10EAC}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
    {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x1193D, 0x1193E},
    {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47},
    {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
    {0x16FF0, 0x16FF1}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF},
};
#define LATER_COMPOSED 0x11938 /* the one composition added since */

static uint32_t combining_class(int32_t c)
{
    if (c < 0x300) return 0;
    uint32_t ccc = (uint32_t)utf8proc_get_property(c)->combining_class;
    if (ccc == 0) return 0;
    size_t lo = 0, hi = sizeof later_marks / sizeof *later_marks;
    while (lo < hi) { /* the first range that ends at or after c */
        size_t mid = (lo + hi) / 2;
        if (later_marks[mid].hi < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    bool later = lo < sizeof later_marks / sizeof *later_marks && later_marks[lo].lo <= c;
    return later ? 0 : ccc;
}

bool nfc_is_trivial(const char *text, size_t n)
{
    /* Every character below U+0300 (lead bytes below 0xCC) is a starter that composes with no
     * predecessor. */
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] >= 0xCC) return false;
    return true;
}

static int mark_cmp(const void *a, const void *b)
{
    const struct mark *x = a, *y = b;
    if (x->ccc != y->ccc) return x->ccc < y->ccc ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

/* Canonical ordering: runs of marks by combining class.  A sort, since the insertion that the
 * library does is quadratic in a long run. */
static bool sort_marks(int32_t *c, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t end = i;
        bool ordered = true;
        uint32_t last = 0;
        while (end < n) {
            uint32_t ccc = combining_class(c[end]);
            if (ccc == 0) break;
            if (ccc < last) ordered = false;
            last = ccc;
            end++;
        }
        if (!ordered) {
            struct mark *m = mem_try_array(end - i, sizeof *m);
            if (!m) return false;
            for (size_t k = i; k < end; k++)
                m[k - i] = (struct mark){combining_class(c[k]), (uint32_t)(k - i), c[k]};
            qsort(m, end - i, sizeof *m, mark_cmp);
            for (size_t k = i; k < end; k++)
                c[k] = m[k - i].c;
            mem_free(m);
        }
        i = end + (end < n);
    }
    return true;
}

/* Decompose into `c` (room for `cap`); the count, or -1 when it does not fit. */
static ptrdiff_t decompose(int32_t *c, size_t cap, const char *text, size_t n)
{
    size_t at = 0;
    for (size_t i = 0; i < n;) {
        int bytes, boundary = 0;
        uint32_t u = utf8_get(text + i, &bytes);
        i += (size_t)bytes;
        if (at == cap) return -1;
        if (u < 0xC0 || u == LATER_COMPOSED) {
            c[at++] = (int32_t)u;
            continue;
        }
        utf8proc_ssize_t r =
            utf8proc_decompose_char((int32_t)u, c + at, (utf8proc_ssize_t)(cap - at),
                                    UTF8PROC_STABLE | UTF8PROC_COMPOSE, &boundary);
        if (r < 0 || (size_t)r > cap - at) return -1;
        at += (size_t)r;
    }
    return (ptrdiff_t)at;
}

/* The composition of two characters, or -1. */
static int32_t compose_pair(int32_t a, int32_t b)
{
    int32_t pair[2] = {a, b};
    if (b < 0x300 || utf8proc_normalize_utf32(pair, 2, UTF8PROC_STABLE | UTF8PROC_COMPOSE) != 1)
        return -1;
    return pair[0] == LATER_COMPOSED ? -1 : pair[0];
}

/* Compose in place; the new count. */
static size_t compose(int32_t *c, size_t n)
{
    size_t at = 0, starter = SIZE_MAX;
    int last = -1; /* class of the last mark kept after the starter; -1 directly after it */
    for (size_t i = 0; i < n; i++) {
        int ccc = (int)combining_class(c[i]);
        if (starter != SIZE_MAX && last < ccc) {
            int32_t both = compose_pair(c[starter], c[i]);
            if (both >= 0) {
                c[starter] = both;
                continue;
            }
        }
        if (ccc == 0) starter = at;
        last = ccc == 0 ? -1 : ccc;
        c[at++] = c[i];
    }
    return at;
}

bool nfc_put(struct buf *out, const char *text, size_t n)
{
    size_t cap;
    /* A character of 2 bytes or more becomes at most 4 code points (3 in fact: U+0390). */
    if (!mul_size(&cap, n, 2) || !add_size(&cap, cap, 8)) return false;
    int32_t *c = mem_try_array(cap, sizeof *c);
    if (!c) return false;
    ptrdiff_t len = decompose(c, cap, text, n);
    bool ok = len >= 0 && sort_marks(c, (size_t)len);
    if (ok) {
        size_t r = compose(c, (size_t)len);
        char chunk[4096];
        size_t used = 0;
        for (size_t i = 0; ok && i < r; i++) {
            used += (size_t)utf8_write(chunk + used, (uint32_t)c[i]);
            if (used > sizeof chunk - 4 || i + 1 == r) {
                ok = buf_put(out, chunk, used);
                used = 0;
            }
        }
    }
    mem_free(c);
    return ok;
}
