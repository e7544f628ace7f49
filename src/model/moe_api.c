#include "model/moe_api.h"
#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include "base/pool.h"
#include <string.h>

enum { MAX_TOKENS_DEFAULT = 512 };

int32_t moult_version(void)
{
    return MOULT_API_VERSION;
}

int32_t api_return(moult_error *out, err_t rc, const struct err *e)
{
    static const int32_t codes[] = {
        [OK] = MOULT_OK,
        [ERR_INPUT] = MOULT_ERR_INPUT,
        [ERR_STATE] = MOULT_ERR_STATE,
        [ERR_UNSUPPORTED] = MOULT_ERR_UNSUPPORTED,
        [ERR_NOMEM] = MOULT_ERR_NOMEM,
        [ERR_SYSTEM] = MOULT_ERR_SYSTEM,
        [ERR_NOTFOUND] = MOULT_ERR_UNSUPPORTED, /* a GPU, a driver */
    };
    if (rc == OK) return MOULT_OK;
    int32_t code =
        (size_t)rc < sizeof codes / sizeof codes[0] && codes[rc] ? codes[rc] : MOULT_ERR_SYSTEM;
    if (out == NULL) return code;
    out->code = code;
    size_t n = strnlen(e->msg, sizeof out->message - 1);
    memcpy(out->message, e->msg, n);
    out->message[n] = 0;
    return code;
}

err_t api_read(void *own, size_t own_size, size_t least, const void *from, struct err *e)
{
    size_t size = 0;
    if (from == NULL) return err_set(e, ERR_INPUT, "struct: NULL");
    memcpy(&size, from, sizeof size);
    if (size < least)
        return err_set(e, ERR_INPUT, "size: %zu; set it to sizeof the struct (at least %zu)", size,
                       least);
    for (size_t i = own_size; i < size; i++)
        if (((const char *)from)[i] != 0)
            return err_set(e, ERR_UNSUPPORTED,
                           "size: %zu; a field past %zu is set that this "
                           "library does not know",
                           size, own_size);
    memset(own, 0, own_size);
    memcpy(own, from, size < own_size ? size : own_size);
    return OK;
}

err_t api_device(const struct moult_moe *m, int32_t device, const void *stream, struct err *e)
{
    if (device != MOULT_DEVICE_CPU && device != MOULT_DEVICE_CUDA)
        return err_set(e, ERR_INPUT, "device: %d; allowed: CPU (0), CUDA (1)", device);
    if (m->gpu) return OK;
    if (device != MOULT_DEVICE_CPU)
        return err_set(e, ERR_UNSUPPORTED, "device: CUDA (1); a handle on the CPU allows CPU (0)");
    if (stream != NULL)
        return err_set(e, ERR_INPUT, "stream: a handle on the CPU has none; allowed: NULL");
    return OK;
}

static err_t check_enum(int32_t v, int32_t end, const char *name, struct err *e)
{
    if (v >= 0 && v < end) return OK;
    return err_set(e, ERR_INPUT, "%s: %d; allowed: 0 to %d", name, v, end - 1);
}

static err_t fill(struct moult_moe *m, const moult_moe_config *c, struct err *e)
{
    err_t rc = check_enum(c->device, MOULT_DEVICE_CUDA + 1, "device", e);
    if (rc == OK) rc = check_enum(c->activation, MOE_ACTIVATION_COUNT, "activation", e);
    if (rc == OK) rc = check_enum(c->activation_format, ACT_COUNT, "activation_format", e);
    if (rc == OK) rc = check_enum(c->routing_method, ROUTE_COUNT, "routing_method", e);
    if (rc != OK) return rc;
    if (c->num_threads < 0 || c->num_threads > 1024)
        return err_set(e, ERR_INPUT, "num_threads: %d; allowed: 0 to 1024", c->num_threads);
    m->route =
        (struct route){.method = (route_method_t)c->routing_method,
                       .n_experts = c->num_experts,
                       .top_k = c->top_k,
                       .n_group = c->n_group,
                       .topk_group = c->topk_group,
                       .scaling = c->routed_scaling_factor != 0 ? c->routed_scaling_factor : 1.0f,
                       .norm = c->norm_topk_prob != 0};
    m->shape = (struct moe_shape){
        .hidden = c->hidden_size,
        .inner = c->intermediate_size,
        .n_experts = c->num_experts,
        .top_k = c->top_k,
        .local_offset = c->local_expert_offset,
        .n_local = c->local_num_experts ? c->local_num_experts : c->num_experts,
        .activation = (moe_activation_t)c->activation,
        .weigh_input = route_weighs_input(m->route.method) || c->weights_on_input,
        .act = (act_t)c->activation_format};
    m->max_tokens = c->max_tokens ? c->max_tokens : MAX_TOKENS_DEFAULT;
    return route_check(&m->route, e);
}

/* An array [a][b] of elements; false when there is no memory. */
static bool get(void *out, size_t a, size_t b, size_t elem)
{
    size_t n;
    void *p = mul_size(&n, a, b) ? mem_try_array(n ? n : 1, elem) : NULL;
    memcpy(out, &p, sizeof p);
    return p != NULL;
}

static err_t get_buffers(struct moult_moe *m, struct err *e)
{
    size_t t = (size_t)m->max_tokens, hidden = (size_t)m->shape.hidden;
    size_t ne = (size_t)m->shape.n_experts, k = (size_t)m->shape.top_k;
    if (get(&m->x, t, hidden, 4) && get(&m->y, t, hidden, 4) && get(&m->logits, t, ne, 4) &&
        get(&m->bias, ne, 1, 4) && get(&m->weights, t, k, 4))
        return OK;
    return err_set(e, ERR_NOMEM, "no memory for %d tokens", m->max_tokens);
}

static err_t cpu_create(struct moult_moe *m, const moult_moe_config *c, struct err *e)
{
    err_t rc = cpu_ops_get(&m->ops, c->isa, e);
    if (rc != OK) return rc;
    m->pool = pool_new(c->num_threads ? c->num_threads : pool_cpus());
    rc = moe_op_new(&m->op, &m->shape, m->ops, m->pool, m->max_tokens, e);
    return rc == OK ? get_buffers(m, e) : rc;
}

int32_t moult_moe_create(moult_moe **out, const moult_moe_config *config, moult_error *err)
{
    struct err e = {0};
    moult_moe_config c;
    if (out == NULL) return api_return(err, err_set(&e, ERR_INPUT, "out: NULL"), &e);
    err_t rc = api_read(&c, sizeof c, offsetof(moult_moe_config, max_tokens), config, &e);
    if (rc != OK) return api_return(err, rc, &e);
    struct moult_moe *m = mem_alloc(sizeof *m);
    rc = fill(m, &c, &e);
    if (rc == OK)
        rc = c.device == MOULT_DEVICE_CUDA ? gpu_create(m, &c, &e) : cpu_create(m, &c, &e);
    if (rc == OK)
        *out = m;
    else
        moult_moe_destroy(m);
    return api_return(err, rc, &e);
}

int32_t moult_moe_workspace_bytes(size_t *out, const moult_moe_config *config, moult_error *err)
{
    struct err e = {0};
    moult_moe_config c;
    struct moult_moe m = {0};
    size_t bytes = 0;
    err_t rc = out ? api_read(&c, sizeof c, offsetof(moult_moe_config, max_tokens), config, &e)
                   : err_set(&e, ERR_INPUT, "out: NULL");
    if (rc == OK) rc = fill(&m, &c, &e);
    if (rc == OK && c.device == MOULT_DEVICE_CUDA) rc = gpu_work_bytes(&bytes, &m, &e);
    if (rc == OK) *out = bytes;
    return api_return(err, rc, &e);
}

void moult_moe_destroy(moult_moe *m)
{
    if (m == NULL) return;
    gpu_destroy(m);
    api_set_free(m, m->set);
    moe_op_free(m->op);
    pool_free(m->pool);
    mem_free(m->x);
    mem_free(m->y);
    mem_free(m->logits);
    mem_free(m->bias);
    mem_free(m->weights);
    mem_free(m);
}

/* Run */

static err_t check_choices(const struct moult_moe *m, const moult_moe_call *c, struct err *e)
{
    int given = (c->logits != NULL) + (c->packed != NULL) + (c->topk_ids != NULL);
    if (given != 1)
        return err_set(e, ERR_INPUT, "logits, packed, topk_ids: %d are given; allowed: one", given);
    if ((c->topk_ids != NULL) != (c->topk_weights != NULL))
        return err_set(e, ERR_INPUT, "topk_ids and topk_weights go together");
    if (c->logits) {
        struct route r = m->route;
        static const float some; /* whether there is one is what is checked */
        r.bias = c->routing_bias ? &some : NULL;
        return route_check(&r, e);
    }
    if (c->routing_bias || c->replay_ids)
        return err_set(e, ERR_INPUT, "%s: only with logits",
                       c->routing_bias ? "routing_bias" : "replay_ids");
    return OK;
}

static err_t check_call(const struct moult_moe *m, const moult_moe_call *c, struct err *e)
{
    const struct {
        int32_t v;
        const char *name;
    } dtypes[] = {{c->input_dtype, "input_dtype"},
                  {c->output_dtype, "output_dtype"},
                  {c->logits_dtype, "logits_dtype"},
                  {c->bias_dtype, "bias_dtype"},
                  {c->weights_dtype, "weights_dtype"}};
    if (m->gpu ? !m->gpu_ready : !m->set) return err_set(e, ERR_STATE, "no weights were set");
    if (c->num_tokens < 0)
        return err_set(e, ERR_INPUT, "num_tokens: %d; allowed: 0 and more", c->num_tokens);
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        err_t rc = check_enum(dtypes[i].v, MOULT_DTYPE_BF16 + 1, dtypes[i].name, e);
        if (rc != OK) return rc;
    }
    err_t rc = api_device(m, MOULT_DEVICE_CPU, c->stream, e);
    if (rc == OK && c->num_tokens > 0 && (!c->input || !c->output))
        rc = err_set(e, ERR_INPUT, "%s: NULL", c->input ? "output" : "input");
    return rc == OK ? check_choices(m, c, e) : rc;
}

/* n values from element `at` of an array of either type. */
static void widen(float *out, const void *from, int32_t dtype, size_t at, size_t n)
{
    if (dtype == MOULT_DTYPE_F32) {
        memcpy(out, (const float *)from + at, n * sizeof *out);
        return;
    }
    const uint16_t *h = from;
    for (size_t i = 0; i < n; i++)
        out[i] = bf16_to_f32(h[at + i]);
}

static void narrow(void *to, int32_t dtype, size_t at, const float *x, size_t n)
{
    if (dtype == MOULT_DTYPE_F32) {
        memcpy((float *)to + at, x, n * sizeof *x);
        return;
    }
    uint16_t *h = to;
    for (size_t i = 0; i < n; i++)
        h[at + i] = f32_to_bf16(x[i]);
}

static void choose(struct moult_moe *m, const moult_moe_call *c, size_t t0, int32_t n)
{
    size_t k = (size_t)m->shape.top_k, ne = (size_t)m->shape.n_experts;
    if (c->logits) {
        struct route r = m->route;
        r.bias = c->routing_bias ? m->bias : NULL;
        widen(m->logits, c->logits, c->logits_dtype, t0 * ne, (size_t)n * ne);
        moe_op_route(m->op, &r, m->logits, n, c->replay_ids ? c->replay_ids + t0 * k : NULL);
    } else if (c->packed) {
        moe_op_unpack(m->op, c->packed + t0 * k, n);
    } else {
        widen(m->weights, c->topk_weights, c->weights_dtype, t0 * k, (size_t)n * k);
        moe_op_take(m->op, c->topk_ids + t0 * k, m->weights, n);
    }
    if (c->replay_out) moe_op_replay(m->op, c->replay_out + t0 * k, n);
    if (c->packed_out) moe_op_pack(m->op, c->packed_out + t0 * k, n);
}

static void run_slice(struct moult_moe *m, const moult_moe_call *c, size_t t0, int32_t n)
{
    size_t hidden = (size_t)m->shape.hidden, at = t0 * hidden, len = (size_t)n * hidden;
    widen(m->x, c->input, c->input_dtype, at, len);
    if (c->input_dtype == MOULT_DTYPE_F32) m->ops->round(m->x, m->x, len);
    memset(m->y, 0, len * sizeof *m->y);
    choose(m, c, t0, n);
    moe_op_run(m->op, &m->set->view, m->x, n, m->y);
    narrow(c->output, c->output_dtype, at, m->y, len);
}

int32_t moult_moe_run(moult_moe *m, const moult_moe_call *call, moult_error *err)
{
    struct err e = {0};
    moult_moe_call c;
    if (m == NULL) return api_return(err, err_set(&e, ERR_INPUT, "moe: NULL"), &e);
    err_t rc = api_read(&c, sizeof c, offsetof(moult_moe_call, replay_out), call, &e);
    if (rc == OK) rc = check_call(m, &c, &e);
    if (rc != OK) return api_return(err, rc, &e);
    if (m->gpu) return api_return(err, gpu_run(m, &c, &e), &e);
    if (c.routing_bias) widen(m->bias, c.routing_bias, c.bias_dtype, 0, (size_t)m->shape.n_experts);
    for (int32_t t = 0, n; t < c.num_tokens; t += n) {
        n = c.num_tokens - t < m->max_tokens ? c.num_tokens - t : m->max_tokens;
        run_slice(m, &c, (size_t)t, n);
    }
    return MOULT_OK;
}
