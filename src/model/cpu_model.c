#include "base/mem.h"
#include "base/pages.h"
#include "model/forward.h"
#include "model/rope.h"
#include <math.h>
#include <string.h>

enum { SLICE_MAX = 1024 };

struct norm_loop {
    const struct cpu_model *m;
    const uint16_t *w;
};

static void norm_row(void *arg, int i)
{
    const struct norm_loop *l = arg;
    size_t n = (size_t)l->m->c.hidden_size, at = (size_t)i * n;
    l->m->ops->rmsnorm(l->m->a + at, l->m->x + at, l->w, n, l->m->c.rms_norm_eps);
}

void forward_norm(struct slice *s, size_t slot)
{
    struct norm_loop l = {s->m, store_ptr(s->m->store, slot)};
    pool_run(s->m->pool, norm_row, &l, s->n);
}

void forward_add(struct slice *s)
{
    size_t n = (size_t)s->n * (size_t)s->m->c.hidden_size;
    for (size_t i = 0; i < n; i++)
        s->m->x[i] += s->m->y[i];
}

/* Its id, or what the step before drew for it. */
static size_t id_of(const struct cpu_model *m, const struct step *st, int32_t t)
{
    int32_t id = st->ids[t];
    if (id >= 0) return (size_t)id;
    CHECK(~id < m->n_drawn);
    return (size_t)m->drawn[~id];
}

/* The residual stream after all layers of tokens [t0, t0 + n), normed, in m->a. */
static void forward(struct cpu_model *m, const struct step *st, int32_t t0, int32_t n)
{
    struct slice s = {.m = m, .st = st, .t0 = t0, .n = n};
    size_t hidden = (size_t)m->c.hidden_size;
    const uint16_t *embed = store_ptr(m->store, SLOT_EMBED);
    for (int32_t i = 0; i < n; i++) {
        const uint16_t *row = embed + id_of(m, st, t0 + i) * hidden;
        for (size_t j = 0; j < hidden; j++)
            m->x[(size_t)i * hidden + j] = bf16_to_f32(row[j]);
    }
    for (int32_t layer = 0; layer < m->c.n_layers; layer++) {
        s.layer = layer;
        tensors_layer(&s.slots, &m->c, layer);
        forward_attention(&s);
        if (m->c.dense[layer])
            forward_dense(&s);
        else
            forward_moe(&s);
    }
    forward_norm(&s, SLOT_NORM);
}

/* Logits of n rows of m->a. */
static void head(struct cpu_model *m, const int32_t *rows, int32_t n, float *logits)
{
    const size_t slot = SLOT_HEAD;
    struct inputs in = forward_inputs(m, m->a, rows, n, (size_t)m->c.hidden_size, &slot, 1);
    forward_multiply(m, logits, &in, n, slot);
}

struct sample_loop {
    struct cpu_model *m;
    const struct step *st;
    int32_t which[ROW_CHUNK];
};

static void sample_task(void *arg, int i)
{
    const struct sample_loop *l = arg;
    const struct step_row *r = &l->st->rows[l->which[i]];
    size_t vocab = (size_t)l->m->c.vocab_size, at = (size_t)i * vocab;
    sample_row(r->in, r->out, l->m->logits + at, l->m->c.vocab_size, l->m->scratch + at,
               l->m->scratch_ids + at);
}

/* Every row whose token lies in the slice. */
static void sample_rows(struct cpu_model *m, const struct step *st, int32_t t0, int32_t n)
{
    struct sample_loop l = {.m = m, .st = st};
    int32_t rows[ROW_CHUNK], count = 0;
    for (int32_t r = 0; r <= st->n_rows; r++) {
        if (count == ROW_CHUNK || (r == st->n_rows && count)) {
            head(m, rows, count, m->logits);
            pool_run(m->pool, sample_task, &l, count);
            count = 0;
        }
        if (r == st->n_rows) break;
        int32_t t = st->rows[r].token;
        if (t < t0 || t >= t0 + n) continue;
        l.which[count] = r;
        rows[count++] = t - t0;
    }
}

static void cpu_submit(struct model *base, const struct step *st)
{
    struct cpu_model *m = (struct cpu_model *)base;
    for (int32_t t = 0, n; t < st->n_tokens; t += n) {
        n = st->n_tokens - t < m->slice ? st->n_tokens - t : m->slice;
        forward(m, st, t, n);
        sample_rows(m, st, t, n);
    }
    m->n_drawn = st->n_rows < m->cap_drawn ? st->n_rows : m->cap_drawn;
    for (int32_t r = 0; r < m->n_drawn; r++)
        m->drawn[r] = st->rows[r].out->id;
}

static err_t cpu_collect(struct model *base, const struct step *st, struct err *e)
{
    (void)base; /* submit has done the work */
    (void)st;
    (void)e;
    return OK;
}

static err_t cpu_logits(struct model *base, const struct step *st, const int32_t *tokens,
                        int32_t count, float *logits, struct err *e)
{
    (void)e;
    struct cpu_model *m = (struct cpu_model *)base;
    for (int32_t t = 0, n; t < st->n_tokens; t += n) {
        n = st->n_tokens - t < m->slice ? st->n_tokens - t : m->slice;
        forward(m, st, t, n);
        for (int32_t i = 0; i < count; i++) {
            int32_t row = tokens[i] - t;
            if (row >= 0 && row < n) head(m, &row, 1, logits + (size_t)i * (size_t)m->c.vocab_size);
        }
    }
    return OK;
}

static const char *cpu_isa(const struct model *base)
{
    return ((const struct cpu_model *)base)->ops->name;
}

static unsigned cpu_can(const struct model *base)
{
    unsigned always = MODEL_OF | MODEL_KEPT;
    bool moe = ((const struct cpu_model *)base)->c.n_experts > 0;
    return moe ? always | MODEL_EXPERTS | MODEL_FORCED : always;
}

static void cpu_break_invariance(struct model *base)
{
    ((struct cpu_model *)base)->broken = true;
}

size_t model_kv_page_bytes(const struct config *c, kv_type_t kv)
{
    return (size_t)c->n_layers * 2 * (size_t)c->n_kv_heads * KV_PAGE * (size_t)c->head_dim *
           kv_elem_bytes(kv);
}

static void cpu_kv_clear(struct model *base, int32_t page)
{
    struct cpu_model *m = (struct cpu_model *)base;
    size_t bytes = (size_t)m->c.n_kv_heads * model_kv_head_bytes(m);
    for (int i = 0; i < m->c.n_layers * 2; i++)
        memset(model_kv(m, i / 2, i % 2, page), 0, bytes);
}

static size_t kv_bytes(const struct cpu_model *m)
{
    return (size_t)m->n_pages * model_kv_page_bytes(&m->c, m->kv_type); /* known to fit: get_kv */
}

static err_t cpu_kv_release(struct model *base, struct err *e)
{
    struct cpu_model *m = (struct cpu_model *)base;
    (void)e;
    pages_drop(m->kv, kv_bytes(m));
    return OK;
}

static err_t cpu_kv_resume(struct model *base, struct err *e)
{
    (void)base; /* it has memory where a page is cleared */
    (void)e;
    return OK;
}

static err_t check_shape(const struct config *c, struct err *e)
{
    if (c->head_dim <= 0 || c->head_dim % 16 || c->head_dim > HEAD_DIM_MAX)
        return err_set(e, ERR_UNSUPPORTED, "head_dim: %d; allowed: multiples of 16 up to %d",
                       c->head_dim, HEAD_DIM_MAX);
    if (c->hidden_size % 2 || c->moe_intermediate_size % 2 || c->intermediate_size % 2)
        return err_set(
            e, ERR_UNSUPPORTED,
            "hidden_size %d, moe_intermediate_size %d, intermediate_size %d: must be even",
            c->hidden_size, c->moe_intermediate_size, c->intermediate_size);
    if (c->n_kv_heads <= 0 || c->n_heads % c->n_kv_heads)
        return err_set(e, ERR_UNSUPPORTED, "num_attention_heads: %d is no multiple of %d KV heads",
                       c->n_heads, c->n_kv_heads);
    if (c->n_experts > 0 && (c->top_k < 1 || c->top_k > ROUTE_TOP_K_MAX || c->top_k > c->n_experts))
        return err_set(e, ERR_UNSUPPORTED,
                       "num_experts_per_tok: %d; allowed: 1 to %d and at most num_experts (%d)",
                       c->top_k, ROUTE_TOP_K_MAX, c->n_experts);
    return OK;
}

/* An array [a][b] of elements; false when there is no memory. */
static bool get(void *out, size_t a, size_t b, size_t elem)
{
    size_t n;
    void *p = mul_size(&n, a, b) ? mem_try_array(n ? n : 1, elem) : NULL;
    memcpy(out, &p, sizeof p);
    return p != NULL;
}

/* Pages are cleared as they are handed out (model_kv_clear); touching all of them here would cost
 * seconds. */
static bool get_kv(struct cpu_model *m)
{
    size_t bytes;
    if (!mul_size(&bytes, (size_t)m->n_pages, model_kv_page_bytes(&m->c, m->kv_type))) return false;
    m->kv = pages_reserve(bytes);
    return m->kv != NULL;
}

static bool get_buffers(struct cpu_model *m)
{
    const struct config *c = &m->c;
    size_t n = (size_t)m->slice, hidden = (size_t)c->hidden_size, f = sizeof(float);
    size_t nq = (size_t)c->n_heads * (size_t)c->head_dim, vocab = (size_t)c->vocab_size;
    size_t nkv = (size_t)c->n_kv_heads * (size_t)c->head_dim, k = (size_t)c->top_k;
    size_t ne = (size_t)c->n_experts, inner = (size_t)c->intermediate_size;
    size_t rows = n > ROW_CHUNK ? n : ROW_CHUNK, blocks = fixed_blocks(forward_widest(c));
    return get(&m->x, n, hidden, f) && get(&m->a, n, hidden, f) && get(&m->y, n, hidden, f) &&
           get(&m->q, n, nq, f) && get(&m->o, n, nq, f) && get(&m->k, n, nkv, f) &&
           get(&m->v, n, nkv, f) && get(&m->router, n, ne, f) && get(&m->packed, n, k, 4) &&
           get(&m->h, n, inner, f) && get(&m->logits, ROW_CHUNK, vocab, f) &&
           get(&m->scratch, ROW_CHUNK, vocab, f) && get(&m->scratch_ids, ROW_CHUNK, vocab, 4) &&
           get(&m->fixed, rows, blocks, sizeof(struct fixed)) &&
           get(&m->drawn, (size_t)m->cap_drawn, 1, 4) && get_kv(m) &&
           get(&m->cos, (size_t)m->n_angles, (size_t)c->head_dim / 2, f) &&
           get(&m->sin, (size_t)m->n_angles, (size_t)c->head_dim / 2, f);
}

static void cpu_free(struct model *base)
{
    struct cpu_model *m = (struct cpu_model *)base;
    void *all[] = {m->cos,     m->sin,         m->x,     m->a,         m->q,
                   m->o,       m->k,           m->v,     m->y,         m->router,
                   m->packed,  m->h,           m->act_a, m->act_scale, m->logits,
                   m->scratch, m->scratch_ids, m->fixed, m->drawn};
    if (m->kv) pages_release(m->kv, kv_bytes(m));
    moe_op_free(m->moe);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
    mem_free(m);
}

static const struct model_ops cpu_ops = {
    .free = cpu_free,
    .isa = cpu_isa,
    .can = cpu_can,
    .set_numerics = cpu_set_numerics,
    .check_update = cpu_check_update,
    .kv_clear = cpu_kv_clear,
    .kv_release = cpu_kv_release,
    .kv_resume = cpu_kv_resume,
    .submit = cpu_submit,
    .collect = cpu_collect,
    .logits = cpu_logits,
    .break_invariance = cpu_break_invariance,
};

err_t model_new(struct model **out, const struct config *c, struct store *s, struct pool *pool,
                int32_t n_kv_pages, kv_type_t kv, int32_t max_step_tokens, const char *isa,
                struct err *e)
{
    const struct backend_ops *ops;
    err_t rc = check_shape(c, e);
    if (rc == OK) rc = cpu_ops_get(&ops, isa, e);
    if (rc != OK) return rc;
    if (n_kv_pages < 1 || max_step_tokens < 1)
        return err_set(e, ERR_INPUT, "KV pages %d, step tokens %d: at least 1", n_kv_pages,
                       max_step_tokens);
    struct cpu_model *m = mem_alloc(sizeof *m);
    m->base.ops = &cpu_ops;
    m->c = *c;
    m->store = s;
    m->pool = pool;
    m->ops = ops;
    m->n_pages = n_kv_pages;
    m->kv_type = kv;
    m->slice = max_step_tokens < SLICE_MAX ? max_step_tokens : SLICE_MAX;
    m->cap_drawn = max_step_tokens;
    m->n_angles = c->max_positions;
    if (m->n_angles / KV_PAGE >= n_kv_pages) m->n_angles = n_kv_pages * KV_PAGE;
    if (!get_buffers(m)) {
        cpu_free(&m->base);
        return err_set(e, ERR_NOMEM,
                       "no memory for %d KV pages of %zu bytes and the step's buffers", n_kv_pages,
                       model_kv_page_bytes(c, kv));
    }
    rc = forward_moe_new(m, ACT_BF16, e);
    if (rc != OK) {
        cpu_free(&m->base);
        return rc;
    }
    rope_angles(m->cos, m->sin, c, m->n_angles);
    *out = &m->base;
    return OK;
}
