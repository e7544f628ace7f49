#include "model/ops.h"
#include <stddef.h>

void model_free(struct model *m)
{
    if (m) m->ops->free(m);
}

const char *model_isa(const struct model *m)
{
    return m->ops->isa(m);
}

unsigned model_can(const struct model *m)
{
    return m->ops->can(m);
}

err_t model_set_numerics(struct model *m, act_t act, bool routed, struct err *e)
{
    return m->ops->set_numerics(m, act, routed, e);
}

err_t model_check_update(const struct model *m, const struct update *u, struct err *e)
{
    return m->ops->check_update(m, u, e);
}

void model_kv_clear(struct model *m, int32_t page)
{
    m->ops->kv_clear(m, page);
}

err_t model_kv_release(struct model *m, struct err *e)
{
    return m->ops->kv_release(m, e);
}

err_t model_kv_resume(struct model *m, struct err *e)
{
    return m->ops->kv_resume(m, e);
}

void model_submit(struct model *m, const struct step *st)
{
    m->ops->submit(m, st);
}

err_t model_collect(struct model *m, const struct step *st, struct err *e)
{
    return m->ops->collect(m, st, e);
}

err_t model_logits(struct model *m, const struct step *st, const int32_t *tokens, int32_t n,
                   float *logits, struct err *e)
{
    return m->ops->logits(m, st, tokens, n, logits, e);
}

void model_break_invariance(struct model *m)
{
    m->ops->break_invariance(m);
}
