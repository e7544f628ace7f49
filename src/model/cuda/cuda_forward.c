#include "backend/cuda/layout_cuda.h"
#include "model/cuda/cuda_model.h"
#include <math.h>

/* All tokens by one matrix of format f, in f32. */
static struct gemm_args linear(const struct cuda_slice *s, format_t f, const struct gemm_weight *w,
                               const struct cuda_rows *x, int32_t k, int32_t n, float *out,
                               int32_t ldo)
{
    struct gemm_args g = {.w = w,
                          .out = out,
                          .ldx = k,
                          .ldo = ldo,
                          .k = k,
                          .n = n,
                          .n_groups = 1,
                          .n_rows = s->n,
                          .out_kind = GEMM_F32,
                          .prefetch = 1};
    cuda_reads(&g, x, f);
    return g;
}

static void launch(const struct cuda_slice *s, format_t f, const struct gemm_args *g)
{
    gemm_launch(&s->m->gemm, s->m->q, f, g, s->n, !s->m->plain);
}

/* Weights [n][k] worth fetching into the L2 cache now; of `groups` matrices each, if not 0. */
static struct gemm_next next(const struct gemm_weight *w, format_t f, int32_t n, int32_t k,
                             int32_t groups)
{
    size_t bytes;
    const size_t most = 24u << 20; /* half of the cache */
    if (!layout_cuda_bytes(&bytes, f, (uint64_t)n, (uint64_t)k) ||
        bytes > most / (size_t)(groups ? groups : 1))
        return (struct gemm_next){0};
    return (struct gemm_next){w, (uint32_t)bytes, groups != 0};
}

/* The rows [tokens][n] at x for matrices of format f, rounded into `out` where they are. */
static struct cuda_rows inputs(const struct cuda_slice *s, int32_t layer, enum cuda_input which,
                               format_t f, const uint16_t *x, uint16_t *out, int32_t n)
{
    return cuda_round(s, layer * CUDA_INPUTS + (int32_t)which, f,
                      (struct round_args){.x = x, .out = out, .n = n}, s->n);
}

/* Choices of a layer's tokens. */
static uint32_t *packed_of(const struct cuda_slice *s, int32_t layer)
{
    const struct cuda_model *m = s->m;
    size_t at = m->tells ? (size_t)layer * (size_t)s->n * (size_t)m->c.top_k : 0;
    return m->packed + at;
}

/* `from`: the layer whose experts COMBINE adds. */
static struct norm_args norm_of(const struct cuda_slice *s, norm_source_t source, int32_t from,
                                size_t slot)
{
    struct cuda_model *m = s->m;
    return (struct norm_args){
        .x = m->x,
        .y = m->y,
        .ids = m->dev.ids,
        .embed = m->embed,
        .expert = m->expert_out,
        .row_of = m->row_of,
        .packed = source == NORM_COMBINE ? packed_of(s, from) : m->packed,
        .w = store_ptr(m->store, slot),
        .out = m->a,
        .n = m->c.hidden_size,
        .vocab = m->c.vocab_size,
        .top_k = m->c.top_k,
        .eps = m->c.rms_norm_eps,
    };
}

static void norm(const struct cuda_slice *s, norm_source_t source, int32_t from, size_t slot)
{
    struct norm_args a = norm_of(s, source, from, slot);
    bool first = source == NORM_EMBED && s->few; /* of the step: what is before it has ended */
    kernels_norm(s->m->kernels, s->m->q, source, &a, s->n, !s->m->plain && !first);
}

/* Pages of a layer's K; its V lie kv_half behind. */
static char *k_pages(const struct cuda_model *m, int32_t layer)
{
    return (char *)(uintptr_t)region_base(m->kv) + (size_t)layer * m->kv_layer;
}

/* BF16 only if all three are. */
static format_t qkv_format(const struct layer_weights *w)
{
    format_t f = w->q_format != FORMAT_BF16 ? w->q_format : w->k_format;
    return f != FORMAT_BF16 ? f : w->v_format;
}

/* m->qkv = the projections of m->a. */
static void project(const struct cuda_slice *s, int32_t layer)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    const struct layer_weights *w = &m->layers[layer];
    int32_t nq = c->n_heads * c->head_dim, nkv = c->n_kv_heads * c->head_dim, ld = nq + 2 * nkv;
    /* expert_out is free between the norm that adds it and GEMM 2. */
    struct cuda_rows a =
        inputs(s, layer, CUDA_IN_QKV, qkv_format(w), m->a, m->expert_out, c->hidden_size);
    struct gemm_args g =
        linear(s, w->q_format, w->q, &a, c->hidden_size, w->one_qkv ? ld : nq, m->qkv, ld);
    g.next[0] = next(w->o, w->o_format, c->hidden_size, nq, 0);
    if (!c->dense[layer])
        g.next[1] = next(w->router, w->router_format, c->n_experts, c->hidden_size, 0);
    if (w->one_qkv) {
        g.n_groups = 3;
        g.part[1] = nq;
        g.part[2] = nq + nkv;
        g.part[3] = ld;
    }
    launch(s, w->q_format, &g);
    if (!w->one_qkv) {
        g = linear(s, w->k_format, w->k, &a, c->hidden_size, nkv, m->qkv + nq, ld);
        launch(s, w->k_format, &g);
        g = linear(s, w->v_format, w->v, &a, c->hidden_size, nkv, m->qkv + nq + nkv, ld);
        launch(s, w->v_format, &g);
    }
}

/* m->att_q, and K and V in their pages. */
static struct rope_args rope_of(const struct cuda_slice *s, int32_t layer)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    const struct layer_weights *w = &m->layers[layer];
    int32_t ld = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
    return (struct rope_args){
        .qkv = m->qkv,
        .ld = ld,
        .q_norm = store_ptr(m->store, w->slots.q_norm),
        .k_norm = store_ptr(m->store, w->slots.k_norm),
        .cos = m->cos,
        .sin = m->sin,
        .pos = m->dev.pos,
        .seq = m->dev.seq,
        .tables = m->dev.tables,
        .table_ld = s->table_ld,
        .q = m->att_q,
        .k = k_pages(m, layer),
        .v = k_pages(m, layer) + m->kv_half,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .eps = c->rms_norm_eps,
        .k_scale = w->k_scale,
        .v_scale = w->v_scale,
    };
}

static float score_scale(const struct cuda_model *m, int32_t layer)
{
    return m->layers[layer].k_scale / sqrtf((float)m->c.head_dim);
}

/* m->att_o = attention of m->att_q: shared prefixes first, then what each list of blocks has left.
 */
static void attend(const struct cuda_slice *s, int32_t layer)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    struct attn_args a = {
        .q = m->att_q,
        .out = m->att_o,
        .k = k_pages(m, layer),
        .v = k_pages(m, layer) + m->kv_half,
        .tables = m->dev.tables,
        .table_ld = s->table_ld,
        .partial = m->partial,
        .arrived = m->arrived,
        .n_kv_heads = c->n_kv_heads,
        .group = c->n_heads / c->n_kv_heads,
        .max_chunks = s->max_chunks,
        .first_chunk = s->first_chunk,
        .scale = score_scale(m, layer),
        .v_scale = m->layers[layer].v_scale,
    };
    if (s->n_blocks[ATTN_PREFIX]) {
        a.state = m->state;
        a.state_ml = m->state_ml;
        a.spans = m->spans[ATTN_PREFIX];
        a.n_blocks = s->n_blocks[ATTN_PREFIX];
        kernels_attn_prefix(m->kernels, m->q, &a, !m->plain);
    }
    for (attn_kind_t kind = 0; kind < ATTN_KINDS; kind++) {
        a.spans = m->spans[kind];
        a.n_blocks = s->n_blocks[kind];
        if (a.n_blocks) kernels_attn(m->kernels, m->q, kind, &a, !m->plain);
    }
}

/* m->att_o from m->qkv. */
static void rope_and_attend(const struct cuda_slice *s, int32_t layer)
{
    struct cuda_model *m = s->m;
    struct rope_args r = rope_of(s, layer);
    if (!s->few) {
        kernels_rope(m->kernels, m->q, &r, s->n, !m->plain);
        attend(s, layer);
        return;
    }
    struct attn_few_args a = {.rope = r, .out = m->att_o, .scale = score_scale(m, layer)};
    kernels_attn_few(m->kernels, m->q, &a, s->n, s->max_chunks, !m->plain);
}

/* Leaves its sum in y for the next norm (NORM_ADD). */
static void attention(const struct cuda_slice *s, int32_t layer, norm_source_t source)
{
    struct cuda_model *m = s->m;
    const struct layer_weights *w = &m->layers[layer];
    norm(s, source, layer - 1, w->slots.in_norm);
    project(s, layer);
    rope_and_attend(s, layer);
    int32_t nq = m->c.n_heads * m->c.head_dim;
    struct cuda_rows o = inputs(s, layer, CUDA_IN_O, w->o_format, m->att_o, m->att_o, nq);
    struct gemm_args g =
        linear(s, w->o_format, w->o, &o, nq, m->c.hidden_size, m->y, m->c.hidden_size);
    launch(s, w->o_format, &g);
}

static struct route_args route_of(const struct cuda_slice *s, int32_t layer)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    return (struct route_args){
        .seq = m->dev.seq,
        .packed = packed_of(s, layer),
        .offsets = m->offsets,
        .token_of = m->token_of,
        .row_of = m->row_of,
        .ticket = m->ticket,
        .n_tokens = s->n,
        .n_experts = c->n_experts,
        .top_k = c->top_k,
        .n_local = c->n_experts,
        .normalise = c->norm_topk_prob,
    };
}

/* Experts of the tokens, and the plan of their rows. */
static void route(const struct cuda_slice *s, int32_t layer, const struct layer_weights *w)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    struct cuda_rows a =
        inputs(s, layer, CUDA_IN_ROUTER, w->router_format, m->a, m->expert_out, c->hidden_size);
    struct gemm_args g = linear(s, w->router_format, w->router, &a, c->hidden_size, c->n_experts,
                                m->router, c->n_experts);
    launch(s, w->router_format, &g);
    struct route_args r = route_of(s, layer);
    r.logits = m->router;
    kernels_route(m->kernels, m->q, &r, !m->plain);
}

/* NORM_ADD, then what `route` does. */
static void norm_route(const struct cuda_slice *s, int32_t layer, const struct layer_weights *w)
{
    struct cuda_model *m = s->m;
    if (w->router_format != FORMAT_BF16 || !kernels_norm_routes(m->kernels, s->n)) {
        norm(s, NORM_ADD, layer, w->slots.post_norm);
        route(s, layer, w);
        return;
    }
    struct norm_route_args a = {.norm = norm_of(s, NORM_ADD, layer, w->slots.post_norm),
                                .route = route_of(s, layer),
                                .router = w->router};
    kernels_norm_route(m->kernels, m->q, &a, !m->plain);
}

/* Leaves its rows in expert_out for the next norm (NORM_COMBINE). */
static void experts(const struct cuda_slice *s, int32_t layer, const struct layer_weights *w)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    int64_t rows = (int64_t)s->n * c->top_k;
    struct cuda_rows a = inputs(s, layer, CUDA_IN_UP, w->gate_format, m->a, m->a, c->hidden_size);
    struct gemm_args up = {
        .src = m->token_of,
        .first = m->offsets,
        .w = w->gate,
        .up = w->up,
        .out = m->h,
        .ldx = c->hidden_size,
        .ldo = c->moe_intermediate_size,
        .k = c->hidden_size,
        .n = c->moe_intermediate_size,
        .n_groups = c->n_experts,
        .out_kind = GEMM_SWIGLU,
        .next[0] = next(w->down, w->down_format, c->hidden_size, c->moe_intermediate_size,
                        rows < c->n_experts ? (int32_t)rows : c->n_experts),
    };
    cuda_reads(&up, &a, w->gate_format);
    gemm_launch(&m->gemm, m->q, w->gate_format, &up, rows, !m->plain);
    struct round_args r_h = {
        .x = m->h, .out = m->h, .n_rows = m->offsets + c->n_experts, .n = c->moe_intermediate_size};
    struct cuda_rows h =
        cuda_round(s, layer * CUDA_INPUTS + CUDA_IN_DOWN, w->down_format, r_h, (int32_t)rows);
    struct gemm_args down = {
        .first = m->offsets,
        .w = w->down,
        .out = m->expert_out,
        .ldx = c->moe_intermediate_size,
        .ldo = c->hidden_size,
        .k = c->moe_intermediate_size,
        .n = c->hidden_size,
        .n_groups = c->n_experts,
        .out_kind = GEMM_BF16,
    };
    cuda_reads(&down, &h, w->down_format);
    if (layer + 1 < c->n_layers) {
        int32_t nq = c->n_heads * c->head_dim, nkv = c->n_kv_heads * c->head_dim;
        down.next[0] = next(w[1].q, w[1].q_format, nq, c->hidden_size, 0);
        down.next[1] = next(w[1].k, w[1].k_format, nkv, c->hidden_size, 0);
        down.next[2] = next(w[1].v, w[1].v_format, nkv, c->hidden_size, 0);
    }
    gemm_launch(&m->gemm, m->q, w->down_format, &down, rows, !m->plain);
}

/* Leaves its sum in y for the next norm (NORM_ADD). */
static void dense_mlp(const struct cuda_slice *s, int32_t layer, const struct layer_weights *w)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    struct cuda_rows a = inputs(s, layer, CUDA_IN_UP, w->gate_format, m->a, m->a, c->hidden_size);
    struct gemm_args up = {
        .w = w->gate,
        .up = w->up,
        .out = m->h,
        .ldx = c->hidden_size,
        .ldo = c->intermediate_size,
        .k = c->hidden_size,
        .n = c->intermediate_size,
        .n_groups = 1,
        .n_rows = s->n,
        .out_kind = GEMM_SWIGLU,
        .prefetch = 1,
    };
    cuda_reads(&up, &a, w->gate_format);
    gemm_launch(&m->gemm, m->q, w->gate_format, &up, s->n, !m->plain);
    struct cuda_rows h =
        inputs(s, layer, CUDA_IN_DOWN, w->down_format, m->h, m->h, c->intermediate_size);
    struct gemm_args g = linear(s, w->down_format, w->down, &h, c->intermediate_size,
                                c->hidden_size, m->y, c->hidden_size);
    launch(s, w->down_format, &g);
}

static norm_source_t after_mlp(const struct config *c, int32_t layer)
{
    return c->dense[layer] ? NORM_ADD : NORM_COMBINE;
}

void cuda_moe(const struct cuda_slice *s, int32_t layer, bool routed)
{
    const struct layer_weights *w = &s->m->layers[layer];
    if (routed) route(s, layer, w);
    experts(s, layer, w);
    norm(s, NORM_COMBINE, layer, w->slots.post_norm);
}

static void plan_attention(const struct cuda_slice *s)
{
    struct cuda_model *m = s->m;
    for (int list = 0; list < ATTN_LISTS; list++) {
        struct attn_plan_args plan = {.blocks = m->dev.blocks[list],
                                      .pos = m->dev.pos,
                                      .spans = m->spans[list],
                                      .n_blocks = s->n_blocks[list],
                                      .n_kv_heads = m->c.n_kv_heads,
                                      .first_chunk = s->first_chunk};
        if (plan.n_blocks == 0) continue;
        if (list == ATTN_PREFIX)
            kernels_attn_prefix_plan(m->kernels, m->q, &plan, false);
        else
            kernels_attn_plan(m->kernels, m->q, (attn_kind_t)list, &plan, false);
    }
}

void cuda_forward(const struct cuda_slice *s)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    if (!s->few) plan_attention(s);
    for (int32_t i = 0; i < c->n_layers; i++) {
        const struct layer_weights *w = &m->layers[i];
        attention(s, i, i == 0 ? NORM_EMBED : after_mlp(c, i - 1));
        if (c->dense[i])
            norm(s, NORM_ADD, i, w->slots.post_norm), dense_mlp(s, i, w);
        else
            norm_route(s, i, w), experts(s, i, w);
    }
    /* x of all tokens; the rows that are wanted are normed by cuda_head. */
    struct norm_args a = {
        .x = m->x,
        .y = m->y,
        .expert = m->expert_out,
        .row_of = m->row_of,
        .packed = packed_of(s, c->n_layers - 1),
        .w = m->norm,
        .n = c->hidden_size,
        .top_k = c->top_k,
        .eps = c->rms_norm_eps,
    };
    kernels_norm(m->kernels, m->q, after_mlp(c, c->n_layers - 1), &a, s->n, !m->plain);
}

void cuda_head(const struct cuda_slice *s, int32_t row0, int32_t n, bool sample)
{
    struct cuda_model *m = s->m;
    const struct config *c = &m->c;
    struct norm_args a = {.x = m->x,
                          .w = m->norm,
                          .out = m->a,
                          .pick = m->dev.pick + row0,
                          .n = c->hidden_size,
                          .eps = c->rms_norm_eps};
    kernels_norm(m->kernels, m->q, NORM_PLAIN, &a, n, !m->plain);
    struct cuda_rows x =
        cuda_round(s, c->n_layers * CUDA_INPUTS, m->head_format,
                   (struct round_args){.x = m->a, .out = m->a, .n = c->hidden_size}, n);
    struct gemm_args g = linear(s, m->head_format, m->head, &x, c->hidden_size, c->vocab_size,
                                m->logits, m->ld_logits);
    g.n_rows = n;
    gemm_launch(&m->gemm, m->q, m->head_format, &g, n, !m->plain);
    if (!sample) return;
    struct sample_args p = {.logits = m->logits,
                            .ld = m->ld_logits,
                            .specs = m->dev.specs + row0,
                            .out = m->results + row0,
                            .next_ids = m->drawn + row0,
                            .states = m->states,
                            .order = m->order,
                            .lowered = m->lowered,
                            .counts = m->counts,
                            .vocab = c->vocab_size};
    kernels_sample(m->kernels, m->q, &p, n, !m->plain);
}
