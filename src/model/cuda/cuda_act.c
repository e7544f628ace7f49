/* cuda_act.c - activation formats: rows are rounded by a kernel between the one that makes them and
 * the GEMM, in place where nothing reads them as they were; their scales go to the GEMM. */
#include "backend/cuda/slot.h"
#include "base/mem.h"
#include "model/cuda/cuda_model.h"

static const round_t round_of[ACT_COUNT] = {
    [ACT_FP8_BLOCK] = ROUND_FP8_BLOCK,
    [ACT_MXFP8] = ROUND_MXFP8,
    [ACT_NVFP4] = ROUND_NVFP4,
    [ACT_NVFP4_PER_TOKEN] = ROUND_NVFP4_PER_TOKEN,
};

struct cuda_rows cuda_round(const struct cuda_slice *s, int32_t group, format_t f,
                            struct round_args a, int32_t rows)
{
    struct cuda_model *m = s->m;
    struct cuda_rows r = {.plain = a.x};
    if (m->act == ACT_BF16 || f == FORMAT_BF16) return r;
    a.scale = m->act_scale;
    a.kind = (int32_t)round_of[m->act];
    if (acts[m->act].static_scale) a.input_scale = m->groups.args.out + group;
    kernels_round(m->kernels, m->q, &a, rows, !m->plain);
    r.rounded = a.out;
    if (acts[m->act].scale_group) r.scale = m->act_scale;
    return r;
}

void cuda_reads(struct gemm_args *g, const struct cuda_rows *r, format_t f)
{
    g->x = r->plain;
    if (f == FORMAT_BF16 || !r->rounded) return;
    g->x = r->rounded;
    g->x_scale = r->scale;
}

/* --- input scales of the checkpoint */

struct group_list {
    const struct cuda_model *m;
    const float **from;
    int32_t *first;
    int32_t n, n_groups;
};

/* One more group: slots first, first + step, ... */
static void add_some(struct group_list *l, size_t first, size_t step, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        size_t slot = first + (size_t)i * step;
        const struct resident *r = &store_spec(l->m->store, slot)->shape;
        if (r->format == FORMAT_NVFP4)
            l->from[l->n++] = slot_input(r, store_ptr(l->m->store, slot));
    }
}

static void end_group(struct group_list *l)
{
    l->first[++l->n_groups] = l->n;
}

/* In the order of enum cuda_input. */
static void add_layer(struct group_list *l, const struct layer_slots *at, bool dense)
{
    int32_t n = dense ? 1 : l->m->c.n_experts;
    size_t gate = dense ? at->gate : at->expert0;
    add_some(l, at->q, 1, 1);
    add_some(l, at->k, 1, 1);
    add_some(l, at->v, 1, 1);
    end_group(l);
    add_some(l, at->o, 1, 1);
    end_group(l);
    if (!dense) add_some(l, at->router, 1, 1);
    end_group(l);
    add_some(l, gate + MLP_GATE, MLP_SLOTS, n);
    add_some(l, gate + MLP_UP, MLP_SLOTS, n);
    end_group(l);
    add_some(l, gate + MLP_DOWN, MLP_SLOTS, n);
    end_group(l);
}

static int32_t head_group(const struct cuda_model *m)
{
    return m->c.n_layers * CUDA_INPUTS;
}

static err_t upload_groups(struct cuda_model *m, const struct group_list *l, struct err *e)
{
    struct input_groups *g = &m->groups;
    size_t from = (size_t)l->n * sizeof *l->from, groups = (size_t)l->n_groups;
    size_t first = (groups + 1) * sizeof *l->first;
    err_t rc = device_alloc(&g->block, m->d, from + first + groups * sizeof(float), e);
    if (rc != OK) return rc;
    g->n = l->n_groups;
    g->args = (struct inputs_args){
        .from = (const float *const *)(uintptr_t)g->block,
        .first = (const int32_t *)(uintptr_t)(g->block + from),
        .out = (float *)(uintptr_t)(g->block + from + first),
    };
    queue_copy(m->q, g->block, host_addr(l->from), from);
    queue_copy(m->q, g->block + from, host_addr(l->first), first);
    return queue_sync(m->q, e);
}

static err_t make_groups(struct cuda_model *m, struct err *e)
{
    size_t slots = store_slots(m->store), groups = (size_t)head_group(m) + 1;
    struct group_list l = {.m = m,
                           .from = mem_try_array(slots, sizeof *l.from),
                           .first = mem_try_array(groups + 1, sizeof *l.first)};
    err_t rc = l.from && l.first ? OK : err_set(e, ERR_NOMEM, "no memory for a table of scales");
    for (int32_t i = 0; rc == OK && i < m->c.n_layers; i++)
        add_layer(&l, &m->layers[i].slots, m->c.dense[i]);
    if (rc == OK) {
        add_some(&l, SLOT_HEAD, 1, 1);
        end_group(&l);
        rc = upload_groups(m, &l, e);
    }
    mem_free(l.from);
    mem_free(l.first);
    return rc;
}

static void find_scales(struct cuda_model *m)
{
    struct launch l = {.grid = {(uint32_t)m->groups.n}, .threads = INPUTS_THREADS};
    queue_launch(m->q, &m->groups.kernel, l, &m->groups.args);
    m->groups.epoch = store_epoch(m->store);
}

void cuda_read_inputs(struct cuda_model *m)
{
    if (acts[m->act].static_scale && m->groups.epoch != store_epoch(m->store)) find_scales(m);
}

/* --- model.h */

/* Scales of rows are a matter of the GEMM's kernel, and each format's takes those of its own
 * recipe. */
static err_t check_formats(const struct cuda_model *m, act_t act, struct err *e)
{
    uint32_t group = acts[act].scale_group;
    for (size_t i = 0; group && i < store_slots(m->store); i++) {
        const struct slot_spec *s = store_spec(m->store, i);
        format_t f = s->shape.format;
        if (s->shape.kind != RESIDENT_MATRIX || f == FORMAT_BF16 || gemm_x_scales(f) == group)
            continue;
        return err_set(e, ERR_UNSUPPORTED,
                       "--activation-format %s: %s is %s; on a GPU it needs weights in %s or bf16, "
                       "and mxfp8 takes all",
                       acts[act].name, s->name, formats[f].name,
                       formats[group == ACT_ROW ? FORMAT_NVFP4 : FORMAT_FP8_BLOCK].name);
    }
    return OK;
}

/* Fused and routed are one path here: the plan is always made of packed ids and weights. */
err_t cuda_set_numerics(struct model *base, act_t act, bool routed, struct err *e)
{
    struct cuda_model *m = (struct cuda_model *)base;
    (void)routed;
    err_t rc = check_formats(m, act, e);
    if (rc != OK) return rc;
    device_use(m->d);
    cuda_drop_graphs(m);
    m->act = act;
    if (!acts[act].static_scale) return OK;
    if (!m->groups.block) rc = make_groups(m, e);
    if (rc != OK) return rc;
    find_scales(m);
    return cuda_check_update(base, NULL, e);
}

err_t cuda_check_update(const struct model *base, const struct update *u, struct err *e)
{
    const struct cuda_model *m = (const struct cuda_model *)base;
    return numerics_check_inputs(&m->c, m->store, u, m->act, e);
}
