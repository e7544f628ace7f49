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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_spelling),
        cmocka_unit_test(prefixes),
        cmocka_unit_test(square_fused),
        cmocka_unit_test(kv_scales),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
