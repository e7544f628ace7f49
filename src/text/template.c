/* Chat templates: parse once, render many times; see jinja.h for the inside. */
#include "text/template.h"
#include "base/mem.h"
#include "text/jinja.h"
#include <string.h>

struct tmpl {
    struct jctx arena; /* of the tree */
    const struct jnode *root;
};

static const struct jnode *parse(struct jctx *c, const char *s, size_t n)
{
    struct jtokens toks = {0};
    if (setjmp(c->jump)) return NULL;
    jn_lex(c, &toks, s, n);
    return jn_parse(c, &toks);
}

err_t tmpl_parse(struct tmpl **out, const char *source, size_t n, struct err *e)
{
    struct tmpl *t = mem_alloc(sizeof *t);
    t->arena.e = e;
    t->arena.line = 1;
    t->root = parse(&t->arena, source, n);
    t->arena.e = NULL;
    if (!t->root) {
        err_t code = t->arena.code;
        tmpl_free(t);
        return code;
    }
    *out = t;
    return OK;
}

static err_t render(struct jctx *c, const struct jnode *root, struct buf *out, const json_t *vars)
{
    struct jscope top = {0};
    struct jbuf b = {0};
    if (setjmp(c->jump)) return c->code;
    struct jv v = jv_from_json(c, vars, 0);
    if (v.k == J_DICT) top.vars = *v.d;
    jx_exec(c, &top, root, &b);
    if (b.n && !buf_put(out, b.p, b.n)) jn_fail(c, ERR_NOMEM, "no memory for the output");
    return OK;
}

err_t tmpl_render(const struct tmpl *t, struct buf *out, const json_t *vars, struct err *e)
{
    struct jctx c = {.e = e};
    err_t r = render(&c, t->root, out, vars);
    jn_release(&c);
    return r;
}

void tmpl_free(struct tmpl *t)
{
    if (!t) return;
    jn_release(&t->arena);
    mem_free(t);
}
