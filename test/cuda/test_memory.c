/*
 * test_memory.c - what the driver says is gone, beside what we account for: weights in every
 * format, and a model whose steps have been captured.
 */
#include "cuda/stores.h"
#include "model/cuda/cuda.h"

static struct gpu gpu;

static size_t free_now(void)
{
    size_t n = 0;
    MUST(device_free_bytes(&n, gpu.d, &must_e));
    return n;
}

/* A gigabyte or so of weights: their own account and the driver's, over the bytes a checkpoint has.
 */
static void weights(void **state)
{
    (void)state;
    for (format_t f = 0; f < FORMAT_COUNT; f++) {
        struct config c;
        config_of(&c,
                  formats[f].elem_bits == 16  ? 2
                  : formats[f].elem_bits == 8 ? 4
                                              : 7,
                  2048, 768, 44, 32000);
        struct gpu_store g = store_make(gpu.d, &c, f, STAGING_OFF);
        struct gpu_store again = store_make(gpu.d, &c, f, STAGING_OFF);
        update_random(&g, 1); /* kernels are loaded when they are first used */
        double stored = (double)dummy_bytes(g.specs, g.n);
        size_t before = free_now();
        update_random(&again, 1);
        double gone = (double)(before - free_now()), own = (double)store_bytes(g.s);
        printf("%-12s stored %.3f GB, own account %.4f of it, the driver's %.4f\n", formats[f].name,
               stored * 1e-9, own / stored, gone / stored);
        fflush(stdout);
        assert_true(stored > 0.5e9);
        assert_true(own <= 1.02 * stored && own >= 0.98 * stored);
        assert_true(gone <= 1.02 * stored && gone >= 0.98 * stored);
        store_drop(&g);
        store_drop(&again);
    }
}

enum { PAGES = 4096, SEQS = 128, LAYERS = 48, STEP = 512 };

/* One decode step of n sequences at position `at`. */
static void decode(struct model *m, int n, int at)
{
    static const struct sample_params greedy = {.top_p = 1, .repetition_penalty = 1};
    static int32_t ids[SEQS], pos[SEQS], seq[SEQS], tables[SEQS][32];
    static struct step_seq seqs[SEQS];
    static struct sample_input in[SEQS];
    static struct sample_output out[SEQS];
    static struct step_row rows[SEQS];
    for (int i = 0; i < n; i++) {
        for (int p = 0; p < 32; p++)
            tables[i][p] = i * 32 + p;
        ids[i] = i;
        pos[i] = at;
        seq[i] = i;
        seqs[i] = (struct step_seq){tables[i], 32};
        in[i] =
            (struct sample_input){.target = -1, .params = &greedy, .position = (uint64_t)at + 1};
        rows[i] = (struct step_row){i, &in[i], &out[i]};
    }
    struct step st = {.n_tokens = n,
                      .ids = ids,
                      .pos = pos,
                      .seq = seq,
                      .n_seqs = n,
                      .seqs = seqs,
                      .n_rows = n,
                      .rows = rows};
    model_submit(m, &st);
    MUST(model_collect(m, &st, &must_e));
}

/* A model of many layers takes no more than was planned, whatever its steps. */
static void model(void **state)
{
    (void)state;
    struct config c;
    struct cuda_needs needs = {0};
    struct model *m = NULL;
    config_of(&c, LAYERS, 512, 128, 32, 32000);
    struct gpu_store g = store_make(gpu.d, &c, FORMAT_NVFP4, STAGING_OFF);
    update_random(&g, 1);
    const struct cuda_options o = {.n_kv_pages = PAGES, .max_step_tokens = STEP, .max_seqs = SEQS};
    MUST(cuda_model_needs(&needs, gpu.d, &c, &o, &must_e));
    size_t start = free_now();
    MUST(cuda_model_new(&m, &c, g.s, gpu.d, &o, &must_e));
    size_t made = start - free_now(), kv = needs.kv_page * PAGES;
    size_t planned = needs.step + needs.partial + kv;
    printf("model: driver %.1f MB for %.1f planned (step %.1f, partial %.1f, KV %.1f)\n",
           (double)made * 1e-6, (double)planned * 1e-6, (double)needs.step * 1e-6,
           (double)needs.partial * 1e-6, (double)kv * 1e-6);
    decode(m, 1, 0);
    size_t first = free_now(), graphs = 1;
    printf("the first step takes %.1f MB more\n", (double)(start - made - first) * 1e-6);
    for (int at = 0; at < 512; at += 300)
        for (int n = 1; n <= SEQS; n += n < 8 ? 1 : 8, graphs++)
            decode(m, n, at);
    size_t end = free_now();
    printf("%zu captured steps take %.1f MB, %.0f bytes a layer each; %.1f MB planned for all\n",
           graphs, (double)(first - end) * 1e-6, (double)(first - end) / (double)graphs / LAYERS,
           (double)needs.graphs * 1e-6);
    fflush(stdout);
    assert_true(made <= planned + ((size_t)8 << 20));
    assert_true(start - end <= planned + needs.graphs + ((size_t)512 << 20));
    model_free(m);
    store_drop(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(weights), cmocka_unit_test(model)};
    if (!gpu_open(&gpu)) return 0;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
