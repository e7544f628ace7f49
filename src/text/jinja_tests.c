/* Tests (`x is ...`), built-in functions, calls. */
#include "text/jinja.h"
#include <inttypes.h>
#include <string.h>
#include <time.h>

enum {
    T_DEFINED,
    T_UNDEFINED,
    T_NONE,
    T_STRING,
    T_MAPPING,
    T_ITERABLE,
    T_SEQUENCE,
    T_NUMBER,
    T_INTEGER,
    T_FLOATT,
    T_BOOLEAN,
    T_TRUE,
    T_FALSE,
    T_EQ,
    T_EQ2,
    T_EQ3,
    T_NE,
    T_NE2,
    T_LT,
    T_LT2,
    T_GT,
    T_GT2,
    T_LE,
    T_LE2,
    T_GE,
    T_GE2,
    T_IN,
    T_ODD,
    T_EVEN,
    T_DIVISIBLE,
    T_CALLABLE,
    T_LOWER,
    T_UPPER,
    T_SAME,
    T_LT3,
    T_GT3,
    T_COUNT
};

int jn_test_id(const char *name, size_t n)
{
    static const char *const names[] = {
        "defined",  "undefined", "none",    "string", "mapping",  "iterable",
        "sequence", "number",    "integer", "float",  "boolean",  "true",
        "false",    "eq",        "equalto", "==",     "ne",       "!=",
        "lt",       "<",         "gt",      ">",      "le",       "<=",
        "ge",       ">=",        "in",      "odd",    "even",     "divisibleby",
        "callable", "lower",     "upper",   "sameas", "lessthan", "greaterthan"};
    for (int i = 0; i < T_COUNT; i++)
        if (jv_is(jv_str(name, n), names[i])) return i;
    return -1;
}

static bool remainder_is(struct jctx *c, struct jv v, struct jv by, int64_t want)
{
    struct jv r = jv_arith(c, '%', v, by);
    return jv_eq(c, r, jv_int(want));
}

static bool same(struct jctx *c, struct jv a, struct jv b)
{
    return a.k == b.k && jv_eq(c, a, b);
}

static bool ordered(struct jctx *c, int id, struct jv v, struct jv x)
{
    int r = jv_cmp(c, v, x);
    switch (id) {
    case T_LT:
    case T_LT2:
    case T_LT3: return r == -1;
    case T_GT:
    case T_GT2:
    case T_GT3: return r == 1;
    case T_LE:
    case T_LE2: return r == -1 || r == 0;
    default: return r == 1 || r == 0;
    }
}

bool jn_test(struct jctx *c, int id, struct jv v, struct jargs *a)
{
    struct jv x = a->n ? a->v[0] : jv_none();
    bool seq = v.k == J_STR || v.k == J_LIST || v.k == J_TUPLE || v.k == J_DICT || v.k == J_UNDEF;
    if (((id >= T_EQ && id <= T_IN) || id == T_DIVISIBLE || id == T_SAME || id >= T_LT3) && !a->n)
        jn_fail(c, ERR_INPUT, "the test takes a value");
    switch (id) {
    case T_DEFINED: return v.k != J_UNDEF;
    case T_UNDEFINED: return v.k == J_UNDEF;
    case T_NONE: return v.k == J_NONE;
    case T_STRING: return v.k == J_STR;
    case T_MAPPING: return v.k == J_DICT;
    case T_ITERABLE: return seq || v.k == J_LOOP;
    case T_SEQUENCE: return seq;
    case T_NUMBER: return v.k == J_INT || v.k == J_FLOAT || v.k == J_BOOL;
    case T_INTEGER: return v.k == J_INT;
    case T_FLOATT: return v.k == J_FLOAT;
    case T_BOOLEAN: return v.k == J_BOOL;
    case T_TRUE: return v.k == J_BOOL && v.b;
    case T_FALSE: return v.k == J_BOOL && !v.b;
    case T_EQ:
    case T_EQ2:
    case T_EQ3: return jv_eq(c, v, x);
    case T_NE:
    case T_NE2: return !jv_eq(c, v, x);
    case T_IN: return jv_in(c, v, x);
    case T_ODD: return remainder_is(c, v, jv_int(2), 1);
    case T_EVEN: return remainder_is(c, v, jv_int(2), 0);
    case T_DIVISIBLE: return remainder_is(c, v, x, 0);
    case T_CALLABLE: return v.k == J_FUNC || v.k == J_MACRO || v.k == J_BOUND;
    case T_LOWER:
    case T_UPPER: {
        struct jargs none = {0};
        return jv_truth(
            js_method(c, jv_tostr(c, v), id == T_LOWER ? "islower" : "isupper", 7, &none));
    }
    case T_SAME: return same(c, v, x);
    default: return ordered(c, id, v, x);
    }
}

enum { FN_RANGE, FN_RAISE, FN_STRFTIME, FN_DICT, FN_NAMESPACE, FN_COUNT };

int jn_function_id(const char *name, size_t n)
{
    static const char *const names[] = {"range", "raise_exception", "strftime_now", "dict",
                                        "namespace"};
    for (int i = 0; i < FN_COUNT; i++)
        if (jv_is(jv_str(name, n), names[i])) return i;
    return -1;
}

static struct jv range(struct jctx *c, struct jargs *a)
{
    int64_t v[3] = {0, 0, 1};
    if (a->n < 1 || a->n > 3) jn_fail(c, ERR_INPUT, "range takes 1 to 3 integers");
    for (size_t i = 0; i < a->n; i++) {
        if (a->v[i].k == J_UNDEF) jn_undefined(c, a->v[i]);
        if (!jv_isint(a->v[i], &v[a->n == 1 ? 1 : i]))
            jn_fail(c, ERR_INPUT, "range takes integers, not '%s'", jv_type(a->v[i]));
    }
    if (v[2] == 0) jn_fail(c, ERR_INPUT, "range step is 0");
    struct jv out = jv_list(c, J_LIST);
    for (int64_t i = v[0]; v[2] > 0 ? i < v[1] : i > v[1];) {
        /* jinja2's sandbox has the same limit. */
        if (out.l->n >= 100000) jn_fail(c, ERR_INPUT, "range is over 100000 long");
        jv_push(c, out.l, jv_int(i));
        if (__builtin_add_overflow(i, v[2], &i)) break;
    }
    return out;
}

static struct jv strftime_now(struct jctx *c, struct jargs *a)
{
    struct jv f = jn_arg(a, 0, "format", jv_none());
    char fmt[128], t[512];
    struct tm tm;
    time_t now = time(NULL);
    if (f.k != J_STR || f.n >= sizeof fmt)
        jn_fail(c, ERR_INPUT, "strftime_now takes a format under 128 bytes");
    memcpy(fmt, f.s, f.n);
    fmt[f.n] = 0;
    localtime_r(&now, &tm);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(t, sizeof t, fmt, &tm);
#pragma GCC diagnostic pop
    char *p = jn_alloc(c, n + 1);
    memcpy(p, t, n);
    return jv_str(p, n);
}

static struct jv make_dict(struct jctx *c, struct jargs *a, enum jkind k)
{
    struct jv d = jv_dict(c, k);
    if (a->n && a->v[0].k == J_DICT) {
        for (size_t i = 0; i < a->v[0].d->n; i++)
            jv_put(c, d.d, a->v[0].d->p[i].k, a->v[0].d->p[i].v);
    } else if (a->n) {
        struct jlist *l = jv_iter(c, a->v[0]);
        for (size_t i = 0; i < l->n; i++) {
            struct jlist *kv = jv_iter(c, l->v[i]);
            if (kv->n != 2) jn_fail(c, ERR_INPUT, "dict takes pairs");
            jv_put(c, d.d, kv->v[0], kv->v[1]);
        }
    }
    for (size_t i = 0; i < a->nkw; i++)
        jv_put(c, d.d, a->kw[i].k, a->kw[i].v);
    return d;
}

struct jv jn_function(struct jctx *c, int id, struct jargs *a)
{
    switch (id) {
    case FN_RANGE: return range(c, a);
    case FN_RAISE: {
        struct jv m = jv_tostr(c, jn_arg(a, 0, "message", jv_cstr("raise_exception")));
        jn_fail(c, ERR_INPUT, "%.*s", (int)(m.n < 700 ? m.n : 700), m.s);
    }
    case FN_STRFTIME: return strftime_now(c, a);
    default: return make_dict(c, a, id == FN_DICT ? J_DICT : J_NS);
    }
}

struct jv jn_call(struct jctx *c, struct jv f, struct jargs *a)
{
    if (f.k == J_FUNC) return jn_function(c, f.aux, a);
    if (f.k == J_MACRO) return jx_macro(c, f.macro, a);
    if (f.k == J_BOUND) return js_method(c, f.bound->self, f.bound->name, f.bound->n, a);
    if (f.k == J_UNDEF) jn_undefined(c, f);
    jn_fail(c, ERR_INPUT, "'%s' object is not callable", jv_type(f));
}
