/* test_spelling.c - one model in every spelling: the same resident bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "folder_store.h"
#include "spell_model.h"

static void load(struct store **s, const char *dir, const char *what)
{
    struct err e = {0};
    struct config c;
    if (folder_store(s, &c, dir, FORMAT_COUNT, &e) != OK) fail_msg("%s: %s", what, e.msg);
}

/* Every part of every slot, against what was encoded. */
static void compare(const struct store *s, const struct tiny *t, const struct spell *sp)
{
    for (size_t i = 0; i < t->n; i++) {
        const struct resident *r = &store_spec(s, i)->shape;
        const struct tiny_weight *w = &t->w[i];
        size_t rows = (size_t)r->rows, cols = (size_t)r->cols, scales;
        if (!t->specs[i].linear || t->format == FORMAT_BF16) continue;
        assert_int_equal(r->format, t->format);
        uint8_t *got = mem_alloc(w->data_bytes + w->scale_bytes + 4);
        store_get(s, got, i, PART_DATA, 0, rows);
        assert_memory_equal(got, w->data, w->data_bytes);
        scales = format_scale_rows(t->format, rows);
        store_get(s, got, i, PART_SCALE, 0, scales);
        assert_memory_equal(got, w->scale, scales * format_scale_cols(t->format, cols) *
                                               (size_t)formats[t->format].scale_bytes);
        float x;
        if (formats[t->format].tensor) {
            store_get(s, &x, i, PART_TENSOR, 0, 1);
            assert_memory_equal(&x, &w->tensor, 4);
        }
        store_get(s, &x, i, PART_INPUT, 0, 1);
        if (sp->input)
            assert_memory_equal(&x, &w->input, 4);
        else
            assert_true(isnan(x));
        mem_free(got);
    }
}

static void every_spelling(void **state)
{
    (void)state;
    struct tiny t = {0};
    uint64_t first = 0, first_bytes = 0;
    for (size_t i = 0; i < N_SPELLS; i++) {
        const struct spell *s = &spells[i];
        bool base = s == spell_of(s->format);
        char dir[] = "/tmp/moult-s-XXXXXX";
        struct store *store;
        if (base) {
            if (i) tiny_free(&t);
            tiny_new(&t, s->format, 64, 128);
        }
        assert_non_null(mkdtemp(dir));
        tiny_write(&t, dir, s, NULL);
        load(&store, dir, s->name);
        compare(store, &t, s);
        if (base) {
            first = store_hash(store);
            first_bytes = store_bytes(store);
        } else if (store_hash(store) != first) {
            fail_msg("%s: other resident bytes than %s", s->name, spell_of(s->format)->name);
        }
        assert_int_equal(store_bytes(store), first_bytes);
        store_free(store);
        dir_drop(dir);
    }
    tiny_free(&t);
}

/* Prefixes that checkpoints put in front. */
static void prefixes(void **state)
{
    (void)state;
    static const char *const to[] = {"model.", "", "language_model.model.", "model.language_model."};
    static const char *const head[] = {NULL, NULL, "language_model.", NULL};
    struct tiny t;
    uint64_t h = 0;
    tiny_new(&t, FORMAT_MXFP8, 64, 128);
    for (size_t i = 0; i < sizeof to / sizeof to[0]; i++) {
        char dir[] = "/tmp/moult-s-XXXXXX";
        struct store *store;
        struct st_draft o = {.from = "model.", .to = to[i], .front = head[i]};
        assert_non_null(mkdtemp(dir));
        tiny_write(&t, dir, spell_of(FORMAT_MXFP8), &o);
        load(&store, dir, to[i]);
        if (i == 0) h = store_hash(store);
        assert_true(store_hash(store) == h);
        store_free(store);
        dir_drop(dir);
    }
    tiny_free(&t);
}

/* [E, 2I, H] and [E, H, 2I] look alike where 2I = H: down_proj tells them apart. */
static void square_fused(void **state)
{
    (void)state;
    static const int sizes[][2] = {{128, 64}, {128, 128}, {256, 128}};
    for (size_t k = 0; k < 3; k++)
        for (int f = 0; f < FORMAT_COUNT; f++) {
            struct tiny t;
            uint64_t h = 0;
            tiny_new(&t, (format_t)f, sizes[k][0], sizes[k][1]);
            for (size_t i = 0; i < N_SPELLS; i++) {
                const struct spell *s = &spells[i];
                char dir[] = "/tmp/moult-s-XXXXXX";
                struct store *store;
                if (s->format != (format_t)f || s->arrange == MIXTRAL) continue;
                /* halves of 64 rows share a block of 128 */
                if (f == FORMAT_FP8_BLOCK && sizes[k][1] % 128 && s->arrange != EACH) continue;
                assert_non_null(mkdtemp(dir));
                tiny_write(&t, dir, s, NULL);
                load(&store, dir, s->name);
                if (s == spell_of(s->format)) h = store_hash(store);
                if (store_hash(store) != h)
                    fail_msg("%s, %d x %d: other bytes", s->name, sizes[k][0], sizes[k][1]);
                store_free(store);
                dir_drop(dir);
            }
            tiny_free(&t);
        }
}

static void kv_scales(void **state)
{
    (void)state;
    static const struct {
        const char *k, *v;
        const char *says; /* NULL: loads */
    } t[] = {
        {"k_proj.k_scale", "v_proj.v_scale", NULL},
        {"qkv_proj.k_scale", "qkv_proj.v_scale", NULL},
        {"attn.k_scale", "attn.v_scale", NULL},
        {"k_scale", "v_scale", NULL},
        {"k_proj.output_scale", "v_proj.output_scale", NULL},
        {"k_proj.k_scale", NULL, "missing: model.layers.1.self_attn.v_proj.v_scale"},
        {NULL, "v_proj.v_scale", "missing: model.layers.1.self_attn.k_proj.k_scale"},
        {"k_proj.k_size", NULL, "k_size: unknown to the model"},
    };
    struct tiny m;
    tiny_new(&m, FORMAT_BF16, 64, 128);
    for (size_t i = 0; i < sizeof t / sizeof t[0] + 1; i++) {
        char dir[] = "/tmp/moult-s-XXXXXX", name[128];
        struct st_draft o = {0};
        struct store *store;
        struct config c;
        struct err e = {0};
        float k = 0.5f, v = 0.25f, got[2];
        bool one = i == sizeof t / sizeof t[0]; /* kv_scale, of both */
        assert_non_null(mkdtemp(dir));
        tiny_tensors(&o, &m, &spells[0]);
        const char *names[2] = {one ? "kv_scale" : t[i].k, one ? NULL : t[i].v};
        for (int j = 0; j < 2; j++) {
            if (names[j] == NULL) continue;
            snprintf(name, sizeof name, "model.layers.1.self_attn.%s", names[j]);
            st_put(&o, name, "F32", j ? "[1]" : "[]", j ? &v : &k, 4);
        }
        st_write(&o, dir);
        tiny_config(&m, dir, NULL);
        err_t rc = folder_store(&store, &c, dir, FORMAT_COUNT, &e);
        dir_drop(dir);
        if (!one && t[i].says) {
            assert_int_equal(rc, ERR_INPUT);
            if (!strstr(e.msg, t[i].says)) fail_msg("\"%s\" lacks \"%s\"", e.msg, t[i].says);
            continue;
        }
        if (rc != OK) fail_msg("%s", e.msg);
        struct layer_slots l;
        tensors_layer(&l, &c, 1);
        memcpy(got, store_ptr(store, l.kv_scale), sizeof got);
        assert_true(got[0] == k && got[1] == (one ? k : v));
        tensors_layer(&l, &c, 0); /* has none */
        memcpy(got, store_ptr(store, l.kv_scale), sizeof got);
        assert_true(got[0] == 1.0f && got[1] == 1.0f);
        store_free(store);
    }
    tiny_free(&m);
}

/* ---- random checkpoints: whatever is found lies inside its tensor ---- */

static uint64_t draw(uint64_t *state, uint64_t n)
{
    return mix(++*state * 0x9e3779b97f4a7c15ULL) % n;
}

static int by_tensor_name(const void *a, const void *b)
{
    const struct checkpoint_entry *x = a, *y = b;
    return strcmp(x->tensor->name, y->tensor->name);
}

static void inside(const struct source *s)
{
    static const size_t in[CONVERT_COUNT] = {1, 2, 2, 4, 4, 2, 2};
    if (s->tensor == NULL) return;
    assert_true(s->rows > 0 && s->cols > 0);
    uint64_t last = s->first + (s->rows - 1) * s->row_stride + (s->cols - 1) * s->col_stride;
    assert_true((last + 1) * in[s->convert] <= s->tensor->bytes);
}

static void random_checkpoints(void **state)
{
    (void)state;
    static const char *const modules[] = {"model.layers.0.mlp.experts.1.gate_proj",
                                          "model.layers.0.mlp.experts.1.down_proj",
                                          "model.layers.0.block_sparse_moe.experts.1.w3",
                                          "model.layers.0.mlp.experts.gate_up_proj",
                                          "model.layers.0.mlp.experts.down_proj"};
    static const char *const tails[] = {"", ".weight", "_blocks", ".weight_packed", ".weight_scale",
                                        ".weight_scale_inv", "_scales", "_weight_scale",
                                        ".weight_scale_2", "_weight_scale_2", ".input_scale"};
    static const st_dtype_t dtypes[] = {ST_BF16, ST_F32, ST_F8_E4M3, ST_U8, ST_F8_E8M0, ST_F4, ST_I8};
    static const uint64_t dims[] = {2, 32, 64, 1, 4, 0};
    static const uint8_t likely[][2] = {{0, 2}, {0, 2}, {3, 3}, {3, 3}, {1, 3}, {1, 3}, {3, 4}, {2, 3},
                                        {1, 1}, {1, 0}, {1, 1}};
    uint64_t seed = 1;
    size_t n_found = 0;
    for (int round = 0; round < 20000; round++) {
        char names[12][128];
        struct st_tensor t[12];
        struct checkpoint_entry entries[12];
        struct st_file file = {0};
        struct checkpoint c = {.entries = entries};
        struct spelling s;
        struct err e;
        for (int i = 0; i < 12; i++) {
            struct st_tensor x = {.name = names[c.n_tensors]};
            size_t tail = draw(&seed, 11);
            snprintf(names[c.n_tensors], 128, "%s%s", modules[draw(&seed, 5)], tails[tail]);
            bool twice = false;
            for (size_t k = 0; k < c.n_tensors; k++)
                twice = twice || strcmp(names[k], x.name) == 0;
            if (twice) continue;
            x.dtype = dtypes[draw(&seed, 8) ? likely[tail][draw(&seed, 2)] : draw(&seed, 7)];
            x.n_dims = draw(&seed, 8) ? 2 + (int)draw(&seed, 2) : (int)draw(&seed, 5);
            uint64_t len = 1;
            for (int d = 0; d < x.n_dims; d++)
                len *= x.shape[d] = dims[draw(&seed, draw(&seed, 8) ? 3 : 6)];
            x.bytes = len * (uint64_t)st_dtype_bits(x.dtype) / 8;
            t[c.n_tensors] = x;
            entries[c.n_tensors] = (struct checkpoint_entry){&file, &t[c.n_tensors]};
            c.n_tensors++;
        }
        qsort(entries, c.n_tensors, sizeof entries[0], by_tensor_name);
        assert_int_equal(spelling_open(&s, &c, &e), OK);
        static const char *const asked[] = {"gate_proj", "up_proj", "down_proj"};
        for (int p = 0; p < 54; p++) { /* 2 experts, 3 projections, 9 shapes */
            char name[128];
            struct spelled w;
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.weight", p / 27,
                     asked[p / 9 % 3]);
            uint64_t rows = dims[p / 3 % 3], cols = dims[p % 3];
            err_t rc = spelling_find(&s, &w, name, 2, rows, cols, &e);
            assert_true(rc == OK || rc == ERR_NOTFOUND || rc == ERR_INPUT || rc == ERR_UNSUPPORTED);
            if (rc != OK) continue;
            n_found++;
            for (int k = 0; k < PART_COUNT; k++)
                inside(&w.part[k]);
        }
        spelling_close(&s);
    }
    if (n_found < 1000) fail_msg("only %zu found", n_found);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_spelling),
        cmocka_unit_test(prefixes),
        cmocka_unit_test(square_fused),
        cmocka_unit_test(kv_scales),
        cmocka_unit_test(random_checkpoints),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
