/* Arena, failure, and values with Python's semantics. */
#include "base/mem.h"
#include "text/jinja.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct jchunk {
    struct jchunk *next;
    size_t used, cap;
    _Alignas(16) char bytes[];
};

void *jn_alloc(struct jctx *c, size_t bytes)
{
    size_t n;
    if (bytes > JN_MEM_MAX || c->used > JN_MEM_MAX - bytes)
        jn_fail(c, ERR_TOOBIG, "template needs more than %zu MiB", JN_MEM_MAX >> 20);
    n = (bytes + 15) & ~(size_t)15;
    if (!n) n = 16;
    struct jchunk *k = c->chunks;
    if (!k || k->cap - k->used < n) {
        size_t cap = n > 32768 ? n : 65536;
        k = mem_try(sizeof *k + cap);
        if (!k) jn_fail(c, ERR_NOMEM, "no memory for the template (%zu bytes)", cap);
        k->cap = cap;
        c->used += cap;
        /* A large block goes behind the current one, whose rest stays in use. */
        if (cap == n && c->chunks) {
            k->next = c->chunks->next;
            c->chunks->next = k;
        } else {
            k->next = c->chunks;
            c->chunks = k;
        }
    }
    void *p = k->bytes + k->used;
    k->used += n;
    return p;
}

void jn_release(struct jctx *c)
{
    while (c->chunks) {
        struct jchunk *k = c->chunks;
        c->chunks = k->next;
        mem_free(k);
    }
}

void jn_fail(struct jctx *c, err_t code, const char *fmt, ...)
{
    char t[800];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t, sizeof t, fmt, ap);
    va_end(ap);
    c->code = code;
    err_set(c->e, code, "chat template line %d: %s", c->line, t);
    longjmp(c->jump, 1);
}

void jn_charge(struct jctx *c, size_t bytes)
{
    c->steps += (long)(bytes / 64);
    if (c->steps > JN_STEP_MAX) jn_fail(c, ERR_TOOBIG, "template ran over %d steps", JN_STEP_MAX);
}

void jb_put(struct jctx *c, struct jbuf *b, const char *s, size_t n)
{
    if (!n) return;
    if (b->cap - b->n < n) {
        size_t cap = b->cap * 2 > b->n + n ? b->cap * 2 : b->n + n + 32;
        char *p = jn_alloc(c, cap);
        if (b->n) memcpy(p, b->p, b->n);
        b->p = p;
        b->cap = cap;
    }
    memcpy(b->p + b->n, s, n);
    b->n += n;
}

void jb_puts(struct jctx *c, struct jbuf *b, const char *s)
{
    jb_put(c, b, s, strlen(s));
}

struct jv jb_str(const struct jbuf *b)
{
    return jv_str(b->p ? b->p : "", b->n);
}
struct jv jv_none(void)
{
    return (struct jv){.k = J_NONE};
}
struct jv jv_bool(bool b)
{
    return (struct jv){.k = J_BOOL, .b = b};
}
struct jv jv_int(int64_t i)
{
    return (struct jv){.k = J_INT, .i = i};
}
struct jv jv_float(double f)
{
    return (struct jv){.k = J_FLOAT, .f = f};
}
struct jv jv_str(const char *s, size_t n)
{
    return (struct jv){.k = J_STR, .s = s, .n = n};
}
struct jv jv_cstr(const char *s)
{
    return jv_str(s, strlen(s));
}

struct jv jv_undef(const char *name, size_t n, int owner)
{
    return (struct jv){.k = J_UNDEF, .s = name, .n = n, .aux = owner};
}

struct jv jv_list(struct jctx *c, enum jkind k)
{
    return (struct jv){.k = k, .l = jn_alloc(c, sizeof(struct jlist))};
}

struct jv jv_dict(struct jctx *c, enum jkind k)
{
    return (struct jv){.k = k, .d = jn_alloc(c, sizeof(struct jdict))};
}

void jv_push(struct jctx *c, struct jlist *l, struct jv v)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 4;
        struct jv *p = jn_alloc(c, cap * sizeof *p);
        if (l->n) memcpy(p, l->v, l->n * sizeof *p);
        l->v = p;
        l->cap = cap;
    }
    l->v[l->n++] = v;
}

static void append(struct jctx *c, struct jdict *d, struct jv k, struct jv v)
{
    if (d->n == d->cap) {
        size_t cap = d->cap ? d->cap * 2 : 4;
        struct jpair *p = jn_alloc(c, cap * sizeof *p);
        if (d->n) memcpy(p, d->p, d->n * sizeof *p);
        d->p = p;
        d->cap = cap;
    }
    d->p[d->n++] = (struct jpair){k, v};
}

struct jv *jv_find(struct jctx *c, const struct jdict *d, struct jv k)
{
    jn_charge(c, d->n * 8);
    for (size_t i = 0; i < d->n; i++) {
        struct jv *x = &d->p[i].k;
        if (k.k == J_STR && x->k == J_STR) {
            if (x->n == k.n && (!k.n || memcmp(x->s, k.s, k.n) == 0)) return &d->p[i].v;
        } else if (jv_eq(c, *x, k)) {
            return &d->p[i].v;
        }
    }
    return NULL;
}

void jv_put(struct jctx *c, struct jdict *d, struct jv k, struct jv v)
{
    if (k.k == J_LIST || k.k == J_DICT) jn_fail(c, ERR_INPUT, "unhashable type: '%s'", jv_type(k));
    struct jv *at = jv_find(c, d, k);
    if (at)
        *at = v;
    else
        append(c, d, k, v);
}

struct jv jv_from_json(struct jctx *c, const json_t *j, int depth)
{
    if (depth > JN_DATA_MAX) jn_fail(c, ERR_INPUT, "data nests more than %d deep", JN_DATA_MAX);
    switch (json_typeof(j)) {
    case JSON_STRING: return jv_str(json_string_value(j), json_string_length(j));
    case JSON_INTEGER: return jv_int(json_integer_value(j));
    case JSON_REAL: return jv_float(json_real_value(j));
    case JSON_TRUE:
    case JSON_FALSE: return jv_bool(json_is_true(j));
    case JSON_NULL: return jv_none();
    case JSON_ARRAY: {
        struct jv l = jv_list(c, J_LIST);
        for (size_t i = 0; i < json_array_size(j); i++)
            jv_push(c, l.l, jv_from_json(c, json_array_get(j, i), depth + 1));
        return l;
    }
    default: {
        struct jv d = jv_dict(c, J_DICT);
        json_t *mj = (json_t *)(uintptr_t)j; /* iteration takes a non-const object, changes none */
        for (void *it = json_object_iter(mj); it; it = json_object_iter_next(mj, it)) {
            const char *key = json_object_iter_key(it);
            struct jv v = jv_from_json(c, json_object_iter_value(it), depth + 1);
            append(c, d.d, jv_str(key, json_object_iter_key_len(it)), v);
        }
        return d;
    }
    }
}

bool jv_is(struct jv v, const char *s)
{
    return v.n == strlen(s) && memcmp(v.s, s, v.n) == 0;
}

const char *jv_type(struct jv v)
{
    static const char *const names[] = {
        "Undefined", "NoneType", "bool",      "int",      "float", "str",         "list",
        "tuple",     "dict",     "Namespace", "function", "Macro", "LoopContext", "method"};
    return names[v.k];
}

void jn_undefined(struct jctx *c, struct jv v)
{
    int n = (int)(v.n < 100 ? v.n : 100);
    if (v.aux)
        jn_fail(c, ERR_INPUT, "'%s object' has no attribute '%.*s'",
                jv_type((struct jv){.k = (enum jkind)(v.aux - 1)}), n, v.s);
    jn_fail(c, ERR_INPUT, "'%.*s' is undefined", n, v.s ? v.s : "");
}

bool jv_truth(struct jv v)
{
    switch (v.k) {
    case J_UNDEF:
    case J_NONE: return false;
    case J_BOOL: return v.b;
    case J_INT: return v.i != 0;
    case J_FLOAT: return v.f != 0;
    case J_STR: return v.n != 0;
    case J_LIST:
    case J_TUPLE: return v.l->n != 0;
    case J_DICT: return v.d->n != 0;
    default: return true;
    }
}

bool jv_isint(struct jv v, int64_t *out)
{
    if (v.k != J_INT && v.k != J_BOOL) return false;
    *out = v.k == J_INT ? v.i : v.b;
    return true;
}

bool jv_num(struct jv v, double *out)
{
    int64_t i;
    if (v.k == J_FLOAT) *out = v.f;
    if (jv_isint(v, &i)) *out = (double)i;
    return v.k == J_FLOAT || v.k == J_INT || v.k == J_BOOL;
}

bool jv_eq(struct jctx *c, struct jv a, struct jv b)
{
    int64_t i, j;
    double x, y;
    if (jv_isint(a, &i) && jv_isint(b, &j)) return i == j;
    if (jv_num(a, &x) && jv_num(b, &y)) return !(x < y) && !(x > y) && x == x && y == y;
    if (a.k != b.k) return false;
    bool same = true;
    jn_enter(c);
    switch (a.k) {
    case J_UNDEF:
    case J_NONE: break;
    case J_STR: same = a.n == b.n && (!a.n || memcmp(a.s, b.s, a.n) == 0); break;
    case J_LIST:
    case J_TUPLE:
        same = a.l->n == b.l->n;
        for (size_t k = 0; same && k < a.l->n; k++)
            same = jv_eq(c, a.l->v[k], b.l->v[k]);
        break;
    case J_DICT:
        same = a.d->n == b.d->n;
        for (size_t k = 0; same && k < a.d->n; k++) {
            struct jv *v = jv_find(c, b.d, a.d->p[k].k);
            same = v && jv_eq(c, a.d->p[k].v, *v);
        }
        break;
    case J_FUNC: same = a.aux == b.aux; break;
    default: same = a.d == b.d;
    }
    c->depth--;
    return same;
}

/* -1, 0, 1, or 2 when a NaN makes it unordered. */
int jv_cmp(struct jctx *c, struct jv a, struct jv b)
{
    int64_t i, j;
    double x, y;
    if (jv_isint(a, &i) && jv_isint(b, &j)) return i < j ? -1 : i > j;
    if (jv_num(a, &x) && jv_num(b, &y)) return x < y ? -1 : x > y ? 1 : x == x && y == y ? 0 : 2;
    if (a.k == J_UNDEF) jn_undefined(c, a);
    if (b.k == J_UNDEF) jn_undefined(c, b);
    if (a.k == J_STR && b.k == J_STR) {
        size_t n = a.n < b.n ? a.n : b.n;
        int r = n ? memcmp(a.s, b.s, n) : 0;
        return r ? (r < 0 ? -1 : 1) : a.n < b.n ? -1 : a.n > b.n;
    }
    if (a.k != b.k || (a.k != J_LIST && a.k != J_TUPLE))
        jn_fail(c, ERR_INPUT, "cannot order '%s' and '%s'", jv_type(a), jv_type(b));
    jn_enter(c);
    int r = 0;
    for (size_t k = 0; !r && k < a.l->n && k < b.l->n; k++)
        if (!jv_eq(c, a.l->v[k], b.l->v[k])) r = jv_cmp(c, a.l->v[k], b.l->v[k]);
    c->depth--;
    return r ? r : a.l->n < b.l->n ? -1 : a.l->n > b.l->n;
}

bool jv_in(struct jctx *c, struct jv item, struct jv box)
{
    if (box.k == J_STR) {
        if (item.k == J_UNDEF) jn_undefined(c, item);
        if (item.k != J_STR)
            jn_fail(c, ERR_INPUT, "'in <string>' takes a string, not '%s'", jv_type(item));
        jn_charge(c, box.n);
        return !item.n || memmem(box.s, box.n, item.s, item.n) != NULL;
    }
    if (box.k == J_DICT) return jv_find(c, box.d, item) != NULL;
    struct jlist *l = jv_iter(c, box);
    for (size_t i = 0; i < l->n; i++)
        if (jv_eq(c, l->v[i], item)) return true;
    return false;
}

struct jlist *jv_iter(struct jctx *c, struct jv v)
{
    if (v.k == J_LIST || v.k == J_TUPLE) return v.l;
    struct jv out = jv_list(c, J_LIST);
    if (v.k == J_STR) {
        for (size_t i = 0, used; i < v.n; i += used) {
            jn_cp(v.s + i, v.n - i, &used);
            jv_push(c, out.l, jv_str(v.s + i, used));
        }
    } else if (v.k == J_DICT) {
        for (size_t i = 0; i < v.d->n; i++)
            jv_push(c, out.l, v.d->p[i].k);
    } else if (v.k == J_UNDEF && v.aux) {
        return out.l;
    } else if (v.k != J_UNDEF) {
        jn_fail(c, ERR_INPUT, "'%s' object is not iterable", jv_type(v));
    }
    return out.l;
}

size_t jv_len(struct jctx *c, struct jv v)
{
    if (v.k == J_STR) return jn_cp_len(v.s, v.n);
    if (v.k == J_DICT) return v.d->n;
    if (v.k == J_LOOP) return v.loop->items->n;
    if (v.k == J_UNDEF) return 0;
    if (v.k != J_LIST && v.k != J_TUPLE)
        jn_fail(c, ERR_INPUT, "object of type '%s' has no len()", jv_type(v));
    return v.l->n;
}
