#include "model/moe_op.h"
#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include <math.h>

enum { SIZE_LIMIT = 1 << 20 }; /* of hidden and inner */

/* Panels a task computes, and rows it holds of gate and up at once. */
enum { BLOCK_PANELS = 4, BLOCK = BLOCK_PANELS * PANEL_ROWS, BLOCK_ROWS = GEMM_ROWS };

/* Rows that GEMMs read: as they are, and rounded for quantized matrices. */
struct rows {
    const float *plain;  /* [rows][cols] */
    float *act;          /* [rows][cols]; `plain` itself where nothing else reads that */
    float *scale;        /* [rows][act_scales] */
    float input;         /* the input scale in use */
    struct fixed *fixed; /* [rows][fixed_blocks(cols)]: what 4-bit matrices read */
};

struct moe_op {
    struct moe_shape s;
    const struct backend_ops *ops;
    struct pool *pool;
    int32_t max_tokens;
    int32_t *ids;    /* [max_tokens][top_k] */
    float *weights;  /* [max_tokens][top_k] */
    int32_t *row_of; /* [max_tokens][top_k]: row in h and ey, -1: not local */
    int32_t *src;    /* [max_tokens * top_k]: the token of a row */
    int32_t *first;  /* [n_local + 1]: rows of expert e are [first[e], first[e + 1]) */
    int32_t *active; /* [n_local]: those with rows */
    float *weighed;  /* [max_tokens][hidden], with weigh_input */
    float *inner;    /* [max_tokens * top_k][inner] */
    float *ey;       /* [max_tokens * top_k][hidden] */
    struct rows in;  /* x or `weighed` */
    struct rows h;   /* `inner` */
    /* of one run */
    const struct moe_weights *w;
    const float *x;
    float *y;
};

static err_t check_shape(const struct moe_shape *s, int32_t max_tokens, struct err *e)
{
    const int32_t sizes[] = {s->hidden, s->inner};
    for (int i = 0; i < 2; i++)
        if (sizes[i] < 2 || sizes[i] > SIZE_LIMIT || sizes[i] % 2)
            return err_set(e, ERR_INPUT, "%s: %d; allowed: even numbers from 2 to %d",
                           i ? "intermediate_size" : "hidden_size", sizes[i], SIZE_LIMIT);
    if (s->n_experts < 1 || s->n_experts > ROUTE_EXPERTS_MAX)
        return err_set(e, ERR_INPUT, "num_experts: %d; allowed: 1 to %d", s->n_experts,
                       ROUTE_EXPERTS_MAX);
    if (s->top_k < 1 || s->top_k > ROUTE_TOP_K_MAX)
        return err_set(e, ERR_INPUT, "top_k: %d; allowed: 1 to %d", s->top_k, ROUTE_TOP_K_MAX);
    if (s->local_offset < 0 || s->n_local < 1 || s->local_offset > s->n_experts - s->n_local)
        return err_set(e, ERR_INPUT,
                       "local_expert_offset %d, local_num_experts %d: must lie in num_experts (%d)",
                       s->local_offset, s->n_local, s->n_experts);
    if (s->weigh_input && s->top_k != 1)
        return err_set(e, ERR_INPUT, "top_k: %d; weights on the input allow 1", s->top_k);
    if (max_tokens < 1 || max_tokens > INT32_MAX / s->top_k)
        return err_set(e, ERR_INPUT, "max_tokens: %d; allowed: 1 to %d", max_tokens,
                       INT32_MAX / s->top_k);
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

static bool get_buffers(struct moe_op *op)
{
    const struct moe_shape *s = &op->s;
    size_t t = (size_t)op->max_tokens, k = (size_t)s->top_k, n = t * k, f = sizeof(float);
    size_t hidden = (size_t)s->hidden, inner = (size_t)s->inner, ne = (size_t)s->n_local;
    bool ok = get(&op->ids, t, k, 4) && get(&op->weights, t, k, f) && get(&op->row_of, t, k, 4) &&
              get(&op->src, n, 1, 4) && get(&op->first, ne + 1, 1, 4) &&
              get(&op->active, ne, 1, 4) && get(&op->inner, n, inner, f) &&
              get(&op->ey, n, hidden, f);
    if (ok && s->weigh_input) ok = get(&op->weighed, t, hidden, f);
    op->h.plain = op->h.act = op->inner;
    if (ok)
        ok = get(&op->in.fixed, t, fixed_blocks(hidden), sizeof(struct fixed)) &&
             get(&op->h.fixed, n, fixed_blocks(inner), sizeof(struct fixed));
    if (!ok || s->act == ACT_BF16) return ok;
    return get(&op->in.act, t, hidden, f) && get(&op->in.scale, t, act_scales(s->act, hidden), f) &&
           get(&op->h.scale, n, act_scales(s->act, inner), f);
}

err_t moe_op_new(struct moe_op **out, const struct moe_shape *s, const struct backend_ops *ops,
                 struct pool *pool, int32_t max_tokens, struct err *e)
{
    err_t rc = check_shape(s, max_tokens, e);
    if (rc != OK) return rc;
    struct moe_op *op = mem_alloc(sizeof *op);
    op->s = *s;
    op->ops = ops;
    op->pool = pool;
    op->max_tokens = max_tokens;
    if (!get_buffers(op)) {
        moe_op_free(op);
        return err_set(e, ERR_NOMEM, "no memory for %d tokens of %d experts each", max_tokens,
                       s->top_k);
    }
    *out = op;
    return OK;
}

void moe_op_free(struct moe_op *op)
{
    if (op == NULL) return;
    void *all[] = {op->ids,     op->weights,  op->row_of,  op->src,    op->first,
                   op->active,  op->weighed,  op->inner,   op->in.act, op->in.scale,
                   op->h.scale, op->in.fixed, op->h.fixed, op->ey};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
    mem_free(op);
}

/* Choices */

struct route_loop {
    struct moe_op *op;
    const struct route *r;
    const float *logits;
    const int16_t *replay;
};

static void route_task(void *arg, int i)
{
    const struct route_loop *l = arg;
    struct moe_op *op = l->op;
    float scratch[2 * ROUTE_EXPERTS_MAX];
    size_t k = (size_t)op->s.top_k, at = (size_t)i * k;
    const float *x = l->logits + (size_t)i * (size_t)op->s.n_experts;
    if (l->replay == NULL) {
        route_token(l->r, op->ops, x, scratch, op->ids + at, op->weights + at);
        return;
    }
    for (size_t j = 0; j < k; j++)
        op->ids[at + j] = l->replay[at + j];
    route_weigh(l->r, op->ops, x, scratch, op->ids + at, op->weights + at);
}

void moe_op_route(struct moe_op *op, const struct route *r, const float *logits, int32_t n,
                  const int16_t *replay)
{
    CHECK(n <= op->max_tokens && r->n_experts == op->s.n_experts && r->top_k == op->s.top_k);
    struct route_loop l = {op, r, logits, replay};
    pool_run(op->pool, route_task, &l, n);
}

static size_t choices(const struct moe_op *op, int32_t n)
{
    CHECK(n >= 0 && n <= op->max_tokens);
    return (size_t)n * (size_t)op->s.top_k;
}

void moe_op_unpack(struct moe_op *op, const int32_t *packed, int32_t n)
{
    for (size_t i = 0, end = choices(op, n); i < end; i++) {
        op->ids[i] = route_packed_id(packed[i]);
        op->weights[i] = route_packed_weight(packed[i]);
    }
}

void moe_op_take(struct moe_op *op, const int32_t *ids, const float *weights, int32_t n)
{
    for (size_t i = 0, end = choices(op, n); i < end; i++) {
        op->ids[i] = ids[i];
        op->weights[i] = act_round(weights[i]);
    }
}

void moe_op_pack(const struct moe_op *op, int32_t *packed, int32_t n)
{
    for (size_t i = 0, end = choices(op, n); i < end; i++)
        packed[i] = route_pack(op->ids[i], op->weights[i]);
}

void moe_op_replay(const struct moe_op *op, int16_t *ids, int32_t n)
{
    for (size_t i = 0, end = choices(op, n); i < end; i++)
        ids[i] = (int16_t)op->ids[i];
}

const int32_t *moe_op_ids(const struct moe_op *op)
{
    return op->ids;
}

const float *moe_op_weights(const struct moe_op *op)
{
    return op->weights;
}

/* Plan: rows in order of expert, then token.  Returns the number of active experts. */
static int32_t plan(struct moe_op *op, int32_t n)
{
    int32_t ne = op->s.n_local, k = op->s.top_k, n_active = 0, *first = op->first;
    for (int32_t e = 0; e <= ne; e++)
        first[e] = 0;
    for (int32_t i = 0; i < n * k; i++) {
        int64_t e = (int64_t)op->ids[i] - op->s.local_offset;
        op->row_of[i] = e >= 0 && e < ne ? (int32_t)e : -1;
        if (op->row_of[i] >= 0) first[e + 1]++;
    }
    for (int32_t e = 0; e < ne; e++) {
        if (first[e + 1] > 0) op->active[n_active++] = e;
        first[e + 1] += first[e];
    }
    /* first[e] walks through its rows here, and so becomes the next one's start. */
    for (int32_t i = 0; i < n * k; i++) {
        if (op->row_of[i] < 0) continue;
        int32_t row = first[op->row_of[i]]++;
        op->row_of[i] = row;
        op->src[row] = i / k;
    }
    for (int32_t e = ne; e > 0; e--)
        first[e] = first[e - 1];
    first[0] = 0;
    return n_active;
}

/* Activations */

static bool rounds(const struct moe_op *op, const struct matrix *m)
{
    return op->s.act != ACT_BF16 && m->format != FORMAT_BF16;
}

/* Does any down (or gate and up) read rounded rows, and with what input scale? */
static bool any_rounds(const struct moe_op *op, const struct moe_weights *w, bool down,
                       float *input)
{
    bool any = false, scale = acts[op->s.act].static_scale;
    *input = 0.0f;
    for (size_t i = 0; i < (size_t)op->s.n_local * MOE_MATRICES && (scale || !any); i++) {
        const struct matrix *m = &w->experts[i];
        if ((i % MOE_MATRICES == MOE_DOWN) != down || !rounds(op, m)) continue;
        any = true;
        if (m->format == FORMAT_NVFP4 && *m->input > *input && *m->input < INFINITY)
            *input = *m->input;
    }
    float given = down ? w->input_down : w->input_in;
    if (given > 0.0f) *input = given;
    return any;
}

err_t moe_op_check_inputs(const struct moe_op *op, const struct moe_weights *w, struct err *e)
{
    float input;
    if (!acts[op->s.act].static_scale) return OK;
    for (int down = 0; down < 2; down++)
        if (any_rounds(op, w, down, &input) && !(input > 0.0f))
            return err_set(e, ERR_INPUT,
                           "activation_format nvfp4: no expert's %s has an input_scale; "
                           "nvfp4-per-token needs none",
                           down ? "down_proj" : "gate_proj or up_proj");
    return OK;
}

/* Does any down (or gate and up) have 4-bit elements? */
static bool any_fixed(const struct moe_op *op, const struct moe_weights *w, bool down)
{
    for (size_t i = 0; i < (size_t)op->s.n_local * MOE_MATRICES; i++)
        if ((i % MOE_MATRICES == MOE_DOWN) == down && matrix_fixed(&w->experts[i])) return true;
    return false;
}

static struct gemm reads(const struct moe_op *op, const struct rows *r, size_t cols,
                         const struct matrix *m)
{
    struct gemm g = {.a = r->plain, .lda = cols, .fixed = r->fixed, .w = m};
    if (!rounds(op, m)) return g;
    uint32_t group = acts[op->s.act].scale_group;
    g.a = r->act;
    g.a_scale = r->scale;
    g.act_scale = group == ACT_ROW ? ACT_SCALE_ROW : group ? ACT_SCALE_128 : ACT_SCALE_NONE;
    return g;
}

static void round_row(const struct moe_op *op, const struct rows *r, size_t row, size_t cols)
{
    size_t ns = act_scales(op->s.act, cols);
    act_row(op->s.act, r->act + row * cols, r->scale + row * ns, r->plain + row * cols, cols,
            r->input);
}

/* 4-bit matrices are quantized, so they read rounded rows where anything does. */
static void fix_row(const struct moe_op *op, const struct rows *r, size_t row, size_t cols)
{
    const float *x = op->s.act != ACT_BF16 ? r->act : r->plain;
    fixed_row(r->fixed + row * fixed_blocks(cols), x + row * cols, cols);
}

static void round_in(void *arg, int i)
{
    const struct moe_op *op = arg;
    round_row(op, &op->in, (size_t)i, (size_t)op->s.hidden);
}

static void fix_in(void *arg, int i)
{
    const struct moe_op *op = arg;
    fix_row(op, &op->in, (size_t)i, (size_t)op->s.hidden);
}

/* Rows of one active expert; its matrix decides, and nothing else reads them. */
static void prepare_h(void *arg, int i)
{
    const struct moe_op *op = arg;
    int32_t e = op->active[i];
    const struct matrix *m = &op->w->experts[e * MOE_MATRICES + MOE_DOWN];
    for (int32_t r = op->first[e]; r < op->first[e + 1]; r++) {
        if (rounds(op, m)) round_row(op, &op->h, (size_t)r, (size_t)op->s.inner);
        if (matrix_fixed(m)) fix_row(op, &op->h, (size_t)r, (size_t)op->s.inner);
    }
}

static void weigh_row(void *arg, int i)
{
    const struct moe_op *op = arg;
    size_t hidden = (size_t)op->s.hidden, at = (size_t)i * hidden;
    for (size_t j = 0; j < hidden; j++)
        op->weighed[at + j] = act_round(op->weights[i] * op->x[at + j]);
}

/* GEMM 1 */

/* What follows gate and up of one expert. */
struct gate {
    const struct backend_ops *ops;
    const float *gate_bias, *up_bias; /* [inner] or NULL */
    bool plain;                       /* alpha 1, beta 0, no limit */
    float alpha, beta, limit;
};

static void add_bias(float *x, const float *bias, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] += bias[i];
}

/* Comparisons let a NaN pass. */
static void clamped(const struct gate *a, float *h, float *g, float *u, size_t n)
{
    float t[BLOCK];
    for (size_t i = 0; i < n; i++) {
        if (g[i] > a->limit) g[i] = a->limit;
        if (u[i] > a->limit) u[i] = a->limit;
        if (u[i] < -a->limit) u[i] = -a->limit;
        t[i] = -(a->alpha * g[i]);
    }
    (void)a->ops->exp_sum(t, t, 0.0f, n);
    for (size_t i = 0; i < n; i++)
        h[i] = act_round(g[i] / (1.0f + t[i]) * (u[i] + a->beta));
}

static void activate(const struct gate *a, float *h, float *g, float *u, size_t col, size_t n)
{
    if (a->gate_bias) add_bias(g, a->gate_bias + col, n);
    if (a->up_bias) add_bias(u, a->up_bias + col, n);
    if (a->plain)
        a->ops->swiglu(h, g, u, n);
    else
        clamped(a, h, g, u, n);
}

/* h rows [row, end) for the panels of block b.  gg and gu say what gate and up read. */
static void gate_up(const struct gate *a, struct gemm gg, struct gemm gu, float *h, int32_t row,
                    int32_t end, int b)
{
    float tg[BLOCK_ROWS * BLOCK], tu[BLOCK_ROWS * BLOCK];
    size_t inner = gg.w->rows, col = (size_t)b * BLOCK;
    size_t cols = inner - col < BLOCK ? inner - col : BLOCK;
    size_t n_panels = (cols + PANEL_ROWS - 1) / PANEL_ROWS;
    gg.ldo = gu.ldo = BLOCK;
    gg.col0 = gu.col0 = col;
    for (int32_t r = row; r < end; r += BLOCK_ROWS) {
        size_t n = end - r < BLOCK_ROWS ? (size_t)(end - r) : BLOCK_ROWS;
        struct gemm t = gemm_from_row(gg, (size_t)r);
        t.out = tg;
        a->ops->gemm(&t, n, (size_t)b * BLOCK_PANELS, n_panels);
        t = gemm_from_row(gu, (size_t)r);
        t.out = tu;
        a->ops->gemm(&t, n, (size_t)b * BLOCK_PANELS, n_panels);
        for (size_t i = 0; i < n; i++)
            activate(a, h + ((size_t)r + i) * inner + col, tg + i * BLOCK, tu + i * BLOCK, col,
                     cols);
    }
}

static int blocks_of(int32_t n)
{
    return (n + BLOCK - 1) / BLOCK;
}

static struct gate gate_of(const struct moe_op *op, int32_t e)
{
    const struct moe_weights *w = op->w;
    bool oai = op->s.activation == MOE_SWIGLU_OAI;
    size_t at = (size_t)e * (size_t)op->s.inner;
    return (struct gate){
        .ops = op->ops,
        .gate_bias = w->gate_bias ? w->gate_bias + at : NULL,
        .up_bias = w->up_bias ? w->up_bias + at : NULL,
        .plain = !oai && !w->alpha && !w->beta && !w->limit,
        .alpha = w->alpha ? w->alpha[e]
                 : oai    ? 1.702f
                          : 1.0f,
        .beta = w->beta ? w->beta[e]
                : oai   ? 1.0f
                        : 0.0f,
        .limit = w->limit ? w->limit[e]
                 : oai    ? 7.0f
                          : INFINITY,
    };
}

static void expert_gate_up(void *arg, int i)
{
    const struct moe_op *op = arg;
    int32_t nb = blocks_of(op->s.inner), e = op->active[i / nb];
    const struct matrix *m = op->w->experts + (size_t)e * MOE_MATRICES;
    struct gate a = gate_of(op, e);
    struct gemm gg = reads(op, &op->in, (size_t)op->s.hidden, &m[MOE_GATE]);
    struct gemm gu = reads(op, &op->in, (size_t)op->s.hidden, &m[MOE_UP]);
    gg.idx = gu.idx = op->src;
    gate_up(&a, gg, gu, op->inner, op->first[e], op->first[e + 1], i % nb);
}

/* GEMM 2 */

static void expert_down(void *arg, int i)
{
    const struct moe_op *op = arg;
    int32_t nb = blocks_of(op->s.hidden), e = op->active[i / nb], row = op->first[e];
    size_t hidden = (size_t)op->s.hidden, col = (size_t)(i % nb) * BLOCK;
    size_t n = (size_t)(op->first[e + 1] - row), cols = hidden - col < BLOCK ? hidden - col : BLOCK;
    struct gemm g =
        reads(op, &op->h, (size_t)op->s.inner, &op->w->experts[e * MOE_MATRICES + MOE_DOWN]);
    g = gemm_from_row(g, (size_t)row);
    g.out = op->ey + (size_t)row * hidden;
    g.ldo = hidden;
    op->ops->gemm(&g, n, col / PANEL_ROWS, (cols + PANEL_ROWS - 1) / PANEL_ROWS);
    const float *bias = op->w->down_bias ? op->w->down_bias + (size_t)e * hidden + col : NULL;
    for (size_t r = 0; r < n; r++) {
        float *y = g.out + r * hidden + col;
        if (bias) add_bias(y, bias, cols);
        op->ops->round(y, y, cols);
    }
}

static void combine_token(void *arg, int i)
{
    const struct moe_op *op = arg;
    size_t hidden = (size_t)op->s.hidden, at = (size_t)i * (size_t)op->s.top_k, n = 0;
    const float *rows[ROUTE_TOP_K_MAX];
    float w[ROUTE_TOP_K_MAX];
    for (size_t j = at; j < at + (size_t)op->s.top_k; j++) {
        if (op->row_of[j] < 0) continue;
        rows[n] = op->ey + (size_t)op->row_of[j] * hidden;
        w[n++] = op->s.weigh_input ? 1.0f : op->weights[j];
    }
    if (n) op->ops->combine(op->y + (size_t)i * hidden, rows, w, n, hidden);
}

void moe_op_run(struct moe_op *op, const struct moe_weights *w, const float *x, int32_t n, float *y)
{
    CHECK(n <= op->max_tokens);
    op->w = w;
    op->x = x;
    op->y = y;
    int32_t n_active = plan(op, n);
    bool in = op->s.act != ACT_BF16 && any_rounds(op, w, false, &op->in.input);
    bool h = op->s.act != ACT_BF16 && any_rounds(op, w, true, &op->h.input);
    op->in.plain = op->s.weigh_input ? op->weighed : x;
    if (op->s.weigh_input) pool_run(op->pool, weigh_row, op, n);
    if (in) pool_run(op->pool, round_in, op, n);
    if (any_fixed(op, w, false)) pool_run(op->pool, fix_in, op, n);
    pool_run(op->pool, expert_gate_up, op, n_active * blocks_of(op->s.inner));
    if (h || any_fixed(op, w, true)) pool_run(op->pool, prepare_h, op, n_active);
    pool_run(op->pool, expert_down, op, n_active * blocks_of(op->s.hidden));
    pool_run(op->pool, combine_token, op, n);
}

/* Dense */

struct dense_loop {
    struct gate a;
    struct gemm gate, up;
    float *h;
    int32_t n;
};

static void dense_task(void *arg, int i)
{
    const struct dense_loop *l = arg;
    gate_up(&l->a, l->gate, l->up, l->h, 0, l->n, i);
}

void moe_dense_gate_up(const struct backend_ops *ops, struct pool *pool, const struct gemm *gate,
                       const struct gemm *up, int32_t n, float *h)
{
    struct dense_loop l = {
        .a = {.ops = ops, .plain = true}, .gate = *gate, .up = *up, .h = h, .n = n};
    pool_run(pool, dense_task, &l, blocks_of((int32_t)gate->w->rows));
}
