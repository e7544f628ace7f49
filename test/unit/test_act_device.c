/*
 * test_act_device.c - activation formats on the GPU (MOULT_TEST_DEVICE=cuda): the logits follow the
 * CPU's in the same format, not the CPU's in BF16; a token's bits do not depend on how it was
 * batched, nor on graphs; input scales follow an update.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "device.h"
#include "folder_store.h"
#include "weight/update_internal.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { TOKENS = 320, SEQS = 5, PAGES = (TOKENS / KV_PAGE + 1) * SEQS, DECODED = 24 };

#define FOLDER "../shared/models/tiny-moe/"

struct world {
    struct config c;
    struct test_device t;
    struct store *host, *device;
    struct pool *pool;
    int32_t ids[TOKENS], pages[SEQS][PAGES / SEQS];
};

static void read_ids(int32_t *ids, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, FOLDER "%s.reference.json", name);
    json_t *doc = json_load_file(path, 0, NULL);
    assert_non_null(doc);
    const json_t *all = json_object_get(doc, "references_float32");
    for (size_t i = 0, n = 0; n < TOKENS; i++) { /* one prompt after another */
        const json_t *prompt = json_object_get(json_array_get(all, i), "input_ids");
        assert_non_null(prompt);
        for (size_t j = 0; j < json_array_size(prompt) && n < TOKENS; j++)
            ids[n++] = (int32_t)json_integer_value(json_array_get(prompt, j));
    }
    json_decref(doc);
}

static void open_world(struct world *w, const char *name)
{
    struct err e = {0};
    char dir[256];
    snprintf(dir, sizeof dir, FOLDER "%s", name);
    if (!test_on_gpu() || access(dir, R_OK) != 0) {
        print_message("%s\n", test_on_gpu() ? dir : "MOULT_TEST_DEVICE is not cuda");
        skip();
    }
    memset(w, 0, sizeof *w);
    read_ids(w->ids, name);
    test_device_open(&w->t);
    w->pool = pool_new(2);
    if (folder_store_in(&w->host, &w->c, dir, FORMAT_COUNT, memory_host, &e) != OK ||
        folder_store_in(&w->device, &w->c, dir, FORMAT_COUNT, w->t.memory, &e) != OK)
        fail_msg("%s", e.msg);
    for (int32_t i = 0; i < PAGES; i++)
        w->pages[i % SEQS][i / SEQS] = PAGES - 1 - i;
}

static void close_world(struct world *w)
{
    store_free(w->host);
    store_free(w->device);
    test_device_close(&w->t);
    pool_free(w->pool);
}

static struct model *model_of(struct world *w, bool gpu, act_t act, const char *isa)
{
    struct model *m;
    struct err e = {0};
    struct test_device cpu = {.memory = memory_host};
    if (test_model_new(gpu ? &w->t : &cpu, &m, &w->c, gpu ? w->device : w->host, w->pool, PAGES,
                       KV_BF16, TOKENS, isa, &e) != OK ||
        model_set_numerics(m, act, false, &e) != OK)
        fail_msg("%s", e.msg);
    return m;
}

/* Logits [TOKENS][vocab] of one prompt; caller frees. */
static float *logits_of(struct world *w, bool gpu, act_t act)
{
    struct model *m = model_of(w, gpu, act, NULL);
    int32_t pos[TOKENS], seq[TOKENS] = {0}, rows[TOKENS];
    struct step_seq s = {w->pages[0], PAGES / SEQS};
    struct step st = {
        .n_tokens = TOKENS, .ids = w->ids, .pos = pos, .seq = seq, .n_seqs = 1, .seqs = &s};
    struct err e = {0};
    float *out = mem_alloc((size_t)TOKENS * (size_t)w->c.vocab_size * sizeof *out);
    for (int32_t i = 0; i < TOKENS; i++)
        pos[i] = rows[i] = i;
    if (model_logits(m, &st, rows, TOKENS, out, &e) != OK) fail_msg("%s", e.msg);
    model_free(m);
    return out;
}

static double distance(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sqrt(sum / (double)n);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How far half of the tokens' logits may be from the CPU's in this format, as part of the distance of
 * the formats: rounding magnifies last bits, and the finer it is the less it moves by itself. */
static double most(act_t act)
{
    return act == ACT_FP8_BLOCK ? 0.75 : 0.35;
}

static void follows_cpu(struct world *w, const char *name, act_t act)
{
    size_t vocab = (size_t)w->c.vocab_size;
    float *plain = logits_of(w, false, ACT_BF16), *cpu = logits_of(w, false, act),
          *gpu = logits_of(w, true, act);
    double part[TOKENS];
    for (size_t i = 0; i < TOKENS; i++) {
        double apart = distance(cpu + i * vocab, plain + i * vocab, vocab);
        double off = distance(gpu + i * vocab, cpu + i * vocab, vocab);
        assert_true(isfinite(off));
        part[i] = off / apart;
    }
    qsort(part, TOKENS, sizeof part[0], by_value);
    print_message("%s, %s: GPU to CPU over rounded to BF16, median %.3f, p90 %.3f\n", name,
                  acts[act].name, part[TOKENS / 2], part[TOKENS * 9 / 10]);
    assert_true(part[TOKENS / 2] <= most(act));
    mem_free(plain);
    mem_free(cpu);
    mem_free(gpu);
}

/* One step of n tokens from `at` in each of n_seqs sequences; logprobs [n_seqs][TOKENS] of the ids
 * that follow. */
static void step(struct world *w, struct model *m, int32_t at, int32_t n, int32_t n_seqs,
                 float (*logprob)[TOKENS])
{
    int32_t count = n * n_seqs, *ids = mem_alloc((size_t)count * 4),
            *pos = mem_alloc((size_t)count * 4), *seq = mem_alloc((size_t)count * 4);
    struct sample_params params = {.top_p = 1.0f, .repetition_penalty = 1.0f};
    struct sample_input *in = mem_alloc((size_t)count * sizeof *in);
    struct sample_output *out = mem_alloc((size_t)count * sizeof *out);
    struct step_row *rows = mem_alloc((size_t)count * sizeof *rows);
    struct step_seq seqs[SEQS];
    struct err e = {0};
    for (int32_t i = 0; i < count; i++) {
        seq[i] = i / n;
        pos[i] = at + i % n;
        ids[i] = w->ids[pos[i]];
        in[i] = (struct sample_input){.target = w->ids[(pos[i] + 1) % TOKENS], .params = &params};
        rows[i] = (struct step_row){.token = i, .in = &in[i], .out = &out[i]};
    }
    for (int32_t s = 0; s < n_seqs; s++)
        seqs[s] = (struct step_seq){w->pages[s], PAGES / SEQS};
    struct step st = {.n_tokens = count,
                      .ids = ids,
                      .pos = pos,
                      .seq = seq,
                      .n_seqs = n_seqs,
                      .seqs = seqs,
                      .n_rows = count,
                      .rows = rows};
    model_submit(m, &st);
    if (model_collect(m, &st, &e) != OK) fail_msg("%s", e.msg);
    for (int32_t i = 0; i < count; i++)
        logprob[i / n][pos[i]] = out[i].logprob;
    mem_free(ids), mem_free(pos), mem_free(seq), mem_free(in), mem_free(out), mem_free(rows);
}

/* Each sequence in pieces, the last tokens one by one. */
static void score(struct world *w, act_t act, const char *isa, int32_t piece, int32_t n_seqs,
                  float (*logprob)[TOKENS])
{
    struct model *m = model_of(w, true, act, isa);
    for (int32_t at = 0, n; at < TOKENS; at += n) {
        n = at < TOKENS - DECODED ? piece : 1;
        if (at < TOKENS - DECODED && n > TOKENS - DECODED - at) n = TOKENS - DECODED - at;
        step(w, m, at, n, n_seqs, logprob);
    }
    model_free(m);
}

static void batch_does_not_show(struct world *w, act_t act)
{
    static float whole[1][TOKENS], other[SEQS][TOKENS];
    static const struct {
        const char *isa; /* not NULL: no graphs */
        int32_t piece, n_seqs;
    } ways[] = {{NULL, TOKENS, 1}, {"plain", TOKENS, 1}, {NULL, 1, 1},
                {NULL, 7, 3},      {"plain", 33, SEQS},  {NULL, 60, SEQS}};
    struct model *m = model_of(w, true, act, NULL);
    step(w, m, 0, TOKENS, 1, whole);
    model_free(m);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        score(w, act, ways[i].isa, ways[i].piece, ways[i].n_seqs, other);
        for (int32_t s = 0; s < ways[i].n_seqs; s++)
            if (memcmp(other[s], whole[0], sizeof whole[0]) != 0)
                fail_msg("%s: way %zu, sequence %d differs", acts[act].name, i, s);
    }
}

static void check(const char *name, const act_t *formats_of, int n)
{
    static struct world w;
    open_world(&w, name);
    for (int i = 0; i < n; i++) {
        follows_cpu(&w, name, formats_of[i]);
        batch_does_not_show(&w, formats_of[i]);
    }
    close_world(&w);
}

static void fp8(void **state)
{
    (void)state;
    static const act_t all[] = {ACT_FP8_BLOCK, ACT_MXFP8};
    check("fp8", all, 2);
}

static void nvfp4(void **state)
{
    (void)state;
    static const act_t all[] = {ACT_NVFP4, ACT_NVFP4_PER_TOKEN, ACT_MXFP8};
    check("nvfp4", all, 3);
}

static void mxfp8(void **state)
{
    (void)state;
    static const act_t all[] = {ACT_MXFP8};
    check("mxfp8-last1-bf16", all, 1);
}

/* Scales of rows are those of the weights' own recipe. */
static void recipes_do_not_mix(void **state)
{
    (void)state;
    static struct world w;
    static const struct {
        const char *name, *format;
        act_t act;
    } refused[] = {{"nvfp4", "nvfp4", ACT_FP8_BLOCK},
                   {"fp8", "fp8-block", ACT_NVFP4_PER_TOKEN},
                   {"mxfp8-last1-bf16", "mxfp8", ACT_NVFP4}};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        struct err e = {0};
        open_world(&w, refused[i].name);
        struct model *m = model_of(&w, true, ACT_BF16, NULL);
        assert_int_equal(model_set_numerics(m, refused[i].act, false, &e), ERR_UNSUPPORTED);
        assert_non_null(strstr(e.msg, refused[i].format));
        model_free(m);
        close_world(&w);
    }
}

/* Every input scale times 1.5: what a model made afterwards computes. */
static void scales_follow_updates(void **state)
{
    (void)state;
    static struct world w;
    static float before[1][TOKENS], after[1][TOKENS], fresh[1][TOKENS];
    struct update *u;
    struct update_progress progress = {0};
    struct err e = {0};
    open_world(&w, "nvfp4");
    struct model *m = model_of(&w, true, ACT_NVFP4, NULL);
    step(&w, m, 0, TOKENS, 1, before);
    assert_int_equal(update_begin(&u, w.device, &e), OK);
    assert_int_equal(update_stage_dir(u, FOLDER "nvfp4", 2, &progress, &e), OK);
    for (size_t i = 0; i < store_slots(w.device); i++) {
        const struct resident *r = &store_spec(w.device, i)->shape;
        float input;
        if (r->kind != RESIDENT_MATRIX || r->format != FORMAT_NVFP4) continue;
        store_get(w.device, &input, i, PART_INPUT, 0, 1);
        input *= 1.5f;
        update_put(u, i, PART_INPUT, 0, 1, &input);
    }
    if (update_prepare(u, &e) != OK || model_check_update(m, u, &e) != OK) fail_msg("%s", e.msg);
    update_commit(u);
    update_free(u);
    step(&w, m, 0, TOKENS, 1, after);
    model_free(m);
    m = model_of(&w, true, ACT_NVFP4, NULL);
    step(&w, m, 0, TOKENS, 1, fresh);
    model_free(m);
    assert_memory_not_equal(before, after, sizeof before);
    assert_memory_equal(after, fresh, sizeof after);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8), cmocka_unit_test(nvfp4), cmocka_unit_test(mxfp8),
        cmocka_unit_test(recipes_do_not_mix), cmocka_unit_test(scales_follow_updates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
