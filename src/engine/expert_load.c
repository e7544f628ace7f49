#include "engine/expert_load.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/internal.h"
#include <string.h>

struct call {
    struct engine *e;
    uint64_t *out;
};

bool expert_load_wanted(const struct expert_load *l)
{
    return l->counts && clock_ns() < l->until;
}

void expert_load_count(struct expert_load *l, const struct config *c, const int16_t *ids)
{
    for (int32_t i = 0; i < c->n_layers; i++)
        for (int32_t k = 0; k < c->top_k; k++, ids++)
            if (!c->dense[i]) l->counts[(size_t)i * (size_t)c->n_experts + (size_t)*ids]++;
}

static err_t look(void *ctx, struct err *err)
{
    struct call *c = ctx;
    struct expert_load *l = &c->e->load;
    size_t n = (size_t)c->e->o.config->n_layers * (size_t)c->e->o.config->n_experts;
    if (!l->counts) l->counts = mem_try_array(n, sizeof *l->counts);
    c->out = mem_try_array(n, sizeof *c->out);
    if (!l->counts || !c->out)
        return err_set(err, ERR_NOMEM, "no memory to count the tokens of %zu experts", n);
    memcpy(c->out, l->counts, n * sizeof *c->out);
    l->until = clock_ns() + (int64_t)EXPERT_LOAD_S * 1000000000;
    return OK;
}

err_t engine_expert_load(struct engine *e, uint64_t **counts, struct err *err)
{
    struct call c = {.e = e};
    if (!(model_can(e->o.model) & MODEL_EXPERTS))
        return err_set(err, ERR_UNSUPPORTED,
                       "this model does not tell which experts its tokens go to");
    err_t rc = engine_between_steps(e, look, &c, err);
    if (rc == OK)
        *counts = c.out;
    else
        mem_free(c.out);
    return rc;
}
