/* test_format_cases.c - quantized checkpoints that once went wrong somewhere: C07, C19, C21, C23,
 * C25, and what else a checkpoint may not hold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/cpu/cpu.h"
#include "folder_store.h"
#include "spell_model.h"

/* A folder of the model in its format's first spelling, changed as `o` says. */
static void write_as(char *dir, const struct tiny *t, const struct spell *s, struct st_draft *o,
                     const char *config)
{
    assert_non_null(mkdtemp(dir));
    tiny_write(t, dir, s, o);
    if (config) tiny_config(t, dir, config);
}

static struct store *must_load(const char *dir)
{
    struct store *s = NULL;
    struct config c;
    struct err e = {0};
    if (folder_store(&s, &c, dir, FORMAT_COUNT, &e) != OK) fail_msg("%s", e.msg);
    return s;
}

/* An update from the folder is refused with `says`, and nothing has changed; so is a fresh start. */
static void must_refuse(struct store *s, const char *dir, const char *says)
{
    struct store *fresh = NULL;
    struct config c;
    struct err e = {0};
    uint64_t h = store_hash(s), epoch = store_epoch(s);
    err_t rc = update_from(s, dir, 2, &e);
    if (rc == OK) fail_msg("accepted; \"%s\" expected", says);
    if (!strstr(e.msg, says)) fail_msg("\"%s\" lacks \"%s\"", e.msg, says);
    assert_int_equal(err_http(rc), 400);
    assert_true(store_hash(s) == h && store_epoch(s) == epoch);
    if (folder_store(&fresh, &c, dir, FORMAT_COUNT, &e) == OK) store_free(fresh);
}

static void c07_scales_missing_or_other_dtype(void **state)
{
    (void)state;
    struct tiny t, bf16;
    struct err e = {0};
    char a[] = "/tmp/moult-c-XXXXXX", b[] = "/tmp/moult-c-XXXXXX", c[] = "/tmp/moult-c-XXXXXX",
         d[] = "/tmp/moult-c-XXXXXX";
    struct st_draft drop = {.drop = "weight_scale_inv"};
    tiny_new(&t, FORMAT_FP8_BLOCK, 64, 128);
    tiny_new(&bf16, FORMAT_BF16, 64, 128);
    write_as(d, &t, spell_of(FORMAT_FP8_BLOCK), NULL, NULL);
    struct store *s = must_load(d);
    uint64_t h = store_hash(s);
    write_as(a, &t, spell_of(FORMAT_FP8_BLOCK), &drop, NULL);
    must_refuse(s, a,
                "tensor model.layers.0.self_attn.q_proj.weight: F8_E4M3 without its scale; "
                "missing: model.layers.0.self_attn.q_proj.weight_scale_inv");
    write_as(b, &bf16, spell_of(FORMAT_BF16), NULL, NULL);
    must_refuse(s, b, "model.layers.0.self_attn.q_proj: fp8-block -> bf16");
    for (size_t i = 0; i < N_SPELLS; i++) {
        if (strcmp(spells[i].name, "fp8 block, BF16 scales") != 0) continue;
        write_as(c, &t, &spells[i], NULL, NULL);
        if (update_from(s, c, 1, &e) != OK) fail_msg("%s", e.msg);
        assert_true(store_hash(s) == h && store_epoch(s) == 2);
    }
    store_free(s);
    dir_drop(a), dir_drop(b), dir_drop(c), dir_drop(d);
    tiny_free(&t);
    tiny_free(&bf16);
}

/* ---- single matrices ---- */

static void matrix_spec(struct slot_spec *s, const char *name, uint64_t rows, uint64_t cols)
{
    *s = (struct slot_spec){.n_dims = 2, .shape = {RESIDENT_MATRIX, FORMAT_BF16, rows, cols}};
    snprintf(s->name, sizeof s->name, "%.100s.weight", name);
}

/* The store of a folder of some matrices; NULL with `e` filled. */
static struct store *matrices(const char *dir, struct slot_spec *specs, size_t n, struct err *e)
{
    struct plan p = {0};
    struct store *s = NULL;
    err_t rc = plan_open(&p, dir, specs, n, e);
    if (rc == OK) rc = plan_formats(&p, specs, e);
    plan_close(&p);
    if (rc == OK) rc = store_new(&s, specs, n, memory_host, e);
    if (rc == OK && update_from(s, dir, 1, e) != OK) {
        store_free(s);
        return NULL;
    }
    return rc == OK ? s : NULL;
}

static void product(const struct store *s, size_t slot, const float *a, float *out, const char *isa)
{
    const struct backend_ops *o = cpu_ops_find(isa);
    const struct matrix *w = store_matrix(s, slot);
    struct fixed *fixed = mem_alloc(fixed_blocks(w->cols) * sizeof *fixed);
    struct gemm g = {.a = a, .lda = w->cols, .fixed = fixed, .w = w, .out = out, .ldo = w->rows};
    fixed_row(fixed, a, w->cols);
    o->gemm(&g, 1, 0, (w->rows + 15) / 16);
    mem_free(fixed);
}

/* All elements of a slot as f32. */
static float *decoded(const struct store *s, size_t slot)
{
    const struct resident *r = &store_spec(s, slot)->shape;
    size_t rows = (size_t)r->rows, cols = (size_t)r->cols, data = 0, scale = 0;
    struct format_parts p = {.format = r->format, .rows = rows, .cols = cols, .tensor = 1.0f};
    assert_true(format_bytes(r->format, rows, cols, &data, &scale));
    void *d = mem_alloc(data), *sc = mem_alloc(scale + 1);
    float *out = mem_alloc(rows * cols * sizeof *out);
    store_get(s, d, slot, PART_DATA, 0, rows);
    store_get(s, sc, slot, PART_SCALE, 0, format_scale_rows(r->format, rows));
    if (formats[r->format].tensor) store_get(s, &p.tensor, slot, PART_TENSOR, 0, 1);
    p.data = d;
    p.scale = sc;
    for (size_t i = 0; i < rows; i++)
        format_decode_row(out + i * cols, &p, i);
    mem_free(d);
    mem_free(sc);
    return out;
}

static const char *const isas[] = {"portable", "avx2", "avx512"};

static void c19_gate_and_up_scales(void **state)
{
    (void)state;
    static const char *const proj[] = {"gate_proj", "up_proj"};
    static const float ratios[][2] = {{0.5f, 2.0f}, {0.037f, 0.037f * 1.2547f}};
    for (int k = 0; k < 2; k++) {
        char dir[] = "/tmp/moult-c-XXXXXX", name[128];
        struct slot_spec specs[2];
        struct st_draft o = {0};
        struct err e = {0};
        uint8_t codes[2][128], scales[16];
        memset(scales, 0x38, sizeof scales); /* 1.0 */
        for (int p = 0; p < 2; p++) {
            for (size_t i = 0; i < sizeof codes[0]; i++)
                codes[p][i] = k ? (uint8_t)mix(i + 1000 * (uint64_t)p + 1) : 0x22; /* 1.0 */
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.0.%s", proj[p]);
            matrix_spec(&specs[p], name, 16, 16);
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.0.%s.weight", proj[p]);
            st_put(&o, name, "U8", "[16, 8]", codes[p], sizeof codes[p]);
            strcat(name, "_scale");
            st_put(&o, name, "F8_E4M3", "[16, 1]", scales, sizeof scales);
            strcat(name, "_2");
            st_put(&o, name, "F32", "[]", &ratios[k][p], 4);
        }
        assert_non_null(mkdtemp(dir));
        st_write(&o, dir);
        struct store *s = matrices(dir, specs, 2, &e);
        if (s == NULL) fail_msg("%s", e.msg);
        float a[16], out[16];
        for (int i = 0; i < 16; i++)
            a[i] = 1.0f;
        for (size_t v = 0; v < 3; v++)
            for (size_t p = 0; p < 2 && cpu_ops_find(isas[v]); p++) {
                product(s, p, a, out, isas[v]);
                for (int r = 0; r < 16; r++) {
                    double sum = 0.0;
                    for (int c = 0; c < 16; c++)
                        sum += (double)format_e2m1(codes[p][r * 8 + c / 2] >> 4 * (c % 2) & 15);
                    if (k == 0) assert_true(out[r] == (p ? 32.0f : 8.0f));
                    assert_true(fabs((double)out[r] - sum * (double)ratios[k][p]) <=
                                1e-6 * fabs(sum * (double)ratios[k][p]));
                }
            }
        store_free(s);
        dir_drop(dir);
    }
}

/* q, k and v of one attention, each FP8 with a scale of its own. */
static void c19_dense_scales(void **state)
{
    (void)state;
    static const char *const proj[] = {"q_proj", "k_proj", "v_proj"};
    static const float scale[] = {1.0f, 0.5f, 0.25f};
    char dir[] = "/tmp/moult-c-XXXXXX", name[128];
    struct slot_spec specs[3];
    struct st_draft o = {0};
    struct err e = {0};
    uint8_t codes[16 * 16];
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)(0x38 + i % 3 * 8); /* 1, 2, 4 */
    for (int p = 0; p < 3; p++) {
        snprintf(name, sizeof name, "model.layers.0.self_attn.%s", proj[p]);
        matrix_spec(&specs[p], name, 16, 16);
        strcat(name, ".weight");
        st_put(&o, name, "F8_E4M3", "[16, 16]", codes, sizeof codes);
        strcat(name, "_scale");
        st_put(&o, name, "F32", "[]", &scale[p], 4);
    }
    assert_non_null(mkdtemp(dir));
    st_write(&o, dir);
    struct store *s = matrices(dir, specs, 3, &e);
    if (s == NULL) fail_msg("%s", e.msg);
    float a[16], out[3][16];
    for (int i = 0; i < 16; i++)
        a[i] = 1.0f;
    for (size_t v = 0; v < 3; v++) {
        if (cpu_ops_find(isas[v]) == NULL) continue;
        for (size_t p = 0; p < 3; p++)
            product(s, p, a, out[p], isas[v]);
        for (int r = 0; r < 16; r++) {
            float sum = 0.0f;
            for (int c = 0; c < 16; c++)
                sum += format_e4m3(codes[r * 16 + c]);
            for (int p = 0; p < 3; p++)
                assert_true(out[p][r] == sum * scale[p]);
        }
    }
    store_free(s);
    dir_drop(dir);
}

/* A [rows, 300] weight of ones with a scale grid; NULL if it is refused. */
static struct store *block_weight(char *dir, size_t rows, const char *grid, size_t gr, size_t gc,
                                  struct err *e)
{
    struct slot_spec spec;
    struct st_draft o = {0};
    uint8_t *codes = mem_alloc(rows * 300);
    float *scale = mem_alloc(gr * gc * sizeof *scale);
    char dims[64];
    memset(codes, 0x38, rows * 300);
    for (size_t i = 0; i < gr * gc; i++)
        scale[i] = ldexpf(1.0f, (int)(i / gc)) * ldexpf(1.0f, -(int)(i % gc));
    snprintf(dims, sizeof dims, "[%zu, 300]", rows);
    st_put(&o, "w.weight", "F8_E4M3", dims, codes, rows * 300);
    st_put(&o, "w.weight_scale_inv", "F32", grid, scale, gr * gc * 4);
    mem_free(codes);
    mem_free(scale);
    assert_non_null(mkdtemp(dir));
    st_write(&o, dir);
    matrix_spec(&spec, "w", rows, 300);
    struct store *s = matrices(dir, &spec, 1, e);
    dir_drop(dir);
    return s;
}

static void c23_odd_blocks(void **state)
{
    (void)state;
    static const size_t r[] = {0, 124, 125, 126, 127, 128, 255, 256, 999}, c[] = {0, 127, 128, 299};
    struct err e = {0};
    char a[] = "/tmp/moult-c-XXXXXX", b[] = "/tmp/moult-c-XXXXXX", d[] = "/tmp/moult-c-XXXXXX",
         f[] = "/tmp/moult-c-XXXXXX", g[] = "/tmp/moult-c-XXXXXX";
    struct store *s = block_weight(a, 1000, "[8, 3]", 8, 3, &e);
    if (s == NULL) fail_msg("%s", e.msg);
    assert_int_equal(store_spec(s, 0)->shape.format, FORMAT_FP8_BLOCK);
    float *x = decoded(s, 0), one[300] = {0}, out[1000];
    for (size_t i = 0; i < sizeof r / sizeof r[0]; i++)
        for (size_t j = 0; j < sizeof c / sizeof c[0]; j++) {
            float want = ldexpf(1.0f, (int)(r[i] / 128) - (int)(c[j] / 128));
            assert_true(x[r[i] * 300 + c[j]] == want);
            one[c[j]] = 1.0f; /* the same through the kernel */
            product(s, 0, one, out, "portable");
            assert_true(out[r[i]] == want);
            one[c[j]] = 0.0f;
        }
    mem_free(x);
    store_free(s);
    s = block_weight(b, 2112, "[17, 3]", 17, 3, &e);
    assert_non_null(s);
    x = decoded(s, 0);
    assert_true(x[2111 * 300] == 65536.0f && x[2047 * 300] == 32768.0f);
    mem_free(x);
    store_free(s);
    char h[] = "/tmp/moult-c-XXXXXX"; /* ModelOpt's blocks before they are squeezed */
    s = block_weight(h, 1000, "[8, 1, 3, 1]", 8, 3, &e);
    assert_non_null(s);
    assert_int_equal(store_spec(s, 0)->shape.format, FORMAT_FP8_BLOCK);
    store_free(s);
    assert_null(block_weight(d, 1000, "[7, 3]", 7, 3, &e));
    assert_non_null(strstr(e.msg,
                           "tensor w.weight_scale_inv: shape [7, 3], a weight of [1000, 300] "
                           "needs [8, 3] (fp8-block)"));
    assert_null(block_weight(g, 1000, "[3, 8]", 3, 8, &e));
    s = block_weight(f, 1000, "[1, 1]", 1, 1, &e); /* by the documented rule */
    assert_non_null(s);
    assert_int_equal(store_spec(s, 0)->shape.format, FORMAT_FP8_TENSOR);
    store_free(s);
}

/* ---- C21 ---- */

static void c21_config_against_storage(void **state)
{
    (void)state;
    static const struct {
        const char *config, *says; /* NULL: loads */
    } t[] = {
        {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"ignore\":[\"lm_head\","
         "\"*.mlp.gate\",\"model.layers.10.*\"]}",
         NULL},
        {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"ignore\":[\"lm_head\","
         "\"*.mlp.gate\",\"layers.1.*\"]}",
         "module model.layers.1.self_attn.q_proj: stored as nvfp4, but the quantization config "
         "(modelopt NVFP4) excludes it"},
        {"{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"ignore\":["
         "\"language_model.model.layers.0.mlp.experts.3.up_proj\"]}",
         "module model.layers.0.mlp.experts.3.up_proj: stored as nvfp4"},
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}",
         "module model.layers.0.self_attn.q_proj: stored as nvfp4"},
    };
    struct tiny n;
    char ok[] = "/tmp/moult-c-XXXXXX";
    tiny_new(&n, FORMAT_NVFP4, 64, 128);
    write_as(ok, &n, spell_of(FORMAT_NVFP4), NULL, NULL);
    struct store *s = must_load(ok);
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        char dir[] = "/tmp/moult-c-XXXXXX";
        struct err e = {0};
        write_as(dir, &n, spell_of(FORMAT_NVFP4), NULL, t[i].config);
        if (t[i].says)
            must_refuse(s, dir, t[i].says);
        else if (update_from(s, dir, 1, &e) != OK)
            fail_msg("%s", e.msg);
        dir_drop(dir);
    }
    store_free(s);
    dir_drop(ok);
    tiny_free(&n);
}

/* q, k and v of layer 0 and all of layer 1 in BF16, the rest NVFP4: as stored, whatever is listed. */
static void c21_mixed(void **state)
{
    (void)state;
    struct tiny n;
    struct st_draft o = {0};
    char dir[] = "/tmp/moult-c-XXXXXX";
    tiny_new(&n, FORMAT_NVFP4, 64, 128);
    for (size_t i = 0; i < n.n; i++) {
        const char *name = n.specs[i].name;
        bool bf16 = strstr(name, "layers.1.") || strstr(name, "q_proj") || strstr(name, "k_proj") ||
                    strstr(name, "v_proj");
        if (bf16) n.specs[i].linear = false; /* written as BF16 */
    }
    write_as(dir, &n, spell_of(FORMAT_NVFP4), &o,
             "{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\",\"ignore\":[\"lm_head\","
             "\"*.mlp.gate\",\"model.layers.0.self_attn.q_proj\",\"layers.0.self_attn.k_proj\","
             "\"model.layers.0.self_attn.v_proj\",\"model.layers.1.*\"]}");
    struct store *s = must_load(dir);
    for (size_t i = 0; i < n.n; i++)
        if (n.specs[i].shape.kind == RESIDENT_MATRIX)
            assert_int_equal(store_spec(s, i)->shape.format,
                             n.specs[i].linear ? FORMAT_NVFP4 : FORMAT_BF16);
    store_free(s);
    dir_drop(dir);
    tiny_free(&n);
}

/* ---- C25 and other values ---- */

static struct tiny_weight *weight_of(struct tiny *t, const char *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (strstr(t->specs[i].name, name)) return &t->w[i];
    return NULL;
}

#define UP3 "layers.1.mlp.experts.3.up_proj"

static void c25_values(void **state)
{
    (void)state;
    struct edit {
        format_t format;
        int field; /* 0 data, 1 scale, 2 tensor and inverse */
        size_t at;
        double value;     /* byte or f32 */
        const char *says; /* NULL: accepted */
    };
    static const struct edit t[] = {
        {FORMAT_NVFP4, 2, 0, HUGE_VAL, UP3 ".weight_scale_2: scale 0 is inf"},
        {FORMAT_NVFP4, 2, 0, (double)NAN, UP3 ".weight_scale_2: scale 0 is nan"},
        {FORMAT_NVFP4, 2, 0, -1.0, UP3 ".weight_scale_2: scale 0 is -1"},
        {FORMAT_NVFP4, 2, 0, 0.0, UP3 ".weight_scale_2: scale 0, but element"},
        {FORMAT_NVFP4, 2, 0, 1e-40, NULL}, /* exact products */
        {FORMAT_NVFP4, 1, 9, 0x7f, UP3 ".weight_scale: scale 9, of row 2, is NaN or negative"},
        {FORMAT_NVFP4, 1, 9, 0xb8, UP3 ".weight_scale: scale 9, of row 2, is NaN or negative"},
        {FORMAT_NVFP4, 1, 9, 0x00, NULL},
        {FORMAT_MXFP8, 1, 5, 0xff, UP3 ".weight_scale_inv: scale 5, of row 2, is NaN or outside"},
        {FORMAT_MXFP8, 1, 5, 127 + 120, UP3 ".weight_scale_inv: scale 5, of row 2, is NaN or out"},
        {FORMAT_MXFP8, 1, 5, 127 - 118, UP3 ".weight_scale_inv: scale 5, of row 2, is NaN or out"},
        {FORMAT_MXFP8, 1, 5, 0, UP3 ".weight_scale_inv: scale 5, of row 2, is 2^-127, and"},
        {FORMAT_MXFP8, 1, 5, 127 + 119, NULL},
        {FORMAT_MXFP8, 1, 5, 127 - 117, NULL},
        {FORMAT_MXFP8, 0, 77, 0x7f, UP3 ".weight: element 77 is NaN"},
        {FORMAT_MXFP8, 0, 77, 0xff, UP3 ".weight: element 77 is NaN"},
        {FORMAT_MXFP4, 1, 5, 0xff, UP3 ".weight_scale: scale 5, of row 2, is NaN or outside"},
        {FORMAT_FP8_BLOCK, 3, 0, (double)NAN,
         UP3 ".weight_scale_inv: scale 0, of row 0, is NaN, inf"},
        {FORMAT_FP8_BLOCK, 3, 0, HUGE_VAL, UP3 ".weight_scale_inv: scale 0, of row 0, is NaN, inf"},
        {FORMAT_FP8_BLOCK, 3, 0, -0.5, UP3 ".weight_scale_inv: scale 0, of row 0, is NaN, inf"},
        {FORMAT_FP8_CHANNEL, 3, 7, (double)NAN,
         UP3 ".weight_scale: scale 7, of row 7, is NaN, inf"},
        {FORMAT_FP8_BLOCK, 3, 0, 0.0, NULL},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct tiny n;
        struct err e = {0};
        char ok[] = "/tmp/moult-c-XXXXXX", dir[] = "/tmp/moult-c-XXXXXX";
        tiny_new(&n, t[i].format, 64, 128);
        write_as(ok, &n, spell_of(t[i].format), NULL, NULL);
        struct store *s = must_load(ok);
        struct tiny_weight *w = weight_of(&n, UP3);
        float x = (float)t[i].value;
        if (t[i].field < 2) (t[i].field ? w->scale : w->data)[t[i].at] = (uint8_t)t[i].value;
        if (t[i].field == 2) w->tensor = x;
        if (t[i].field == 3) memcpy(w->scale + t[i].at * 4, &x, 4);
        write_as(dir, &n, spell_of(t[i].format), NULL, NULL);
        if (t[i].says)
            must_refuse(s, dir, t[i].says);
        else if (update_from(s, dir, 2, &e) != OK)
            fail_msg("%zu: %s", i, e.msg);
        store_free(s);
        dir_drop(ok);
        dir_drop(dir);
        tiny_free(&n);
    }
}

/* In an inverse spelling zero is an infinite scale, and infinity none. */
static void c25_inverse(void **state)
{
    (void)state;
    static const struct {
        float inverse;
        const char *says;
    } t[] = {{0.0f, "weight_global_scale: scale 0 is inf"},
             {INFINITY, "weight_global_scale: scale 0, but element"}};
    const struct spell *ct = NULL;
    for (size_t i = 0; i < N_SPELLS; i++)
        if (spells[i].inverse && spells[i].arrange == EACH) ct = &spells[i];
    for (size_t i = 0; i < 2; i++) {
        struct tiny n;
        char ok[] = "/tmp/moult-c-XXXXXX", dir[] = "/tmp/moult-c-XXXXXX";
        tiny_new(&n, FORMAT_NVFP4, 64, 128);
        write_as(ok, &n, ct, NULL, NULL);
        struct store *s = must_load(ok);
        weight_of(&n, UP3)->inverse = t[i].inverse;
        write_as(dir, &n, ct, NULL, NULL);
        must_refuse(s, dir, t[i].says);
        store_free(s);
        dir_drop(ok);
        dir_drop(dir);
        tiny_free(&n);
    }
}

/* Logits of a few tokens. */
static void logits(const char *dir, float *out, size_t n_tokens)
{
    struct config c;
    struct store *s;
    struct model *m;
    struct err e = {0};
    struct pool *pool = pool_new(1);
    if (folder_store(&s, &c, dir, FORMAT_COUNT, &e) != OK) fail_msg("%s", e.msg);
    if (model_new(&m, &c, s, pool, 4, KV_BF16, 32, NULL, &e) != OK) fail_msg("%s", e.msg);
    int32_t ids[32], pos[32], seq[32] = {0}, pages[4] = {0, 1, 2, 3};
    for (int i = 0; i < (int)n_tokens; i++) {
        ids[i] = (i * 7 + 3) % c.vocab_size;
        pos[i] = i;
    }
    struct step_seq sq = {pages, 4};
    struct step st = {.n_tokens = (int32_t)n_tokens,
                      .ids = ids,
                      .pos = pos,
                      .seq = seq,
                      .n_seqs = 1,
                      .seqs = &sq};
    assert_int_equal(model_logits(m, &st, pos, (int32_t)n_tokens, out, NULL), OK);
    model_free(m);
    store_free(s);
    pool_free(pool);
}

/* A dead expert, all zeros with scales of zero, adds exactly nothing. */
static void c25_dead_expert(void **state)
{
    (void)state;
    struct tiny n;
    char a[] = "/tmp/moult-c-XXXXXX", b[] = "/tmp/moult-c-XXXXXX";
    enum { TOKENS = 24, VOCAB = 48 };
    static float x[TOKENS * VOCAB], y[TOKENS * VOCAB], z[TOKENS * VOCAB];
    tiny_new(&n, FORMAT_NVFP4, 64, 128);
    write_as(a, &n, spell_of(FORMAT_NVFP4), NULL, NULL);
    logits(a, z, TOKENS);
    for (size_t i = 0; i < n.n; i++) { /* the reference: only down is zero */
        if (!strstr(n.specs[i].name, ".experts.2.down_proj")) continue;
        memset(n.w[i].data, 0, n.w[i].data_bytes);
    }
    dir_drop(a);
    write_as(strcpy(a, "/tmp/moult-c-XXXXXX"), &n, spell_of(FORMAT_NVFP4), NULL, NULL);
    logits(a, x, TOKENS);
    for (size_t i = 0; i < n.n; i++) {
        if (!strstr(n.specs[i].name, ".experts.2.")) continue;
        memset(n.w[i].data, 0, n.w[i].data_bytes);
        memset(n.w[i].scale, 0, n.w[i].scale_bytes);
        n.w[i].tensor = 1.0f;
    }
    write_as(b, &n, spell_of(FORMAT_NVFP4), NULL, NULL);
    logits(b, y, TOKENS);
    for (size_t i = 0; i < TOKENS * VOCAB; i++)
        assert_true(isfinite(y[i]));
    assert_memory_equal(x, y, sizeof x);
    assert_memory_not_equal(x, z, sizeof x); /* the expert was in use */
    dir_drop(a);
    dir_drop(b);
    tiny_free(&n);
}

/* Input scales that calibration never set mean "none". */
static void input_scales(void **state)
{
    (void)state;
    static const float values[] = {0.0f, -1.0f, NAN, INFINITY, 0.5f};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        struct tiny n;
        char dir[] = "/tmp/moult-c-XXXXXX";
        tiny_new(&n, FORMAT_NVFP4, 64, 128);
        weight_of(&n, UP3)->input = values[i];
        write_as(dir, &n, spell_of(FORMAT_NVFP4), NULL, NULL);
        struct store *s = must_load(dir);
        float got;
        store_get(s, &got, store_find(s, "model." UP3 ".weight"), PART_INPUT, 0, 1);
        assert_true(values[i] == 0.5f ? got == 0.5f : isnan(got));
        store_free(s);
        dir_drop(dir);
        tiny_free(&n);
    }
}

/* Tensors that are missing, too many or not what their name says. */
static void tensors(void **state)
{
    (void)state;
    static const struct {
        format_t format;
        const char *drop, *from, *to, *says;
        const char *extra, *dtype, *dims; /* one more tensor, of 16 bytes */
    } t[] = {
        {FORMAT_NVFP4, UP3 ".weight_scale_2", NULL, NULL,
         "without its tensor scale; missing: model." UP3 ".weight_scale_2 or model." UP3
         ".weight_global_scale",
         NULL, NULL, NULL},
        {FORMAT_NVFP4, UP3, NULL, NULL, "missing tensors: model." UP3 ".weight", NULL, NULL, NULL},
        {FORMAT_NVFP4, "input_scale", NULL, NULL, NULL, NULL, NULL, NULL},
        {FORMAT_NVFP4, NULL, NULL, NULL, UP3 ".pre_quant_scale: unknown to the model",
         "model." UP3 ".pre_quant_scale", "BF16", "[8]"},
        {FORMAT_NVFP4, NULL, NULL, NULL,
         "model." UP3 ".weight_global_scale: is what model." UP3 ".weight_scale_2 is too",
         "model." UP3 ".weight_global_scale", "F32", "[4]"},
        {FORMAT_NVFP4, NULL, NULL, NULL, "experts.4.up_proj.weight: unknown to the model",
         "model.layers.1.mlp.experts.4.up_proj.weight", "BF16", "[8]"},
        {FORMAT_BF16, NULL, NULL, NULL,
         UP3 ".weight_scale: not expected: model." UP3 ".weight is bf16",
         "model." UP3 ".weight_scale", "F32", "[4]"},
        {FORMAT_MXFP8, NULL, NULL, NULL,
         UP3 ".weight_scale_2: not expected: model." UP3 ".weight is mxfp8",
         "model." UP3 ".weight_scale_2", "F32", "[4]"},
        {FORMAT_MXFP8, UP3 ".weight_scale_inv", NULL, NULL,
         UP3 ".weight_scale_inv: shape [2, 8], a weight of [128, 64] needs [128, 2] (mxfp8)",
         "model." UP3 ".weight_scale_inv", "U8", "[2, 8]"},
        {FORMAT_FP8_BLOCK, UP3 ".weight_scale_inv", NULL, NULL,
         UP3 ".weight_scale_inv: dtype: I32 is no scale of F8_E4M3",
         "model." UP3 ".weight_scale_inv", "I32", "[1, 4]"},
        {FORMAT_BF16, UP3, NULL, NULL, UP3 ".weight: dtype: I8 is not BF16", "model." UP3 ".weight",
         "I8", "[16]"},
        {FORMAT_BF16, UP3, NULL, NULL, UP3 ".weight: shape [2, 4], the model needs [128, 64]",
         "model." UP3 ".weight", "BF16", "[2, 4]"},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct tiny n;
        struct err e = {0};
        char ok[] = "/tmp/moult-c-XXXXXX", dir[] = "/tmp/moult-c-XXXXXX", zeros[16] = {0};
        struct st_draft o = {.drop = t[i].drop};
        tiny_new(&n, t[i].format, 64, 128);
        write_as(ok, &n, spell_of(t[i].format), NULL, NULL);
        struct store *s = must_load(ok);
        tiny_tensors(&o, &n, spell_of(t[i].format));
        o.drop = NULL;
        if (t[i].extra) st_put(&o, t[i].extra, t[i].dtype, t[i].dims, zeros, sizeof zeros);
        assert_non_null(mkdtemp(dir));
        st_write(&o, dir);
        tiny_config(&n, dir, NULL);
        if (t[i].says)
            must_refuse(s, dir, t[i].says);
        else if (update_from(s, dir, 2, &e) != OK)
            fail_msg("%zu: %s", i, e.msg);
        store_free(s);
        dir_drop(ok);
        dir_drop(dir);
        tiny_free(&n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c07_scales_missing_or_other_dtype),
        cmocka_unit_test(c19_gate_and_up_scales),
        cmocka_unit_test(c19_dense_scales),
        cmocka_unit_test(c21_config_against_storage),
        cmocka_unit_test(c21_mixed),
        cmocka_unit_test(c23_odd_blocks),
        cmocka_unit_test(c25_values),
        cmocka_unit_test(c25_inverse),
        cmocka_unit_test(c25_dead_expert),
        cmocka_unit_test(input_scales),
        cmocka_unit_test(tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
