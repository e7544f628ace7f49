/* Template source to tokens, with Jinja's white-space control. */
#include "text/jinja.h"
#include <stdlib.h>
#include <string.h>

struct lex {
    struct jctx *c;
    struct jtokens *out;
    const char *s;
    size_t n, i;
    int line;
    bool line_start; /* the last thing read ended in a newline */
};

static void emit(struct lex *x, enum jtok t, int op, struct jv v)
{
    struct jtokens *o = x->out;
    if (o->n == o->cap) {
        size_t cap = o->cap ? o->cap * 2 : 64;
        struct jtoken *p = jn_alloc(x->c, cap * sizeof *p);
        if (o->n) memcpy(p, o->v, o->n * sizeof *p);
        o->v = p;
        o->cap = cap;
    }
    o->v[o->n++] = (struct jtoken){.t = t, .op = op, .line = x->line, .v = v};
}

/* Move to `to`, counting lines. */
static void move(struct lex *x, size_t to)
{
    for (; x->i < to; x->i++)
        if (x->s[x->i] == '\n') x->line++;
}

static bool at(const struct lex *x, size_t i, const char *w)
{
    size_t k = strlen(w);
    return i + k <= x->n && memcmp(x->s + i, w, k) == 0;
}

static size_t skip_space(const struct lex *x, size_t i)
{
    while (i < x->n) {
        size_t used;
        if (!jn_space(jn_cp(x->s + i, x->n - i, &used))) break;
        i += used;
    }
    return i;
}

/* Bytes of `s` left when trailing white space is gone. */
static size_t rstrip(const char *s, size_t n)
{
    while (n > 0) {
        size_t k = n - 1, used;
        while (k > 0 && ((unsigned char)s[k] & 0xC0) == 0x80)
            k--;
        if (!jn_space(jn_cp(s + k, n - k, &used))) break;
        n = k;
    }
    return n;
}

static void data(struct lex *x, size_t end, char sign, bool variable)
{
    const char *s = x->s + x->i;
    size_t n = end - x->i, keep = n;
    if (sign == '-') {
        keep = rstrip(s, n);
    } else if (sign != '+' && !variable) {
        size_t bol = n;
        while (bol > 0 && s[bol - 1] != '\n')
            bol--;
        if ((bol > 0 || x->line_start) && rstrip(s + bol, n - bol) == 0) keep = bol;
    }
    if (keep) emit(x, T_DATA, 0, jv_str(s, keep));
    move(x, end);
}

/* The end of a tag at `i`, as its length with the white space it eats; 0: not an end. */
static size_t tag_end(const struct lex *x, size_t i, const char *close, bool trims)
{
    if ((at(x, i, "-") || (trims && at(x, i, "+"))) && at(x, i + 1, close))
        return x->s[i] == '-' ? skip_space(x, i + 3) - i : 3;
    if (!at(x, i, close)) return 0;
    return trims && at(x, i + 2, "\n") ? 3 : 2;
}

static void ended(struct lex *x, size_t to)
{
    move(x, to);
    x->line_start = to > 0 && x->s[to - 1] == '\n';
}

static int hexval(char ch)
{
    if (ch >= '0' && ch <= '9') return ch - '0';
    ch = (char)(ch | 32);
    return ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
}

static size_t escape(struct lex *x, struct jbuf *b, const char *s, size_t n)
{
    static const char from[] = "ntrabfv\\'\"", to[] = "\n\t\r\a\b\f\v\\'\"";
    char ch = s[1];
    const char *f = ch ? strchr(from, ch) : NULL;
    if (ch == '\n') return 2;
    if (f) {
        jb_put(x->c, b, to + (f - from), 1);
        return 2;
    }
    if (ch >= '0' && ch <= '7') {
        size_t i = 1;
        int32_t v = 0;
        while (i < n && i < 4 && s[i] >= '0' && s[i] <= '7')
            v = v * 8 + (s[i++] - '0');
        jb_cp(x->c, b, v);
        return i;
    }
    size_t digits = ch == 'x' ? 2 : ch == 'u' ? 4 : ch == 'U' ? 8 : 0;
    if (!digits) {
        jb_put(x->c, b, s, 1);
        return 1;
    }
    int64_t v = 0;
    for (size_t i = 0; i < digits; i++) {
        int h = 2 + i < n ? hexval(s[2 + i]) : -1;
        if (h < 0) jn_fail(x->c, ERR_INPUT, "bad \\%c escape in a string", ch);
        v = v * 16 + h;
    }
    if (v > 0x10FFFF || (v >= 0xD800 && v < 0xE000))
        jn_fail(x->c, ERR_INPUT, "\\%c escape is not a character", ch);
    jb_cp(x->c, b, (int32_t)v);
    return 2 + digits;
}

static void string(struct lex *x)
{
    char q = x->s[x->i];
    size_t i = x->i + 1;
    struct jbuf b = {0};
    while (i < x->n && x->s[i] != q) {
        if (x->s[i] == '\\' && i + 1 < x->n) {
            i += escape(x, &b, x->s + i, x->n - i);
        } else {
            size_t k = i + 1;
            while (k < x->n && x->s[k] != q && x->s[k] != '\\')
                k++;
            jb_put(x->c, &b, x->s + i, k - i);
            i = k;
        }
    }
    if (i >= x->n) jn_fail(x->c, ERR_INPUT, "string is not closed");
    emit(x, T_STR, 0, jb_str(&b));
    move(x, i + 1);
}

static bool digit(const struct lex *x, size_t i)
{
    return i < x->n && x->s[i] >= '0' && x->s[i] <= '9';
}

static size_t digits(const struct lex *x, size_t i, char *t, size_t *n)
{
    while (digit(x, i) || (i < x->n && x->s[i] == '_' && digit(x, i + 1))) {
        if (x->s[i] != '_') {
            if (*n >= 60) jn_fail(x->c, ERR_INPUT, "number is too long");
            t[(*n)++] = x->s[i];
        }
        i++;
    }
    return i;
}

static void number(struct lex *x, bool after_dot)
{
    char t[140] = {0};
    size_t n = 0, i = x->i;
    char r = i + 1 < x->n ? (char)(x->s[i + 1] | 32) : 0;
    int base = x->s[i] != '0' ? 10 : r == 'x' ? 16 : r == 'o' ? 8 : r == 'b' ? 2 : 10;
    if (base != 10) {
        int64_t v = 0;
        for (i += 2; i < x->n && (x->s[i] == '_' || hexval(x->s[i]) >= 0); i++) {
            if (x->s[i] == '_') continue;
            if (hexval(x->s[i]) >= base || v > (INT64_MAX - 15) / base)
                jn_fail(x->c, ERR_INPUT, "bad number");
            v = v * base + hexval(x->s[i]);
        }
        emit(x, T_INT, 0, jv_int(v));
        move(x, i);
        return;
    }
    bool real = false;
    i = digits(x, i, t, &n);
    if (!after_dot && i < x->n && x->s[i] == '.' && digit(x, i + 1)) {
        real = true;
        t[n++] = '.';
        size_t frac = 0;
        i = digits(x, i + 1, t + n, &frac);
        n += frac;
    }
    size_t sign = i + 1 < x->n && (x->s[i + 1] == '+' || x->s[i + 1] == '-');
    if (!after_dot && i < x->n && (x->s[i] | 32) == 'e' && digit(x, i + 1 + sign)) {
        real = true;
        t[n++] = 'e';
        if (sign) t[n++] = x->s[i + 1];
        size_t e = 0;
        i = digits(x, i + 1 + sign, t + n, &e);
    }
    if (real) {
        emit(x, T_FLOAT, 0, jv_float(strtod(t, NULL)));
    } else {
        int64_t v = 0;
        for (char *p = t; *p; p++)
            if (__builtin_mul_overflow(v, (int64_t)10, &v) ||
                __builtin_add_overflow(v, (int64_t)(*p - '0'), &v))
                jn_fail(x->c, ERR_INPUT, "integer %s is over 64 bits", t);
        emit(x, T_INT, 0, jv_int(v));
    }
    move(x, i);
}

static bool name_char(char ch)
{
    return (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') || (ch >= '0' && ch <= '9') ||
           ch == '_' || (unsigned char)ch >= 0x80;
}

static int operator(const struct lex *x)
{
    static const struct {
        char s[3];
        int op;
    } two[] = {{"==", O_EQ}, {"!=", O_NE},   {"<=", O_LE},
               {">=", O_GE}, {"//", O_IDIV}, {"**", O_POW}};
    for (size_t k = 0; k < sizeof two / sizeof *two; k++)
        if (at(x, x->i, two[k].s)) return two[k].op;
    char ch = x->s[x->i];
    return ch && strchr("+-/*%~[](){}<>=.:|,;", ch) ? ch : 0;
}

/* The inside of {{ }} or {% %}. */
static void inside(struct lex *x, bool block)
{
    const char *close = block ? "%}" : "}}";
    char open[JN_NEST_MAX * 4];
    size_t depth = 0;
    bool dot = false;
    for (;;) {
        move(x, skip_space(x, x->i));
        if (x->i >= x->n) jn_fail(x->c, ERR_INPUT, "tag is not closed by %s", close);
        x->c->line = x->line;
        size_t k = depth ? 0 : tag_end(x, x->i, close, block);
        if (k) {
            emit(x, block ? T_BEND : T_VEND, 0, jv_none());
            ended(x, x->i + k);
            return;
        }
        char ch = x->s[x->i];
        bool after_dot = dot;
        dot = false;
        if (ch == '"' || ch == '\'') {
            string(x);
        } else if (ch >= '0' && ch <= '9') {
            number(x, after_dot);
        } else if (name_char(ch)) {
            size_t i = x->i;
            while (i < x->n && name_char(x->s[i]))
                i++;
            emit(x, T_NAME, 0, jv_str(x->s + x->i, i - x->i));
            move(x, i);
        } else {
            int op = operator(x);
            if (!op) jn_fail(x->c, ERR_INPUT, "unexpected character '%c'", ch);
            if (ch == '(' || ch == '[' || ch == '{') {
                if (depth == sizeof open) jn_fail(x->c, ERR_INPUT, "brackets nest too deep");
                open[depth++] = ch == '(' ? ')' : ch == '[' ? ']' : '}';
            } else if ((ch == ')' || ch == ']' || ch == '}') && (!depth || open[--depth] != ch)) {
                jn_fail(x->c, ERR_INPUT, "unexpected '%c'", ch);
            }
            emit(x, T_OP, op, jv_none());
            dot = op == '.';
            move(x, x->i + (op > 255 ? 2 : 1));
        }
    }
}

/* The tag `word` alone ({% raw %}, {% endraw %}) at `i`: its end without what follows, or 0. */
static size_t word_tag(const struct lex *x, size_t i, const char *word)
{
    i += 2;
    if (at(x, i, "-") || at(x, i, "+")) i++;
    i = skip_space(x, i);
    if (!at(x, i, word)) return 0;
    return skip_space(x, i + strlen(word));
}

static void raw(struct lex *x, size_t body)
{
    int line = x->line;
    ended(x, body);
    for (size_t i = body; i + 1 < x->n; i++) {
        if (!at(x, i, "{%")) continue;
        size_t e = word_tag(x, i, "endraw"), k = e ? tag_end(x, e, "%}", true) : 0;
        if (!k) continue;
        data(x, i, x->s[i + 2], false);
        ended(x, e + k);
        return;
    }
    x->c->line = line;
    jn_fail(x->c, ERR_INPUT, "raw is not closed by {%% endraw %%}");
}

static void comment(struct lex *x)
{
    if (x->i + 2 >= x->n) { /* jinja2 takes an opening at the very end */
        move(x, x->n);
        return;
    }
    for (size_t i = x->i + 2; i < x->n; i++) {
        size_t k = tag_end(x, i, "#}", true);
        if (!k) continue;
        ended(x, i + k);
        return;
    }
    jn_fail(x->c, ERR_INPUT, "comment is not closed by #}");
}

/* Newlines to \n, and one at the very end dropped, as jinja2 does. */
static void normalise(struct lex *x, const char *s, size_t n)
{
    char *p = jn_alloc(x->c, n + 1);
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\r' && i + 1 < n && s[i + 1] == '\n') continue;
        p[k++] = s[i] == '\r' ? '\n' : s[i];
    }
    if (k && p[k - 1] == '\n') k--;
    x->s = p;
    x->n = k;
}

void jn_lex(struct jctx *c, struct jtokens *out, const char *s, size_t n)
{
    struct lex x = {.c = c, .out = out, .line = 1, .line_start = true};
    normalise(&x, s, n);
    while (x.i < x.n) {
        size_t i = x.i;
        while (i < x.n &&
               !(x.s[i] == '{' && i + 1 < x.n && strchr("{%#", x.s[i + 1]) && x.s[i + 1]))
            i++;
        if (i >= x.n) {
            emit(&x, T_DATA, 0, jv_str(x.s + x.i, x.n - x.i));
            move(&x, x.n);
            break;
        }
        char kind = x.s[i + 1], sign = i + 2 < x.n ? x.s[i + 2] : 0;
        if (sign != '-' && sign != '+') sign = 0;
        data(&x, i, sign, kind == '{');
        c->line = x.line;
        size_t r = kind == '%' ? word_tag(&x, i, "raw") : 0;
        size_t k = r ? (at(&x, r, "-%}") ? skip_space(&x, r + 3) : at(&x, r, "%}") ? r + 2 : 0) : 0;
        if (k) {
            raw(&x, k);
        } else if (kind == '#') {
            comment(&x);
        } else {
            emit(&x, kind == '{' ? T_VBEGIN : T_BBEGIN, 0, jv_none());
            move(&x, i + 2 + (sign != 0));
            inside(&x, kind == '%');
        }
    }
    emit(&x, T_EOF, 0, jv_none());
}
