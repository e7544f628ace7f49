/* What the inputs of matrices are rounded to. */
#include "base/mem.h"
#include "model/forward.h"
#include <math.h>

static bool rounds(const struct cpu_model *m, const struct matrix *w)
{
    return m->act != ACT_BF16 && w->format != FORMAT_BF16;
}

/* Does a matrix of the slots read rounded rows, and with what largest input scale? */
static bool any_rounds(const struct cpu_model *m, const size_t *slots, int n, float *input)
{
    bool any = false;
    *input = 0.0f;
    for (int i = 0; i < n; i++) {
        const struct matrix *w = store_matrix(m->store, slots[i]);
        if (!rounds(m, w)) continue;
        any = true;
        if (w->format == FORMAT_NVFP4 && *w->input > *input && *w->input < INFINITY)
            *input = *w->input;
    }
    return any;
}

struct round_loop {
    const struct cpu_model *m;
    const float *a;
    const int32_t *idx; /* or NULL */
    size_t cols;
    float input;
};

static void round_row(void *arg, int i)
{
    const struct round_loop *l = arg;
    size_t from = (size_t)(l->idx ? l->idx[i] : i), ns = act_scales(l->m->act, l->cols);
    act_row(l->m->act, l->m->act_a + (size_t)i * l->cols, l->m->act_scale + (size_t)i * ns,
            l->a + from * l->cols, l->cols, l->input);
}

static bool any_fixed(const struct cpu_model *m, const size_t *slots, int n)
{
    for (int i = 0; i < n; i++)
        if (matrix_fixed(store_matrix(m->store, slots[i]))) return true;
    return false;
}

/* 4-bit matrices are quantized, so they read rounded rows where anything does. */
static void fix_row(void *arg, int i)
{
    const struct round_loop *l = arg;
    const struct cpu_model *m = l->m;
    size_t row = (size_t)i, from = (size_t)(l->idx ? l->idx[i] : i);
    const float *x = m->act != ACT_BF16 ? m->act_a + row * l->cols : l->a + from * l->cols;
    fixed_row(m->fixed + row * fixed_blocks(l->cols), x, l->cols);
}

struct inputs forward_inputs(struct cpu_model *m, const float *a, const int32_t *idx, int32_t rows,
                             size_t cols, const size_t *slots, int n_slots)
{
    struct inputs in = {.a = a, .idx = idx, .cols = cols};
    struct round_loop l = {.m = m, .a = a, .idx = idx, .cols = cols};
    if (any_rounds(m, slots, n_slots, &l.input)) pool_run(m->pool, round_row, &l, rows);
    if (any_fixed(m, slots, n_slots)) pool_run(m->pool, fix_row, &l, rows);
    return in;
}

struct gemm forward_reads(const struct cpu_model *m, const struct inputs *in, size_t slot)
{
    const struct matrix *w = store_matrix(m->store, slot);
    struct gemm g = {.a = in->a, .lda = in->cols, .idx = in->idx, .w = w, .ldo = w->rows};
    if (matrix_fixed(w)) {
        g.fixed = m->fixed;
        g.idx = NULL;
    }
    if (!rounds(m, w)) return g;
    uint32_t group = acts[m->act].scale_group;
    g.a = m->act_a;
    g.idx = NULL;
    g.a_scale = m->act_scale;
    g.act_scale = group == ACT_ROW ? ACT_SCALE_ROW : group ? ACT_SCALE_128 : ACT_SCALE_NONE;
    return g;
}

void forward_multiply(struct cpu_model *m, float *out, const struct inputs *in, int32_t rows,
                      size_t slot)
{
    struct gemm g = forward_reads(m, in, slot);
    g.out = out;
    cpu_gemm(m->ops, m->pool, &g, (size_t)rows);
}

void forward_gemm(struct cpu_model *m, float *out, const float *a, int32_t rows, size_t slot)
{
    size_t cols = store_matrix(m->store, slot)->cols;
    struct inputs in = forward_inputs(m, a, NULL, rows, cols, &slot, 1);
    forward_multiply(m, out, &in, rows, slot);
}

size_t forward_widest(const struct config *c)
{
    size_t n = (size_t)c->hidden_size, q = (size_t)c->n_heads * (size_t)c->head_dim;
    if (n < q) n = q;
    return n < (size_t)c->intermediate_size ? (size_t)c->intermediate_size : n;
}

/* Old buffers go; BF16 needs none. */
static bool get_act(struct cpu_model *m, act_t act)
{
    size_t cols = forward_widest(&m->c), n, ns;
    size_t rows = (size_t)(m->slice > ROW_CHUNK ? m->slice : ROW_CHUNK);
    mem_free(m->act_a);
    mem_free(m->act_scale);
    m->act_a = m->act_scale = NULL;
    if (act == ACT_BF16) return true;
    if (!mul_size(&n, rows, cols)) return false;
    ns = rows * (act_scales(act, cols) + 1); /* a product below n */
    m->act_a = mem_try_array(n, sizeof *m->act_a);
    m->act_scale = mem_try_array(ns, sizeof *m->act_scale);
    return m->act_a && m->act_scale;
}

err_t cpu_set_numerics(struct model *base, act_t act, bool routed, struct err *e)
{
    struct cpu_model *m = (struct cpu_model *)base;
    m->act = ACT_BF16;
    err_t rc = forward_moe_new(m, act, e);
    if (rc != OK) return rc;
    if (!get_act(m, act))
        return err_set(e, ERR_NOMEM, "no memory for rounded inputs of %d tokens", m->slice);
    m->act = act;
    m->routed = routed;
    return cpu_check_update(base, NULL, e);
}

/* A group of matrices that one input scale serves. */
struct group {
    const struct config *c;
    const struct store *s;
    const struct update *u; /* where the scales are; NULL: resident */
    size_t first;           /* quantized slot; SIZE_MAX: none */
    bool has_scale;         /* one is enough: no more are read, which takes a while on a device */
};

static void group_add(struct group *g, size_t slot)
{
    format_t f = store_spec(g->s, slot)->shape.format;
    float input;
    if (f == FORMAT_BF16) return;
    if (g->first == SIZE_MAX) g->first = slot;
    if (f != FORMAT_NVFP4 || g->has_scale) return;
    if (g->u)
        input = update_input_scale(g->u, slot);
    else
        store_get(g->s, &input, slot, PART_INPUT, 0, 1);
    g->has_scale = input > 0.0f && input < INFINITY;
}

static err_t group_end(struct group *g, struct err *e)
{
    err_t rc = OK;
    if (g->first != SIZE_MAX && !g->has_scale)
        rc = err_set(e, ERR_INPUT,
                     "activation format nvfp4: %s has no input_scale; nvfp4-per-token needs none",
                     store_spec(g->s, g->first)->name);
    g->first = SIZE_MAX;
    g->has_scale = false;
    return rc;
}

static err_t check_group(struct group *g, const size_t *slots, int n, struct err *e)
{
    for (int i = 0; i < n; i++)
        group_add(g, slots[i]);
    return group_end(g, e);
}

static err_t check_experts(struct group *g, const struct layer_slots *l, struct err *e)
{
    for (int i = 0; i < g->c->n_experts; i++) {
        group_add(g, slot_expert(l, i, MLP_GATE));
        group_add(g, slot_expert(l, i, MLP_UP));
    }
    err_t rc = group_end(g, e);
    for (int i = 0; rc == OK && i < g->c->n_experts; i++)
        group_add(g, slot_expert(l, i, MLP_DOWN));
    return rc == OK ? group_end(g, e) : rc;
}

static err_t check_layer(struct group *g, int32_t layer, struct err *e)
{
    struct layer_slots l;
    tensors_layer(&l, g->c, layer);
    const size_t qkv[] = {l.q, l.k, l.v}, pair[] = {l.gate, l.up};
    err_t rc = check_group(g, qkv, 3, e);
    if (rc == OK) rc = check_group(g, &l.o, 1, e);
    if (rc == OK && !g->c->dense[layer]) return check_experts(g, &l, e);
    if (rc == OK) rc = check_group(g, pair, 2, e);
    return rc == OK ? check_group(g, &l.down, 1, e) : rc;
}

err_t numerics_check_inputs(const struct config *c, const struct store *s, const struct update *u,
                            act_t act, struct err *e)
{
    const size_t head = SLOT_HEAD;
    struct group g = {.c = c, .s = s, .u = u, .first = SIZE_MAX};
    if (!acts[act].static_scale) return OK;
    err_t rc = check_group(&g, &head, 1, e);
    for (int32_t i = 0; rc == OK && i < c->n_layers; i++)
        rc = check_layer(&g, i, e);
    return rc;
}

err_t cpu_check_update(const struct model *base, const struct update *u, struct err *e)
{
    const struct cpu_model *m = (const struct cpu_model *)base;
    return numerics_check_inputs(&m->c, m->store, u, m->act, e);
}

/* Recipes, from the most precise device path of each format. */
static const char *const recipes[FORMAT_COUNT] = {
    [FORMAT_BF16] = "bf16",
    [FORMAT_FP8_BLOCK] = "fp8-block",
    [FORMAT_FP8_TENSOR] = "fp8 by tensor (not offered)",
    [FORMAT_FP8_CHANNEL] = "fp8 by token (not offered)",
    [FORMAT_MXFP8] = "mxfp8",
    [FORMAT_NVFP4] = "nvfp4",
    [FORMAT_MXFP4] = "mxfp8",
};

/* Input scales looked at: reading one back from a device takes a while. */
enum { CALIBRATED_MAX = 64 };

const char *model_recipe(const struct store *s)
{
    size_t count[FORMAT_COUNT] = {0}, best = FORMAT_BF16, calibrated = 0;
    for (size_t i = 0; i < store_slots(s); i++) {
        const struct resident *r = &store_spec(s, i)->shape;
        float input;
        if (r->kind != RESIDENT_MATRIX) continue;
        count[r->format]++;
        if (r->format != FORMAT_NVFP4 || count[r->format] > CALIBRATED_MAX) continue;
        store_get(s, &input, i, PART_INPUT, 0, 1);
        /* Trainers that scale by token write 1 (Miles). */
        if (input > 0.0f && input != 1.0f) calibrated++;
    }
    for (size_t f = FORMAT_BF16 + 1; f < FORMAT_COUNT; f++)
        if (count[f] && (best == FORMAT_BF16 || count[f] > count[best])) best = f;
    if (best == FORMAT_NVFP4 && calibrated == 0) return acts[ACT_NVFP4_PER_TOKEN].name;
    return recipes[best];
}
