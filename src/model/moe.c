#include "model/forward.h"
#include <math.h>

/* Panels a task computes, and rows it holds of gate and up at once. */
enum { BLOCK_PANELS = 4, BLOCK = BLOCK_PANELS * 16, BLOCK_ROWS = 32 };

/* Softmax over the experts, the top k (ties to the lower index), weights rounded once. */
static void route(void *arg, int i)
{
    const struct slice *s = arg;
    const struct model *m = s->m;
    int32_t ne = m->c.n_experts, k = m->c.top_k;
    float *p = m->router + (size_t)i * (size_t)ne;
    int32_t *ids = m->topk_id + (size_t)i * (size_t)k;
    float *w = m->topk_w + (size_t)i * (size_t)k, max = p[0], total = 0.0f;
    for (int e = 1; e < ne; e++)
        if (p[e] > max) max = p[e];
    float sum = (float)m->ops->exp_sum(p, p, max, (size_t)ne);
    for (int j = 0; j < k; j++) {
        int best = -1;
        for (int e = 0; e < ne; e++)
            if (p[e] >= 0.0f && (best < 0 || p[e] > p[best])) best = e;
        if (best < 0) { /* NaN logits: any expert, once; the NaN goes on in the weight */
            ids[j] = j;
            w[j] = NAN;
            continue;
        }
        ids[j] = best;
        w[j] = p[best] / sum;
        p[best] = -1.0f;
    }
    for (int j = 0; j < k; j++)
        total += w[j];
    for (int j = 0; j < k; j++)
        w[j] = act_round(m->c.norm_topk_prob ? w[j] / total : w[j]);
}

/* Rows in order of expert, then token.  Returns the number of active experts. */
static int32_t sort_rows(struct slice *s)
{
    struct model *m = s->m;
    int32_t ne = m->c.n_experts, n = s->n * m->c.top_k, n_active = 0;
    for (int32_t e = 0; e <= ne; e++)
        m->first[e] = 0;
    for (int32_t i = 0; i < n; i++)
        m->first[m->topk_id[i] + 1]++;
    for (int32_t e = 0; e < ne; e++) {
        if (m->first[e + 1] > 0) m->active[n_active++] = e;
        m->first[e + 1] += m->first[e];
    }
    /* first[e] walks through its rows here, and so becomes the next one's start. */
    for (int32_t i = 0; i < n; i++) {
        int32_t row = m->first[m->topk_id[i]]++;
        m->topk_row[i] = row;
        m->src[row] = i / m->c.top_k;
    }
    for (int32_t e = ne; e > 0; e--)
        m->first[e] = m->first[e - 1];
    m->first[0] = 0;
    return n_active;
}

/* h = round(silu(gate) * up) for panels of block b, for rows [row, end) of a matrix pair. */
static void gate_up(const struct model *m, struct gemm g, const struct matrix *gate,
                    const struct matrix *up, int32_t row, int32_t end, int b)
{
    float tg[BLOCK_ROWS * BLOCK], tu[BLOCK_ROWS * BLOCK];
    size_t inner = gate->rows, p0 = (size_t)b * BLOCK_PANELS;
    size_t cols = inner - p0 * PANEL_ROWS < BLOCK ? inner - p0 * PANEL_ROWS : BLOCK;
    size_t n_panels = (cols + PANEL_ROWS - 1) / PANEL_ROWS;
    g.w = gate;
    for (int32_t r = row; r < end; r += BLOCK_ROWS) {
        size_t n = end - r < BLOCK_ROWS ? (size_t)(end - r) : BLOCK_ROWS;
        struct gemm t = gemm_from_row(g, (size_t)r);
        t.ldo = BLOCK;
        t.col0 = p0 * PANEL_ROWS;
        t.out = tg;
        m->ops->gemm(&t, n, p0, n_panels);
        t.w = up;
        t.out = tu;
        m->ops->gemm(&t, n, p0, n_panels);
        for (size_t i = 0; i < n; i++)
            m->ops->swiglu(m->h + ((size_t)r + i) * inner + p0 * PANEL_ROWS, tg + i * BLOCK,
                           tu + i * BLOCK, cols);
    }
}

static int blocks_of(int32_t n)
{
    return (n + BLOCK - 1) / BLOCK;
}

static void expert_gate_up(void *arg, int i)
{
    const struct slice *s = arg;
    const struct model *m = s->m;
    int32_t inner = m->c.moe_intermediate_size, e = m->active[i / blocks_of(inner)];
    struct gemm g = {.a = m->a, .lda = (size_t)m->c.hidden_size, .idx = m->src};
    gate_up(m, g, store_matrix(m->store, slot_expert(&s->slots, e, MLP_GATE)),
            store_matrix(m->store, slot_expert(&s->slots, e, MLP_UP)), m->first[e], m->first[e + 1],
            i % blocks_of(inner));
}

static void expert_down(void *arg, int i)
{
    const struct slice *s = arg;
    const struct model *m = s->m;
    int32_t hidden = m->c.hidden_size, inner = m->c.moe_intermediate_size;
    int32_t e = m->active[i / blocks_of(hidden)], row = m->first[e], n = m->first[e + 1] - row;
    size_t p0 = (size_t)(i % blocks_of(hidden)) * BLOCK_PANELS;
    size_t left = ((size_t)hidden + 15) / 16 - p0, np = left < BLOCK_PANELS ? left : BLOCK_PANELS;
    size_t cols = (size_t)hidden - p0 * 16 < BLOCK ? (size_t)hidden - p0 * 16 : BLOCK;
    struct gemm g = {.a = m->h + (size_t)row * (size_t)inner,
                     .lda = (size_t)inner,
                     .w = store_matrix(m->store, slot_expert(&s->slots, e, MLP_DOWN)),
                     .out = m->ey + (size_t)row * (size_t)hidden,
                     .ldo = (size_t)hidden};
    m->ops->gemm(&g, (size_t)n, p0, np);
    for (int32_t r = 0; r < n; r++) {
        float *y = g.out + (size_t)r * (size_t)hidden + p0 * 16;
        m->ops->round(y, y, cols);
    }
}

static void combine_token(void *arg, int i)
{
    const struct slice *s = arg;
    const struct model *m = s->m;
    size_t hidden = (size_t)m->c.hidden_size, at = (size_t)i * (size_t)m->c.top_k;
    const float *rows[64];
    for (int j = 0; j < m->c.top_k; j++)
        rows[j] = m->ey + (size_t)m->topk_row[at + (size_t)j] * hidden;
    m->ops->combine(m->x + (size_t)i * hidden, rows, m->topk_w + at, (size_t)m->c.top_k, hidden);
}

void forward_moe(struct slice *s)
{
    struct model *m = s->m;
    const struct config *c = &m->c;
    forward_norm(s, s->slots.post_norm);
    forward_gemm(m, m->router, m->a, s->n, s->slots.router);
    pool_run(m->pool, route, s, s->n);
    int32_t n_active = sort_rows(s);
    pool_run(m->pool, expert_gate_up, s, n_active * blocks_of(c->moe_intermediate_size));
    pool_run(m->pool, expert_down, s, n_active * blocks_of(c->hidden_size));
    pool_run(m->pool, combine_token, s, s->n);
}

static void dense_gate_up(void *arg, int i)
{
    const struct slice *s = arg;
    const struct model *m = s->m;
    struct gemm g = {.a = m->a, .lda = (size_t)m->c.hidden_size};
    gate_up(m, g, store_matrix(m->store, s->slots.gate), store_matrix(m->store, s->slots.up), 0,
            s->n, i);
}

void forward_dense(struct slice *s)
{
    struct model *m = s->m;
    const struct config *c = &m->c;
    forward_norm(s, s->slots.post_norm);
    pool_run(m->pool, dense_gate_up, s, blocks_of(c->intermediate_size));
    forward_gemm(m, m->y, m->h, s->n, s->slots.down);
    forward_add(s);
}
