/* Values of expressions. */
#include "text/jinja.h"
#include <string.h>

void jn_enter(struct jctx *c)
{
    if (++c->depth > JN_DEPTH_MAX)
        jn_fail(c, ERR_INPUT, "evaluation is more than %d deep", JN_DEPTH_MAX);
    jn_charge(c, 64);
}

static struct jv lookup(struct jctx *c, struct jscope *s, struct jv name)
{
    for (; s; s = s->up) {
        struct jv *v = jv_find(c, &s->vars, name);
        if (v) return *v;
    }
    int f = jn_function_id(name.s, name.n);
    if (f >= 0) return (struct jv){.k = J_FUNC, .aux = f};
    return jv_undef(name.s, name.n, 0);
}

void je_args(struct jctx *c, struct jscope *s, const struct jnode *n, size_t first, struct jargs *a)
{
    *a = (struct jargs){.n = n->n - first, .nkw = n->nkw};
    if (a->n) a->v = jn_alloc(c, a->n * sizeof *a->v);
    if (a->nkw) a->kw = jn_alloc(c, a->nkw * sizeof *a->kw);
    for (size_t i = 0; i < a->n; i++)
        a->v[i] = je_eval(c, s, n->kid[first + i]);
    for (size_t i = 0; i < a->nkw; i++)
        a->kw[i] = (struct jpair){n->kwname[i], je_eval(c, s, n->kw[i])};
}

static bool compare_one(struct jctx *c, int op, struct jv a, struct jv b)
{
    switch (op) {
    case O_EQ: return jv_eq(c, a, b);
    case O_NE: return !jv_eq(c, a, b);
    case O_IN: return jv_in(c, a, b);
    case O_NOTIN: return !jv_in(c, a, b);
    case '<': return jv_cmp(c, a, b) < 0;
    case '>': return jv_cmp(c, a, b) == 1;
    case O_LE: return jv_cmp(c, a, b) <= 0;
    default: {
        int r = jv_cmp(c, a, b);
        return r == 0 || r == 1;
    }
    }
}

static struct jv compare(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jv a = je_eval(c, s, n->kid[0]);
    for (size_t i = 1; i < n->n; i++) {
        struct jv b = je_eval(c, s, n->kid[i]);
        if (!compare_one(c, n->ops[i - 1], a, b)) return jv_bool(false);
        a = b;
    }
    return jv_bool(true);
}

static struct jv collection(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    if (n->k == N_DICT) {
        struct jv d = jv_dict(c, J_DICT);
        for (size_t i = 0; i + 1 < n->n; i += 2) {
            struct jv k = je_eval(c, s, n->kid[i]);
            jv_put(c, d.d, k, je_eval(c, s, n->kid[i + 1]));
        }
        return d;
    }
    struct jv l = jv_list(c, n->k == N_LIST ? J_LIST : J_TUPLE);
    for (size_t i = 0; i < n->n; i++)
        jv_push(c, l.l, je_eval(c, s, n->kid[i]));
    return l;
}

static struct jv sign(struct jctx *c, const struct jnode *n, struct jv v)
{
    int64_t i;
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (v.k == J_FLOAT) return jv_float(n->k == N_NEG ? -v.f : v.f);
    if (!jv_isint(v, &i))
        jn_fail(c, ERR_INPUT, "bad operand type for unary %c: '%s'", n->k == N_NEG ? '-' : '+',
                jv_type(v));
    if (n->k == N_NEG && i == INT64_MIN) jn_fail(c, ERR_INPUT, "integer over 64 bits");
    return jv_int(n->k == N_NEG ? -i : i);
}

static struct jv concat(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jbuf b = {0};
    for (size_t i = 0; i < n->n; i++)
        jv_print(c, &b, je_eval(c, s, n->kid[i]));
    return jb_str(&b);
}

static struct jv slice(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jv part[4];
    for (int i = 0; i < 4; i++)
        part[i] = n->kid[i] ? je_eval(c, s, n->kid[i]) : jv_none();
    return jv_slice(c, part[0], part[1], part[2], part[3]);
}

static struct jv applied(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jv v = je_eval(c, s, n->kid[0]);
    struct jargs a;
    je_args(c, s, n, 1, &a);
    c->line = n->line;
    if (n->k == N_CALL) return jn_call(c, v, &a);
    return n->k == N_FILTER ? jn_filter(c, n->op, v, &a) : jv_bool(jn_test(c, n->op, v, &a));
}

static struct jv eval(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jv a, b;
    switch (n->k) {
    case N_CONST: return n->v;
    case N_NAME: return lookup(c, s, n->v);
    case N_LIST:
    case N_TUPLE:
    case N_DICT: return collection(c, s, n);
    case N_ATTR:
        a = je_eval(c, s, n->kid[0]);
        c->line = n->line;
        return jv_attr(c, a, n->v.s, n->v.n);
    case N_ITEM:
        a = je_eval(c, s, n->kid[0]);
        b = je_eval(c, s, n->kid[1]);
        c->line = n->line;
        return jv_item(c, a, b);
    case N_SLICE: return slice(c, s, n);
    case N_CALL:
    case N_FILTER:
    case N_TEST: return applied(c, s, n);
    case N_NOT: return jv_bool(!jv_truth(je_eval(c, s, n->kid[0])));
    case N_NEG:
    case N_POS: return sign(c, n, je_eval(c, s, n->kid[0]));
    case N_AND: a = je_eval(c, s, n->kid[0]); return jv_truth(a) ? je_eval(c, s, n->kid[1]) : a;
    case N_OR: a = je_eval(c, s, n->kid[0]); return jv_truth(a) ? a : je_eval(c, s, n->kid[1]);
    case N_BIN:
        a = je_eval(c, s, n->kid[0]);
        b = je_eval(c, s, n->kid[1]);
        c->line = n->line;
        return jv_arith(c, n->op, a, b);
    case N_CONCAT: return concat(c, s, n);
    case N_CMP: return compare(c, s, n);
    case N_COND:
        if (jv_truth(je_eval(c, s, n->kid[1]))) return je_eval(c, s, n->kid[0]);
        return n->kid[2] ? je_eval(c, s, n->kid[2]) : jv_undef("the inline if", 13, 0);
    default: jn_fail(c, ERR_INPUT, "not an expression");
    }
}

struct jv je_eval(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    jn_enter(c);
    c->line = n->line;
    struct jv v = eval(c, s, n);
    c->depth--;
    return v;
}
