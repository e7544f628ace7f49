/* test_reference.c - the forward against transformers' float32 on the small model. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "device.h"
#include "folder_store.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EVERY 4 /* prompts: the numbers are the plain build's matter */
#else
#define EVERY 1
#endif

enum { MAX_TOKENS = 1536, PAGES = MAX_TOKENS / KV_PAGE };

struct world {
    struct config c;
    struct test_device t;
    struct store *store;
    struct pool *pool;
    struct model *m;
    int32_t ids[MAX_TOKENS], pos[MAX_TOKENS], seq[MAX_TOKENS], pages[PAGES];
    double errors[20 * MAX_TOKENS];
    size_t n_errors;
    int greedy_differ, greedy;
};

static void load(struct world *w, const char *dir)
{
    struct err e = {0};
    test_device_open(&w->t);
    if (folder_store_in(&w->store, &w->c, dir, FORMAT_COUNT, w->t.memory, &e) != OK)
        fail_msg("%s", e.msg);
    w->pool = pool_new(2);
    if (test_model_new(&w->t, &w->m, &w->c, w->store, w->pool, PAGES, KV_BF16, MAX_TOKENS, NULL,
                       &e) != OK)
        fail_msg("%s", e.msg);
    for (int i = 0; i < PAGES; i++)
        w->pages[i] = PAGES - 1 - i;
}

static void run(struct world *w, int t0, int n, const struct step_row *rows, int n_rows)
{
    struct step_seq s = {w->pages, PAGES};
    struct step st = {.n_tokens = n,
                      .ids = w->ids + t0,
                      .pos = w->pos + t0,
                      .seq = w->seq,
                      .n_seqs = 1,
                      .seqs = &s,
                      .n_rows = n_rows,
                      .rows = rows};
    model_submit(w->m, &st);
    struct err collect_e;
    assert_int_equal(model_collect(w->m, &st, &collect_e), OK);
}

static void prompt(struct world *w, const json_t *ref)
{
    const json_t *ids = json_object_get(ref, "input_ids"),
                 *lp = json_object_get(ref, "prompt_logprobs");
    const json_t *greedy = json_object_get(ref, "greedy_ids");
    int n = (int)json_array_size(ids);
    assert_true(n + 64 < MAX_TOKENS);
    struct sample_input *in = mem_alloc(sizeof *in * (size_t)n);
    struct sample_output *out = mem_alloc(sizeof *out * (size_t)n);
    struct step_row *rows = mem_alloc(sizeof *rows * (size_t)n);
    struct sample_params params = {.top_p = 1.0f, .repetition_penalty = 1.0f};
    for (int i = 0; i < n; i++)
        w->ids[i] = (int32_t)json_integer_value(json_array_get(ids, (size_t)i));
    for (int i = 0; i < n; i++) {
        in[i] = (struct sample_input){.target = i + 1 < n ? w->ids[i + 1] : -1, .params = &params};
        rows[i] = (struct step_row){.token = i, .in = &in[i], .out = &out[i]};
    }
    run(w, 0, n, rows, n);
    for (int i = 0; i + 1 < n; i++)
        w->errors[w->n_errors++] =
            fabs((double)out[i].logprob - json_number_value(json_array_get(lp, (size_t)i)));
    rows[0].token = 0;
    for (size_t g = 0; g < json_array_size(greedy); g++) {
        int32_t id = out[g == 0 ? n - 1 : 0].id;
        w->greedy++;
        if (id != json_integer_value(json_array_get(greedy, g))) {
            w->greedy_differ++;
            break;
        }
        w->ids[n + (int)g] = id;
        in[0].target = -1;
        run(w, n + (int)g, 1, rows, 1);
    }
    mem_free(in);
    mem_free(out);
    mem_free(rows);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void check(const char *name, const char *dir, const char *path)
{
    if (access(path, R_OK) != 0) {
        print_message("%s is absent\n", path);
        skip();
    }
    struct world *w = mem_alloc(sizeof *w);
    for (int i = 0; i < MAX_TOKENS; i++)
        w->pos[i] = i;
    json_t *doc = json_load_file(path, 0, NULL);
    assert_non_null(doc);
    load(w, dir);
    const json_t *refs = json_object_get(doc, "references_float32");
    for (size_t i = 0; i < json_array_size(refs); i += EVERY)
        prompt(w, json_array_get(refs, i));
    double sum = 0.0;
    for (size_t i = 0; i < w->n_errors; i++)
        sum += w->errors[i];
    qsort(w->errors, w->n_errors, sizeof w->errors[0], by_value);
    double mean = sum / (double)w->n_errors, p99 = w->errors[w->n_errors * 99 / 100];
    double max = w->errors[w->n_errors - 1];
    print_message("%s, %s: %zu logprobs, error mean %.2e, p99 %.2e, max %.2e; greedy texts that "
                  "differ: %d\n",
                  name, model_isa(w->m), w->n_errors, mean, p99, max, w->greedy_differ);
#ifdef MOULT_REFERENCE_F32
    assert_true(max <= 2e-4);
    assert_int_equal(w->greedy_differ, 0);
#else
    assert_true(mean <= 4e-3);
    assert_true(p99 <= 0.04);
#endif
    json_decref(doc);
    model_free(w->m);
    store_free(w->store);
    test_device_close(&w->t);
    pool_free(w->pool);
    mem_free(w);
}

static void early(void **state)
{
    (void)state;
    check("early", "models/tiny-moe-early", "test/data/early.reference.json");
}

static void final(void **state)
{
    (void)state;
    check("final", "models/tiny-moe", "test/data/final.reference.json");
}

/* Quantized folders: the reference ran on the exactly dequantized weights. */
#define SHARED(name) \
    name, "../shared/models/tiny-moe/" name, "../shared/models/tiny-moe/" name ".reference.json"

static void fp8(void **state)
{
    (void)state;
    check(SHARED("fp8"));
}

static void nvfp4(void **state)
{
    (void)state;
    check(SHARED("nvfp4"));
}

static void mxfp8(void **state)
{
    (void)state;
    check(SHARED("mxfp8-last1-bf16"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(early), cmocka_unit_test(final),
                                       cmocka_unit_test(fp8), cmocka_unit_test(nvfp4),
                                       cmocka_unit_test(mxfp8)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
