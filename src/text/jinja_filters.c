/* Filters, as jinja2's. */
#include "text/jinja.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
#define FILTERS(X)                                                                          \
    X(tojson) X(length) X(count) X(trim) X(default) X(d) X(join) X(replace) X(upper)        \
    X(lower) X(capitalize) X(title) X(list) X(items) X(map) X(selectattr) X(rejectattr)     \
    X(select) X(reject) X(first) X(last) X(string) X(int) X(float) X(abs) X(round)          \
    X(reverse) X(sort) X(unique) X(indent) X(safe) X(dictsort) X(min) X(max) X(sum) X(attr)
/* clang-format on */

enum {
#define X(n) F_##n,
    FILTERS(X)
#undef X
        F_END
};

int jn_filter_id(const char *name, size_t n)
{
    static const char *const names[] = {
#define X(f) #f,
        FILTERS(X)
#undef X
    };
    for (int i = 0; i < F_END; i++)
        if (jv_is(jv_str(name, n), names[i])) return i;
    return -1;
}

struct jv jn_arg(const struct jargs *a, size_t i, const char *name, struct jv dflt)
{
    if (i < a->n) return a->v[i];
    for (size_t k = 0; k < a->nkw; k++)
        if (jv_is(a->kw[k].k, name)) return a->kw[k].v;
    return dflt;
}

/* "a.b.0" of a value. */
static struct jv path(struct jctx *c, struct jv v, struct jv name)
{
    if (name.k != J_STR) return jv_item(c, v, name);
    for (size_t i = 0; i <= name.n;) {
        size_t k = i;
        bool num = true;
        int64_t idx = 0;
        for (; k < name.n && name.s[k] != '.'; k++) {
            num = num && name.s[k] >= '0' && name.s[k] <= '9' && k - i < 9;
            if (num) idx = idx * 10 + (name.s[k] - '0');
        }
        v = jv_item(c, v, num && k > i ? jv_int(idx) : jv_str(name.s + i, k - i));
        i = k + 1;
    }
    return v;
}

static struct jargs rest(const struct jargs *a, size_t skip)
{
    struct jargs r = *a;
    skip = skip < r.n ? skip : r.n;
    if (skip) r.v += skip;
    r.n -= skip;
    return r;
}

static struct jv map(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jlist *l = jv_iter(c, v);
    struct jv out = jv_list(c, J_LIST), u = jv_undef("", 0, 0), dflt = u;
    struct jv attr = a->n ? u : jn_arg(a, 0, "attribute", u);
    struct jargs r = rest(a, 1);
    int id = -1;
    if (attr.k == J_UNDEF) {
        if (!a->n || a->v[0].k != J_STR) jn_fail(c, ERR_INPUT, "map takes a filter's name");
        id = jn_filter_id(a->v[0].s, a->v[0].n);
        if (id < 0)
            jn_fail(c, ERR_UNSUPPORTED, "no filter named '%.*s'",
                    (int)(a->v[0].n < 80 ? a->v[0].n : 80), a->v[0].s);
    } else {
        dflt = jn_arg(a, 1, "default", u);
    }
    jn_enter(c);
    for (size_t i = 0; i < l->n; i++) {
        jn_charge(c, 64);
        struct jv x = id < 0 ? path(c, l->v[i], attr) : jn_filter(c, id, l->v[i], &r);
        jv_push(c, out.l, id < 0 && x.k == J_UNDEF && dflt.k != J_UNDEF ? dflt : x);
    }
    c->depth--;
    return out;
}

static struct jv choose(struct jctx *c, struct jv v, struct jargs *a, bool attr, bool keep)
{
    struct jlist *l = jv_iter(c, v);
    struct jv out = jv_list(c, J_LIST);
    size_t skip = attr ? 1 : 0;
    int id = -1;
    if (attr && !a->n) jn_fail(c, ERR_INPUT, "selectattr takes an attribute's name");
    if (a->n > skip) {
        struct jv t = a->v[skip];
        if (t.k == J_STR) id = jn_test_id(t.s, t.n);
        if (id < 0)
            jn_fail(c, ERR_UNSUPPORTED, "no test named '%.*s'",
                    t.k == J_STR ? (int)(t.n < 80 ? t.n : 80) : 0, t.k == J_STR ? t.s : "");
    }
    struct jargs r = rest(a, skip + 1);
    for (size_t i = 0; i < l->n; i++) {
        jn_charge(c, 64);
        struct jv x = attr ? path(c, l->v[i], a->v[0]) : l->v[i];
        if ((id < 0 ? jv_truth(x) : jn_test(c, id, x, &r)) == keep) jv_push(c, out.l, l->v[i]);
    }
    return out;
}

static struct jv fold(struct jctx *c, struct jv v, bool sensitive)
{
    return !sensitive && v.k == J_STR ? js_case(c, v, 'l') : v;
}

/* Stable merge sort of (key, value) pairs. */
static void merge(struct jctx *c, struct jpair *p, struct jpair *t, size_t n, bool rev)
{
    if (n < 2) return;
    size_t h = n / 2, i = 0, j = h, k = 0;
    merge(c, p, t, h, rev);
    merge(c, p + h, t, n - h, rev);
    jn_charge(c, n * 16);
    while (i < h && j < n) {
        int r = rev ? jv_cmp(c, p[i].k, p[j].k) : jv_cmp(c, p[j].k, p[i].k);
        t[k++] = r == -1 ? p[j++] : p[i++];
    }
    while (i < h)
        t[k++] = p[i++];
    while (j < n)
        t[k++] = p[j++];
    memcpy(p, t, n * sizeof *p);
}

static struct jv sorted(struct jctx *c, struct jv v, bool rev, bool sensitive, struct jv attr)
{
    struct jlist *l = jv_iter(c, v);
    struct jv out = jv_list(c, J_LIST);
    struct jpair *p = jn_alloc(c, 2 * (l->n + 1) * sizeof *p);
    for (size_t i = 0; i < l->n; i++) {
        struct jv k = attr.k == J_NONE ? l->v[i] : path(c, l->v[i], attr);
        p[i] = (struct jpair){fold(c, k, sensitive), l->v[i]};
    }
    merge(c, p, p + l->n, l->n, rev);
    for (size_t i = 0; i < l->n; i++)
        jv_push(c, out.l, p[i].v);
    return out;
}

static struct jv dictsort(struct jctx *c, struct jv v, struct jargs *a)
{
    if (v.k != J_DICT) jn_fail(c, ERR_INPUT, "dictsort takes a dict, not '%s'", jv_type(v));
    struct jargs none = {0};
    struct jv by = jn_arg(a, 1, "by", jv_cstr("key"));
    bool value = by.k == J_STR && jv_is(by, "value");
    return sorted(c, js_method(c, v, "items", 5, &none),
                  jv_truth(jn_arg(a, 2, "reverse", jv_none())),
                  jv_truth(jn_arg(a, 0, "case_sensitive", jv_none())), jv_int(value));
}

static struct jv unique(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jlist *l = jv_iter(c, v);
    struct jv out = jv_list(c, J_LIST), keys = jv_list(c, J_LIST);
    struct jv attr = jn_arg(a, 1, "attribute", jv_none());
    bool sens = jv_truth(jn_arg(a, 0, "case_sensitive", jv_none()));
    for (size_t i = 0; i < l->n; i++) {
        struct jv k = attr.k == J_NONE ? l->v[i] : path(c, l->v[i], attr);
        k = fold(c, k, sens);
        if (jv_in(c, k, keys)) continue;
        jv_push(c, keys.l, k);
        jv_push(c, out.l, l->v[i]);
    }
    return out;
}

static struct jv extreme(struct jctx *c, struct jv v, struct jargs *a, int want)
{
    struct jlist *l = jv_iter(c, v);
    struct jv attr = jn_arg(a, 1, "attribute", jv_none()), best = jv_none(), bk = best;
    bool sens = jv_truth(jn_arg(a, 0, "case_sensitive", jv_none()));
    if (!l->n) return jv_undef("an empty sequence", 17, 0);
    for (size_t i = 0; i < l->n; i++) {
        struct jv k = attr.k == J_NONE ? l->v[i] : path(c, l->v[i], attr);
        k = fold(c, k, sens);
        if (i && jv_cmp(c, k, bk) != want) continue;
        best = l->v[i];
        bk = k;
    }
    return best;
}

static struct jv sum(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jlist *l = jv_iter(c, v);
    struct jv attr = jn_arg(a, 0, "attribute", jv_none()), s = jn_arg(a, 1, "start", jv_int(0));
    for (size_t i = 0; i < l->n; i++)
        s = jv_arith(c, '+', s, attr.k == J_NONE ? l->v[i] : path(c, l->v[i], attr));
    return s;
}

static struct jv join(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jlist *l = jv_iter(c, v);
    struct jv sep = jv_tostr(c, jn_arg(a, 0, "d", jv_cstr("")));
    struct jv attr = jn_arg(a, 1, "attribute", jv_none());
    struct jbuf b = {0};
    for (size_t i = 0; i < l->n; i++) {
        if (i) jb_put(c, &b, sep.s, sep.n);
        jv_print(c, &b, attr.k == J_NONE ? l->v[i] : path(c, l->v[i], attr));
    }
    return jb_str(&b);
}

static struct jv indent(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jv s = jv_tostr(c, v), w = jn_arg(a, 0, "width", jv_int(4));
    bool first = jv_truth(jn_arg(a, 1, "first", jv_none()));
    bool blank = jv_truth(jn_arg(a, 2, "blank", jv_none()));
    struct jbuf pad = {0}, b = {0};
    int64_t n = 0;
    if (w.k == J_STR)
        jb_put(c, &pad, w.s, w.n);
    else if (!jv_isint(w, &n) || n > 10000)
        jn_fail(c, ERR_INPUT, "indent takes a width up to 10000");
    for (; n > 0; n--)
        jb_puts(c, &pad, " ");
    for (size_t i = 0, line = 0; i <= s.n; line++) {
        const char *e = i < s.n ? memchr(s.s + i, '\n', s.n - i) : NULL;
        size_t k = e ? (size_t)(e - s.s) : s.n;
        if (line) jb_puts(c, &b, "\n");
        if (line ? k > i || blank : first) jb_put(c, &b, pad.p, pad.n);
        jb_put(c, &b, s.s + i, k - i);
        i = k + 1;
    }
    return jb_str(&b);
}

/* The whole of a number written in text, or false. */
static bool read_float(struct jctx *c, struct jv s, double *out)
{
    struct jv t = js_strip(c, s, jv_none(), true, true);
    char buf[64], *end;
    if (!t.n || t.n >= sizeof buf || memchr(t.s, 'x', t.n) || memchr(t.s, 'X', t.n)) return false;
    memcpy(buf, t.s, t.n);
    buf[t.n] = 0;
    *out = strtod(buf, &end);
    return *end == 0;
}

static struct jv to_int(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jv dflt = jn_arg(a, 0, "default", jv_int(0));
    int64_t i, base = 10;
    double f;
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (!jv_isint(jn_arg(a, 1, "base", jv_int(10)), &base) || base < 2 || base > 36) return dflt;
    if (jv_isint(v, &i)) return jv_int(i);
    if (v.k == J_STR) {
        struct jv t = js_strip(c, v, jv_none(), true, true);
        char buf[80], *end;
        if (!t.n || t.n >= sizeof buf) return dflt;
        memcpy(buf, t.s, t.n);
        buf[t.n] = 0;
        long long r = strtoll(buf, &end, (int)base);
        if (*end == 0 && r != INT64_MAX && r != INT64_MIN) return jv_int(r);
        if (!read_float(c, t, &f)) return dflt;
    } else if (v.k == J_FLOAT) {
        f = v.f;
    } else {
        return dflt;
    }
    return f > -9.2e18 && f < 9.2e18 ? jv_int((int64_t)f) : dflt;
}

static struct jv to_float(struct jctx *c, struct jv v, struct jargs *a)
{
    double f;
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (jv_num(v, &f) || (v.k == J_STR && read_float(c, v, &f))) return jv_float(f);
    return jn_arg(a, 0, "default", jv_float(0));
}

static struct jv rounded(struct jctx *c, struct jv v, struct jargs *a)
{
    struct jv m = jn_arg(a, 1, "method", jv_cstr("common"));
    int64_t p, i;
    double f;
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (!jv_num(v, &f)) jn_fail(c, ERR_INPUT, "round takes a number, not '%s'", jv_type(v));
    if (!jv_isint(jn_arg(a, 0, "precision", jv_int(0)), &p) || p < -300 || p > 300)
        jn_fail(c, ERR_INPUT, "round takes a precision from -300 to 300");
    double s = pow(10, (double)p);
    bool up = m.k == J_STR && jv_is(m, "ceil");
    if (up || (m.k == J_STR && jv_is(m, "floor")))
        return jv_float((up ? ceil(f * s) : floor(f * s)) / s);
    if (jv_isint(v, &i) && p >= 0) return jv_int(i);
    /* Through decimal text, which rounds the exact value half to even as Python does. */
    char t[700];
    if (p >= 0) {
        snprintf(t, sizeof t, "%.*f", (int)p, f);
        f = strtod(t, NULL);
    } else {
        f = nearbyint(f * s) / s;
    }
    return v.k == J_FLOAT ? jv_float(f) : jv_int((int64_t)f);
}

static struct jv reversed(struct jctx *c, struct jv v)
{
    if (v.k == J_STR) return jv_slice(c, v, jv_none(), jv_none(), jv_int(-1));
    struct jlist *l = jv_iter(c, v);
    struct jv out = jv_list(c, J_LIST);
    for (size_t i = l->n; i-- > 0;)
        jv_push(c, out.l, l->v[i]);
    return out;
}

static struct jv end_item(struct jctx *c, struct jv v, bool first)
{
    struct jlist *l = jv_iter(c, v);
    if (!l->n) return jv_undef(first ? "the first item" : "the last item", first ? 14 : 13, 0);
    return l->v[first ? 0 : l->n - 1];
}

static struct jv absolute(struct jctx *c, struct jv v)
{
    int64_t i;
    if (v.k == J_FLOAT) return jv_float(fabs(v.f));
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (!jv_isint(v, &i) || i == INT64_MIN) jn_fail(c, ERR_INPUT, "abs of '%s'", jv_type(v));
    return jv_int(i < 0 ? -i : i);
}

static struct jv replace(struct jctx *c, struct jv v, struct jargs *a)
{
    int64_t n = -1;
    if (a->n < 2) jn_fail(c, ERR_INPUT, "replace takes two strings");
    jv_isint(jn_arg(a, 2, "count", jv_int(-1)), &n);
    return js_replace(c, jv_tostr(c, v), jv_tostr(c, a->v[0]), jv_tostr(c, a->v[1]), n);
}

static struct jv to_list(struct jctx *c, struct jv v)
{
    struct jlist *l = jv_iter(c, v);
    return (struct jv){.k = J_LIST, .l = l};
}

static struct jv items(struct jctx *c, struct jv v)
{
    struct jargs none = {0};
    if (v.k == J_UNDEF) return jv_list(c, J_LIST);
    if (v.k != J_DICT) jn_fail(c, ERR_INPUT, "items takes a mapping, not '%s'", jv_type(v));
    return js_method(c, v, "items", 5, &none);
}

struct jv jn_filter(struct jctx *c, int id, struct jv v, struct jargs *a)
{
    struct jv none = jv_none();
    struct jbuf b = {0};
    switch (id) {
    case F_tojson: jv_json(c, &b, v, a); return jb_str(&b);
    case F_length:
    case F_count: return jv_int((int64_t)jv_len(c, v));
    case F_trim: return js_strip(c, jv_tostr(c, v), jn_arg(a, 0, "chars", none), true, true);
    case F_default:
    case F_d:
        if (v.k == J_UNDEF || (jv_truth(jn_arg(a, 1, "boolean", none)) && !jv_truth(v)))
            return jn_arg(a, 0, "default_value", jv_cstr(""));
        return v;
    case F_join: return join(c, v, a);
    case F_replace: return replace(c, v, a);
    case F_upper: return js_case(c, jv_tostr(c, v), 'u');
    case F_lower: return js_case(c, jv_tostr(c, v), 'l');
    case F_capitalize: return js_case(c, jv_tostr(c, v), 'c');
    case F_title: return js_case(c, jv_tostr(c, v), 'j');
    case F_list: return to_list(c, v);
    case F_items: return items(c, v);
    case F_map: return map(c, v, a);
    case F_selectattr: return choose(c, v, a, true, true);
    case F_rejectattr: return choose(c, v, a, true, false);
    case F_select: return choose(c, v, a, false, true);
    case F_reject: return choose(c, v, a, false, false);
    case F_first: return end_item(c, v, true);
    case F_last: return end_item(c, v, false);
    case F_string:
    case F_safe: return jv_tostr(c, v);
    case F_int: return to_int(c, v, a);
    case F_float: return to_float(c, v, a);
    case F_abs: return absolute(c, v);
    case F_round: return rounded(c, v, a);
    case F_reverse: return reversed(c, v);
    case F_sort:
        return sorted(c, v, jv_truth(jn_arg(a, 0, "reverse", none)),
                      jv_truth(jn_arg(a, 1, "case_sensitive", none)),
                      jn_arg(a, 2, "attribute", none));
    case F_unique: return unique(c, v, a);
    case F_indent: return indent(c, v, a);
    case F_dictsort: return dictsort(c, v, a);
    case F_min: return extreme(c, v, a, -1);
    case F_max: return extreme(c, v, a, 1);
    case F_sum: return sum(c, v, a);
    default: return path(c, v, jn_arg(a, 0, "name", none));
    }
}
