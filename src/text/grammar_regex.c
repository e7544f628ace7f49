/* grammar_regex.c - regular expressions: a tree, then nodes. */
#include "text/grammar_build.h"

#include "base/mem.h"
#include "text/utf8.h"
#include <string.h>

#define MAX_NEST   200
#define MAX_REPEAT 100000

enum { R_EMPTY, R_SET, R_CAT, R_ALT, R_REPEAT };

/* Children of CAT and ALT hang from `child`, the last first, as nodes are made from the end. */
struct re {
    int kind;
    int32_t child, before; /* before: the child that stands in front of this one; -1: none */
    int32_t min, max;      /* REPEAT; max < 0: any */
    struct cset set;
    bool bol, eol; /* a branch of the outermost ALT: ^ and $ were there */
};

struct parser {
    struct gbuild *b;
    const char *p;
    size_t n, at;
    struct re *re;
    int32_t n_re, cap_re;
    int depth;
};

static int32_t new_re(struct parser *s, int kind)
{
    if (!gb_work(s->b)) return 0;
    if (s->n_re == s->cap_re) {
        size_t cap = s->cap_re ? (size_t)s->cap_re * 2 : 64;
        struct re *p = mem_retry(s->re, (size_t)s->cap_re * sizeof *p, cap * sizeof *p);
        if (!p) {
            gb_fail(s->b, ERR_NOMEM, "no memory for the grammar");
            return 0;
        }
        s->re = p;
        s->cap_re = (int32_t)cap;
    }
    s->re[s->n_re] = (struct re){.kind = kind, .child = -1, .before = -1};
    return s->n_re++;
}

static void bad(struct parser *s, const char *what)
{
    gb_fail(s->b, ERR_INPUT, "regex: %s at byte %zu is not supported", what, s->at);
}

static int peek(const struct parser *s)
{
    return s->at < s->n ? (unsigned char)s->p[s->at] : -1;
}

static bool take(struct parser *s, const char *word)
{
    size_t n = strlen(word);
    if (s->n - s->at < n || memcmp(s->p + s->at, word, n)) return false;
    s->at += n;
    return true;
}

static uint32_t next_char(struct parser *s)
{
    int bytes = 1;
    uint32_t c = utf8_get(s->p + s->at, &bytes);
    s->at += (size_t)bytes;
    return c;
}

static uint32_t hex(struct parser *s, int digits)
{
    uint32_t v = 0;
    for (int i = 0; i < digits; i++) {
        int c = peek(s), low = c | 32;
        if (c >= '0' && c <= '9')
            v = v * 16 + (uint32_t)(c - '0');
        else if (low >= 'a' && low <= 'f')
            v = v * 16 + (uint32_t)(low - 'a') + 10;
        else {
            bad(s, "an escape without its hexadecimal digits");
            return 0;
        }
        s->at++;
    }
    return v;
}

static void add_class(struct parser *s, struct cset *to, int c)
{
    struct cset k = {0};
    struct gbuild *b = s->b;
    int low = c | 32;
    if (low == 'd' || low == 'w') (void)cset_add(b, &k, '0', '9');
    if (low == 'w') {
        (void)cset_add(b, &k, 'A', 'Z');
        (void)cset_add(b, &k, 'a', 'z');
        (void)cset_add(b, &k, '_', '_');
    }
    if (low == 's') {
        (void)cset_add(b, &k, '\t', '\r');
        (void)cset_add(b, &k, ' ', ' ');
    }
    if (c < 'a') (void)cset_negate(b, &k);
    for (int32_t i = 0; i < k.n; i++)
        (void)cset_add(b, to, k.v[i].lo, k.v[i].hi);
    cset_release(&k);
}

/* After a backslash.  A class goes to `set` (*is_class), else the character is returned. */
static uint32_t escape(struct parser *s, struct cset *set, bool *is_class, bool in_class)
{
    static const char from[] = "tnrfva", to[] = "\t\n\r\f\v\a";
    int c = peek(s);
    const char *known = c > 0 ? strchr(from, c) : NULL;
    *is_class = c > 0 && strchr("dDwWsS", c);
    if (c < 0) {
        bad(s, "a backslash at the end");
        return 0;
    }
    if (*is_class) {
        s->at++;
        add_class(s, set, c);
        return 0;
    }
    if (known) return s->at++, (uint32_t)to[known - from];
    if (c == 'b' && in_class) return s->at++, '\b';
    if (c == 'x') return s->at++, hex(s, 2);
    if (c == 'u') return s->at++, hex(s, 4);
    if (c == '0') return s->at++, 0;
    if ((c >= '1' && c <= '9') || (c | 32) == 'k')
        bad(s, "a back reference");
    else if ((c | 32) == 'b' || c == 'A' || (c | 32) == 'z')
        bad(s, "a word or text boundary");
    else if ((c | 32) == 'p')
        bad(s, "\\p");
    else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
        bad(s, "an unknown escape");
    return s->b->rc ? 0 : next_char(s);
}

static void char_class(struct parser *s, struct cset *set)
{
    bool negate = take(s, "^"), first = true, is_class;
    for (; s->b->rc == OK && (first || peek(s) != ']'); first = false) {
        if (peek(s) < 0) return bad(s, "a [ without ]");
        if (s->p[s->at] == '[' && s->at + 1 < s->n && s->p[s->at + 1] &&
            strchr(":.=", s->p[s->at + 1]))
            return bad(s, "a POSIX class");
        uint32_t lo =
            take(s, "\\") ? escape(s, set, &is_class, true) : (is_class = false, next_char(s));
        if (is_class) continue;
        uint32_t hi = lo;
        if (peek(s) == '-' && s->at + 1 < s->n && s->p[s->at + 1] != ']') {
            s->at++;
            hi = take(s, "\\") ? escape(s, set, &is_class, true) : next_char(s);
            if (is_class || hi < lo) return bad(s, "a range that does not rise");
        }
        (void)cset_add(s->b, set, lo, hi);
    }
    if (s->b->rc) return; /* `at` may be the end */
    s->at++;
    (void)(negate ? cset_negate(s->b, set) : cset_sort(s->b, set));
}

static int32_t alternatives(struct parser *s);

static int32_t group(struct parser *s)
{
    if (take(s, "?P<") ||
        (s->at + 2 < s->n && s->p[s->at + 2] != '=' && s->p[s->at + 2] != '!' && take(s, "?<"))) {
        const char *end = memchr(s->p + s->at, '>', s->n - s->at);
        if (!end) return bad(s, "a group name without >"), 0;
        s->at = (size_t)(end - s->p) + 1;
    } else if (!take(s, "?:") && peek(s) == '?') {
        return bad(s, "this kind of group (lookaround, flags, atomic)"), 0;
    }
    if (++s->depth > MAX_NEST) return bad(s, "deeper nesting of groups"), 0;
    int32_t r = alternatives(s);
    s->depth--;
    if (!take(s, ")")) bad(s, "a ( without )");
    return r;
}

static int32_t atom(struct parser *s)
{
    if (take(s, "(")) return group(s);
    int32_t r = new_re(s, R_SET);
    struct cset set = {0};
    bool is_class;
    if (take(s, "[")) {
        char_class(s, &set);
    } else if (take(s, ".")) {
        (void)cset_add(s->b, &set, '\n', '\n');
        (void)cset_negate(s->b, &set);
    } else if (take(s, "\\")) {
        uint32_t c = escape(s, &set, &is_class, false);
        if (!is_class) (void)cset_add(s->b, &set, c, c);
        (void)cset_sort(s->b, &set);
    } else if (peek(s) > 0 && strchr("*+?^$", peek(s))) {
        bad(s, peek(s) == '^' || peek(s) == '$' ? "an anchor that is not at an end of the whole"
                                                : "a repetition of nothing");
    } else {
        uint32_t c = next_char(s);
        (void)cset_add(s->b, &set, c, c);
    }
    if (s->b->rc)
        cset_release(&set);
    else
        s->re[r].set = set;
    return r;
}

/* {m}, {m,}, {,n}, {m,n}; anything else is no quantifier and nothing is taken. */
static bool braces(struct parser *s, int32_t *min, int32_t *max)
{
    size_t from = s->at;
    int64_t v[2] = {-1, -1};
    bool comma = false;
    if (!take(s, "{")) return false;
    for (; peek(s) >= 0 && peek(s) != '}'; s->at++) {
        int c = peek(s);
        if (c == ',' && !comma)
            comma = true;
        else if (c >= '0' && c <= '9')
            v[comma] = (v[comma] < 0 ? 0 : v[comma]) * 10 + (c - '0');
        else
            break;
        if (v[comma] > MAX_REPEAT) return bad(s, "a repetition above 100000"), false;
    }
    if (!take(s, "}") || (v[0] < 0 && v[1] < 0)) {
        s->at = from;
        return false;
    }
    *min = v[0] < 0 ? 0 : (int32_t)v[0];
    *max = comma ? (int32_t)v[1] : (int32_t)v[0];
    if (*max >= 0 && *max < *min) bad(s, "a repetition whose limits do not rise");
    return true;
}

static int32_t repeated(struct parser *s)
{
    int32_t r = atom(s), min = 0, max = -1;
    for (bool again = false; s->b->rc == OK; again = true) {
        if (take(s, "?"))
            min = 0, max = 1;
        else if (take(s, "*"))
            min = 0, max = -1;
        else if (take(s, "+"))
            min = 1, max = -1;
        else if (!braces(s, &min, &max))
            break;
        if (again) return bad(s, "a repetition of a repetition"), r;
        if (!take(s, "?") && peek(s) == '+')
            return bad(s, "a possessive repetition"), r; /* lazy: the same */
        int32_t q = new_re(s, R_REPEAT);
        if (s->b->rc) break;
        s->re[q].child = r;
        s->re[q].min = min;
        s->re[q].max = max;
        r = q;
    }
    return r;
}

static int32_t branch(struct parser *s)
{
    int32_t cat = new_re(s, R_CAT), last = -1;
    bool outer = s->depth == 0, bol = outer && take(s, "^"), eol = false;
    while (s->b->rc == OK && peek(s) >= 0 && peek(s) != '|' && peek(s) != ')') {
        bool end = s->at + 1 == s->n || s->p[s->at + 1] == '|';
        if (outer && peek(s) == '$' && end) {
            s->at++;
            eol = true;
            break;
        }
        int32_t r = repeated(s);
        if (s->b->rc) return 0;
        s->re[r].before = last;
        last = r;
    }
    if (s->b->rc) return 0;
    s->re[cat].child = last;
    s->re[cat].bol = bol;
    s->re[cat].eol = eol;
    return cat;
}

static int32_t alternatives(struct parser *s)
{
    int32_t alt = new_re(s, R_ALT), last = -1;
    do {
        int32_t r = branch(s);
        if (s->b->rc) return 0;
        s->re[r].before = last;
        last = r;
    } while (take(s, "|"));
    s->re[alt].child = last;
    return alt;
}

/* ---- nodes ---- */

struct writer {
    const struct re *re;
    bool search, json;
};

static int32_t put_set(struct gbuild *b, const struct cset *set, bool json, int32_t next)
{
    return json ? gb_json_chars(b, set, next) : gb_chars(b, set, next);
}

static int32_t put_any(struct gbuild *b, bool json, int32_t next) /* any characters */
{
    struct cset all = {.v = &(struct crange){0, 0x10ffff}, .n = 1};
    int32_t loop = gb_split(b, next, next), body = put_set(b, &all, json, loop);
    if (b->rc == OK) b->node[loop].a = body;
    return loop;
}

static int32_t put_re(struct gbuild *b, const struct writer *w, int32_t r, int32_t next);

static int32_t put_repeat(struct gbuild *b, const struct writer *w, const struct re *re,
                          int32_t next)
{
    int32_t start = next, left = re->min;
    if (re->max < 0) {
        int32_t loop = gb_split(b, next, next), body = put_re(b, w, re->child, loop);
        if (b->rc) return 0;
        b->node[loop].a = body;
        start = left > 0 ? body : loop;
        left -= left > 0;
    }
    for (int32_t i = re->min; i < re->max && gb_work(b); i++)
        start = gb_split(b, put_re(b, w, re->child, start), next);
    for (; left > 0 && gb_work(b); left--)
        start = put_re(b, w, re->child, start);
    return start;
}

static int32_t put_re(struct gbuild *b, const struct writer *w, int32_t r, int32_t next)
{
    const struct re *re = &w->re[r];
    if (!gb_work(b)) return 0;
    if (re->kind == R_SET) return put_set(b, &re->set, w->json, next);
    if (re->kind == R_REPEAT) return put_repeat(b, w, re, next);
    if (re->kind == R_CAT) {
        for (int32_t c = re->child; c >= 0; c = w->re[c].before)
            next = put_re(b, w, c, next);
        return next;
    }
    int32_t start = -1;
    for (int32_t c = re->child; c >= 0 && b->rc == OK; c = w->re[c].before) {
        int32_t one = put_re(b, w, c, next);
        start = start < 0 ? one : gb_split(b, one, start);
    }
    return start;
}

static int32_t put_whole(struct gbuild *b, const struct writer *w, int32_t top, int32_t next)
{
    int32_t start = -1;
    for (int32_t c = w->re[top].child; c >= 0 && b->rc == OK; c = w->re[c].before) {
        int32_t one = w->search && !w->re[c].eol ? put_any(b, w->json, next) : next;
        one = put_re(b, w, c, one);
        if (w->search && !w->re[c].bol) one = put_any(b, w->json, one);
        start = start < 0 ? one : gb_split(b, one, start);
    }
    return start;
}

int32_t gb_regex(struct gbuild *b, const char *p, size_t n, bool search, bool json, int32_t next)
{
    struct parser s = {.b = b, .p = p, .n = n};
    if (utf8_valid(p, n) < n) gb_fail(b, ERR_INPUT, "regex: not valid UTF-8");
    int32_t top = b->rc ? 0 : alternatives(&s), start = 0;
    if (b->rc == OK && s.at < n) bad(&s, "a ) without (");
    struct writer w = {s.re, search, json};
    if (b->rc == OK) start = put_whole(b, &w, top, next);
    for (int32_t i = 0; i < s.n_re; i++)
        cset_release(&s.re[i].set);
    mem_free(s.re);
    return start;
}
