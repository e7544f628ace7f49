#include "base/mem.h"
#include "model/forward.h"

/* Qwen3-MoE: softmax over all experts, the top k, and their sum divided out or not. */
static struct route route_of(const struct config *c)
{
    return (struct route){
        .method = c->norm_topk_prob ? ROUTE_RENORMALIZE_NAIVE : ROUTE_DEFAULT,
        .n_experts = c->n_experts,
        .top_k = c->top_k,
        .scaling = 1.0f,
    };
}

err_t forward_moe_new(struct cpu_model *m, act_t act, struct err *e)
{
    const struct config *c = &m->c;
    struct moe_shape s = {.hidden = c->hidden_size,
                          .inner = c->moe_intermediate_size,
                          .n_experts = c->n_experts,
                          .top_k = c->top_k,
                          .n_local = c->n_experts,
                          .activation = MOE_SWIGLU,
                          .act = act};
    struct moe_op *op;
    err_t rc = moe_op_new(&op, &s, m->ops, m->pool, m->slice, e);
    if (rc != OK) return rc;
    moe_op_free(m->moe);
    m->moe = op;
    return OK;
}

/* A token's place in step.experts or step.forced. */
static size_t layer_at(const struct slice *s)
{
    return (size_t)s->layer * (size_t)s->m->c.top_k;
}

/* Tokens whose experts are given: through the packed form, with the weights that the router's logits
 * give them. */
static void force(struct slice *s, const struct route *r)
{
    struct cpu_model *m = s->m;
    float scratch[2 * ROUTE_EXPERTS_MAX], weights[ROUTE_TOP_K_MAX];
    int32_t ids[ROUTE_TOP_K_MAX];
    moe_op_pack(m->moe, m->packed, s->n);
    for (int32_t i = 0; i < s->n; i++) {
        const int16_t *given = s->st->forced[s->t0 + i];
        if (!given) continue;
        for (int32_t k = 0; k < r->top_k; k++)
            ids[k] = given[layer_at(s) + (size_t)k];
        route_weigh(r, m->ops, m->router + (size_t)i * (size_t)r->n_experts, scratch, ids, weights);
        for (int32_t k = 0; k < r->top_k; k++)
            m->packed[i * r->top_k + k] = route_pack(ids[k], weights[k]);
    }
    moe_op_unpack(m->moe, m->packed, s->n);
}

/* ids [s->n][top_k], or NULL: zeros. */
static void tell_experts(struct slice *s, const int32_t *ids)
{
    size_t k = (size_t)s->m->c.top_k, row = (size_t)s->m->c.n_layers * k;
    if (!s->st->experts) return;
    for (size_t i = 0; i < (size_t)s->n; i++) {
        int16_t *to = s->st->experts + ((size_t)s->t0 + i) * row + layer_at(s);
        for (size_t j = 0; j < k; j++)
            to[j] = ids ? (int16_t)ids[i * k + j] : 0;
    }
}

void forward_moe(struct slice *s)
{
    struct cpu_model *m = s->m;
    struct route r = route_of(&m->c);
    struct moe_weights w = {.experts = store_matrix(m->store, slot_expert(&s->slots, 0, MLP_GATE))};
    forward_norm(s, s->slots.post_norm);
    forward_gemm(m, m->router, m->a, s->n, s->slots.router);
    moe_op_route(m->moe, &r, m->router, s->n, NULL);
    if (s->st->forced) {
        force(s, &r);
    } else if (m->routed) {
        moe_op_pack(m->moe, m->packed, s->n);
        moe_op_unpack(m->moe, m->packed, s->n);
    }
    tell_experts(s, moe_op_ids(m->moe));
    moe_op_run(m->moe, &w, m->a, s->n, m->x);
}

void forward_dense(struct slice *s)
{
    struct cpu_model *m = s->m;
    const struct layer_slots *l = &s->slots;
    const size_t pair[] = {l->gate, l->up};
    tell_experts(s, NULL);
    forward_norm(s, l->post_norm);
    struct inputs in = forward_inputs(m, m->a, NULL, s->n, (size_t)m->c.hidden_size, pair, 2);
    struct gemm gate = forward_reads(m, &in, l->gate), up = forward_reads(m, &in, l->up);
    moe_dense_gate_up(m->ops, m->pool, &gate, &up, s->n, m->h);
    forward_gemm(m, m->y, m->h, s->n, l->down);
    forward_add(s);
}
