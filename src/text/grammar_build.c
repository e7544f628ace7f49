#include "text/grammar_build.h"

#include "base/mem.h"
#include "text/utf8.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORK   ((int64_t)1 << 22)
#define MAX_RANGES 4096

void gb_fail(struct gbuild *b, err_t rc, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    if (b->rc) return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    b->rc = err_set(b->e, rc, "%s", text);
}

bool gb_work(struct gbuild *b)
{
    if (++b->work > MAX_WORK) gb_fail(b, ERR_INPUT, "the grammar is too large to be built");
    return b->rc == OK;
}

static int32_t put(struct gbuild *b, struct gnode node)
{
    if (!gb_work(b)) return 0;
    if (b->n == GRAMMAR_MAX_NODES) {
        gb_fail(b, ERR_INPUT,
                "the grammar is too large: more than %d nodes (long repetitions are written out)",
                GRAMMAR_MAX_NODES);
        return 0;
    }
    if (b->n == b->cap) {
        size_t cap = b->cap ? (size_t)b->cap * 2 : 256;
        struct gnode *p = mem_retry(b->node, (size_t)b->cap * sizeof *p, cap * sizeof *p);
        if (!p) {
            gb_fail(b, ERR_NOMEM, "no memory for the grammar");
            return 0;
        }
        b->node = p;
        b->cap = (int32_t)cap;
    }
    b->node[b->n] = node;
    return b->n++;
}

int32_t gb_rule(struct gbuild *b)
{
    if (!gb_work(b)) return 0;
    if (b->n_rules == b->cap_rules) {
        size_t cap = b->cap_rules ? (size_t)b->cap_rules * 2 : 64;
        int32_t *p = mem_retry(b->rule, (size_t)b->cap_rules * sizeof *p, cap * sizeof *p);
        if (!p) {
            gb_fail(b, ERR_NOMEM, "no memory for the grammar");
            return 0;
        }
        b->rule = p;
        b->cap_rules = (int32_t)cap;
    }
    b->rule[b->n_rules] = -1;
    return b->n_rules++;
}

int32_t gb_range(struct gbuild *b, unsigned lo, unsigned hi, int32_t next)
{
    return put(b, (struct gnode){G_RANGE, (uint8_t)lo, (uint8_t)hi, next, 0});
}

int32_t gb_split(struct gbuild *b, int32_t one, int32_t other)
{
    return put(b, (struct gnode){G_SPLIT, 0, 0, one, other});
}

int32_t gb_call(struct gbuild *b, int32_t rule, int32_t next)
{
    return put(b, (struct gnode){G_CALL, 0, 0, rule, next});
}

int32_t gb_end(struct gbuild *b)
{
    return put(b, (struct gnode){.kind = G_END});
}

int32_t gb_bytes(struct gbuild *b, const char *s, size_t n, int32_t next)
{
    while (n-- > 0 && b->rc == OK)
        next = gb_range(b, (unsigned char)s[n], (unsigned char)s[n], next);
    return next;
}

/* ---- sets of code points ---- */

bool cset_add(struct gbuild *b, struct cset *s, uint32_t lo, uint32_t hi)
{
    if (!gb_work(b)) return false;
    if (s->n == MAX_RANGES) {
        gb_fail(b, ERR_INPUT, "a character class of more than %d ranges", MAX_RANGES);
        return false;
    }
    if (s->n == s->cap) {
        size_t cap = s->cap ? (size_t)s->cap * 2 : 8;
        struct crange *p = mem_retry(s->v, (size_t)s->cap * sizeof *p, cap * sizeof *p);
        if (!p) {
            gb_fail(b, ERR_NOMEM, "no memory for the grammar");
            return false;
        }
        s->v = p;
        s->cap = (int32_t)cap;
    }
    s->v[s->n++] = (struct crange){lo, hi};
    return true;
}

static int by_lo(const void *a, const void *b)
{
    const struct crange *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

bool cset_sort(struct gbuild *b, struct cset *s)
{
    if (b->rc) return false;
    if (s->n < 2) return true;
    qsort(s->v, (size_t)s->n, sizeof *s->v, by_lo);
    int32_t at = 0;
    for (int32_t i = 1; i < s->n; i++) {
        if (s->v[i].lo > s->v[at].hi + 1)
            s->v[++at] = s->v[i];
        else if (s->v[i].hi > s->v[at].hi)
            s->v[at].hi = s->v[i].hi;
    }
    s->n = at + 1;
    return true;
}

bool cset_negate(struct gbuild *b, struct cset *s)
{
    struct cset out = {0};
    uint32_t from = 0;
    if (!cset_sort(b, s)) return false;
    for (int32_t i = 0; i <= s->n; i++) {
        uint32_t to = i < s->n ? s->v[i].lo : 0x110000;
        if (from < to) (void)cset_add(b, &out, from, to - 1);
        if (i < s->n) from = s->v[i].hi + 1;
    }
    cset_release(s);
    *s = out;
    return b->rc == OK;
}

void cset_release(struct cset *s)
{
    mem_free(s->v);
    *s = (struct cset){0};
}

/* lo..hi have the same number of bytes; where the trailing bytes are not all 80..bf the range is
 * cut. */
static int32_t put_span(struct gbuild *b, uint32_t lo, uint32_t hi, int32_t next, int32_t other)
{
    char x[4], y[4];
    int n = utf8_write(x, lo);
    for (int i = 1; i < n; i++) {
        uint32_t m = (1u << (6 * i)) - 1;
        if ((lo & ~m) == (hi & ~m)) continue;
        if (lo & m)
            return put_span(b, lo, lo | m, next, put_span(b, (lo | m) + 1, hi, next, other));
        if ((hi & m) != m)
            return put_span(b, lo, (hi & ~m) - 1, next, put_span(b, hi & ~m, hi, next, other));
    }
    (void)utf8_write(y, hi);
    for (int i = n; i-- > 0;)
        next = gb_range(b, (unsigned char)x[i], (unsigned char)y[i], next);
    return other < 0 ? next : gb_split(b, next, other);
}

int32_t gb_chars(struct gbuild *b, const struct cset *s, int32_t next)
{
    static const struct crange parts[] = {
        {0, 0x7f}, {0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, 0x10ffff}};
    int32_t start = -1;
    for (int32_t i = s->n; i-- > 0;) {
        for (size_t k = sizeof parts / sizeof parts[0]; k-- > 0;) {
            uint32_t lo = s->v[i].lo > parts[k].lo ? s->v[i].lo : parts[k].lo;
            uint32_t hi = s->v[i].hi < parts[k].hi ? s->v[i].hi : parts[k].hi;
            if (lo <= hi && b->rc == OK) start = put_span(b, lo, hi, next, start);
        }
    }
    return start >= 0 ? start : gb_range(b, 1, 0, next); /* of no characters: a range of no byte */
}

/* The automaton of Knuth, Morris and Pratt, a split a byte that may come. */
int32_t gb_until(struct gbuild *b, const char *s, int32_t next)
{
    int32_t n = (int32_t)strlen(s), state[64], fail[64] = {0};
    CHECK(n > 0 && n < 64);
    for (int32_t i = 1, k = 0; i < n; i++) {
        while (k > 0 && s[i] != s[k])
            k = fail[k - 1];
        if (s[i] == s[k]) k++;
        fail[i] = k;
    }
    for (int32_t i = 0; i < n; i++)
        state[i] = gb_split(b, 0, 0); /* filled below, when all of them are known */
    for (int32_t i = 0; i < n && b->rc == OK; i++) {
        int32_t at = -1;
        for (int c = 0, from = 0; c < 256; c = from) {
            int32_t k = i;
            while (k > 0 && (unsigned char)s[k] != c)
                k = fail[k - 1];
            if ((unsigned char)s[k] == c) k++;
            int32_t to = k == n ? next : state[k];
            for (from = c + 1; from < 256; from++) { /* bytes of the same effect are one range */
                int32_t j = i;
                while (j > 0 && (unsigned char)s[j] != from)
                    j = fail[j - 1];
                if ((unsigned char)s[j] == from) j++;
                if (j != k) break;
            }
            int32_t edge = gb_range(b, (unsigned)c, (unsigned)from - 1, to);
            at = at < 0 ? edge : gb_split(b, edge, at);
        }
        if (b->rc == OK) b->node[state[i]].a = b->node[state[i]].b = at;
    }
    return state[0];
}
