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

void forward_moe(struct slice *s)
{
    struct cpu_model *m = s->m;
    struct route r = route_of(&m->c);
    struct moe_weights w = {.experts = store_matrix(m->store, slot_expert(&s->slots, 0, MLP_GATE))};
    forward_norm(s, s->slots.post_norm);
    forward_gemm(m, m->router, m->a, s->n, s->slots.router);
    moe_op_route(m->moe, &r, m->router, s->n, NULL);
    if (m->routed) {
        moe_op_pack(m->moe, m->packed, s->n);
        moe_op_unpack(m->moe, m->packed, s->n);
    }
    moe_op_run(m->moe, &w, m->a, s->n, m->x);
}

void forward_dense(struct slice *s)
{
    struct cpu_model *m = s->m;
    const struct layer_slots *l = &s->slots;
    const size_t pair[] = {l->gate, l->up};
    forward_norm(s, l->post_norm);
    struct inputs in = forward_inputs(m, m->a, NULL, s->n, (size_t)m->c.hidden_size, pair, 2);
    struct gemm gate = forward_reads(m, &in, l->gate), up = forward_reads(m, &in, l->up);
    moe_dense_gate_up(m->ops, m->pool, &gate, &up, s->n, m->h);
    forward_gemm(m, m->y, m->h, s->n, l->down);
    forward_add(s);
}
