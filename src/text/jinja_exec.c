/* Statements run. */
#include "text/jinja.h"
#include <string.h>

static void assign(struct jctx *c, struct jscope *s, const struct jnode *t, struct jv v)
{
    if (t->k == N_NAME) {
        jv_put(c, &s->vars, t->v, v);
        return;
    }
    struct jlist *l = jv_iter(c, v);
    if (l->n != t->n) jn_fail(c, ERR_INPUT, "cannot unpack %zu values into %zu names", l->n, t->n);
    for (size_t i = 0; i < t->n; i++)
        assign(c, s, t->kid[i], l->v[i]);
}

static struct jlist *filtered(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jlist *l = jv_iter(c, je_eval(c, s, n->kid[1]));
    if (!n->kid[2]) return l;
    struct jv keep = jv_list(c, J_LIST);
    for (size_t i = 0; i < l->n; i++) {
        struct jscope in = {.up = s};
        assign(c, &in, n->kid[0], l->v[i]);
        if (jv_truth(je_eval(c, &in, n->kid[2]))) jv_push(c, keep.l, l->v[i]);
    }
    return keep.l;
}

static enum jflow loop(struct jctx *c, struct jscope *s, const struct jnode *n, struct jbuf *out)
{
    struct jloop *lp = jn_alloc(c, sizeof *lp);
    lp->items = filtered(c, s, n);
    for (; lp->i < lp->items->n; lp->i++) {
        struct jscope in = {.up = s};
        jn_charge(c, 64);
        jv_put(c, &in.vars, jv_cstr("loop"), (struct jv){.k = J_LOOP, .loop = lp});
        assign(c, &in, n->kid[0], lp->items->v[lp->i]);
        if (jx_exec(c, &in, n->kid[3], out) == F_BREAK) break;
    }
    if (!lp->items->n && n->kid[4]) return jx_exec(c, s, n->kid[4], out);
    return F_NEXT;
}

/* The filters of a block applied to its text: the innermost operand is the placeholder. */
static struct jv filters(struct jctx *c, struct jscope *s, const struct jnode *n, struct jv text)
{
    if (n->k != N_FILTER) return text;
    struct jv v = filters(c, s, n->kid[0], text);
    struct jargs a;
    je_args(c, s, n, 1, &a);
    c->line = n->line;
    return jn_filter(c, n->op, v, &a);
}

static void set(struct jctx *c, struct jscope *s, const struct jnode *t, struct jv v)
{
    if (t->k != N_NSREF) {
        assign(c, s, t, v);
        return;
    }
    struct jnode name = {.k = N_NAME, .line = t->line, .v = t->v};
    struct jv ns = je_eval(c, s, &name);
    if (ns.k != J_NS)
        jn_fail(c, ERR_INPUT, "'%.*s' is not a namespace", (int)(t->v.n < 80 ? t->v.n : 80),
                t->v.s);
    jv_put(c, ns.d, t->kid[0]->v, v);
}

static struct jv closure(struct jctx *c, struct jscope *s, const struct jnode *n)
{
    struct jmacro *m = jn_alloc(c, sizeof *m);
    m->node = n;
    /* A macro may outlive the loop or block it stands in, so the scope moves to the arena. */
    struct jscope **link = &m->scope;
    for (; s && s->up; s = s->up) {
        struct jscope *copy = jn_alloc(c, sizeof *copy);
        *copy = *s;
        *link = copy;
        link = &copy->up;
    }
    *link = s;
    return (struct jv){.k = J_MACRO, .macro = m};
}

struct jv jx_macro(struct jctx *c, struct jmacro *m, struct jargs *a)
{
    const struct jnode *n = m->node;
    struct jscope in = {.up = m->scope};
    struct jbuf b = {0};
    size_t np = n->n - 1, used = 0;
    if (a->n > np)
        jn_fail(c, ERR_INPUT, "macro '%.*s' takes not more than %zu argument(s)",
                (int)(n->v.n < 80 ? n->v.n : 80), n->v.s, np);
    jn_enter(c);
    for (size_t i = 0; i < np; i++) {
        struct jv name = n->kid[i]->v, v = jv_undef(name.s, name.n, 0);
        bool given = i < a->n;
        if (given) v = a->v[i];
        for (size_t k = 0; k < a->nkw; k++) {
            if (a->kw[k].k.n != name.n || memcmp(a->kw[k].k.s, name.s, name.n) != 0) continue;
            if (given) jn_fail(c, ERR_INPUT, "macro argument given twice");
            v = a->kw[k].v;
            given = true;
            used++;
        }
        size_t first = np - n->nkw;
        if (!given && i >= first) v = je_eval(c, &in, n->kw[i - first]);
        jv_put(c, &in.vars, name, v);
    }
    for (size_t k = 0; k < a->nkw; k++)
        if (jv_is(a->kw[k].k, "caller") && a->kw[k].v.k == J_MACRO) {
            jv_put(c, &in.vars, a->kw[k].k, a->kw[k].v);
            used++;
        }
    if (used != a->nkw)
        jn_fail(c, ERR_INPUT, "macro '%.*s' has no such keyword argument",
                (int)(n->v.n < 80 ? n->v.n : 80), n->v.s);
    jx_exec(c, &in, n->kid[np], &b);
    c->depth--;
    return jb_str(&b);
}

static void call_block(struct jctx *c, struct jscope *s, const struct jnode *n, struct jbuf *out)
{
    const struct jnode *call = n->kid[0];
    struct jv f = je_eval(c, s, call->kid[0]);
    struct jargs a;
    je_args(c, s, call, 1, &a);
    struct jpair *kw = jn_alloc(c, (a.nkw + 1) * sizeof *kw);
    if (a.nkw) memcpy(kw, a.kw, a.nkw * sizeof *kw);
    kw[a.nkw++] = (struct jpair){jv_cstr("caller"), closure(c, s, n->kid[1])};
    a.kw = kw;
    jv_print(c, out, jn_call(c, f, &a));
}

static enum jflow with(struct jctx *c, struct jscope *s, const struct jnode *n, struct jbuf *out)
{
    struct jscope in = {.up = s};
    for (size_t i = 0; i < n->nkw; i++)
        jv_put(c, &in.vars, n->kwname[i], je_eval(c, s, n->kw[i]));
    return jx_exec(c, &in, n->kid[0], out);
}

static enum jflow captured(struct jctx *c, struct jscope *s, const struct jnode *n,
                           struct jbuf *out)
{
    bool is_set = n->k == N_SETBLOCK;
    struct jscope in = {.up = s};
    struct jbuf b = {0};
    enum jflow f = jx_exec(c, &in, n->kid[is_set ? 2 : 1], &b);
    if (f != F_NEXT) return f;
    struct jv v = filters(c, s, n->kid[is_set ? 1 : 0], jb_str(&b));
    if (is_set)
        set(c, s, n->kid[0], v);
    else
        jv_print(c, out, v);
    return F_NEXT;
}

static enum jflow exec(struct jctx *c, struct jscope *s, const struct jnode *n, struct jbuf *out)
{
    switch (n->k) {
    case N_BLOCK:
        for (size_t i = 0; i < n->n; i++) {
            enum jflow f = jx_exec(c, s, n->kid[i], out);
            if (f != F_NEXT) return f;
        }
        return F_NEXT;
    case N_DATA: jb_put(c, out, n->v.s, n->v.n); break;
    case N_PRINT: jv_print(c, out, je_eval(c, s, n->kid[0])); break;
    case N_IF:
        while (n && n->k == N_IF) {
            if (jv_truth(je_eval(c, s, n->kid[0]))) return jx_exec(c, s, n->kid[1], out);
            n = n->kid[2];
        }
        return n ? jx_exec(c, s, n, out) : F_NEXT;
    case N_FOR: return loop(c, s, n, out);
    case N_SET: set(c, s, n->kid[0], je_eval(c, s, n->kid[1])); break;
    case N_SETBLOCK:
    case N_FILTERBLOCK: return captured(c, s, n, out);
    case N_MACRO: jv_put(c, &s->vars, n->v, closure(c, s, n)); break;
    case N_CALLBLOCK: call_block(c, s, n, out); break;
    case N_WITH: return with(c, s, n, out);
    case N_BREAK: return F_BREAK;
    case N_CONTINUE: return F_CONTINUE;
    default: break;
    }
    if (out->n > JN_OUT_MAX) jn_fail(c, ERR_TOOBIG, "output is over %zu MiB", JN_OUT_MAX >> 20);
    return F_NEXT;
}

enum jflow jx_exec(struct jctx *c, struct jscope *s, const struct jnode *n, struct jbuf *out)
{
    jn_enter(c);
    c->line = n->line;
    enum jflow f = exec(c, s, n, out);
    c->depth--;
    return f;
}
