/* Expressions to a syntax tree; the grammar and precedence of jinja2's parser. */
#include "text/jinja.h"
#include <string.h>

struct jnode *jp_node(struct jparser *p, enum jnode_kind k)
{
    struct jnode *n = jn_alloc(p->c, sizeof *n);
    n->k = k;
    n->line = p->t->line;
    return n;
}

void jp_add(struct jparser *p, struct jnode *n, struct jnode *kid)
{
    if (n->n == n->cap) {
        size_t cap = n->cap ? n->cap * 2 : 4;
        struct jnode **v = jn_alloc(p->c, cap * sizeof *v);
        if (n->n) memcpy(v, n->kid, n->n * sizeof *v);
        n->kid = v;
        n->cap = cap;
    }
    n->kid[n->n++] = kid;
}

void jp_addkw(struct jparser *p, struct jnode *n, struct jv name, struct jnode *kid)
{
    if (n->nkw == n->kwcap) {
        size_t cap = n->kwcap ? n->kwcap * 2 : 4;
        struct jnode **v = jn_alloc(p->c, cap * sizeof *v);
        struct jv *names = jn_alloc(p->c, cap * sizeof *names);
        if (n->nkw) memcpy(v, n->kw, n->nkw * sizeof *v);
        if (n->nkw) memcpy(names, n->kwname, n->nkw * sizeof *names);
        n->kw = v;
        n->kwname = names;
        n->kwcap = cap;
    }
    n->kwname[n->nkw] = name;
    n->kw[n->nkw++] = kid;
}

void jp_unexpected(struct jparser *p, const char *wanted)
{
    static const char *const names[] = {
        "end of template", "text",    "{{",    "}}",      "{%", "%}", "name",
        "string",          "integer", "float", "operator"};
    const struct jtoken *t = p->t;
    p->c->line = t->line;
    if (t->t == T_NAME)
        jn_fail(p->c, ERR_INPUT, "expected %s, found '%.*s'", wanted,
                (int)(t->v.n < 80 ? t->v.n : 80), t->v.s);
    if (t->t == T_OP && t->op < 256)
        jn_fail(p->c, ERR_INPUT, "expected %s, found '%c'", wanted, t->op);
    jn_fail(p->c, ERR_INPUT, "expected %s, found %s", wanted, names[t->t]);
}

bool jp_is_op(const struct jparser *p, int op)
{
    return p->t->t == T_OP && p->t->op == op;
}

bool jp_is_name(const struct jparser *p, const char *s)
{
    return p->t->t == T_NAME && jv_is(p->t->v, s);
}

bool jp_skip_op(struct jparser *p, int op)
{
    if (!jp_is_op(p, op)) return false;
    p->t++;
    return true;
}

bool jp_skip_name(struct jparser *p, const char *s)
{
    if (!jp_is_name(p, s)) return false;
    p->t++;
    return true;
}

void jp_want_op(struct jparser *p, int op)
{
    char w[4] = {'\'', (char)op, '\'', 0};
    if (!jp_skip_op(p, op)) jp_unexpected(p, w);
}

void jp_want(struct jparser *p, enum jtok t, const char *what)
{
    if (p->t->t != t) jp_unexpected(p, what);
    p->t++;
}

void jp_enter(struct jparser *p)
{
    p->c->line = p->t->line;
    if (++p->nest > JN_NEST_MAX) jn_fail(p->c, ERR_INPUT, "nested more than %d deep", JN_NEST_MAX);
}

static struct jnode *pair(struct jparser *p, enum jnode_kind k, struct jnode *a, struct jnode *b)
{
    struct jnode *n = jp_node(p, k);
    jp_add(p, n, a);
    if (b) jp_add(p, n, b);
    return n;
}

/* Arguments after '(' up to and with ')'. */
static void call_args(struct jparser *p, struct jnode *n)
{
    while (!jp_skip_op(p, ')')) {
        if (jp_is_op(p, '*') || jp_is_op(p, O_POW))
            jn_fail(p->c, ERR_INPUT, "*args and **kwargs in a call are not supported");
        if (p->t->t == T_NAME && p->t[1].t == T_OP && p->t[1].op == '=') {
            struct jv name = p->t->v;
            p->t += 2;
            jp_addkw(p, n, name, jp_expr(p, true));
        } else {
            if (n->nkw) jp_unexpected(p, "a keyword argument");
            jp_add(p, n, jp_expr(p, true));
        }
        if (!jp_is_op(p, ')')) jp_want_op(p, ',');
    }
}

static struct jnode *dict(struct jparser *p)
{
    struct jnode *n = jp_node(p, N_DICT);
    while (!jp_skip_op(p, '}')) {
        jp_add(p, n, jp_expr(p, true));
        jp_want_op(p, ':');
        jp_add(p, n, jp_expr(p, true));
        if (!jp_is_op(p, '}')) jp_want_op(p, ',');
    }
    return n;
}

static struct jnode *constant(struct jparser *p, struct jv v)
{
    struct jnode *n = jp_node(p, N_CONST);
    n->v = v;
    return n;
}

static struct jnode *strings(struct jparser *p)
{
    struct jnode *n = constant(p, p->t->v);
    p->t++;
    if (p->t->t != T_STR) return n;
    struct jbuf b = {0};
    jb_put(p->c, &b, n->v.s, n->v.n);
    for (; p->t->t == T_STR; p->t++)
        jb_put(p->c, &b, p->t->v.s, p->t->v.n);
    n->v = jb_str(&b);
    return n;
}

static struct jnode *name(struct jparser *p)
{
    struct jv v = p->t->v;
    struct jnode *n = jp_node(p, N_NAME);
    n->v = v;
    bool t = jv_is(v, "true") || jv_is(v, "True"), f = jv_is(v, "false") || jv_is(v, "False");
    if (t || f) n = constant(p, jv_bool(t));
    if (jv_is(v, "none") || jv_is(v, "None")) n = constant(p, jv_none());
    p->t++;
    return n;
}

struct jnode *jp_primary(struct jparser *p)
{
    struct jnode *n;
    if (p->t->t == T_NAME) return name(p);
    if (p->t->t == T_STR) return strings(p);
    if (p->t->t == T_INT || p->t->t == T_FLOAT) {
        n = constant(p, p->t->v);
        p->t++;
        return n;
    }
    if (jp_skip_op(p, '(')) {
        n = jp_is_op(p, ')') ? jp_node(p, N_TUPLE) : jp_tuple(p, true, false);
        jp_want_op(p, ')');
        return n;
    }
    if (jp_skip_op(p, '[')) {
        n = jp_node(p, N_LIST);
        while (!jp_skip_op(p, ']')) {
            jp_add(p, n, jp_expr(p, true));
            if (!jp_is_op(p, ']')) jp_want_op(p, ',');
        }
        return n;
    }
    if (jp_skip_op(p, '{')) return dict(p);
    jp_unexpected(p, "an expression");
}

static struct jnode *subscript(struct jparser *p, struct jnode *o)
{
    struct jnode *part[3] = {NULL, NULL, NULL};
    int i = 0;
    bool slice = false;
    while (!jp_is_op(p, ']')) {
        if (jp_skip_op(p, ':')) {
            slice = true;
            if (++i > 2) jp_unexpected(p, "']'");
        } else {
            if (part[i]) jp_unexpected(p, "']'");
            part[i] = jp_expr(p, true);
        }
    }
    jp_want_op(p, ']');
    if (!slice) {
        if (!part[0]) jp_unexpected(p, "an index");
        return pair(p, N_ITEM, o, part[0]);
    }
    struct jnode *n = pair(p, N_SLICE, o, NULL);
    for (i = 0; i < 3; i++)
        jp_add(p, n, part[i]);
    return n;
}

static struct jnode *postfix(struct jparser *p, struct jnode *x)
{
    for (;;) {
        if (jp_skip_op(p, '.')) {
            struct jnode *n;
            if (p->t->t == T_INT) {
                n = pair(p, N_ITEM, x, constant(p, p->t->v));
            } else {
                if (p->t->t != T_NAME) jp_unexpected(p, "an attribute name");
                n = pair(p, N_ATTR, x, NULL);
                n->v = p->t->v;
            }
            p->t++;
            x = n;
        } else if (jp_skip_op(p, '[')) {
            x = subscript(p, x);
        } else if (jp_skip_op(p, '(')) {
            x = pair(p, N_CALL, x, NULL);
            call_args(p, x);
        } else {
            return x;
        }
    }
}

static struct jnode *filter(struct jparser *p, struct jnode *x)
{
    if (p->t->t != T_NAME) jp_unexpected(p, "a filter name");
    struct jnode *n = pair(p, N_FILTER, x, NULL);
    n->v = p->t->v;
    n->op = jn_filter_id(n->v.s, n->v.n);
    if (n->op < 0) {
        p->c->line = n->line;
        jn_fail(p->c, ERR_UNSUPPORTED, "no filter named '%.*s'", (int)(n->v.n < 80 ? n->v.n : 80),
                n->v.s);
    }
    p->t++;
    if (jp_skip_op(p, '(')) call_args(p, n);
    return n;
}

/* {% set x | f %} and {% filter f %}: filters on the block's text, kid 0 of the innermost is x. */
struct jnode *jp_filters(struct jparser *p, struct jnode *x)
{
    while (jp_skip_op(p, '|'))
        x = filter(p, x);
    return x;
}

static struct jnode *test(struct jparser *p, struct jnode *x)
{
    bool negate = jp_skip_name(p, "not");
    if (p->t->t != T_NAME) jp_unexpected(p, "a test name");
    struct jnode *n = pair(p, N_TEST, x, NULL);
    n->v = p->t->v;
    n->op = jn_test_id(n->v.s, n->v.n);
    if (n->op < 0) {
        p->c->line = n->line;
        jn_fail(p->c, ERR_UNSUPPORTED, "no test named '%.*s'", (int)(n->v.n < 80 ? n->v.n : 80),
                n->v.s);
    }
    p->t++;
    const struct jtoken *t = p->t;
    if (jp_skip_op(p, '(')) {
        call_args(p, n);
    } else if ((t->t == T_NAME && !jp_is_name(p, "else") && !jp_is_name(p, "or") &&
                !jp_is_name(p, "and")) ||
               t->t == T_STR || t->t == T_INT || t->t == T_FLOAT || jp_is_op(p, '[') ||
               jp_is_op(p, '{')) {
        if (jp_is_name(p, "is")) jp_unexpected(p, "an operator (tests do not chain)");
        /* `x is defined if y`: a name that is a keyword here is no argument. */
        if (!jp_is_name(p, "if") || n->op != jn_test_id("defined", 7))
            jp_add(p, n, postfix(p, jp_primary(p)));
    }
    return negate ? pair(p, N_NOT, n, NULL) : n;
}

static struct jnode *unary(struct jparser *p, bool with_filter)
{
    struct jnode *x;
    jp_enter(p);
    if (jp_skip_op(p, '-'))
        x = pair(p, N_NEG, unary(p, false), NULL);
    else if (jp_skip_op(p, '+'))
        x = pair(p, N_POS, unary(p, false), NULL);
    else
        x = jp_primary(p);
    x = postfix(p, x);
    while (with_filter) {
        if (jp_skip_op(p, '|')) {
            x = filter(p, x);
        } else if (jp_skip_name(p, "is")) {
            x = test(p, x);
        } else if (jp_skip_op(p, '(')) {
            x = pair(p, N_CALL, x, NULL);
            call_args(p, x);
        } else {
            break;
        }
    }
    p->nest--;
    return x;
}

static struct jnode *binary(struct jparser *p, int level);

static struct jnode *concat(struct jparser *p)
{
    struct jnode *x = binary(p, 1);
    if (!jp_is_op(p, '~')) return x;
    x = pair(p, N_CONCAT, x, NULL);
    while (jp_skip_op(p, '~'))
        jp_add(p, x, binary(p, 1));
    return x;
}

/* Level 2: + -; 1: * / // %; 0: ** (left-associative in jinja2). */
static struct jnode *binary(struct jparser *p, int level)
{
    static const int ops[3][4] = {{O_POW}, {'*', '/', O_IDIV, '%'}, {'+', '-'}};
    struct jnode *x = level == 2 ? concat(p) : level == 1 ? binary(p, 0) : unary(p, true);
    for (;;) {
        int op = 0;
        for (int i = 0; i < 4; i++)
            if (ops[level][i] && jp_is_op(p, ops[level][i])) op = ops[level][i];
        if (!op) return x;
        p->t++;
        struct jnode *r = level == 2 ? concat(p) : level == 1 ? binary(p, 0) : unary(p, true);
        x = pair(p, N_BIN, x, r);
        x->op = op;
    }
}

static int compare_op(struct jparser *p)
{
    static const int ops[] = {O_EQ, O_NE, '<', '>', O_LE, O_GE};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (jp_skip_op(p, ops[i])) return ops[i];
    if (jp_skip_name(p, "in")) return O_IN;
    if (jp_is_name(p, "not") && p->t[1].t == T_NAME && jv_is(p->t[1].v, "in")) {
        p->t += 2;
        return O_NOTIN;
    }
    return 0;
}

static struct jnode *compare(struct jparser *p)
{
    struct jnode *x = binary(p, 2), *n = NULL;
    int op, ops[32], count = 0;
    while ((op = compare_op(p)) != 0) {
        if (!n) n = pair(p, N_CMP, x, NULL);
        if (count == 32) jn_fail(p->c, ERR_INPUT, "comparison has over 32 operators");
        ops[count++] = op;
        jp_add(p, n, binary(p, 2));
    }
    if (!n) return x;
    n->ops = jn_alloc(p->c, sizeof ops);
    memcpy(n->ops, ops, (size_t)count * sizeof *ops);
    return n;
}

static struct jnode *not_expr(struct jparser *p)
{
    if (!jp_skip_name(p, "not")) return compare(p);
    jp_enter(p);
    struct jnode *n = pair(p, N_NOT, not_expr(p), NULL);
    p->nest--;
    return n;
}

static struct jnode *and_expr(struct jparser *p)
{
    struct jnode *x = not_expr(p);
    while (jp_skip_name(p, "and"))
        x = pair(p, N_AND, x, not_expr(p));
    return x;
}

static struct jnode *or_expr(struct jparser *p)
{
    struct jnode *x = and_expr(p);
    while (jp_skip_name(p, "or"))
        x = pair(p, N_OR, x, and_expr(p));
    return x;
}

struct jnode *jp_expr(struct jparser *p, bool with_cond)
{
    jp_enter(p);
    struct jnode *x = or_expr(p);
    while (with_cond && jp_skip_name(p, "if")) {
        x = pair(p, N_COND, x, or_expr(p));
        jp_add(p, x, jp_skip_name(p, "else") ? jp_expr(p, true) : NULL);
    }
    p->nest--;
    return x;
}

static bool tuple_ends(const struct jparser *p, bool stop_at_in)
{
    return p->t->t == T_VEND || p->t->t == T_BEND || jp_is_op(p, ')') || jp_is_op(p, '=') ||
           (stop_at_in && jp_is_name(p, "in"));
}

struct jnode *jp_tuple(struct jparser *p, bool with_cond, bool stop_at_in)
{
    /* `for a, b in`: primaries only, so that `in` is not taken as an operator. */
    struct jnode *x = stop_at_in ? postfix(p, jp_primary(p)) : jp_expr(p, with_cond);
    if (!jp_is_op(p, ',')) return x;
    struct jnode *n = pair(p, N_TUPLE, x, NULL);
    while (jp_skip_op(p, ',')) {
        if (tuple_ends(p, stop_at_in)) break;
        jp_add(p, n, stop_at_in ? postfix(p, jp_primary(p)) : jp_expr(p, with_cond));
    }
    return n;
}
