/* Statements to a syntax tree. */
#include "text/jinja.h"
#include <string.h>

static struct jnode *body(struct jparser *p, const char *const *ends);
static const char *const NO_END[] = {NULL};

static void block_end(struct jparser *p)
{
    jp_want(p, T_BEND, "'%}'");
}

static struct jnode *until(struct jparser *p, const char *end)
{
    const char *const ends[] = {end, NULL};
    struct jnode *b = body(p, ends);
    p->t++;
    return b;
}

static struct jnode *if_stmt(struct jparser *p)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct jnode *top = jp_node(p, N_IF), *n = top;
    for (;;) {
        jp_add(p, n, jp_tuple(p, true, false));
        block_end(p);
        jp_add(p, n, body(p, ends));
        if (jp_skip_name(p, "elif")) {
            struct jnode *next = jp_node(p, N_IF);
            jp_add(p, n, next);
            n = next;
            continue;
        }
        if (jp_skip_name(p, "else")) {
            block_end(p);
            jp_add(p, n, until(p, "endif"));
        } else {
            p->t++;
            jp_add(p, n, NULL);
        }
        return top;
    }
}

static void check_target(struct jparser *p, const struct jnode *t)
{
    if (t->k == N_NAME) return;
    if (t->k != N_TUPLE) jp_unexpected(p, "a name to assign to");
    for (size_t i = 0; i < t->n; i++)
        check_target(p, t->kid[i]);
}

static struct jnode *for_stmt(struct jparser *p)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    struct jnode *n = jp_node(p, N_FOR), *t = jp_tuple(p, false, true), *cond = NULL;
    check_target(p, t);
    jp_add(p, n, t);
    if (!jp_skip_name(p, "in")) jp_unexpected(p, "'in'");
    jp_add(p, n, jp_tuple(p, false, false));
    if (jp_skip_name(p, "if")) cond = jp_expr(p, true);
    jp_add(p, n, cond);
    if (jp_is_name(p, "recursive")) {
        p->c->line = p->t->line;
        jn_fail(p->c, ERR_UNSUPPORTED, "recursive loops are not supported");
    }
    block_end(p);
    p->loops++;
    jp_add(p, n, body(p, ends));
    p->loops--;
    if (jp_skip_name(p, "else")) {
        block_end(p);
        jp_add(p, n, until(p, "endfor"));
    } else {
        p->t++;
        jp_add(p, n, NULL);
    }
    return n;
}

static struct jnode *set_stmt(struct jparser *p)
{
    struct jnode *n = jp_node(p, N_SET), *t;
    if (p->t->t == T_NAME && p->t[1].t == T_OP && p->t[1].op == '.' && p->t[2].t == T_NAME) {
        t = jp_node(p, N_NSREF);
        t->v = p->t->v;
        struct jnode *attr = jp_node(p, N_CONST);
        attr->v = p->t[2].v;
        jp_add(p, t, attr);
        p->t += 3;
    } else {
        t = jp_node(p, N_NAME);
        if (p->t->t == T_NAME && !(p->t[1].t == T_OP && p->t[1].op == ',')) {
            t->v = p->t->v;
            p->t++;
        } else {
            t = jp_tuple(p, false, false);
            check_target(p, t);
        }
    }
    jp_add(p, n, t);
    if (jp_skip_op(p, '=')) {
        jp_add(p, n, jp_tuple(p, true, false));
        return n;
    }
    n->k = N_SETBLOCK;
    struct jnode *text = jp_node(p, N_CONST);
    text->v = jv_undef(NULL, 0, 0);
    jp_add(p, n, jp_filters(p, text));
    block_end(p);
    jp_add(p, n, until(p, "endset"));
    return n;
}

/* Parameters "(a, b=1)": kid: names; kw: defaults by name. */
static void params(struct jparser *p, struct jnode *n)
{
    jp_want_op(p, '(');
    while (!jp_skip_op(p, ')')) {
        if (p->t->t != T_NAME) jp_unexpected(p, "a parameter name");
        struct jnode *a = jp_node(p, N_NAME);
        a->v = p->t->v;
        p->t++;
        jp_add(p, n, a);
        if (jp_skip_op(p, '='))
            jp_addkw(p, n, a->v, jp_expr(p, true));
        else if (n->nkw)
            jp_unexpected(p, "a default value");
        if (!jp_is_op(p, ')')) jp_want_op(p, ',');
    }
}

/* The body is the last kid. */
static struct jnode *macro(struct jparser *p)
{
    struct jnode *n = jp_node(p, N_MACRO);
    int loops = p->loops;
    if (p->t->t != T_NAME) jp_unexpected(p, "a macro name");
    n->v = p->t->v;
    p->t++;
    params(p, n);
    block_end(p);
    p->loops = 0;
    jp_add(p, n, until(p, "endmacro"));
    p->loops = loops;
    return n;
}

static struct jnode *call_block(struct jparser *p)
{
    struct jnode *n = jp_node(p, N_CALLBLOCK), *m = jp_node(p, N_MACRO);
    int loops = p->loops;
    m->v = jv_cstr("caller");
    if (jp_is_op(p, '(')) params(p, m);
    struct jnode *call = jp_expr(p, true);
    if (call->k != N_CALL) jp_unexpected(p, "a call");
    block_end(p);
    p->loops = 0;
    jp_add(p, m, until(p, "endcall"));
    p->loops = loops;
    jp_add(p, n, call);
    jp_add(p, n, m);
    return n;
}

static struct jnode *with_stmt(struct jparser *p)
{
    struct jnode *n = jp_node(p, N_WITH);
    while (p->t->t != T_BEND) {
        if (n->nkw) jp_want_op(p, ',');
        if (p->t->t != T_NAME) jp_unexpected(p, "a name");
        struct jv name = p->t->v;
        p->t++;
        jp_want_op(p, '=');
        jp_addkw(p, n, name, jp_expr(p, true));
    }
    block_end(p);
    jp_add(p, n, until(p, "endwith"));
    return n;
}

static struct jnode *filter_block(struct jparser *p)
{
    struct jnode *n = jp_node(p, N_FILTERBLOCK), *text = jp_node(p, N_CONST);
    text->v = jv_undef(NULL, 0, 0);
    p->t--;
    p->t->t = T_OP; /* the word `filter` reads as the first '|' */
    p->t->op = '|';
    jp_add(p, n, jp_filters(p, text));
    block_end(p);
    jp_add(p, n, until(p, "endfilter"));
    return n;
}

static struct jnode *statement(struct jparser *p)
{
    p->c->line = p->t->line;
    if (jp_skip_name(p, "if")) return if_stmt(p);
    if (jp_skip_name(p, "for")) return for_stmt(p);
    if (jp_skip_name(p, "set")) return set_stmt(p);
    if (jp_skip_name(p, "macro")) return macro(p);
    if (jp_skip_name(p, "call")) return call_block(p);
    if (jp_skip_name(p, "with")) return with_stmt(p);
    if (jp_skip_name(p, "filter")) return filter_block(p);
    if (jp_skip_name(p, "generation")) {
        block_end(p);
        return until(p, "endgeneration");
    }
    bool brk = jp_is_name(p, "break");
    if (brk || jp_is_name(p, "continue")) {
        if (!p->loops) jn_fail(p->c, ERR_INPUT, "%s outside a loop", brk ? "break" : "continue");
        p->t++;
        return jp_node(p, brk ? N_BREAK : N_CONTINUE);
    }
    if (p->t->t != T_NAME) jp_unexpected(p, "a statement");
    jn_fail(p->c, ERR_UNSUPPORTED, "no statement named '%.*s'",
            (int)(p->t->v.n < 80 ? p->t->v.n : 80), p->t->v.s);
}

static bool ends_here(const struct jparser *p, const char *const *ends)
{
    for (; *ends; ends++)
        if (p->t[1].t == T_NAME && jv_is(p->t[1].v, *ends)) return true;
    return false;
}

/* Up to a block tag in `ends` (left at its name) or the end of the template. */
static struct jnode *body(struct jparser *p, const char *const *ends)
{
    struct jnode *b = jp_node(p, N_BLOCK), *n;
    jp_enter(p);
    for (;;) {
        switch (p->t->t) {
        case T_DATA:
            n = jp_node(p, N_DATA);
            n->v = p->t->v;
            p->t++;
            break;
        case T_VBEGIN:
            p->t++;
            n = jp_node(p, N_PRINT);
            jp_add(p, n, jp_tuple(p, true, false));
            jp_want(p, T_VEND, "'}}'");
            break;
        case T_BBEGIN:
            if (ends_here(p, ends)) {
                p->t++;
                p->nest--;
                return b;
            }
            p->t++;
            n = statement(p);
            block_end(p);
            break;
        default:
            if (*ends) {
                p->c->line = b->line;
                jn_fail(p->c, ERR_INPUT, "block is not closed by {%% %s %%}",
                        ends[1] ? ends[1] : ends[0]);
            }
            p->nest--;
            return b;
        }
        jp_add(p, b, n);
    }
}

struct jnode *jn_parse(struct jctx *c, struct jtokens *toks)
{
    struct jparser p = {.c = c, .t = toks->v};
    return body(&p, NO_END);
}
