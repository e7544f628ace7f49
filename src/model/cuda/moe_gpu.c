#include "backend/cuda/kernels.h"
#include "base/carve.h"
#include "model/cuda/moe_gpu_state.h"
#include <math.h>

static err_t check_shape(const struct moe_gpu_shape *s, struct err *e)
{
    const struct {
        const char *name;
        int32_t value, most, of;
    } fields[] = {{"hidden_size", s->hidden, 1 << 20, 8},
                  {"intermediate_size", s->inner, 1 << 20, 8},
                  {"num_experts", s->n_experts, MOE_CHOOSE_EXPERTS, 1},
                  {"local_num_experts", s->n_local, ROUTE_EXPERTS_MAX, 1},
                  {"top_k", s->top_k, MOE_CHOOSE_TOP_K, 1},
                  {"max_tokens", s->max_tokens, 1 << 20, 1}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].value < 1 || fields[i].value > fields[i].most ||
            fields[i].value % fields[i].of)
            return err_set(e, ERR_UNSUPPORTED, "%s: %d; allowed on a GPU: multiples of %d up to %d",
                           fields[i].name, fields[i].value, fields[i].of, fields[i].most);
    if (s->local_offset < 0 || s->local_offset > s->n_experts - s->n_local)
        return err_set(e, ERR_INPUT,
                       "local_expert_offset %d, local_num_experts %d: must lie in num_experts (%d)",
                       s->local_offset, s->n_local, s->n_experts);
    if (s->weigh_input && s->top_k != 1)
        return err_set(e, ERR_INPUT, "top_k: %d; weights on the input allow 1", s->top_k);
    return OK;
}

/* Places of all buffers from `base` (0: sizes alone). */
static bool place(struct moe_gpu *g, devptr_t base, size_t *bytes)
{
    const struct moe_gpu_shape *s = &g->s;
    struct carve c = carve_at(base);
    size_t t = (size_t)s->max_tokens, k = (size_t)s->top_k, rows = t * k;
    size_t hidden = (size_t)s->hidden, inner = (size_t)s->inner, ne = (size_t)s->n_local;
    size_t x_scales = act_scales(ACT_FP8_BLOCK, hidden),
           h_scales = act_scales(ACT_FP8_BLOCK, inner);
    CARVE(c, g->x, t, hidden);
    CARVE(c, g->x_act, s->act == ACT_BF16 ? 0 : t, hidden);
    CARVE(c, g->h, rows, inner);
    CARVE(c, g->y, rows, hidden);
    CARVE(c, g->wide, rows, 2 * inner > hidden ? 2 * inner : hidden);
    CARVE(c, g->act_scale, rows, x_scales > h_scales ? x_scales : h_scales);
    CARVE(c, g->packed, t, k);
    CARVE(c, g->row_of, t, k);
    CARVE(c, g->token_of, t, k);
    CARVE(c, g->offsets, ne + 1, 1);
    CARVE(c, g->table, ne, MOE_GPU_MATRICES);
    CARVE(c, g->vectors, moe_gpu_vector_floats(s), 1);
    CARVE(c, g->inputs, 2, 1);
    *bytes = c.bytes;
    return c.ok;
}

err_t moe_gpu_work_bytes(size_t *out, const struct moe_gpu_shape *s, struct err *e)
{
    err_t rc = check_shape(s, e);
    if (rc != OK) return rc;
    struct moe_gpu *g = mem_alloc(sizeof *g);
    g->s = *s;
    bool ok = place(g, 0, out);
    mem_free(g);
    return ok ? OK : err_set(e, ERR_NOMEM, "max_tokens: %d do not fit in memory", s->max_tokens);
}

static err_t find_kernels(struct moe_gpu *g, struct err *e)
{
    const struct {
        struct kernel *to;
        const char *name;
        size_t args;
    } all[] = {
        {&g->choose, "moe_choose", sizeof(struct moe_choose_args)},
        {&g->take, "moe_take", sizeof(struct moe_take_args)},
        {&g->rows, "moe_rows", sizeof(struct moe_rows_args)},
        {&g->activate, "moe_activate", sizeof(struct moe_activate_args)},
        {&g->finish, "moe_finish", sizeof(struct moe_finish_args)},
        {&g->combine, "moe_combine", sizeof(struct moe_combine_args)},
    };
    /* The plan and the rounding alone: the rest is any shape that there is. */
    const struct kernels_shape any = {.hidden = 8,
                                      .vocab = 1,
                                      .n_heads = 1,
                                      .n_kv_heads = 1,
                                      .head_dim = 128,
                                      .n_experts = g->s.n_local,
                                      .top_k = 1};
    err_t rc = repack_open(&g->repack, g->d, e);
    if (rc == OK) rc = kernels_new(&g->kernels, g->d, &any, e);
    for (size_t i = 0; i < sizeof all / sizeof all[0] && rc == OK; i++)
        rc = device_kernel(all[i].to, g->d, all[i].name, all[i].args, 0, e);
    return rc;
}

static err_t take_work(struct moe_gpu *g, void *work, size_t work_bytes, struct err *e)
{
    size_t bytes;
    devptr_t base = host_addr(work);
    (void)place(g, 0, &bytes); /* known to fit: moe_gpu_work_bytes */
    if (work && (work_bytes < bytes || base % CARVE_ALIGN))
        return err_set(e, ERR_INPUT, "workspace: %zu bytes at %p; needed: %zu at a multiple of %d",
                       work_bytes, work, bytes, CARVE_ALIGN);
    err_t rc = work ? OK : device_alloc(&g->own_work, g->d, bytes, e);
    if (rc == OK) (void)place(g, work ? base : g->own_work, &bytes);
    return rc;
}

err_t moe_gpu_new(struct moe_gpu **out, const struct moe_gpu_shape *s, int32_t gpu, void *work,
                  size_t work_bytes, struct err *e)
{
    size_t bytes;
    struct device *d;
    err_t rc = moe_gpu_work_bytes(&bytes, s, e);
    if (rc == OK) rc = device_open(&d, gpu, 0, e);
    if (rc != OK) return rc;
    struct moe_gpu *g = mem_alloc(sizeof *g);
    g->s = *s;
    g->d = d;
    g->q = queue_borrow(d);
    g->at = mem_try_array((size_t)s->n_local * MOE_GPU_MATRICES, sizeof *g->at);
    rc = g->at ? find_kernels(g, e) : err_set(e, ERR_NOMEM, "no memory for %d experts", s->n_local);
    if (rc == OK) rc = take_work(g, work, work_bytes, e);
    device_leave(d, device_former(d));
    if (rc != OK) {
        moe_gpu_free(g);
        return rc;
    }
    *out = g;
    return OK;
}

void moe_gpu_free(struct moe_gpu *g)
{
    if (g == NULL) return;
    void *former = device_enter(g->d);
    moe_gpu_weights_free(g);
    device_free(g->d, g->own_work);
    kernels_free(g->kernels);
    queue_free(g->q);
    device_leave(g->d, former);
    device_close(g->d);
    mem_free(g->at);
    mem_free(g);
}

/* --- run --- */

/* One slice of a call. */
struct run {
    struct moe_gpu *g;
    const struct moe_gpu_call *c;
    int32_t t0, n;
    bool programmatic; /* false: the first kernel of a call, and all of one on the default stream */
    const uint32_t *packed;
};

/* After a launch: the next may be programmatic, but for the default stream's. */
static void launched(struct run *r)
{
    r->programmatic = queue_stream(r->g->q) != NULL;
}

static void launch(struct run *r, const struct kernel *k, int32_t blocks, uint32_t threads,
                   const void *args)
{
    queue_launch(r->g->q, k,
                 (struct launch){.grid = {(uint32_t)blocks},
                                 .threads = threads,
                                 .programmatic = r->programmatic},
                 args);
    launched(r);
}

static struct moe_floats floats_at(struct moe_floats f, size_t i)
{
    f.at = (const char *)f.at + i * (f.bf16 ? sizeof(uint16_t) : sizeof(float));
    return f;
}

static struct moe_choices choices(const struct run *r)
{
    size_t at = (size_t)r->t0 * (size_t)r->g->s.top_k;
    return (struct moe_choices){
        .packed = r->g->packed,
        .packed_out = r->c->packed_out ? r->c->packed_out + at : NULL,
        .ids_out = r->c->ids_out ? r->c->ids_out + at : NULL,
    };
}

static void choose(struct run *r)
{
    const struct moe_gpu_shape *s = &r->g->s;
    size_t t0 = (size_t)r->t0, at = t0 * (size_t)s->top_k;
    r->packed = r->g->packed;
    if (r->c->choose) {
        struct moe_choose_args a = *r->c->choose;
        a.logits = floats_at(a.logits, t0 * (size_t)s->n_experts);
        if (a.replay) a.replay += at;
        a.to = choices(r);
        a.n_tokens = r->n;
        launch(r, &r->g->choose, (r->n + MOE_CHOOSE_WARPS - 1) / MOE_CHOOSE_WARPS,
               MOE_CHOOSE_WARPS * 32, &a);
        return;
    }
    struct moe_take_args a = r->c->take;
    if (a.packed && !r->c->packed_out && !r->c->ids_out) { /* as they lie */
        r->packed = (const uint32_t *)(const void *)(a.packed + at);
        return;
    }
    if (a.packed)
        a.packed += at;
    else
        a.ids += at, a.weights = floats_at(a.weights, at);
    a.to = choices(r);
    a.n = r->n * s->top_k;
    a.n_experts = s->n_experts;
    launch(r, &r->g->take, (a.n + MOE_THREADS - 1) / MOE_THREADS, MOE_THREADS, &a);
}

static void plan_rows(struct run *r)
{
    struct moe_gpu *g = r->g;
    struct route_args a = {
        .packed = (uint32_t *)(uintptr_t)r->packed, /* read here */
        .offsets = g->offsets,
        .token_of = g->token_of,
        .row_of = g->row_of,
        .n_tokens = r->n,
        .n_experts = g->s.n_local,
        .top_k = g->s.top_k,
        .first = g->s.local_offset,
        .n_local = g->s.n_local,
    };
    kernels_route(g->kernels, g->q, &a, r->programmatic);
    launched(r);
}

/* Rows that GEMMs read: BF16, and as quantized matrices read them. */
struct operand {
    const uint16_t *plain, *act;
    const float *scale;
};

static struct operand rounded(struct run *r, const uint16_t *x, uint16_t *out, bool of_h, int32_t n,
                              int32_t rows)
{
    static const round_t kinds[ACT_COUNT] = {[ACT_FP8_BLOCK] = ROUND_FP8_BLOCK,
                                             [ACT_MXFP8] = ROUND_MXFP8,
                                             [ACT_NVFP4] = ROUND_NVFP4,
                                             [ACT_NVFP4_PER_TOKEN] = ROUND_NVFP4_PER_TOKEN};
    struct moe_gpu *g = r->g;
    struct operand o = {.plain = x, .act = x};
    bool quantized = of_h ? g->f[MOE_GPU_DOWN] != FORMAT_BF16
                          : g->f[MOE_GPU_GATE] != FORMAT_BF16 || g->f[MOE_GPU_UP] != FORMAT_BF16;
    if (g->s.act == ACT_BF16 || !quantized) return o;
    struct round_args a = {.x = x,
                           .out = out,
                           .scale = g->act_scale,
                           .input_scale = g->inputs + of_h,
                           .n_rows = of_h ? g->offsets + g->s.n_local : NULL,
                           .n = n,
                           .kind = (int32_t)kinds[g->s.act]};
    kernels_round(g->kernels, g->q, &a, rows, r->programmatic);
    launched(r);
    o.act = out;
    if (acts[g->s.act].scale_group) o.scale = g->act_scale;
    return o;
}

static struct operand input_rows(struct run *r)
{
    struct moe_gpu *g = r->g;
    struct moe_floats from = floats_at(r->c->input, (size_t)r->t0 * (size_t)g->s.hidden);
    const uint16_t *x = from.at;
    if (!from.bf16 || g->s.weigh_input || (uintptr_t)from.at % 16) {
        struct moe_rows_args a = {.x = from,
                                  .packed = g->s.weigh_input ? r->packed : NULL,
                                  .out = g->x,
                                  .n = g->s.hidden};
        launch(r, &g->rows, r->n, MOE_THREADS, &a);
        x = g->x;
    }
    return rounded(r, x, g->x_act, false, g->s.hidden, r->n);
}

static void multiply(struct run *r, int which, const struct operand *x, int32_t k, int32_t n,
                     void *out, gemm_out_t kind)
{
    struct moe_gpu *g = r->g;
    format_t f = g->f[which];
    struct gemm_args a = {
        .x = f == FORMAT_BF16 ? x->plain : x->act,
        .x_scale = f == FORMAT_BF16 ? NULL : x->scale,
        .src = which == MOE_GPU_DOWN ? NULL : g->token_of,
        .first = g->offsets,
        .w = g->table + which * g->s.n_local,
        .up = kind == GEMM_SWIGLU ? g->table + MOE_GPU_UP * g->s.n_local : NULL,
        .out = out,
        .ldx = k,
        .ldo = n,
        .k = k,
        .n = n,
        .n_groups = g->s.n_local,
        .out_kind = (int32_t)kind,
    };
    gemm_launch(&g->gemm, g->q, f, &a, (int64_t)r->n * g->s.top_k, r->programmatic);
}

static void gate_up(struct run *r, const struct operand *x)
{
    struct moe_gpu *g = r->g;
    const struct moe_gpu_vectors *v = &g->v;
    int32_t rows = r->n * g->s.top_k, hidden = g->s.hidden, inner = g->s.inner;
    if (!g->s.oai && !v->gate_bias && !v->up_bias && !v->alpha && !v->beta && !v->limit &&
        g->f[MOE_GPU_GATE] == g->f[MOE_GPU_UP]) {
        multiply(r, MOE_GPU_GATE, x, hidden, inner, g->h, GEMM_SWIGLU);
        return;
    }
    float *up = g->wide + (size_t)rows * (size_t)inner;
    multiply(r, MOE_GPU_GATE, x, hidden, inner, g->wide, GEMM_F32);
    multiply(r, MOE_GPU_UP, x, hidden, inner, up, GEMM_F32);
    struct moe_activate_args a = {.gate = g->wide,
                                  .up = up,
                                  .gate_bias = v->gate_bias,
                                  .up_bias = v->up_bias,
                                  .alpha = v->alpha,
                                  .beta = v->beta,
                                  .limit = v->limit,
                                  .alpha_all = g->s.oai ? 1.702f : 1.0f,
                                  .beta_all = g->s.oai ? 1.0f : 0.0f,
                                  .limit_all = g->s.oai ? 7.0f : INFINITY,
                                  .first = g->offsets,
                                  .out = g->h,
                                  .n = inner,
                                  .n_experts = g->s.n_local};
    launch(r, &g->activate, rows, MOE_THREADS, &a);
}

static void down(struct run *r)
{
    struct moe_gpu *g = r->g;
    int32_t rows = r->n * g->s.top_k, hidden = g->s.hidden, inner = g->s.inner;
    struct operand h = rounded(r, g->h, g->h, true, inner, rows);
    if (!g->v.down_bias) {
        multiply(r, MOE_GPU_DOWN, &h, inner, hidden, g->y, GEMM_BF16);
        return;
    }
    multiply(r, MOE_GPU_DOWN, &h, inner, hidden, g->wide, GEMM_F32);
    struct moe_finish_args a = {.x = g->wide,
                                .bias = g->v.down_bias,
                                .first = g->offsets,
                                .out = g->y,
                                .n = hidden,
                                .n_experts = g->s.n_local};
    launch(r, &g->finish, rows, MOE_THREADS, &a);
}

static void combine(struct run *r)
{
    struct moe_gpu *g = r->g;
    size_t at = (size_t)r->t0 * (size_t)g->s.hidden;
    struct moe_combine_args a = {
        .rows = g->y,
        .row_of = g->row_of,
        .packed = r->packed,
        .out = (char *)r->c->output + at * (r->c->output_bf16 ? sizeof(uint16_t) : sizeof(float)),
        .n = g->s.hidden,
        .top_k = g->s.top_k,
        .unweighed = g->s.weigh_input,
        .bf16 = r->c->output_bf16,
    };
    launch(r, &g->combine, r->n, MOE_THREADS, &a);
}

err_t moe_gpu_run(struct moe_gpu *g, const struct moe_gpu_call *c, void *stream, struct err *e)
{
    struct run r = {.g = g, .c = c};
    void *former = device_enter(g->d);
    queue_set_stream(g->q, stream);
    for (; r.t0 < c->n_tokens; r.t0 += r.n) {
        r.n = c->n_tokens - r.t0 < g->s.max_tokens ? c->n_tokens - r.t0 : g->s.max_tokens;
        choose(&r);
        plan_rows(&r);
        struct operand x = input_rows(&r);
        gate_up(&r, &x);
        down(&r);
        combine(&r);
    }
    err_t rc = queue_error(g->q, e);
    device_leave(g->d, former);
    return rc;
}
