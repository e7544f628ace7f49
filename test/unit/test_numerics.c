/*
 * test_numerics.c - activation formats in the model: every quantized matrix outside the experts
 * reads rows rounded as act_ref.h rounds them, BF16 ones and the router what they always read;
 * results depend on nothing but the token; the packed form changes no bit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "act_ref.h"
#include "base/mem.h"
#include "model/forward.h"
#include "random_model.h"
#include "weight/update_internal.h"
#include <stdio.h>

enum { HIDDEN = 160, VOCAB = 96, TOKENS = 50, ROWS = 7 };

struct rig {
    struct config c;
    struct store *store;
    struct pool *pool;
    format_t format;
};

/* Two layers, the first dense; every projection and the head in `format`.  The input scale of slot
 * i is 0.001 + i * 2^-20, where it has one. */
static void rig_new(struct rig *g, format_t format, bool scales)
{
    const char *json =
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":96,\"hidden_size\":160,"
        "\"intermediate_size\":208,\"moe_intermediate_size\":80,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":48,\"num_experts\":8,"
        "\"num_experts_per_tok\":2,\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,"
        "\"rope_theta\":10000.0,\"max_position_embeddings\":256,\"hidden_act\":\"silu\","
        "\"mlp_only_layers\":[0],\"tie_word_embeddings\":false}";
    struct slot_spec *specs;
    struct update *u;
    struct err e = {0};
    size_t n;
    *g = (struct rig){.format = format, .pool = pool_new(2)};
    err_t rc = config_parse(&g->c, json, strlen(json), &e);
    if (rc == OK) rc = model_specs(&g->c, &specs, &n, &e);
    for (size_t i = 0; rc == OK && i < n; i++)
        if (specs[i].linear || i == SLOT_HEAD) {
            specs[i].shape.format = format;
            specs[i].encode = format != FORMAT_BF16;
        }
    if (rc == OK) rc = store_new(&g->store, specs, n, memory_host, &e);
    if (rc == OK) rc = update_begin(&u, g->store, &e);
    for (size_t i = 0; rc == OK && i < n; i++) {
        const struct resident *r = &specs[i].shape;
        uint16_t *w = mem_alloc((size_t)(r->rows * r->cols) * 2);
        random_bf16(w, r->rows * r->cols, r->cols, i + 1);
        for (uint64_t j = 0; specs[i].n_dims == 1 && j < r->cols; j++)
            w[j] = 0x3f80;
        if (!specs[i].optional) rc = update_stage(u, specs[i].name, w, r->rows, r->cols, &e);
        mem_free(w);
        float input = 0.001f + (float)i * 0x1p-20f;
        if (scales && r->kind == RESIDENT_MATRIX && r->format != FORMAT_BF16)
            update_put(u, i, PART_INPUT, 0, 1, &input);
    }
    if (rc == OK) rc = update_prepare(u, &e);
    if (rc != OK) fail_msg("%s", e.msg);
    update_commit(u);
    update_free(u);
    mem_free(specs);
}

static void rig_free(struct rig *g)
{
    pool_free(g->pool);
    store_free(g->store);
}

static struct cpu_model *model_of(struct rig *g, act_t act, bool routed, int slice)
{
    struct model *m;
    struct err e = {0};
    if (model_new(&m, &g->c, g->store, g->pool, 16, KV_BF16, slice, NULL, &e) != OK ||
        model_set_numerics(m, act, routed, &e) != OK)
        fail_msg("%s", e.msg);
    return (struct cpu_model *)m;
}

/* out [rows of w] = the matrix of a slot, decoded, times x, in float64. */
static void multiply(const struct rig *g, size_t slot, const double *x, double *out)
{
    const struct slot_spec *s = store_spec(g->store, slot);
    size_t rows = (size_t)s->shape.rows, cols = (size_t)s->shape.cols, data, scale;
    format_t f = s->shape.format;
    assert_true(format_bytes(f, rows, cols, &data, &scale));
    void *d = mem_alloc(data), *c = mem_alloc(scale + 1);
    float *row = mem_alloc(cols * 4), tensor = 1.0f;
    store_get(g->store, d, slot, PART_DATA, 0, rows);
    if (scale) store_get(g->store, c, slot, PART_SCALE, 0, layout_part_rows(f, PART_SCALE, rows));
    if (formats[f].tensor) store_get(g->store, &tensor, slot, PART_TENSOR, 0, 1);
    struct format_parts p = {f, rows, cols, d, c, tensor};
    for (size_t r = 0; r < rows; r++) {
        format_decode_row(row, &p, r);
        out[r] = 0;
        for (size_t j = 0; j < cols; j++)
            out[r] += (double)row[j] * x[j];
    }
    mem_free(d);
    mem_free(c);
    mem_free(row);
}

/* Mean square of y - (matrix of `slot` times rounded x), over rows of x. */
static double error(const struct rig *g, size_t slot, act_ref_fn *round, double input,
                    const float *x, const float *y)
{
    size_t cols = (size_t)store_spec(g->store, slot)->shape.cols;
    size_t rows = (size_t)store_spec(g->store, slot)->shape.rows;
    double in[256], out[256], sum = 0;
    for (int t = 0; t < ROWS; t++) {
        for (size_t j = 0; j < cols; j++)
            in[j] = (double)x[(size_t)t * cols + j];
        if (round) round(in, cols, input);
        multiply(g, slot, in, out);
        for (size_t r = 0; r < rows; r++) {
            double d = (double)y[(size_t)t * rows + r] - out[r];
            sum += d * d;
        }
    }
    return sum / (double)(rows * ROWS);
}

/* Slots that share their rows, each against float64; nvfp4 with the largest scale of the group. */
static void check_group(const struct rig *g, struct cpu_model *m, act_t act, const size_t *slots,
                        int n)
{
    size_t cols = (size_t)store_spec(g->store, slots[0])->shape.cols;
    float x[ROWS * 256], y[ROWS * 256];
    uint64_t seed = slots[0];
    double input = 0;
    for (size_t i = 0; i < ROWS * cols; i++)
        x[i] = act_round((float)(mix(seed * 1000 + i) >> 40) * 0x1p-22f - 2.0f);
    for (int i = 0; i < n; i++)
        input = fmax(input, (double)*store_matrix(g->store, slots[i])->input);
    struct inputs in = forward_inputs(m, x, NULL, ROWS, cols, slots, n);
    for (int i = 0; i < n; i++) {
        forward_multiply(m, y, &in, ROWS, slots[i]);
        double mse = error(g, slots[i], act_ref[act], input, x, y);
        double other = error(g, slots[i], NULL, 0, x, y);
        if (!(mse * 8 <= other))
            fail_msg("%s, %s: %g, unrounded %g", store_spec(g->store, slots[i])->name,
                     acts[act].name, mse, other);
    }
}

static void dense_matrices(void **state)
{
    (void)state;
    static const format_t formats_of[] = {FORMAT_FP8_BLOCK, FORMAT_MXFP8, FORMAT_NVFP4};
    for (size_t f = 0; f < 3; f++)
        for (int act = ACT_BF16 + 1; act < ACT_COUNT; act++) {
            if (act == ACT_NVFP4 && formats_of[f] != FORMAT_NVFP4) continue;
            struct rig g;
            struct layer_slots l;
            rig_new(&g, formats_of[f], true);
            struct cpu_model *m = model_of(&g, (act_t)act, false, 16);
            tensors_layer(&l, &g.c, 0);
            const size_t qkv[] = {l.q, l.k, l.v}, pair[] = {l.gate, l.up}, head = SLOT_HEAD;
            check_group(&g, m, (act_t)act, qkv, 3);
            check_group(&g, m, (act_t)act, &l.o, 1);
            check_group(&g, m, (act_t)act, pair, 2);
            check_group(&g, m, (act_t)act, &l.down, 1);
            check_group(&g, m, (act_t)act, &head, 1);
            model_free(&m->base);
            rig_free(&g);
        }
}

/* The router is BF16 and reads BF16. */
static void router_stays(void **state)
{
    (void)state;
    struct rig g;
    struct layer_slots l;
    rig_new(&g, FORMAT_NVFP4, false);
    struct cpu_model *m = model_of(&g, ACT_BF16, false, 16),
                     *q = model_of(&g, ACT_NVFP4_PER_TOKEN, false, 16);
    tensors_layer(&l, &g.c, 1);
    float x[ROWS * HIDDEN], a[ROWS * 8], b[ROWS * 8];
    for (int i = 0; i < ROWS * HIDDEN; i++)
        x[i] = act_round((float)(mix((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
    forward_gemm(m, a, x, ROWS, l.router);
    forward_gemm(q, b, x, ROWS, l.router);
    assert_memory_equal(a, b, sizeof a);
    model_free(&m->base);
    model_free(&q->base);
    rig_free(&g);
}

/* Logits of all tokens, prefilled in pieces. */
static void logits_of(struct rig *g, act_t act, bool routed, int piece, float *out)
{
    struct model *m = &model_of(g, act, routed, piece)->base;
    int32_t ids[TOKENS], pos[TOKENS], seq[TOKENS] = {0}, pages[4] = {0, 1, 2, 3}, rows[TOKENS];
    for (int32_t i = 0; i < TOKENS; i++) {
        ids[i] = i * 7 % VOCAB;
        pos[i] = rows[i] = i;
    }
    struct step_seq s = {pages, 4};
    struct step st = {
        .n_tokens = TOKENS, .ids = ids, .pos = pos, .seq = seq, .n_seqs = 1, .seqs = &s};
    assert_int_equal(model_logits(m, &st, rows, TOKENS, out, NULL), OK);
    model_free(m);
}

static void batch_and_form_do_not_show(void **state)
{
    (void)state;
    static float plain[TOKENS * VOCAB], whole[TOKENS * VOCAB], y[TOKENS * VOCAB];
    static const int pieces[] = {1, 7, 33};
    struct rig g;
    rig_new(&g, FORMAT_NVFP4, true);
    logits_of(&g, ACT_BF16, false, TOKENS, plain);
    for (int act = ACT_BF16; act < ACT_COUNT; act++) {
        logits_of(&g, (act_t)act, false, TOKENS, whole);
        assert_int_equal(memcmp(whole, plain, sizeof whole) == 0, act == ACT_BF16);
        for (int i = 0; i < 3; i++) {
            logits_of(&g, (act_t)act, false, pieces[i], y);
            assert_memory_equal(whole, y, sizeof y);
        }
        logits_of(&g, (act_t)act, true, 33, y);
        assert_memory_equal(whole, y, sizeof y);
    }
    rig_free(&g);
}

static void recipes(void **state)
{
    (void)state;
    static const struct {
        format_t f;
        bool scales;
        const char *name;
    } rows[] = {{FORMAT_BF16, false, "bf16"},   {FORMAT_FP8_BLOCK, false, "fp8-block"},
                {FORMAT_MXFP8, false, "mxfp8"}, {FORMAT_MXFP4, false, "mxfp8"},
                {FORMAT_NVFP4, true, "nvfp4"},  {FORMAT_NVFP4, false, "nvfp4-per-token"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct rig g;
        struct err e = {0};
        rig_new(&g, rows[i].f, rows[i].scales);
        struct model *m = &model_of(&g, ACT_BF16, false, 16)->base;
        assert_string_equal(model_recipe(g.store), rows[i].name);
        err_t rc = model_set_numerics(m, ACT_NVFP4, false, &e);
        bool fine = rows[i].f == FORMAT_BF16 || (rows[i].f == FORMAT_NVFP4 && rows[i].scales);
        assert_int_equal(rc, fine ? OK : ERR_INPUT);
        if (!fine) assert_non_null(strstr(e.msg, "nvfp4-per-token needs none"));
        model_free(m);
        rig_free(&g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_matrices), cmocka_unit_test(router_stays),
        cmocka_unit_test(batch_and_form_do_not_show), cmocka_unit_test(recipes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
