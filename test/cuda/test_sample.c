/*
 * test_sample.c - sampling on the GPU against model/sample.c on the same logits: ids and top ids
 * equal, logprobs equal to a step of f32, a row's results the same alone.
 */
#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include "model/sample.h"
#include <math.h>

static struct gpu gpu;

enum { OUTPUTS = 700, BIASES = 40, BARRED = 5 };

struct rows {
    int32_t vocab, n;
    int64_t ld;
    float *logits; /* [n][ld] */
    struct sample_params *params;
    struct sample_input *in;
    int32_t *output_ids, *bias_ids, *barred;
    float *bias;
};

/* Shapes of logits: peaked as a language model's, flat, with ties, tiny differences, wide. */
static void fill_row(float *x, int32_t n, int kind, uint64_t *seed)
{
    for (int32_t i = 0; i < n; i++) {
        float u = noise_f32(seed) + noise_f32(seed) + noise_f32(seed);
        x[i] = kind == 0   ? u * 4.0f
               : kind == 1 ? u * 0.01f
               : kind == 2 ? floorf(u * 8.0f) / 2.0f
                           : u * 40.0f;
        if (kind == 0 && noise_u32(seed) % 3000 == 0) x[i] += 14.0f;
        if (kind == 4) x[i] = 1.25f;
    }
}

struct setting {
    float t;
    int32_t k;
    float p, min_p, freq, pres, rep;
    int bias, bar;
    int32_t n_top, target;
};

static const struct setting settings[] = {
    {0, 0, 1, 0, 0, 0, 1, 0, 0, 0, -1},         {0, 0, 1, 0, 0, 0, 1, 0, 0, 5, -1},
    {1, 0, 1, 0, 0, 0, 1, 0, 0, 0, -1},         {0.6f, 20, 0.95f, 0, 0, 0, 1, 0, 0, 20, -1},
    {1, 0, 0.9f, 0, 0, 0, 1, 0, 0, 1, -1},      {0.3f, 0, 0.5f, 0.1f, 0, 0, 1, 0, 0, 0, -1},
    {1.5f, 1000, 1, 0, 0, 0, 1, 0, 0, 128, -1}, {1, 1, 0.5f, 0, 0, 0, 1, 0, 0, 3, -1},
    {0.8f, 0, 1, 0.05f, 0, 0, 1, 0, 1, 0, -1},  {1, 0, 1, 1.0f, 0, 0, 1, 0, 0, 0, -1},
    {0, 0, 1, 0, 0.7f, 0.3f, 1, 0, 0, 2, -1},   {0.9f, 50, 0.99f, 0, 0.2f, 0, 1.3f, 1, 1, 10, -1},
    {1, 0, 0.999f, 0, 0, 0.5f, 1, 1, 0, 0, -1}, {0, 0, 1, 0, 0, 0, 1.1f, 1, 1, 128, -1},
    {0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 17},         {1, 3, 0.1f, 0, 0, 0, 1, 0, 0, 128, 999},
    {0.01f, 0, 0.9f, 0, 0, 0, 1, 0, 0, 1, -1},  {1, 2000, 0.9999f, 0, 0, 0, 1, 0, 0, 0, -1},
};
enum { SETTINGS = sizeof settings / sizeof settings[0], KINDS = 5 };

static void rows_new(struct rows *r, int32_t vocab, int32_t n)
{
    uint64_t seed = (uint64_t)vocab;
    *r = (struct rows){.vocab = vocab, .n = n, .ld = (vocab + 3) / 4 * 4 + 4};
    r->logits = mem_alloc((size_t)n * (size_t)r->ld * 4);
    r->params = mem_alloc((size_t)n * sizeof *r->params);
    r->in = mem_alloc((size_t)n * sizeof *r->in);
    r->output_ids = mem_alloc(OUTPUTS * 4), r->bias_ids = mem_alloc(BIASES * 4),
    r->barred = mem_alloc(BARRED * 4);
    r->bias = mem_alloc(BIASES * 4);
    for (int i = 0; i < OUTPUTS; i++) /* many come more than once, one is out of range */
        r->output_ids[i] =
            i == 9 ? vocab + 3 : (int32_t)(noise_u32(&seed) % (uint32_t)(i % 2 ? vocab : 100));
    for (int i = 0; i < BIASES; i++) {
        r->bias_ids[i] = i == 3 ? -1 : i * (vocab / BIASES);
        r->bias[i] = noise_f32(&seed) * 9.0f;
    }
    for (int i = 0; i < BARRED; i++)
        r->barred[i] = i == 4 ? r->barred[3] : i * 3;
    for (int32_t i = 0; i < n; i++) {
        const struct setting *s = &settings[i % SETTINGS];
        fill_row(r->logits + (size_t)i * (size_t)r->ld, vocab, i / SETTINGS % KINDS, &seed);
        r->params[i] = (struct sample_params){s->t,
                                              s->k,
                                              s->p,
                                              s->min_p,
                                              s->freq,
                                              s->pres,
                                              s->rep,
                                              s->bias ? BIASES : 0,
                                              r->bias_ids,
                                              r->bias,
                                              noise_u32(&seed),
                                              noise_u32(&seed) % 3};
        r->in[i] = (struct sample_input){.target = s->target,
                                         .n_top = s->n_top,
                                         .params = &r->params[i],
                                         .output_ids = r->output_ids,
                                         .n_output = i % 3 ? OUTPUTS : 1,
                                         .position = (uint64_t)i * 17,
                                         .barred = r->barred,
                                         .n_barred = s->bar ? BARRED : 0};
    }
}

static void rows_free(struct rows *r)
{
    void *all[] = {r->logits, r->params, r->in, r->output_ids, r->bias_ids, r->barred, r->bias};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
}

struct device_rows {
    devptr_t output_ids, bias_ids, bias, barred, counts, states, order, lowered;
};

static void device_rows_new(struct device_rows *d, const struct rows *r)
{
    size_t counts = (size_t)r->n * (size_t)r->vocab * 4;
    d->output_ids = gpu_new(&gpu, r->output_ids, OUTPUTS * 4);
    d->bias_ids = gpu_new(&gpu, r->bias_ids, BIASES * 4);
    d->bias = gpu_new(&gpu, r->bias, BIASES * 4);
    d->barred = gpu_new(&gpu, r->barred, BARRED * 4);
    d->counts = gpu_new(&gpu, NULL, counts);
    queue_fill(gpu.q, d->counts, 0, counts);
    d->states = gpu_new(&gpu, NULL, (size_t)r->n * sizeof(struct sample_state));
    d->order = gpu_new(&gpu, NULL, (size_t)r->n * SAMPLE_ORDER * 8);
    d->lowered = gpu_new(&gpu, NULL, (size_t)r->n * 8);
}

/* Rows [from, from + n). */
static void on_gpu(const struct rows *r, const struct device_rows *d, const struct kernels *k,
                   int32_t from, int32_t n, struct sample_result *out)
{
    struct sample_spec *specs = mem_alloc((size_t)n * sizeof *specs);
    int32_t *next = mem_alloc((size_t)n * 4);
    for (int32_t i = 0; i < n; i++) {
        const struct sample_input *in = &r->in[from + i];
        const struct sample_params *p = in->params;
        specs[i] = (struct sample_spec){in->target,
                                        in->n_top,
                                        p->temperature,
                                        p->top_p,
                                        p->min_p,
                                        p->top_k,
                                        p->frequency_penalty,
                                        p->presence_penalty,
                                        p->repetition_penalty,
                                        p->sample_index,
                                        p->seed,
                                        in->position,
                                        (const int32_t *)d->output_ids,
                                        (const int32_t *)d->bias_ids,
                                        (const float *)d->bias,
                                        (const int32_t *)d->barred,
                                        in->n_output,
                                        p->n_bias,
                                        in->n_barred,
                                        0};
    }
    devptr_t dev[] = {
        gpu_new(&gpu, r->logits + (size_t)from * (size_t)r->ld, (size_t)n * (size_t)r->ld * 4),
        gpu_new(&gpu, specs, (size_t)n * sizeof *specs),
        gpu_new(&gpu, NULL, (size_t)n * sizeof *out), gpu_new(&gpu, NULL, (size_t)n * 4)};
    struct sample_args a = {(float *)dev[0],
                            r->ld,
                            (const struct sample_spec *)dev[1],
                            (struct sample_result *)dev[2],
                            (int32_t *)dev[3],
                            (struct sample_state *)d->states,
                            (uint64_t *)d->order,
                            (int32_t *)d->lowered,
                            (uint32_t *)d->counts,
                            r->vocab};
    kernels_sample(k, gpu.q, &a, n, true);
    gpu_read(&gpu, out, dev[2], (size_t)n * sizeof *out);
    gpu_read(&gpu, next, dev[3], (size_t)n * 4);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(next[i], out[i].id);
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(specs), mem_free(next);
}

static size_t steps(float a, float b) /* apart, in representable numbers */
{
    int32_t x, y;
    memcpy(&x, &a, 4), memcpy(&y, &b, 4);
    return (size_t)llabs((long long)x - y);
}

static void compare(int32_t row, const struct sample_result *got, const struct sample_output *want,
                    size_t *inexact)
{
    if (got->id != want->id || got->finite != want->finite || got->n_top != want->n_top)
        fail_msg("row %d: id %d, finite %d, %d top; must be %d, %d, %d", row, got->id, got->finite,
                 got->n_top, want->id, want->finite, want->n_top);
    if (steps(got->logprob, want->logprob) > 1)
        fail_msg("row %d: logprob %.9g, must be %.9g", row, (double)got->logprob,
                 (double)want->logprob);
    *inexact += got->logprob != want->logprob;
    for (int j = 0; j < want->n_top; j++) {
        if (got->top_ids[j] != want->top_ids[j] ||
            steps(got->top_logprobs[j], want->top_logprobs[j]) > 1)
            fail_msg("row %d: top %d is %d %.9g, must be %d %.9g", row, j, got->top_ids[j],
                     (double)got->top_logprobs[j], want->top_ids[j], (double)want->top_logprobs[j]);
        *inexact += got->top_logprobs[j] != want->top_logprobs[j];
    }
}

static struct kernels *kernels_of(int32_t vocab)
{
    struct kernels_shape s = {
        .hidden = 256, .vocab = vocab, .n_heads = 8, .n_kv_heads = 2, .head_dim = 128};
    struct kernels *k = NULL;
    MUST(kernels_new(&k, gpu.d, &s, &must_e));
    return k;
}

static void check(struct rows *r)
{
    struct kernels *k = kernels_of(r->vocab);
    struct device_rows d;
    struct sample_result *got = mem_alloc((size_t)r->n * sizeof *got),
                         *alone = mem_alloc(sizeof *alone);
    struct sample_output *want = mem_alloc(sizeof *want);
    float *x = mem_alloc((size_t)r->vocab * 4), *scratch = mem_alloc((size_t)r->vocab * 4);
    int32_t *ids = mem_alloc((size_t)r->vocab * 4);
    size_t inexact = 0;
    device_rows_new(&d, r);
    on_gpu(r, &d, k, 0, r->n, got);
    for (int32_t i = 0; i < r->n; i++) {
        memcpy(x, r->logits + (size_t)i * (size_t)r->ld, (size_t)r->vocab * 4);
        sample_row(&r->in[i], want, x, r->vocab, scratch, ids);
        compare(i, &got[i], want, &inexact);
        if (i % 7 != 3) continue;
        on_gpu(r, &d, k, i, 1, alone); /* the counts of the penalties are as they were */
        assert_int_equal(alone->id, got[i].id);
        assert_memory_equal(&alone->logprob, &got[i].logprob, 4);
        assert_memory_equal(alone->top_logprobs, got[i].top_logprobs, (size_t)alone->n_top * 4);
    }
    printf("vocabulary %d, %d rows: %zu logprobs one step off\n", r->vocab, r->n, inexact);
    devptr_t dev[] = {d.output_ids, d.bias_ids, d.bias,  d.barred,
                      d.counts,     d.states,   d.order, d.lowered};
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(got), mem_free(alone), mem_free(want), mem_free(x), mem_free(scratch), mem_free(ids);
    kernels_free(k);
}

static void small(void **state)
{
    (void)state;
    static const int32_t sizes[] = {1009, 2048, 4097};
    for (size_t i = 0; i < (gpu.few ? 1 : sizeof sizes / sizeof sizes[0]); i++) {
        struct rows r;
        rows_new(&r, sizes[i], (gpu.few ? 1 : 4) * SETTINGS * KINDS);
        check(&r);
        rows_free(&r);
    }
}

static void qwen3(void **state)
{
    (void)state;
    struct rows r;
    if (gpu.few) skip();
    rows_new(&r, 151936, SETTINGS * KINDS);
    check(&r);
    rows_free(&r);
}

/* NaN and infinities anywhere make a row not finite, also under a barred id; barring is no
 * fault. */
static void not_finite(void **state)
{
    (void)state;
    struct rows r;
    rows_new(&r, 5000, SETTINGS);
    for (int32_t i = 0; i < r.n; i++) {
        float *x = r.logits + (size_t)i * (size_t)r.ld;
        if (i % 6 == 0) x[4999] = NAN;
        if (i % 6 == 1) x[4096] = INFINITY;
        if (i % 6 == 2) x[0] = -INFINITY;
        if (i % 6 == 3) x[3] = i % 4 ? -INFINITY : NAN; /* barred in some rows */
    }
    check(&r);
    rows_free(&r);
}

int main(int argc, char **argv)
{
    if (!gpu_open(&gpu)) return 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(small), cmocka_unit_test(qwen3),
                                       cmocka_unit_test(not_finite)};
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
