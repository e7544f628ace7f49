/*
 * test_moe_gpu.c - include/moult_moe.h on a GPU: against the CPU's operator by the same calls, in
 * every format, method, arrangement and slice; bits that do not depend on form, batch or graph.
 */
#include "cuda/gpu.h"
#include "unit/moe_rig.h"
#include <moult_moe.h>

static struct gpu gpu;

enum { HIDDEN = 160, INNER = 72, EXPERTS = 12, K = 3, TOKENS = 70 };

#define PTR(p) ((void *)(uintptr_t)(p))
#define DO(call)                                                           \
    do {                                                                   \
        moult_error do_err = {0};                                          \
        if ((call) != MOULT_OK) fail_msg("%s: %s", #call, do_err.message); \
    } while (0)

static const moult_moe_config base = {.size = sizeof base,
                                      .hidden_size = HIDDEN,
                                      .intermediate_size = INNER,
                                      .num_experts = EXPERTS,
                                      .top_k = K,
                                      .routing_method = MOULT_ROUTE_RENORMALIZE,
                                      .max_tokens = 32};

/* All experts' bytes of gate, up and down, and of gate and up in one matrix. */
struct stacked {
    uint8_t *data[3], *scale[3], *fused, *fused_scale;
    float tensor[3][EXPERTS], input[3][EXPERTS], pair[EXPERTS][2], pair_input[EXPERTS][2];
    size_t data_bytes[3], scale_bytes[3]; /* of an expert */
};

struct rig {
    struct moe_rig g;
    struct stacked s;
    moult_moe_weights w; /* host arrays, no biases */
    float x[TOKENS * HIDDEN], logits[TOKENS * EXPERTS], bias[EXPERTS];
    devptr_t dx, dlogits, dbias, dout, dpacked, dids;
};

static void stack(struct rig *r)
{
    struct stacked *s = &r->s;
    format_t f = r->g.format;
    for (int i = 0; i < 3; i++) {
        const struct canon *c = &r->g.canon[i];
        assert_true(format_bytes(f, c->rows, c->cols, &s->data_bytes[i], &s->scale_bytes[i]));
        s->data[i] = mem_alloc(s->data_bytes[i] * EXPERTS);
        s->scale[i] = mem_alloc(s->scale_bytes[i] * EXPERTS + 4);
        for (int e = 0; e < EXPERTS; e++) {
            c = &r->g.canon[e * 3 + i];
            memcpy(s->data[i] + (size_t)e * s->data_bytes[i], c->data, s->data_bytes[i]);
            memcpy(s->scale[i] + (size_t)e * s->scale_bytes[i], c->scale, s->scale_bytes[i]);
            s->tensor[i][e] = c->tensor;
            s->input[i][e] = c->input;
            if (i < 2) s->pair[e][i] = c->tensor, s->pair_input[e][i] = c->input;
        }
    }
    s->fused = mem_alloc(2 * s->data_bytes[0] * EXPERTS);
    s->fused_scale = mem_alloc(2 * s->scale_bytes[0] * EXPERTS + 4);
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < 2; i++) { /* gate first */
            size_t at = (size_t)(2 * e + i);
            memcpy(s->fused + at * s->data_bytes[0], s->data[i] + (size_t)e * s->data_bytes[0],
                   s->data_bytes[0]);
            memcpy(s->fused_scale + at * s->scale_bytes[0],
                   s->scale[i] + (size_t)e * s->scale_bytes[0], s->scale_bytes[0]);
        }
}

static void rig_open(struct rig *r, format_t f)
{
    rig_new(&r->g, f, HIDDEN, INNER, EXPERTS);
    stack(r);
    r->w = (moult_moe_weights){.size = sizeof r->w};
    moult_matrices *m[3] = {&r->w.gate, &r->w.up, &r->w.down};
    for (int i = 0; i < 3; i++) {
        *m[i] = (moult_matrices){.format = (int32_t)f, .data = r->s.data[i]};
        if (f != FORMAT_BF16) m[i]->scale = r->s.scale[i], m[i]->input_scale = r->s.input[i];
        if (formats[f].tensor) m[i]->tensor_scale = r->s.tensor[i];
    }
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        r->x[i] = rig_normal();
    for (int i = 0; i < TOKENS * EXPERTS; i++)
        r->logits[i] = act_round(rig_normal() * 2);
    for (int i = 0; i < EXPERTS; i++)
        r->bias[i] = act_round(rig_normal() * 0.1f);
    r->dx = gpu_new(&gpu, r->x, sizeof r->x);
    r->dlogits = gpu_new(&gpu, r->logits, sizeof r->logits);
    r->dbias = gpu_new(&gpu, r->bias, sizeof r->bias);
    r->dout = gpu_new(&gpu, NULL, sizeof r->x);
    r->dpacked = gpu_new(&gpu, NULL, TOKENS * K * 4);
    r->dids = gpu_new(&gpu, NULL, TOKENS * K * 2);
}

static void rig_close(struct rig *r)
{
    const devptr_t all[] = {r->dx, r->dlogits, r->dbias, r->dout, r->dpacked, r->dids};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(&gpu, all[i]);
    for (int i = 0; i < 3; i++)
        mem_free(r->s.data[i]), mem_free(r->s.scale[i]);
    mem_free(r->s.fused), mem_free(r->s.fused_scale);
    rig_free(&r->g);
}

static moult_moe *handle(moult_moe_config c, bool on_gpu, const moult_moe_weights *w)
{
    moult_moe *moe;
    c.device = on_gpu ? MOULT_DEVICE_CUDA : MOULT_DEVICE_CPU;
    c.num_threads = 2;
    DO(moult_moe_create(&moe, &c, &do_err));
    if (w) DO(moult_moe_set_weights(moe, w, &do_err));
    return moe;
}

static moult_moe_call call_of(const struct rig *r, bool on_gpu)
{
    return (moult_moe_call){.size = sizeof(moult_moe_call),
                            .num_tokens = TOKENS,
                            .input = on_gpu ? PTR(r->dx) : r->x,
                            .output = PTR(r->dout),
                            .logits = on_gpu ? PTR(r->dlogits) : r->logits,
                            .stream = on_gpu ? queue_stream(gpu.q) : NULL};
}

/* y of a call with the GPU's addresses, over poison. */
static void run_gpu(moult_moe *moe, const struct rig *r, moult_moe_call c, float *y)
{
    queue_fill(gpu.q, r->dout, 0xAA, sizeof r->x);
    DO(moult_moe_run(moe, &c, &do_err));
    gpu_read(&gpu, y, r->dout, sizeof r->x);
}

static void run_cpu(moult_moe *moe, moult_moe_call c, float *y)
{
    c.output = y;
    DO(moult_moe_run(moe, &c, &do_err));
}

/* |a - b| / |b| */
static double distance(const float *a, const float *b, size_t n)
{
    double d = 0, s = 0;
    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(d / s);
}

static void near(const char *what, const float *a, const float *b, double most)
{
    double d = distance(a, b, TOKENS * HIDDEN);
    if (!(d <= most)) fail_msg("%s: off by %.2e, allowed %.2e", what, d, most);
}

/* Sums on the tensor core are 3e-6 off; where BF16 then rounds the other way, 2^-9 of an element.
 */
#define NEAR 3e-4

static void every_format_and_form(void **state)
{
    (void)state;
    static float want[TOKENS * HIDDEN], fused[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    static int32_t cpu_packed[TOKENS * K], packed[TOKENS * K], ids[TOKENS * K];
    static float weights[TOKENS * K];
    static int16_t replay[TOKENS * K];
    for (int f = 0; f < FORMAT_COUNT; f++) {
        static struct rig r;
        rig_open(&r, (format_t)f);
        moult_moe *cpu = handle(base, false, &r.w), *moe = handle(base, true, &r.w);
        moult_moe_call c = call_of(&r, false), g = call_of(&r, true);
        c.packed_out = cpu_packed;
        run_cpu(cpu, c, want);
        g.packed_out = PTR(r.dpacked);
        g.replay_out = PTR(r.dids);
        run_gpu(moe, &r, g, fused);
        near(formats[f].name, fused, want, NEAR);
        gpu_read(&gpu, packed, r.dpacked, sizeof packed);
        gpu_read(&gpu, replay, r.dids, sizeof replay);
        assert_memory_equal(packed, cpu_packed, sizeof packed);
        for (int i = 0; i < TOKENS * K; i++) {
            ids[i] = packed[i] >> 16;
            weights[i] = bf16_to_f32((uint16_t)packed[i]);
            assert_int_equal(replay[i], ids[i]);
        }
        g.packed_out = NULL, g.replay_out = NULL, g.logits = NULL;
        g.packed = PTR(r.dpacked);
        run_gpu(moe, &r, g, y);
        assert_memory_equal(y, fused, sizeof y);
        devptr_t dids = gpu_new(&gpu, ids, sizeof ids), dw = gpu_new(&gpu, weights, sizeof weights);
        g.packed = NULL;
        g.topk_ids = PTR(dids);
        g.topk_weights = PTR(dw);
        run_gpu(moe, &r, g, y);
        assert_memory_equal(y, fused, sizeof y);
        g.stream = NULL; /* the default stream */
        MUST(queue_sync(gpu.q, &must_e));
        DO(moult_moe_run(moe, &g, &do_err));
        DO(moult_moe_set_weights(moe, &r.w, &do_err)); /* waits for it */
        gpu_read(&gpu, y, r.dout, sizeof y);
        assert_memory_equal(y, fused, sizeof y);
        gpu_free(&gpu, dids), gpu_free(&gpu, dw);
        moult_moe_destroy(cpu);
        moult_moe_destroy(moe);
        rig_close(&r);
    }
}

/* Ids of nobody and repeated ones; packed ids of other slices. */
static void strange_choices(void **state)
{
    (void)state;
    static struct rig r;
    static float want[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    static int32_t ids[TOKENS * K];
    static float weights[TOKENS * K];
    static const int32_t odd[] = {-1, 70000, 65536, 3, 3, EXPERTS, -32768, 5, 11};
    rig_open(&r, FORMAT_NVFP4);
    moult_moe *cpu = handle(base, false, &r.w), *moe = handle(base, true, &r.w);
    for (int i = 0; i < TOKENS * K; i++) {
        ids[i] = odd[i * 7 % 9];
        weights[i] = rig_normal();
    }
    devptr_t dids = gpu_new(&gpu, ids, sizeof ids), dw = gpu_new(&gpu, weights, sizeof weights);
    moult_moe_call c = call_of(&r, false), g = call_of(&r, true);
    c.logits = g.logits = NULL;
    c.topk_ids = ids, c.topk_weights = weights;
    g.topk_ids = PTR(dids), g.topk_weights = PTR(dw);
    run_cpu(cpu, c, want);
    run_gpu(moe, &r, g, y);
    near("strange ids", y, want, NEAR);
    gpu_free(&gpu, dids), gpu_free(&gpu, dw);
    moult_moe_destroy(cpu);
    moult_moe_destroy(moe);
    rig_close(&r);
}

static void check_method(struct rig *r, moult_moe_config config, bool bias, bool replay)
{
    static float want[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    static int32_t cpu_packed[TOKENS * K], packed[TOKENS * K];
    static int16_t ids[TOKENS * K];
    char what[64];
    size_t n = (size_t)(TOKENS * config.top_k);
    moult_moe *cpu = handle(config, false, &r->w), *moe = handle(config, true, &r->w);
    moult_moe_call c = call_of(r, false), g = call_of(r, true);
    for (size_t i = 0; i < n; i++) /* among them some that are none */
        ids[i] = (int16_t)(i * 5 % (EXPERTS + 1) - (i % 11 == 0 ? EXPERTS + 1 : 0));
    devptr_t dids = gpu_new(&gpu, ids, sizeof ids);
    if (bias) c.routing_bias = r->bias, g.routing_bias = PTR(r->dbias);
    if (replay) c.replay_ids = ids, g.replay_ids = PTR(dids);
    c.packed_out = cpu_packed;
    g.packed_out = PTR(r->dpacked);
    run_cpu(cpu, c, want);
    run_gpu(moe, r, g, y);
    gpu_read(&gpu, packed, r->dpacked, n * 4);
    snprintf(what, sizeof what, "method %d%s%s", config.routing_method, bias ? ", bias" : "",
             replay ? ", replay" : "");
    for (size_t i = 0; i < n; i++)
        if (packed[i] != cpu_packed[i])
            fail_msg("%s: choice %zu is %08x, must be %08x", what, i, (unsigned)packed[i],
                     (unsigned)cpu_packed[i]);
    near(what, y, want, NEAR);
    gpu_free(&gpu, dids);
    moult_moe_destroy(cpu);
    moult_moe_destroy(moe);
}

static void every_method(void **state)
{
    (void)state;
    static struct rig r;
    rig_open(&r, FORMAT_BF16);
    for (int m = 0; m <= MOULT_ROUTE_TOPK_SIGMOID; m++)
        for (int replay = 0; replay < 2; replay++) {
            moult_moe_config c = base;
            c.routing_method = m;
            c.norm_topk_prob = replay;
            if (m == MOULT_ROUTE_LLAMA4) c.top_k = 1;
            bool biased = m == MOULT_ROUTE_DEEPSEEK_V3 || m == MOULT_ROUTE_MINIMAX2;
            if (biased) c.routed_scaling_factor = 2.5f;
            check_method(&r, c, biased, replay);
            if (m != MOULT_ROUTE_DEEPSEEK_V3) continue;
            c.n_group = 4;
            c.topk_group = 2;
            check_method(&r, c, true, replay);
            check_method(&r, c, false, replay);
        }
    rig_close(&r);
}

/* Arrays on the GPU, in every arrangement, with biases and either activation. */
static void every_arrangement(void **state)
{
    (void)state;
    static float want[TOKENS * HIDDEN], y[TOKENS * HIDDEN], first[TOKENS * HIDDEN];
    static const format_t some[] = {FORMAT_BF16, FORMAT_NVFP4, FORMAT_FP8_CHANNEL, FORMAT_MXFP4};
    for (size_t f = 0; f < sizeof some / sizeof some[0]; f++)
        for (int oai = 0; oai < 2; oai++) {
            static struct rig r;
            rig_open(&r, some[f]);
            moult_moe_config config = base;
            config.activation = oai ? MOULT_SWIGLU_OAI : MOULT_SWIGLU;
            moult_moe_weights w = r.w;
            w.gate_bias = r.g.bias[0], w.up_bias = r.g.bias[1], w.down_bias = r.g.bias[2];
            if (oai) w.alpha = r.g.alpha, w.beta = r.g.beta, w.limit = r.g.limit;
            moult_moe *cpu = handle(config, false, &w), *moe = handle(config, true, &w);
            run_cpu(cpu, call_of(&r, false), want);
            run_gpu(moe, &r, call_of(&r, true), first);
            near(oai ? "swiglu-oai with biases" : "swiglu with biases", first, want, NEAR);
            /* The same on the GPU. */
            const void **all[] = {&w.gate.data, &w.gate.scale, &w.up.data,
                                  &w.up.scale,  &w.down.data,  &w.down.scale};
            const float **floats[] = {&w.gate.tensor_scale, &w.gate.input_scale,
                                      &w.up.tensor_scale,   &w.up.input_scale,
                                      &w.down.tensor_scale, &w.down.input_scale};
            devptr_t mem[16];
            int n = 0;
            for (int i = 0; i < 6; i++) {
                size_t bytes = i % 2 ? r.s.scale_bytes[i / 2] : r.s.data_bytes[i / 2];
                if (*all[i]) *all[i] = PTR(mem[n++] = gpu_new(&gpu, *all[i], bytes * EXPERTS));
                if (*floats[i]) *floats[i] = PTR(mem[n++] = gpu_new(&gpu, *floats[i], EXPERTS * 4));
            }
            w.gate_bias = w.up_bias = w.down_bias = w.alpha = w.beta = w.limit = NULL;
            w.device = MOULT_DEVICE_CUDA;
            w.stream = queue_stream(gpu.q);
            moult_moe_weights host = r.w;
            DO(moult_moe_set_weights(cpu, &host, &do_err));
            DO(moult_moe_set_weights(moe, &w, &do_err));
            run_cpu(cpu, call_of(&r, false), want);
            run_gpu(moe, &r, call_of(&r, true), first);
            near("arrays on the GPU", first, want, NEAR);
            for (int i = 0; i < n; i++)
                gpu_free(&gpu, mem[i]);
            /* A fused pair is the same weights. */
            host.arrangement = MOULT_FUSED_GATE_UP;
            host.gate.data = r.s.fused;
            if (host.gate.scale) host.gate.scale = r.s.fused_scale;
            if (host.gate.tensor_scale) host.gate.tensor_scale = r.s.pair[0];
            if (host.gate.input_scale) host.gate.input_scale = r.s.pair_input[0];
            host.up = (moult_matrices){0};
            DO(moult_moe_set_weights(moe, &host, &do_err));
            run_gpu(moe, &r, call_of(&r, true), y);
            assert_memory_equal(y, first, sizeof y);
            moult_moe_destroy(cpu);
            moult_moe_destroy(moe);
            rig_close(&r);
        }
}

static void activation_formats(void **state)
{
    (void)state;
    static const struct {
        format_t f;
        int32_t act;
    } rows[] = {{FORMAT_FP8_BLOCK, MOULT_ACT_FP8_BLOCK}, {FORMAT_MXFP8, MOULT_ACT_MXFP8},
                {FORMAT_NVFP4, MOULT_ACT_NVFP4},         {FORMAT_NVFP4, MOULT_ACT_NVFP4_PER_TOKEN},
                {FORMAT_NVFP4, MOULT_ACT_MXFP8},         {FORMAT_MXFP4, MOULT_ACT_MXFP8},
                {FORMAT_BF16, MOULT_ACT_NVFP4}};
    static float plain[TOKENS * HIDDEN], want[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        static struct rig r;
        rig_open(&r, rows[i].f);
        moult_moe_config c = base;
        moult_moe *cpu = handle(c, false, &r.w);
        run_cpu(cpu, call_of(&r, false), plain);
        moult_moe_destroy(cpu);
        c.activation_format = rows[i].act;
        cpu = handle(c, false, &r.w);
        moult_moe *moe = handle(c, true, &r.w);
        run_cpu(cpu, call_of(&r, false), want);
        run_gpu(moe, &r, call_of(&r, true), y);
        double apart = distance(plain, want, TOKENS * HIDDEN);
        print_message("%s weights, activations %d: %.2e off, %.2e from BF16's\n",
                      formats[rows[i].f].name, rows[i].act, distance(y, want, TOKENS * HIDDEN),
                      apart);
        near("activation format", y, want, rows[i].f == FORMAT_BF16 ? NEAR : apart * 0.2);
        moult_moe_destroy(cpu);
        moult_moe_destroy(moe);
        rig_close(&r);
    }
    moult_moe_config c = base;
    moult_moe *moe;
    moult_error err;
    static struct rig r;
    rig_open(&r, FORMAT_MXFP8);
    c.device = MOULT_DEVICE_CUDA;
    c.activation_format = MOULT_ACT_FP8_BLOCK;
    DO(moult_moe_create(&moe, &c, &do_err));
    assert_int_equal(moult_moe_set_weights(moe, &r.w, &err), MOULT_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "fp8-block"));
    moult_moe_destroy(moe);
    rig_close(&r);
}

/* Two slices of the experts add up to all of them; each is what the CPU's slice is. */
static void slices(void **state)
{
    (void)state;
    static struct rig r;
    static float want[TOKENS * HIDDEN], y[TOKENS * HIDDEN], sum[TOKENS * HIDDEN];
    rig_open(&r, FORMAT_NVFP4);
    for (int half = 0; half < 2; half++) {
        moult_moe_config c = base;
        moult_moe_weights w = r.w;
        moult_matrices *m[3] = {&w.gate, &w.up, &w.down};
        c.local_num_experts = half ? 7 : 5;
        c.local_expert_offset = half ? 5 : 0;
        for (int i = 0; i < 3; i++) {
            size_t at = (size_t)c.local_expert_offset;
            m[i]->data = (const char *)m[i]->data + at * r.s.data_bytes[i];
            m[i]->scale = (const char *)m[i]->scale + at * r.s.scale_bytes[i];
            m[i]->tensor_scale += at;
            m[i]->input_scale += at;
        }
        moult_moe *cpu = handle(c, false, &w), *moe = handle(c, true, &w);
        run_cpu(cpu, call_of(&r, false), want);
        run_gpu(moe, &r, call_of(&r, true), y);
        near("a slice of the experts", y, want, NEAR);
        for (int i = 0; i < TOKENS * HIDDEN; i++)
            sum[i] = half ? sum[i] + y[i] : y[i];
        moult_moe_destroy(cpu);
        moult_moe_destroy(moe);
    }
    moult_moe *moe = handle(base, true, &r.w);
    run_gpu(moe, &r, call_of(&r, true), y);
    near("the slices' sum", sum, y, 1e-6);
    moult_moe_destroy(moe);
    rig_close(&r);
}

/* A token alone, and through BF16 arrays. */
static void batch_does_not_show(void **state)
{
    (void)state;
    static struct rig r;
    static float all[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    static uint16_t half[TOKENS * HIDDEN], got[TOKENS * HIDDEN];
    rig_open(&r, FORMAT_NVFP4);
    for (int act = 0; act < 2; act++) {
        moult_moe_config config = base;
        if (act) config.activation_format = MOULT_ACT_NVFP4_PER_TOKEN;
        moult_moe *moe = handle(config, true, &r.w);
        run_gpu(moe, &r, call_of(&r, true), all);
        for (int i = 0; i < TOKENS; i++) {
            moult_moe_call c = call_of(&r, true);
            c.num_tokens = 1;
            c.input = PTR(r.dx + (size_t)i * HIDDEN * 4);
            c.logits = PTR(r.dlogits + (size_t)i * EXPERTS * 4);
            run_gpu(moe, &r, c, y);
            assert_memory_equal(y, all + i * HIDDEN, HIDDEN * 4);
        }
        for (int i = 0; i < TOKENS * HIDDEN; i++)
            half[i] = f32_to_bf16(r.x[i]);
        for (int odd = 0; odd < 2; odd++) { /* rows that are not 16-byte aligned are copied */
            devptr_t dhalf = gpu_new(&gpu, NULL, sizeof half + 16);
            queue_copy(gpu.q, dhalf + (size_t)odd * 2, host_addr(half), sizeof half);
            moult_moe_call c = call_of(&r, true);
            c.input = PTR(dhalf + (size_t)odd * 2);
            c.input_dtype = c.output_dtype = MOULT_DTYPE_BF16;
            DO(moult_moe_run(moe, &c, &do_err));
            gpu_read(&gpu, got, r.dout, sizeof got);
            for (int i = 0; i < TOKENS * HIDDEN; i++)
                assert_int_equal(got[i], f32_to_bf16(all[i]));
            gpu_free(&gpu, dhalf);
        }
        moult_moe_destroy(moe);
    }
    rig_close(&r);
}

/* A captured call takes nothing and waits for nothing, and sees weights that replace others in
 * place. */
static void captured(void **state)
{
    (void)state;
    static struct rig r, other;
    static float before[TOKENS * HIDDEN], after[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    struct graph *graph;
    size_t bytes;
    rig_open(&r, FORMAT_NVFP4);
    rig_open(&other, FORMAT_NVFP4);
    moult_moe_config c = base;
    c.device = MOULT_DEVICE_CUDA;
    c.workspace_bytes = 1 << 10;
    DO(moult_moe_workspace_bytes(&bytes, &c, &do_err));
    c.workspace = PTR(gpu_new(&gpu, NULL, bytes));
    moult_moe *moe = NULL;
    moult_error err;
    assert_int_equal(moult_moe_create(&moe, &c, &err), MOULT_ERR_INPUT);
    assert_non_null(strstr(err.message, "workspace"));
    c.workspace_bytes = bytes;
    DO(moult_moe_create(&moe, &c, &do_err));
    moult_moe_call call = call_of(&r, true);
    assert_int_equal(moult_moe_run(moe, &call, &err), MOULT_ERR_STATE);
    DO(moult_moe_set_weights(moe, &r.w, &do_err));
    run_gpu(moe, &r, call, before);
    queue_capture(gpu.q);
    DO(moult_moe_run(moe, &call, &do_err));
    MUST(queue_capture_end(gpu.q, &graph, &must_e));
    queue_fill(gpu.q, r.dout, 0xAA, sizeof r.x);
    queue_graph(gpu.q, graph);
    gpu_read(&gpu, y, r.dout, sizeof y);
    assert_memory_equal(y, before, sizeof y);
    moult_moe_weights w = other.w;
    w.stream = queue_stream(gpu.q);
    DO(moult_moe_set_weights(moe, &w, &do_err));
    run_gpu(moe, &r, call, after);
    assert_memory_not_equal(after, before, sizeof after);
    queue_fill(gpu.q, r.dout, 0xAA, sizeof r.x);
    queue_graph(gpu.q, graph);
    gpu_read(&gpu, y, r.dout, sizeof y);
    assert_memory_equal(y, after, sizeof y);
    /* What is refused changes nothing. */
    ((uint8_t *)other.s.scale[2])[5] = 0xff;
    assert_int_equal(moult_moe_set_weights(moe, &w, &err), MOULT_ERR_INPUT);
    assert_non_null(strstr(err.message, "down"));
    queue_graph(gpu.q, graph);
    gpu_read(&gpu, y, r.dout, sizeof y);
    assert_memory_equal(y, after, sizeof y);
    graph_free(graph);
    moult_moe_destroy(moe);
    gpu_free(&gpu, host_addr(c.workspace));
    rig_close(&other);
    rig_close(&r);
}

/* Packed one by one, taken as they are, and back to canonical bytes. */
static void resident(void **state)
{
    (void)state;
    static float want[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
    for (int f = 0; f < FORMAT_COUNT; f++) {
        static struct rig r;
        static const void *table[EXPERTS * 3];
        rig_open(&r, (format_t)f);
        moult_moe *moe = handle(base, true, &r.w), *second = handle(base, true, NULL);
        run_gpu(moe, &r, call_of(&r, true), want);
        for (int i = 0; i < EXPERTS * 3; i++) {
            const struct canon *c = &r.g.canon[i];
            size_t bytes, n = r.s.data_bytes[i % 3], ns = r.s.scale_bytes[i % 3];
            moult_matrices m = {.format = f, .data = c->data, .scale = ns ? c->scale : NULL};
            if (formats[f].tensor) m.tensor_scale = &c->tensor;
            if (f != FORMAT_BF16) m.input_scale = &c->input;
            DO(moult_gpu_resident_bytes(&bytes, f, (int64_t)c->rows, (int64_t)c->cols, &do_err));
            void *to = PTR(gpu_new(&gpu, NULL, bytes)), *own;
            DO(moult_gpu_pack(second, to, &m, (int64_t)c->rows, (int64_t)c->cols, NULL, &do_err));
            table[i] = to;
            DO(moult_gpu_resident(&own, moe, i / 3, i % 3, &do_err));
            const void *const where[] = {to, own};
            for (int k = 0; k < 2; k++) {
                uint8_t *data = mem_alloc(n), *scale = mem_alloc(ns + 1);
                float tensor = 0, input = 0;
                moult_matrix_out out = {data, scale, &tensor, &input};
                DO(moult_gpu_unpack(moe, &out, f, (int64_t)c->rows, (int64_t)c->cols, where[k],
                                    queue_stream(gpu.q), &do_err));
                assert_memory_equal(data, c->data, n);
                if (ns) assert_memory_equal(scale, c->scale, ns);
                if (formats[f].tensor) assert_true(tensor == c->tensor);
                if (f != FORMAT_BF16) assert_true(input == c->input);
                mem_free(data), mem_free(scale);
            }
        }
        moult_moe_weights w = {.size = sizeof w,
                               .arrangement = MOULT_RESIDENT,
                               .device = MOULT_DEVICE_CUDA,
                               .resident = table};
        w.gate.format = w.up.format = w.down.format = f;
        DO(moult_moe_set_weights(second, &w, &do_err));
        run_gpu(second, &r, call_of(&r, true), y);
        assert_memory_equal(y, want, sizeof y);
        moult_moe_destroy(moe);
        moult_moe_destroy(second);
        for (int i = 0; i < EXPERTS * 3; i++)
            gpu_free(&gpu, host_addr(table[i]));
        rig_close(&r);
    }
}

static void refused(void **state)
{
    (void)state;
    moult_moe *moe = NULL;
    moult_error err;
    const struct {
        moult_moe_config c;
        const char *names;
    } rows[] = {
        {{.hidden_size = 100, .intermediate_size = 72, .num_experts = 8, .top_k = 2},
         "hidden_size"},
        {{.hidden_size = 64, .intermediate_size = 44, .num_experts = 8, .top_k = 2},
         "intermediate_size"},
        {{.hidden_size = 64, .intermediate_size = 64, .num_experts = 1024, .top_k = 2},
         "local_num_experts"},
        {{.hidden_size = 64, .intermediate_size = 64, .num_experts = 8, .top_k = 2, .gpu = 99},
         "GPU 99"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moult_moe_config c = rows[i].c;
        c.size = sizeof c;
        c.device = MOULT_DEVICE_CUDA;
        assert_int_equal(moult_moe_create(&moe, &c, &err), MOULT_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.message, rows[i].names));
        assert_null(moe);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_format_and_form),
                                       cmocka_unit_test(strange_choices),
                                       cmocka_unit_test(every_method),
                                       cmocka_unit_test(every_arrangement),
                                       cmocka_unit_test(activation_formats),
                                       cmocka_unit_test(slices),
                                       cmocka_unit_test(batch_does_not_show),
                                       cmocka_unit_test(captured),
                                       cmocka_unit_test(resident),
                                       cmocka_unit_test(refused)};
    if (!gpu_open(&gpu)) return 0;
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
