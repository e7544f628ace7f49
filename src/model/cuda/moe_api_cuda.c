/* moe_api_cuda.c - include/moult_moe.h on a GPU. */
#include "base/mem.h"
#include "model/cuda/moe_gpu.h"
#include "model/moe_api.h"
#include <math.h>

_Static_assert((int)MOE_GPU_DOWN == (int)MOE_DOWN && (int)MOE_GPU_MATRICES == (int)MOE_MATRICES &&
                   (int)WEIGH_SIGMOID == (int)MOE_WEIGH_SIGMOID &&
                   (int)KEY_SIGMOID == (int)MOE_KEY_SIGMOID,
               "the numbers are those of the modules");

static struct moe_gpu_shape shape_of(const struct moult_moe *m)
{
    const struct moe_shape *s = &m->shape;
    return (struct moe_gpu_shape){.hidden = s->hidden,
                                  .inner = s->inner,
                                  .n_experts = s->n_experts,
                                  .top_k = s->top_k,
                                  .local_offset = s->local_offset,
                                  .n_local = s->n_local,
                                  .max_tokens = m->max_tokens,
                                  .oai = s->activation == MOE_SWIGLU_OAI,
                                  .weigh_input = s->weigh_input,
                                  .act = s->act};
}

err_t gpu_create(struct moult_moe *m, const moult_moe_config *c, struct err *e)
{
    struct moe_gpu_shape s = shape_of(m);
    return moe_gpu_new(&m->gpu, &s, c->gpu, c->workspace, c->workspace_bytes, e);
}

void gpu_destroy(struct moult_moe *m)
{
    moe_gpu_free(m->gpu);
}

err_t gpu_work_bytes(size_t *out, const struct moult_moe *m, struct err *e)
{
    struct moe_gpu_shape s = shape_of(m);
    return moe_gpu_work_bytes(out, &s, e);
}

/* --- weights */

/* Host copies of arrays that lie on the device. */
struct fetched {
    struct moult_moe *m;
    void *mem[16];
    int n;
};

/* *p on the host, if there is one. */
static err_t fetch(struct fetched *f, const void **p, size_t bytes, struct err *e)
{
    if (*p == NULL) return OK;
    void *to = mem_try(bytes);
    if (to == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu bytes", bytes);
    f->mem[f->n++] = to;
    err_t rc = moe_gpu_read(f->m->gpu, to, *p, bytes, e);
    *p = to;
    return rc;
}

static void fetched_free(struct fetched *f)
{
    for (int i = 0; i < f->n; i++)
        mem_free(f->mem[i]);
}

static bool is_fused(const moult_moe_weights *w)
{
    return w->arrangement != MOULT_GATE_AND_UP && w->arrangement != MOULT_RESIDENT;
}

/* Everything of `w` but data and scales, on the host. */
static err_t fetch_vectors(struct fetched *f, moult_moe_weights *w, struct err *e)
{
    size_t n = (size_t)f->m->shape.n_local, hidden = (size_t)f->m->shape.hidden,
           inner = (size_t)f->m->shape.inner, pair = is_fused(w) ? 2 : 1;
    const struct {
        const float **p;
        size_t n;
    } all[] = {{&w->gate.tensor_scale, n * pair},
               {&w->gate.input_scale, n * pair},
               {&w->up.tensor_scale, n},
               {&w->up.input_scale, n},
               {&w->down.tensor_scale, n},
               {&w->down.input_scale, n},
               {&w->gate_bias, n * pair * inner},
               {&w->up_bias, n * inner},
               {&w->down_bias, n * hidden},
               {&w->alpha, n},
               {&w->beta, n},
               {&w->limit, n}};
    err_t rc = OK;
    for (size_t i = 0; i < sizeof all / sizeof all[0] && rc == OK; i++) {
        const void *p = *all[i].p;
        rc = fetch(f, &p, all[i].n * sizeof(float), e);
        *all[i].p = p;
    }
    return rc;
}

/* The weights of one expert, as if it were alone. */
struct view {
    moult_moe_weights w;
    void *host[2 * MOE_MATRICES]; /* its bytes, where they lie on the device */
};

static void view_free(struct view *v)
{
    for (int i = 0; i < 2 * MOE_MATRICES; i++)
        mem_free(v->host[i]);
}

static err_t view_bytes(struct view *v, struct moult_moe *m, int i, const void **p, size_t bytes,
                        int32_t x, struct err *e)
{
    if (*p == NULL) return OK;
    *p = (const char *)*p + (size_t)x * bytes;
    if (v->w.device != MOULT_DEVICE_CUDA) return OK;
    v->host[i] = mem_try(bytes ? bytes : 1);
    if (v->host[i] == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu bytes", bytes);
    err_t rc = moe_gpu_read(m->gpu, v->host[i], *p, bytes, e);
    *p = v->host[i];
    return rc;
}

static err_t view_open(struct view *v, struct moult_moe *m, const moult_moe_weights *w, int32_t x,
                       struct err *e)
{
    size_t hidden = (size_t)m->shape.hidden, inner = (size_t)m->shape.inner;
    *v = (struct view){.w = *w};
    moult_matrices *all[MOE_MATRICES] = {&v->w.gate, &v->w.up, &v->w.down};
    err_t rc = OK;
    for (int i = 0; i < MOE_MATRICES && rc == OK; i++) {
        bool down = i == MOE_DOWN;
        int32_t step = i == MOE_GATE && is_fused(w) ? 2 : 1;
        size_t data, scale, rows = down ? hidden : (size_t)step * inner;
        if (all[i]->data == NULL) continue; /* up of a fused pair */
        if (!format_bytes((format_t)all[i]->format, rows, down ? inner : hidden, &data, &scale))
            return err_set(e, ERR_INPUT, "a matrix of %zu rows overflows", rows);
        rc = view_bytes(v, m, 2 * i, &all[i]->data, data, x, e);
        if (rc == OK) rc = view_bytes(v, m, 2 * i + 1, &all[i]->scale, scale, x, e);
        if (all[i]->tensor_scale) all[i]->tensor_scale += x * step;
        if (all[i]->input_scale) all[i]->input_scale += x * step;
    }
    return rc;
}

/* The largest input scales of NVFP4 matrices, of gate and up and of down. */
struct inputs {
    float in, down;
};

static void note_input(struct inputs *to, int which, format_t f, float input)
{
    float *most = which == MOE_DOWN ? &to->down : &to->in;
    if (f == FORMAT_NVFP4 && input > *most && input < INFINITY) *most = input;
}

/* moe_op_check_inputs for weights that are not there yet; what is given comes first. */
static err_t check_inputs(const struct moult_moe *m, const moult_moe_weights *w,
                          const format_t f[MOE_MATRICES], struct inputs *in, struct err *e)
{
    if (w->input_scale_in > 0.0f) in->in = w->input_scale_in;
    if (w->input_scale_down > 0.0f) in->down = w->input_scale_down;
    if (!acts[m->shape.act].static_scale) return OK;
    for (int i = 0; i < MOE_MATRICES; i++)
        if (f[i] != FORMAT_BF16 && !((i == MOE_DOWN ? in->down : in->in) > 0.0f))
            return err_set(e, ERR_INPUT,
                           "activation_format nvfp4: no expert's %s has an input_scale; "
                           "nvfp4-per-token needs none",
                           i == MOE_DOWN ? "down_proj" : "gate_proj or up_proj");
    return OK;
}

/* Looks at every matrix, or (`in` NULL) packs it. */
static err_t each_matrix(struct moult_moe *m, const moult_moe_weights *w, struct inputs *in,
                         struct err *e)
{
    static const char *const names[MOE_MATRICES] = {"gate", "up", "down"};
    err_t rc = OK;
    for (int32_t x = 0; x < m->shape.n_local && rc == OK; x++) {
        struct view v;
        rc = view_open(&v, m, w, x, e);
        for (int i = 0; i < MOE_MATRICES && rc == OK; i++) {
            struct api_source s = {0};
            rc = api_find(&s, m, &v.w, 0, i, e);
            if (rc == OK && in) {
                rc = api_check_values(&s.p, e);
                note_input(in, i, s.p.format, s.input);
            } else if (rc == OK) {
                moe_gpu_put(m->gpu, (size_t)x * MOE_MATRICES + (size_t)i, &s.p, s.input);
            }
            api_release(&s);
            if (rc != OK)
                rc = err_wrap(e, rc, "expert %d, %s", m->shape.local_offset + x, names[i]);
        }
        view_free(&v);
    }
    return rc;
}

static err_t check_resident(struct moult_moe *m, const moult_moe_weights *w,
                            const format_t f[MOE_MATRICES], struct inputs *in, struct err *e)
{
    err_t rc = OK;
    if (w->resident == NULL) return err_set(e, ERR_INPUT, "resident: NULL");
    for (int i = 0; i < m->shape.n_local * MOE_MATRICES && rc == OK; i++) {
        float input = NAN;
        int which = i % MOE_MATRICES;
        if (w->resident[i] == NULL || (uintptr_t)w->resident[i] % 16)
            return err_set(e, ERR_INPUT, "resident[%d]: %p; a multiple of 16 is needed", i,
                           w->resident[i]);
        if (acts[m->shape.act].static_scale)
            rc = moe_gpu_input(m->gpu, &input, which, f[which], w->resident[i], e);
        note_input(in, which, f[which], input);
    }
    return rc;
}

static err_t formats_of(format_t f[MOE_MATRICES], const moult_moe_weights *w, struct err *e)
{
    const int32_t given[MOE_MATRICES] = {
        w->gate.format, is_fused(w) ? w->gate.format : w->up.format, w->down.format};
    for (int i = 0; i < MOE_MATRICES; i++) {
        if (given[i] < 0 || given[i] >= FORMAT_COUNT)
            return err_set(e, ERR_INPUT, "format: %d; allowed: 0 to %d", given[i],
                           FORMAT_COUNT - 1);
        f[i] = (format_t)given[i];
    }
    return OK;
}

/* Nothing of the handle changes before all was looked at; afterwards only the device can fail, and
 * then there are no weights. */
static err_t replace(struct moult_moe *m, const moult_moe_weights *w, struct moe_set *s,
                     struct err *e)
{
    format_t f[MOE_MATRICES];
    struct inputs in = {0};
    bool resident = w->arrangement == MOULT_RESIDENT;
    err_t rc = formats_of(f, w, e);
    if (rc == OK) rc = api_copy_vectors(m, w, s, e);
    if (rc == OK) rc = resident ? check_resident(m, w, f, &in, e) : each_matrix(m, w, &in, e);
    if (rc == OK) rc = check_inputs(m, w, f, &in, e);
    if (rc == OK)
        rc = resident ? moe_gpu_adopt(m->gpu, f, w->resident, e) : moe_gpu_formats(m->gpu, f, e);
    if (rc != OK) return rc;
    m->gpu_ready = false;
    if (!resident) rc = each_matrix(m, w, NULL, e);
    struct moe_gpu_vectors v = {.gate_bias = s->gate_bias,
                                .up_bias = s->up_bias,
                                .down_bias = s->down_bias,
                                .alpha = s->alpha,
                                .beta = s->beta,
                                .limit = s->limit,
                                .input_in = in.in,
                                .input_down = in.down};
    if (rc == OK) rc = moe_gpu_ready(m->gpu, &v, e);
    m->gpu_ready = rc == OK;
    return rc;
}

err_t gpu_set_weights(struct moult_moe *m, const moult_moe_weights *given, struct err *e)
{
    moult_moe_weights w = *given;
    struct fetched f = {.m = m};
    struct moe_set *s = mem_alloc(sizeof *s);
    err_t rc = api_device(m, w.device, w.stream, e);
    if (rc == OK) rc = api_check_arrangement(m, &w, e);
    if (rc == OK) {
        moe_gpu_stream(m->gpu, w.stream);
        if (w.device == MOULT_DEVICE_CUDA) rc = fetch_vectors(&f, &w, e);
    }
    if (rc == OK) rc = replace(m, &w, s, e);
    fetched_free(&f);
    api_set_free(m, s);
    return rc;
}

/* --- run */

static struct moe_floats floats(const void *at, int32_t dtype)
{
    return (struct moe_floats){.at = at, .bf16 = dtype == MOULT_DTYPE_BF16};
}

err_t gpu_run(struct moult_moe *m, const moult_moe_call *c, struct err *e)
{
    struct route_rule rule = route_rule(&m->route);
    struct moe_choose_args choose = {
        .logits = floats(c->logits, c->logits_dtype),
        .bias = floats(c->routing_bias, c->bias_dtype),
        .replay = c->replay_ids,
        .n_experts = m->route.n_experts,
        .top_k = m->route.top_k,
        .n_group = m->route.n_group,
        .topk_group = m->route.topk_group,
        .key = (int32_t)(rule.key == KEY_BIASED ? KEY_SIGMOID : rule.key),
        .weigh = (int32_t)rule.weigh,
        .divide = rule.divide,
        .scales = rule.scales,
        .scaling = m->route.scaling,
    };
    struct moe_gpu_call call = {
        .n_tokens = c->num_tokens,
        .input = floats(c->input, c->input_dtype),
        .output = c->output,
        .output_bf16 = c->output_dtype == MOULT_DTYPE_BF16,
        .choose = c->logits ? &choose : NULL,
        .take = {.packed = c->packed,
                 .ids = c->topk_ids,
                 .weights = floats(c->topk_weights, c->weights_dtype)},
        .packed_out = c->packed_out,
        .ids_out = c->replay_out,
    };
    return moe_gpu_run(m->gpu, &call, c->stream, e);
}

/* --- resident form */

static err_t check_gpu(const struct moult_moe *m, struct err *e)
{
    if (m == NULL) return err_set(e, ERR_INPUT, "moe: NULL");
    return m->gpu ? OK : err_set(e, ERR_INPUT, "moe: it must be of device CUDA (1)");
}

static err_t check_size(int32_t format, int64_t rows, int64_t cols, size_t *bytes, struct err *e)
{
    if (format < 0 || format >= FORMAT_COUNT)
        return err_set(e, ERR_INPUT, "format: %d; allowed: 0 to %d", format, FORMAT_COUNT - 1);
    if (rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX)
        return err_set(e, ERR_INPUT, "rows %lld, cols %lld: must be positive and fit memory",
                       (long long)rows, (long long)cols);
    return moe_gpu_resident_bytes(bytes, (format_t)format, (uint64_t)rows, (uint64_t)cols, e);
}

int32_t moult_gpu_resident_bytes(size_t *out, int32_t format, int64_t rows, int64_t cols,
                                 moult_error *err)
{
    struct err e = {0};
    size_t bytes;
    err_t rc = check_size(format, rows, cols, &bytes, &e);
    if (rc == OK && out == NULL) rc = err_set(&e, ERR_INPUT, "out: NULL");
    if (rc == OK) *out = bytes;
    return api_return(err, rc, &e);
}

/* One matrix on the host, its values looked at. */
static err_t pack(struct moult_moe *m, void *resident, const moult_matrices *from, int64_t rows,
                  int64_t cols, struct err *e)
{
    size_t data, scale;
    struct fetched f = {.m = m};
    const void *d = from->data, *c = from->scale, *t = from->tensor_scale, *i = from->input_scale;
    if (!format_bytes((format_t)from->format, (uint64_t)rows, (uint64_t)cols, &data, &scale))
        return err_set(e, ERR_INPUT, "a matrix of that size overflows");
    err_t rc = fetch(&f, &d, data, e);
    if (rc == OK) rc = fetch(&f, &c, scale, e);
    if (rc == OK) rc = fetch(&f, &t, sizeof(float), e);
    if (rc == OK) rc = fetch(&f, &i, sizeof(float), e);
    if (rc == OK) {
        struct format_parts p = {(format_t)from->format,      (size_t)rows, (size_t)cols, d, c,
                                 t ? *(const float *)t : 1.0f};
        rc = api_check_values(&p, e);
        if (rc == OK) rc = moe_gpu_pack(m->gpu, resident, &p, i ? *(const float *)i : NAN, e);
    }
    fetched_free(&f);
    return rc;
}

int32_t moult_gpu_pack(moult_moe *m, void *resident, const moult_matrices *from, int64_t rows,
                       int64_t cols, void *stream, moult_error *err)
{
    struct err e = {0};
    size_t bytes;
    err_t rc = check_gpu(m, &e);
    if (rc == OK && (!resident || !from))
        rc = err_set(&e, ERR_INPUT, "%s: NULL", from ? "resident" : "matrix");
    if (rc == OK) rc = api_check_matrices(from, "matrix", &e);
    if (rc == OK) rc = check_size(from->format, rows, cols, &bytes, &e);
    if (rc == OK) {
        moe_gpu_stream(m->gpu, stream);
        rc = pack(m, resident, from, rows, cols, &e);
    }
    return api_return(err, rc, &e);
}

int32_t moult_gpu_unpack(moult_moe *m, const moult_matrix_out *out, int32_t format, int64_t rows,
                         int64_t cols, const void *resident, void *stream, moult_error *err)
{
    struct err e = {0};
    size_t bytes;
    err_t rc = check_gpu(m, &e);
    if (rc == OK) rc = check_size(format, rows, cols, &bytes, &e);
    if (rc == OK && (!out || !resident)) rc = err_set(&e, ERR_INPUT, "out, resident: NULL");
    if (rc == OK) {
        moe_gpu_stream(m->gpu, stream);
        rc = moe_gpu_unpack(m->gpu, out->data, out->scale, out->tensor_scale, out->input_scale,
                            (format_t)format, (uint64_t)rows, (uint64_t)cols, resident, &e);
    }
    return api_return(err, rc, &e);
}

int32_t moult_gpu_resident(void **out, const moult_moe *m, int32_t expert, int32_t matrix,
                           moult_error *err)
{
    struct err e = {0};
    err_t rc = check_gpu(m, &e);
    if (rc == OK && !m->gpu_ready) rc = err_set(&e, ERR_STATE, "no weights were set");
    if (rc == OK && (expert < 0 || expert >= m->shape.n_local || matrix < 0 || matrix > MOE_DOWN))
        rc = err_set(&e, ERR_INPUT, "expert %d, matrix %d; allowed: below %d and %d", expert,
                     matrix, m->shape.n_local, MOE_MATRICES);
    if (rc == OK && out == NULL) rc = err_set(&e, ERR_INPUT, "out: NULL");
    if (rc == OK) *out = moe_gpu_resident(m->gpu, (size_t)expert * MOE_MATRICES + (size_t)matrix);
    return api_return(err, rc, &e);
}
