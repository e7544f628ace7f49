/* Values as text: Python's str() and repr(), and json.dumps. */
#include "text/jinja.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* The shortest decimal that reads back as `f`, in Python's layout. */
void jv_float_repr(double f, char out[40])
{
    char t[40], dig[24] = "";
    if (f != f || f > 1.7976931348623157e308 || f < -1.7976931348623157e308) {
        snprintf(out, 40, "%s", f != f ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    for (int p = 0; p < 17; p++) {
        snprintf(t, sizeof t, "%.*e", p, f);
        double back = strtod(t, NULL);
        if (!(back < f) && !(back > f)) break;
    }
    char *e = strchr(t, 'e'), *s = t;
    int ex = (int)strtol(e + 1, NULL, 10), n = 0, o = 0;
    if (*s == '-') out[o++] = *s++;
    for (; s < e; s++)
        if (*s != '.') dig[n++] = *s;
    if (ex < -4 || ex >= 16) {
        out[o++] = dig[0];
        if (n > 1) out[o++] = '.';
        for (int i = 1; i < n; i++)
            out[o++] = dig[i];
        snprintf(out + o, (size_t)(40 - o), "e%c%02d", ex < 0 ? '-' : '+', abs(ex));
        return;
    }
    if (ex < 0) {
        out[o++] = '0';
        out[o++] = '.';
        for (int i = -1; i > ex; i--)
            out[o++] = '0';
        for (int i = 0; i < n; i++)
            out[o++] = dig[i];
    } else {
        for (int i = 0; i <= ex || i < n; i++) {
            if (i == ex + 1) out[o++] = '.';
            out[o++] = i < n ? dig[i] : '0';
        }
        if (n <= ex + 1) {
            out[o++] = '.';
            out[o++] = '0';
        }
    }
    out[o] = 0;
}

static bool printable(int32_t cp)
{
    utf8proc_category_t g = utf8proc_category(cp);
    return cp == ' ' || (g != UTF8PROC_CATEGORY_CN && g < UTF8PROC_CATEGORY_ZS);
}

static void repr_str(struct jctx *c, struct jbuf *b, struct jv v)
{
    bool dq = v.n && memchr(v.s, '\'', v.n) && !memchr(v.s, '"', v.n);
    char q = dq ? '"' : '\'', t[16];
    jb_put(c, b, &q, 1);
    for (size_t i = 0, used; i < v.n; i += used) {
        int32_t cp = jn_cp(v.s + i, v.n - i, &used);
        if (cp == q || cp == '\\')
            snprintf(t, sizeof t, "\\%c", (char)cp);
        else if (cp == '\n' || cp == '\r' || cp == '\t')
            snprintf(t, sizeof t, "\\%c", cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
        else if (printable(cp))
            t[0] = 0;
        else
            snprintf(t, sizeof t,
                     cp < 256     ? "\\x%02x"
                     : cp < 65536 ? "\\u%04x"
                                  : "\\U%08x",
                     (unsigned)cp);
        if (t[0])
            jb_puts(c, b, t);
        else
            jb_put(c, b, v.s + i, used);
    }
    jb_put(c, b, &q, 1);
}

static void repr(struct jctx *c, struct jbuf *b, struct jv v);

static void repr_list(struct jctx *c, struct jbuf *b, struct jv v)
{
    bool t = v.k == J_TUPLE;
    jb_puts(c, b, t ? "(" : "[");
    for (size_t i = 0; i < v.l->n; i++) {
        if (i) jb_puts(c, b, ", ");
        repr(c, b, v.l->v[i]);
    }
    jb_puts(c, b, t ? (v.l->n == 1 ? ",)" : ")") : "]");
}

static void repr(struct jctx *c, struct jbuf *b, struct jv v)
{
    jn_enter(c);
    if (v.k == J_STR) {
        repr_str(c, b, v);
    } else if (v.k == J_UNDEF) {
        jb_puts(c, b, "Undefined");
    } else if (v.k == J_LIST || v.k == J_TUPLE) {
        repr_list(c, b, v);
    } else if (v.k == J_DICT || v.k == J_NS) {
        jb_puts(c, b, v.k == J_NS ? "<Namespace {" : "{");
        for (size_t i = 0; i < v.d->n; i++) {
            if (i) jb_puts(c, b, ", ");
            repr(c, b, v.d->p[i].k);
            jb_puts(c, b, ": ");
            repr(c, b, v.d->p[i].v);
        }
        jb_puts(c, b, v.k == J_NS ? "}>" : "}");
    } else {
        jv_print(c, b, v);
    }
    c->depth--;
}

void jv_print(struct jctx *c, struct jbuf *b, struct jv v)
{
    char t[40];
    switch (v.k) {
    case J_UNDEF: return;
    case J_NONE: jb_puts(c, b, "None"); return;
    case J_BOOL: jb_puts(c, b, v.b ? "True" : "False"); return;
    case J_INT:
        snprintf(t, sizeof t, "%" PRId64, v.i);
        jb_puts(c, b, t);
        return;
    case J_FLOAT:
        jv_float_repr(v.f, t);
        jb_puts(c, b, t);
        return;
    case J_STR: jb_put(c, b, v.s, v.n); return;
    case J_LIST:
    case J_TUPLE:
    case J_DICT:
    case J_NS: repr(c, b, v); return;
    default: jn_fail(c, ERR_INPUT, "a %s cannot be printed", jv_type(v));
    }
}

struct jv jv_tostr(struct jctx *c, struct jv v)
{
    struct jbuf b = {0};
    if (v.k == J_STR) return v;
    jv_print(c, &b, v);
    return jb_str(&b);
}

struct dump {
    struct jctx *c;
    struct jbuf *b;
    struct jv item, colon, indent; /* indent: J_NONE when on one line */
    bool sort, ascii;
};

static void json_str(struct dump *d, struct jv v)
{
    static const char esc[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    char t[16];
    jb_puts(d->c, d->b, "\"");
    for (size_t i = 0, used; i < v.n; i += used) {
        int32_t cp = jn_cp(v.s + i, v.n - i, &used);
        const char *e = cp && cp < 128 ? strchr(esc, cp) : NULL;
        if (e)
            snprintf(t, sizeof t, "\\%c", to[e - esc]);
        else if (cp < 32 || (d->ascii && cp > 126 && cp < 65536))
            snprintf(t, sizeof t, "\\u%04x", (unsigned)cp);
        else if (d->ascii && cp >= 65536)
            snprintf(t, sizeof t, "\\u%04x\\u%04x", 0xD800u + ((unsigned)(cp - 65536) >> 10),
                     0xDC00u + ((unsigned)(cp - 65536) & 1023));
        else
            t[0] = 0;
        if (d->ascii && cp == 127) t[0] = 0;
        if (t[0])
            jb_puts(d->c, d->b, t);
        else
            jb_put(d->c, d->b, v.s + i, used);
    }
    jb_puts(d->c, d->b, "\"");
}

static void newline(struct dump *d, int level)
{
    if (d->indent.k == J_NONE) return;
    jb_puts(d->c, d->b, "\n");
    for (int i = 0; i < level; i++)
        jb_put(d->c, d->b, d->indent.s, d->indent.n);
}

static void dump(struct dump *d, struct jv v, int level);

static struct jv json_key(struct dump *d, struct jv k)
{
    if (k.k == J_STR) return k;
    if (k.k == J_NONE) return jv_cstr("null");
    if (k.k == J_BOOL) return jv_cstr(k.b ? "true" : "false");
    if (k.k == J_INT || k.k == J_FLOAT) return jv_tostr(d->c, k);
    jn_fail(d->c, ERR_INPUT, "tojson: a key is a '%s'", jv_type(k));
}

static void dump_dict(struct dump *d, const struct jdict *o, int level)
{
    struct jpair *p = o->p;
    if (d->sort && o->n) {
        p = jn_alloc(d->c, o->n * sizeof *p);
        for (size_t i = 0; i < o->n; i++) {
            size_t k = i;
            jn_charge(d->c, i * 8);
            for (; k > 0 && jv_cmp(d->c, p[k - 1].k, o->p[i].k) > 0; k--)
                p[k] = p[k - 1];
            p[k] = o->p[i];
        }
    }
    jb_puts(d->c, d->b, "{");
    for (size_t i = 0; i < o->n; i++) {
        if (i) jb_put(d->c, d->b, d->item.s, d->item.n);
        newline(d, level + 1);
        json_str(d, json_key(d, p[i].k));
        jb_put(d->c, d->b, d->colon.s, d->colon.n);
        dump(d, p[i].v, level + 1);
    }
    if (o->n) newline(d, level);
    jb_puts(d->c, d->b, "}");
}

static void dump(struct dump *d, struct jv v, int level)
{
    char t[40];
    jn_enter(d->c);
    switch (v.k) {
    case J_NONE: jb_puts(d->c, d->b, "null"); break;
    case J_BOOL: jb_puts(d->c, d->b, v.b ? "true" : "false"); break;
    case J_INT: jv_print(d->c, d->b, v); break;
    case J_FLOAT:
        jv_float_repr(v.f, t);
        jb_puts(d->c, d->b,
                t[0] == 'n'   ? "NaN"
                : t[0] == 'i' ? "Infinity"
                : t[1] == 'i' ? "-Infinity"
                              : t);
        break;
    case J_STR: json_str(d, v); break;
    case J_LIST:
    case J_TUPLE:
        jb_puts(d->c, d->b, "[");
        for (size_t i = 0; i < v.l->n; i++) {
            if (i) jb_put(d->c, d->b, d->item.s, d->item.n);
            newline(d, level + 1);
            dump(d, v.l->v[i], level + 1);
        }
        if (v.l->n) newline(d, level);
        jb_puts(d->c, d->b, "]");
        break;
    case J_DICT: dump_dict(d, v.d, level); break;
    default: jn_fail(d->c, ERR_INPUT, "tojson: '%s' is not JSON", jv_type(v));
    }
    d->c->depth--;
}

void jv_json(struct jctx *c, struct jbuf *b, struct jv v, const struct jargs *opt)
{
    struct jv none = jv_none(), ind = jn_arg(opt, 1, "indent", none);
    struct jv sep = jn_arg(opt, 2, "separators", none);
    struct dump d = {.c = c, .b = b, .colon = jv_cstr(": "), .indent = none};
    d.ascii = jv_truth(jn_arg(opt, 0, "ensure_ascii", none));
    d.sort = jv_truth(jn_arg(opt, 3, "sort_keys", none));
    int64_t n;
    if (ind.k == J_STR) {
        d.indent = ind;
    } else if (jv_isint(ind, &n)) {
        struct jbuf sp = {0};
        if (n > 64) jn_fail(c, ERR_INPUT, "tojson: indent %" PRId64 " is over 64", n);
        for (; n > 0; n--)
            jb_puts(c, &sp, " ");
        d.indent = jb_str(&sp);
    } else if (ind.k != J_NONE) {
        jn_fail(c, ERR_INPUT, "tojson: indent is a '%s'", jv_type(ind));
    }
    d.item = jv_cstr(d.indent.k == J_NONE ? ", " : ",");
    if (sep.k == J_TUPLE || sep.k == J_LIST) {
        if (sep.l->n != 2 || sep.l->v[0].k != J_STR || sep.l->v[1].k != J_STR)
            jn_fail(c, ERR_INPUT, "tojson: separators are two strings");
        d.item = sep.l->v[0];
        d.colon = sep.l->v[1];
    }
    dump(&d, v, 0);
}
