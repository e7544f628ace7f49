#include "backend/cuda/slot.h"
#include "model/cuda/cuda_model.h"
#include "backend/cuda/layout_cuda.h"
#include "base/carve.h"
#include "model/cuda/cuda.h"
#include "model/rope.h"
#include <stdio.h>
#include <string.h>

/* --- buffers: one table says what a step needs --- */

/* Pages of the longest table a step may have: whole chunks, a power of two of them. */
static int32_t table_pages(int32_t positions)
{
    int32_t chunks = (positions + ATTN_CHUNK - 1) / ATTN_CHUNK, r = 1;
    while (r < chunks)
        r *= 2;
    return r * (ATTN_CHUNK / KV_PAGE);
}

/* Scales of rounded rows, for a token: of the widest rows, or of its experts' inner ones. */
static size_t act_scales_most(const struct config *c, size_t top_k)
{
    const size_t sizes[] = {(size_t)c->hidden_size, (size_t)c->intermediate_size,
                            (size_t)c->n_heads * (size_t)c->head_dim};
    size_t most = top_k * (act_scales(ACT_FP8_BLOCK, (size_t)c->moe_intermediate_size) + 1);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (act_scales(ACT_FP8_BLOCK, sizes[i]) > most) most = act_scales(ACT_FP8_BLOCK, sizes[i]);
    return most;
}

/* Places of all buffers from `base` (0: sizes alone). */
static bool place(struct cuda_model *m, devptr_t base, size_t *bytes)
{
    const struct config *c = &m->c;
    struct carve p = carve_at(base);
    size_t n = (size_t)m->cap, hidden = (size_t)c->hidden_size, k = (size_t)c->top_k;
    size_t nq = (size_t)(c->n_heads * c->head_dim), nkv = (size_t)(c->n_kv_heads * c->head_dim);
    size_t inner = k * (size_t)c->moe_intermediate_size, ne = (size_t)c->n_experts;
    size_t half = (size_t)c->head_dim / 2, pos = (size_t)m->positions;
    size_t rows = CUDA_ROWS, vocab = (size_t)m->ld_logits, seqs = (size_t)m->cap_seqs;
    if (inner < (size_t)c->intermediate_size) inner = (size_t)c->intermediate_size;
    if (k == 0) k = 1;
    CARVE(p, m->x, n, hidden);
    CARVE(p, m->y, n, hidden);
    CARVE(p, m->a, n, hidden);
    CARVE(p, m->qkv, n, nq + 2 * nkv);
    CARVE(p, m->att_q, n, nq);
    CARVE(p, m->att_o, n, nq);
    CARVE(p, m->router, n, ne + 1);
    CARVE(p, m->packed, m->tells ? n * (size_t)c->n_layers : n, k);
    CARVE(p, m->row_of, n, k);
    CARVE(p, m->token_of, n, k);
    CARVE(p, m->offsets, ne + 1, 1);
    CARVE(p, m->ticket, 1, 1);
    CARVE(p, m->h, n, inner);
    CARVE(p, m->act_scale, n, act_scales_most(c, k));
    CARVE(p, m->expert_out, n * k, hidden);
    CARVE(p, m->logits, rows, vocab);
    CARVE(p, m->counts, rows, vocab);
    CARVE(p, m->lowered, rows, 2);
    CARVE(p, m->states, rows, 1);
    CARVE(p, m->order, rows, SAMPLE_ORDER);
    CARVE(p, m->results, n, 1);
    CARVE(p, m->drawn, n, 1);
    CARVE(p, m->cos, pos, half);
    CARVE(p, m->sin, pos, half);
    CARVE(p, m->state, n, nq);
    CARVE(p, m->state_ml, n, 2 * (size_t)c->n_heads);
    for (int i = 0; i < ATTN_LISTS; i++) {
        CARVE(p, m->spans[i], n + 1, 1);
        CARVE(p, m->dev.blocks[i], n, 1);
    }
    CARVE(p, m->arrived, n, (size_t)c->n_kv_heads);
    CARVE(p, m->clear_dev, (size_t)m->n_pages, 1);
    CARVE(p, m->dev.ids, n, 1);
    CARVE(p, m->dev.pos, n, 1);
    CARVE(p, m->dev.seq, n, 1);
    CARVE(p, m->dev.pick, n, 1);
    CARVE(p, m->dev.specs, n, 1);
    CARVE(p, m->dev.tables, seqs, (size_t)m->max_pages);
    *bytes = p.bytes;
    return p.ok;
}

/* --- weights --- */

struct tables {
    struct cuda_model *m;
    struct gemm_weight *host; /* what will lie at m->table */
    size_t n;
};

/* Appends the matrices of slots first, first + step, ..., which have one format (cuda_check.c). */
static void add(struct tables *t, const struct gemm_weight **out, format_t *f, size_t first,
                size_t step, int32_t count)
{
    *out = t->m->table + t->n;
    for (int32_t i = 0; i < count; i++) {
        size_t slot = first + (size_t)i * step;
        const struct slot_spec *p = store_spec(t->m->store, slot);
        *f = p->shape.format;
        t->host[t->n++] = slot_matrix(&p->shape, store_ptr(t->m->store, slot));
    }
}

static void add_layer(struct tables *t, int32_t layer)
{
    struct layer_weights *w = &t->m->layers[layer];
    const struct config *c = &t->m->c;
    bool dense = c->dense[layer];
    tensors_layer(&w->slots, c, layer);
    w->k_scale = w->v_scale = 1.0f;
    size_t gate = dense ? w->slots.gate : w->slots.expert0;
    int32_t n = dense ? 1 : c->n_experts;
    add(t, &w->q, &w->q_format, w->slots.q, 1, 1);
    add(t, &w->k, &w->k_format, w->slots.k, 1, 1);
    add(t, &w->v, &w->v_format, w->slots.v, 1, 1);
    w->one_qkv = w->k_format == w->q_format && w->v_format == w->q_format;
    add(t, &w->o, &w->o_format, w->slots.o, 1, 1);
    if (!dense) add(t, &w->router, &w->router_format, w->slots.router, 1, 1);
    add(t, &w->gate, &w->gate_format, gate + MLP_GATE, MLP_SLOTS, n);
    add(t, &w->up, &w->up_format, gate + MLP_UP, MLP_SLOTS, n);
    add(t, &w->down, &w->down_format, gate + MLP_DOWN, MLP_SLOTS, n);
}

static err_t make_tables(struct cuda_model *m, struct err *e)
{
    size_t count = store_slots(m->store), bytes;
    devptr_t dev;
    if (!mul_size(&bytes, count, sizeof(struct gemm_weight)))
        return err_set(e, ERR_NOMEM, "no memory for a table of %zu weights", count);
    m->layers = mem_try_array((size_t)m->c.n_layers, sizeof m->layers[0]);
    struct tables t = {.m = m, .host = mem_try(bytes)};
    err_t rc = m->layers && t.host
                   ? device_alloc(&dev, m->d, bytes, e)
                   : err_set(e, ERR_NOMEM, "no memory for a table of %zu weights", count);
    if (rc == OK) m->table = (void *)(uintptr_t)dev;
    const struct gemm_weight *head = NULL;
    if (rc == OK) {
        add(&t, &head, &m->head_format, SLOT_HEAD, 1, 1);
        for (int32_t i = 0; i < m->c.n_layers; i++)
            add_layer(&t, i);
        m->head = head;
        m->embed = store_ptr(m->store, SLOT_EMBED);
        m->norm = store_ptr(m->store, SLOT_NORM);
        queue_copy(m->q, dev, host_addr(t.host), t.n * sizeof(struct gemm_weight));
        rc = queue_sync(m->q, e);
    }
    mem_free(t.host);
    return rc;
}

void cuda_drop_graphs(struct cuda_model *m)
{
    for (int32_t i = 0; i < m->n_graphs; i++)
        graph_free(m->graphs[i].graph);
    m->n_graphs = 0;
}

void cuda_read_scales(struct cuda_model *m)
{
    if (m->kv_type == KV_BF16 || m->epoch == store_epoch(m->store)) return;
    for (int32_t i = 0; i < m->c.n_layers; i++) {
        struct layer_weights *w = &m->layers[i];
        float s[2];
        store_get(m->store, s, w->slots.kv_scale, PART_DATA, 0, 1);
        if (s[0] != w->k_scale || s[1] != w->v_scale) cuda_drop_graphs(m);
        w->k_scale = s[0];
        w->v_scale = s[1];
    }
    m->epoch = store_epoch(m->store);
}

/* --- life --- */

static err_t upload_angles(struct cuda_model *m, struct err *e)
{
    int32_t n = m->positions;
    size_t len = (size_t)n * (size_t)m->c.head_dim / 2;
    float *t = mem_try_array(2 * len, sizeof *t);
    if (t == NULL) return err_set(e, ERR_NOMEM, "no memory for the angles of %d positions", n);
    rope_angles(t, t + len, &m->c, n);
    queue_copy(m->q, host_addr(m->cos), host_addr(t), len * sizeof *t);
    queue_copy(m->q, host_addr(m->sin), host_addr(t + len), len * sizeof *t);
    err_t rc = queue_sync(m->q, e);
    mem_free(t);
    return rc;
}

static const char *isa(const struct model *base)
{
    return ((const struct cuda_model *)base)->name;
}

/* Given experts would need their weights from the router's logits, which only the routing kernel reads. */
static unsigned can(const struct model *base)
{
    return MODEL_ASYNC | (((const struct cuda_model *)base)->tells ? MODEL_EXPERTS : 0);
}

static size_t kv_bytes(const struct cuda_model *m)
{
    return m->kv_layer * (size_t)m->c.n_layers;
}

/* Graphs stay valid: the region keeps its addresses. */
static err_t kv_release(struct model *base, struct err *e)
{
    struct cuda_model *m = (struct cuda_model *)base;
    device_use(m->d);
    err_t rc = queue_sync(m->q, e); /* a page may still be being cleared */
    return rc == OK ? region_unmap(m->kv, e) : rc;
}

static err_t kv_resume(struct model *base, struct err *e)
{
    struct cuda_model *m = (struct cuda_model *)base;
    device_use(m->d);
    return region_map(m->kv, kv_bytes(m), e);
}

static void break_invariance(struct model *base)
{
    struct cuda_model *m = (struct cuda_model *)base;
    m->broken = m->graphs_off = true;
}

static void cuda_free(struct model *base)
{
    struct cuda_model *m = (struct cuda_model *)base;
    if (m == NULL) return;
    queue_free(m->q);
    cuda_drop_graphs(m);
    if (m->kernels) kernels_free(m->kernels);
    region_free(m->kv);
    device_free(m->d, m->work);
    device_free(m->d, host_addr(m->partial));
    device_free(m->d, host_addr(m->table));
    cuda_flights_free(m);
    device_free(m->d, m->groups.block);
    mem_free(m->layers);
    mem_free(m);
}

static const struct model_ops cuda_ops = {
    .free = cuda_free,
    .isa = isa,
    .can = can,
    .set_numerics = cuda_set_numerics,
    .check_update = cuda_check_update,
    .kv_clear = cuda_kv_clear,
    .kv_release = kv_release,
    .kv_resume = kv_resume,
    .submit = cuda_submit,
    .collect = cuda_collect,
    .logits = cuda_logits,
    .break_invariance = break_invariance,
};

static void set_sizes(struct cuda_model *m, const struct config *c, const struct cuda_options *o)
{
    m->base.ops = &cuda_ops;
    m->c = *c;
    m->n_pages = o->n_kv_pages;
    m->cap = o->max_step_tokens > CUDA_ROWS ? o->max_step_tokens : CUDA_ROWS;
    m->cap_seqs = o->max_seqs;
    m->positions =
        o->context_len > 0 && o->context_len < c->max_positions ? o->context_len : c->max_positions;
    if (m->positions / KV_PAGE >= o->n_kv_pages) m->positions = o->n_kv_pages * KV_PAGE;
    m->max_pages = table_pages(m->positions);
    m->kv_type = o->kv;
    m->tells = o->experts && c->n_experts > 0;
    m->graphs_off = o->no_graphs;
    m->ld_logits = (c->vocab_size + 7) / 8 * 8;
    m->kv_half = (size_t)o->n_kv_pages * (size_t)c->n_kv_heads * kv_tile_bytes(o->kv, c->head_dim);
    m->kv_layer = 2 * m->kv_half;
}

static size_t partial_bytes(const struct cuda_model *m, const struct device *d)
{
    const struct kernels_shape shape = cuda_shape(&m->c, m->kv_type);
    int32_t chunks =
        m->max_pages / (ATTN_CHUNK / KV_PAGE) + 1; /* one more: model_break_invariance */
    return kernels_attn_bytes_of(d, &shape, chunks);
}

static err_t get_memory(struct cuda_model *m, struct err *e)
{
    size_t bytes, kv = m->kv_layer * (size_t)m->c.n_layers;
    devptr_t partial;
    if (!place(m, 0, &bytes))
        return err_set(e, ERR_NOMEM, "steps of %d tokens do not fit in memory", m->cap);
    err_t rc = device_alloc(&m->work, m->d, bytes, e);
    if (rc != OK) return rc;
    (void)place(m, m->work, &bytes);
    queue_fill(m->q, m->work, 0, bytes);
    rc = device_alloc(&partial, m->d, partial_bytes(m, m->d), e);
    if (rc == OK) m->partial = (void *)(uintptr_t)partial;
    if (rc == OK) rc = cuda_flights_new(m, e);
    if (rc == OK) rc = region_new(&m->kv, m->d, kv, e);
    if (rc == OK) rc = region_map(m->kv, kv, e);
    return rc;
}

/* Bit f for each format f that a matrix has. */
static uint32_t formats_of(const struct store *s)
{
    uint32_t bits = 0;
    for (size_t i = 0; i < store_slots(s); i++)
        if (store_spec(s, i)->shape.kind == RESIDENT_MATRIX)
            bits |= 1u << store_spec(s, i)->shape.format;
    return bits;
}

err_t cuda_model_new(struct model **out, const struct config *c, struct store *s, struct device *d,
                     const struct cuda_options *o, struct err *e)
{
    err_t fits = cuda_model_check(c, store_spec(s, 0), o->kv, e);
    if (fits != OK) return fits;
    struct cuda_model *m = mem_alloc(sizeof *m);
    struct kernels_shape shape = cuda_shape(c, o->kv);
    m->d = d;
    m->store = s;
    set_sizes(m, c, o);
    snprintf(m->name, sizeof m->name, "cuda (%s)", device_about(d)->name);
    err_t rc = queue_new(&m->q, d, e);
    if (rc == OK) rc = gemm_open(&m->gemm, d, formats_of(s), e);
    if (rc == OK) rc = kernels_new(&m->kernels, d, &shape, e);
    if (rc == OK)
        rc = device_kernel(&m->clear_kernel, d, "clear_pages", sizeof(struct clear_args), 0, e);
    if (rc == OK)
        rc = device_kernel(&m->groups.kernel, d, "input_scales", sizeof(struct inputs_args), 0, e);
    if (rc == OK) rc = get_memory(m, e);
    if (rc == OK) rc = make_tables(m, e);
    if (rc == OK) rc = upload_angles(m, e);
    if (rc != OK) {
        cuda_free(&m->base);
        return rc;
    }
    *out = &m->base;
    return OK;
}

/* Kernels of a decode step: those of a layer with every matrix in a launch of its own, then the
 * rest.  GRAPH_NODE_BYTES is what the driver was seen to take a kernel (test/cuda/test_memory.c). */
enum { GRAPH_LAYER_NODES = 16, GRAPH_NODES = 32, GRAPH_NODE_BYTES = 2048 };

static size_t graph_bytes(const struct config *c, const struct cuda_options *o)
{
    size_t nodes = (size_t)c->n_layers * GRAPH_LAYER_NODES + GRAPH_NODES;
    return o->no_graphs ? 0 : CUDA_GRAPHS * nodes * GRAPH_NODE_BYTES;
}

err_t cuda_model_needs(struct cuda_needs *out, const struct device *d, const struct config *c,
                       const struct cuda_options *o, struct err *e)
{
    struct cuda_model *m = mem_alloc(sizeof *m);
    set_sizes(m, c, o);
    bool ok = place(m, 0, &out->step);
    out->partial = partial_bytes(m, d);
    out->graphs = graph_bytes(c, o);
    out->kv_page = m->kv_layer / (size_t)o->n_kv_pages * (size_t)c->n_layers;
    mem_free(m);
    return ok ? OK
              : err_set(e, ERR_NOMEM, "steps of %d tokens do not fit in memory",
                        o->max_step_tokens);
}
