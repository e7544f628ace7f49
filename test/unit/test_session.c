/* test_session.c - partial updates and buckets: every spelling, every fault, against whole updates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "folder_store.h"
#include "spell_model.h"
#include "weight/bucket.h"
#include "weight/export.h"

/* A file of what `keep` takes of a draft's tensors. */
static void *part_of(const struct st_draft *d, bool (*keep)(const char *name), size_t *n)
{
    struct st_draft part = {0};
    struct st_file f;
    struct buf all = {0}, header = {0};
    struct err e;
    uint64_t len = d->header.len + 1;
    assert_true(buf_put(&header, d->header.data, d->header.len) && buf_putc(&header, '}'));
    assert_true(buf_put(&all, &len, 8) && buf_put(&all, header.data, header.len) &&
                buf_put(&all, d->data.data, d->data.len));
    if (st_open_memory(&f, "draft", all.data, all.len, &e) != OK) fail_msg("%s", e.msg);
    for (size_t i = 0; i < f.n; i++) {
        const struct st_tensor *t = &f.tensors[i];
        char dims[96] = "[";
        if (!keep(t->name)) continue;
        for (int k = 0; k < t->n_dims; k++)
            snprintf(dims + strlen(dims), 90 - strlen(dims), "%s%llu", k ? ", " : "",
                     (unsigned long long)t->shape[k]);
        strcat(dims, "]");
        st_put(&part, t->name, st_dtype_name(t->dtype), dims, all.data + t->offset, t->bytes);
    }
    st_close(&f);
    buf_release(&all);
    buf_release(&header);
    if (part.header.len == 0) assert_true(buf_puts(&part.header, "{"));
    assert_true(buf_putc(&part.header, '}'));
    len = part.header.len;
    *n = 8 + part.header.len + part.data.len;
    char *bytes = mem_alloc(*n);
    memcpy(bytes, &len, 8);
    memcpy(bytes + 8, part.header.data, part.header.len);
    if (part.data.len) memcpy(bytes + 8 + part.header.len, part.data.data, part.data.len);
    buf_release(&part.header);
    buf_release(&part.data);
    return bytes;
}

static bool keep_all(const char *name)
{
    (void)name;
    return true;
}

/* Of fused experts the two tensors of a layer go together: a square one does not tell how it lies. */
static bool keep_layer1(const char *name)
{
    return strstr(name, "layers.1.") != NULL;
}

static bool keep_attention(const char *name)
{
    return strstr(name, "layers.0.self_attn.") != NULL || strcmp(name, "lm_head.weight") == 0;
}

static bool is_scale(const char *name)
{
    return strstr(name, "scale") != NULL;
}

static bool keep_scales(const char *name)
{
    return keep_layer1(name) && is_scale(name);
}

static bool keep_weights(const char *name)
{
    return keep_layer1(name) && !is_scale(name);
}

/* Two models of one shape; a store that holds the first. */
struct pair {
    struct tiny a, b;
    struct st_draft db; /* of b */
    struct store *s;
    struct config c;
    char dir[32];
};

static void pair_open(struct pair *p, const struct spell *spell)
{
    struct err e = {0};
    memset(p, 0, sizeof *p);
    strcpy(p->dir, "/tmp/moult-s-XXXXXX");
    assert_non_null(mkdtemp(p->dir));
    tiny_new(&p->a, spell->format, 64, 64);
    tiny_new(&p->b, spell->format, 64, 64);
    for (size_t i = 0; i < p->b.n; i++) { /* other weights, in a's scales */
        struct tiny_weight *w = &p->b.w[i];
        size_t len = (size_t)(p->b.specs[i].shape.rows * p->b.specs[i].shape.cols);
        for (size_t k = 0; k < len; k += 3)
            w->bf16[k] ^= 8; /* F16 has that bit, too */
        for (size_t k = 0; w->data && k < w->data_bytes; k += 5)
            w->data[k] = (uint8_t)(w->data[k] & 0x7e);
        w->tensor *= 2.0f;
        w->inverse *= 0.5f;
    }
    tiny_write(&p->a, p->dir, spell, NULL);
    if (folder_store(&p->s, &p->c, p->dir, FORMAT_COUNT, &e) != OK)
        fail_msg("%s: %s", spell->name, e.msg);
    tiny_tensors(&p->db, &p->b, spell);
}

static void pair_close(struct pair *p)
{
    folder_store_free(p->s);
    tiny_free(&p->a);
    tiny_free(&p->b);
    buf_release(&p->db.header);
    buf_release(&p->db.data);
    dir_drop(p->dir);
}

static err_t update_buckets(struct store *s, struct buckets *b, struct err *e)
{
    struct update *u = NULL;
    err_t rc = update_begin(&u, s, e);
    if (rc != OK) return rc;
    const struct stage_options o = {.n_threads = 2};
    rc = update_stage_part(u, b->files, b->n, &o, NULL, e);
    if (rc == OK) rc = update_prepare(u, e);
    if (rc == OK) update_commit(u);
    update_free(u);
    return rc;
}

static void add(struct buckets *b, const struct pair *p, bool (*keep)(const char *name))
{
    struct err e = {0};
    size_t n;
    void *bytes = part_of(&p->db, keep, &n);
    if (buckets_add(b, bytes, n, UINT64_MAX, &e) != OK) fail_msg("%s", e.msg);
}

/* Canonical bytes of all slots but those whose name holds `without`. */
static void slots(struct buf *out, const struct store *s, const char *only, bool with)
{
    for (size_t i = 0; i < store_slots(s); i++) {
        const struct slot_spec *p = store_spec(s, i);
        struct export_tensor t[EXPORT_MAX];
        size_t n = export_tensors(p, t);
        if ((strstr(p->name, only) != NULL) != with) continue;
        for (size_t k = 0; k < n; k++) {
            char *room = mem_alloc(t[k].rows * t[k].row_bytes + 1);
            store_get(s, room, i, t[k].part, 0, t[k].rows);
            assert_true(buf_put(out, room, t[k].rows * t[k].row_bytes));
            mem_free(room);
        }
    }
}

static bool same(struct buf *a, struct buf *b)
{
    bool equal = a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
    buf_release(a);
    buf_release(b);
    return equal;
}

/* What is named changes to the values that a whole update gives, the rest keeps its bytes. */
static void partial_updates(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SPELLS; i++) {
        struct pair p;
        struct store *whole = NULL;
        struct config c;
        struct err e = {0};
        struct buckets b = {0};
        struct buf was = {0}, is = {0}, want = {0};
        pair_open(&p, &spells[i]);
        char dir[] = "/tmp/moult-s-XXXXXX";
        assert_non_null(mkdtemp(dir));
        tiny_write(&p.b, dir, &spells[i], NULL);
        if (folder_store(&whole, &c, dir, FORMAT_COUNT, &e) != OK)
            fail_msg("%s: %s", spells[i].name, e.msg);
        slots(&was, p.s, "layers.1.", false);
        add(&b, &p, keep_layer1);
        if (update_buckets(p.s, &b, &e) != OK) fail_msg("%s: %s", spells[i].name, e.msg);
        slots(&is, p.s, "layers.1.", false);
        if (!same(&was, &is)) fail_msg("%s: the rest changed", spells[i].name);
        slots(&is, p.s, "layers.1.", true);
        slots(&want, whole, "layers.1.", true);
        if (!same(&is, &want)) fail_msg("%s: layer 1 is not as given", spells[i].name);
        assert_true(store_hash(p.s) != store_hash(whole));
        buckets_release(&b);
        add(&b, &p, keep_all); /* all of it: the whole update's bytes, padding included */
        if (update_buckets(p.s, &b, &e) != OK) fail_msg("%s: %s", spells[i].name, e.msg);
        assert_true(store_hash(p.s) == store_hash(whole));
        assert_int_equal(store_epoch(p.s), 3);
        buckets_release(&b);
        folder_store_free(whole);
        dir_drop(dir);
        pair_close(&p);
    }
}

/* C07: a weight without its scale, or the reverse, is refused; in two buckets they are one. */
static void companions(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SPELLS; i++) {
        struct pair p;
        struct err e = {0};
        struct buckets b = {0}, both = {0};
        if (spells[i].format == FORMAT_BF16) continue;
        pair_open(&p, &spells[i]);
        uint64_t h = store_hash(p.s);
        add(&b, &p, keep_weights);
        assert_int_equal(update_buckets(p.s, &b, &e), ERR_INPUT);
        if (!strstr(e.msg, "without its")) fail_msg("%s: %s", spells[i].name, e.msg);
        buckets_release(&b);
        add(&b, &p, keep_scales);
        assert_int_equal(update_buckets(p.s, &b, &e), ERR_INPUT);
        if (!strstr(e.msg, "without its weight; missing: "))
            fail_msg("%s: %s", spells[i].name, e.msg);
        buckets_release(&b);
        assert_true(store_hash(p.s) == h && store_epoch(p.s) == 1);
        add(&both, &p, keep_scales);
        add(&both, &p, keep_weights);
        if (update_buckets(p.s, &both, &e) != OK) fail_msg("%s: %s", spells[i].name, e.msg);
        assert_true(store_hash(p.s) != h);
        buckets_release(&both);
        pair_close(&p);
    }
}

static void buckets_refuse(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    struct buckets b = {0};
    size_t n, m;
    pair_open(&p, &spells[0]);
    void *attention = part_of(&p.db, keep_attention, &n),
         *again = part_of(&p.db, keep_attention, &m);
    assert_int_equal(buckets_add(&b, attention, n, n - 1, &e), ERR_TOOBIG);
    assert_int_equal(buckets_add(&b, attention, n, n + m, &e), OK);
    size_t tensors = b.n_tensors;
    assert_true(tensors > 4);
    assert_int_equal(buckets_add(&b, again, m, n + m, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "given twice in one update"));
    assert_int_equal(buckets_add(&b, again, m - 1, UINT64_MAX, &e), ERR_INPUT); /* cut short */
    assert_true(b.n == 1 && b.n_tensors == tensors && b.bytes == n);
    mem_free(again);
    add(&b, &p, keep_layer1);
    assert_int_equal(b.n, 2);
    if (update_buckets(p.s, &b, &e) != OK) fail_msg("%s", e.msg);
    assert_true(buckets_limit(p.s) > store_bytes(p.s));
    buckets_release(&b);
    struct buckets none = {0};
    assert_int_equal(update_buckets(p.s, &none, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "no tensors"));
    pair_close(&p);
}

/* Each allocation of it fails in turn: the store is as it was, and then the update succeeds. */
static void every_allocation(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    long at = 1, benign = 0, named = 0;
    pair_open(&p, spell_of(FORMAT_NVFP4));
    uint64_t h = store_hash(p.s);
    for (;; at++) {
        size_t n;
        struct buckets b = {0};
        void *bytes = part_of(&p.db, keep_layer1, &n);
        mem_fault_at(at);
        err_t rc = buckets_add(&b, bytes, n, UINT64_MAX, &e);
        if (rc != OK)
            mem_free(bytes);
        else
            rc = update_buckets(p.s, &b, &e);
        bool failed = mem_fault_at(0) == 0;
        buckets_release(&b);
        if (!failed) {
            assert_int_equal(rc, OK);
            break;
        }
        if (rc == OK) { /* it could do without: pages_left takes memory to look */
            assert_int_equal(store_epoch(p.s), 2);
            pair_close(&p);
            pair_open(&p, spell_of(FORMAT_NVFP4));
            h = store_hash(p.s);
            benign++;
            continue;
        }
        assert_int_equal(rc, ERR_NOMEM);
        assert_true(store_hash(p.s) == h && store_epoch(p.s) == 1);
        named++;
    }
    assert_true(named > 10 && benign < named && store_hash(p.s) != h);
    pair_close(&p);
}

/* With --quantization: what shares an amax comes together, and is then what a whole update makes of it. */
static void quantized_while_staged(void **state)
{
    (void)state;
    char dir[] = "/tmp/moult-s-XXXXXX";
    struct pair p;
    struct store *s = NULL, *whole = NULL;
    struct config c;
    struct err e = {0};
    struct buckets b = {0};
    pair_open(&p, &spells[0]);
    if (folder_store(&s, &c, p.dir, FORMAT_NVFP4, &e) != OK) fail_msg("%s", e.msg);
    assert_non_null(mkdtemp(dir));
    tiny_write(&p.b, dir, &spells[0], NULL);
    if (folder_store(&whole, &c, dir, FORMAT_NVFP4, &e) != OK) fail_msg("%s", e.msg);
    add(&b, &p, keep_weights);
    if (update_buckets(s, &b, &e) != OK) fail_msg("%s", e.msg);
    buckets_release(&b);
    struct buf is = {0}, want = {0};
    slots(&is, s, "layers.1.", true);
    slots(&want, whole, "layers.1.", true);
    assert_true(same(&is, &want));
    uint64_t h = store_hash(s);
    struct st_draft one = {0};
    const struct slot_spec *spec =
        &p.b.specs[store_find(s, "model.layers.0.self_attn.k_proj.weight")];
    size_t at = (size_t)(spec - p.b.specs);
    char dims[32];
    snprintf(dims, sizeof dims, "[%llu, %llu]", (unsigned long long)spec->shape.rows,
             (unsigned long long)spec->shape.cols);
    st_put(&one, spec->name, "BF16", dims, p.b.w[at].bf16,
           (size_t)(spec->shape.rows * spec->shape.cols) * 2);
    size_t n;
    void *bytes = part_of(&one, keep_all, &n);
    assert_int_equal(buckets_add(&b, bytes, n, UINT64_MAX, &e), OK);
    assert_int_equal(update_buckets(s, &b, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "k_proj.weight: is quantized here together with what is missing: "
                                  "model.layers.0.self_attn.q_proj.weight"));
    assert_true(store_hash(s) == h);
    buckets_release(&b);
    buf_release(&one.header);
    buf_release(&one.data);
    folder_store_free(s);
    folder_store_free(whole);
    dir_drop(dir);
    pair_close(&p);
}

/* Without a second generation: the same bytes, and a refused update touches none. */
static void in_place(void **state)
{
    (void)state;
    for (int f = 0; f < FORMAT_COUNT; f++) {
        struct pair p, q;
        struct err e = {0};
        struct update *u = NULL;
        struct update_progress progress = {0};
        const struct stage_options o = {.n_threads = 2};
        struct buckets b = {0}, weights = {0};
        pair_open(&p, spell_of((format_t)f));
        pair_open(&q, spell_of((format_t)f));
        uint64_t h = store_hash(p.s);
        add(&b, &p, keep_layer1);
        if (update_buckets(q.s, &b, &e) != OK) fail_msg("%s", e.msg);
        if (f != FORMAT_BF16) {
            add(&weights, &p, keep_weights);
            assert_int_equal(update_begin_in_place(&u, p.s, &e), OK);
            assert_int_equal(update_stage_part(u, weights.files, weights.n, &o, &progress, &e),
                             ERR_INPUT);
            update_free(u);
            assert_true(store_hash(p.s) == h && !store_lost(p.s));
            buckets_release(&weights);
        }
        assert_int_equal(update_begin_in_place(&u, p.s, &e), OK);
        if (update_stage_part(u, b.files, b.n, &o, &progress, &e) != OK) fail_msg("%s", e.msg);
        assert_int_equal(update_prepare(u, &e), OK);
        for (size_t i = 0; i < store_slots(p.s); i++) /* of what is given and of what is kept */
            if (store_spec(p.s, i)->shape.kind == RESIDENT_MATRIX &&
                store_spec(p.s, i)->shape.format != FORMAT_BF16) {
                float now, then = update_input_scale(u, i);
                store_get(q.s, &now, i, PART_INPUT, 0, 1);
                assert_true(now == then || (now != now && then != then));
            }
        assert_true(store_hash(p.s) == h);
        assert_int_equal(update_overwrite(u, 2, &progress, &e), OK);
        update_free(u);
        assert_true(store_hash(p.s) == store_hash(q.s) && !store_lost(p.s));
        buckets_release(&b);
        pair_close(&p);
        pair_close(&q);
    }
}

/* Where both ways round fit only the layer's other fused tensor tells. */
static bool keep_gate_up(const char *name)
{
    return strstr(name, "layers.1.mlp.experts.gate_up") != NULL;
}

static bool keep_experts(const char *name)
{
    return strstr(name, "layers.1.mlp.experts") != NULL;
}

static void square_fused(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SPELLS; i++) {
        if (strcmp(spells[i].name, "bf16 fused") && strcmp(spells[i].name, "bf16 transposed"))
            continue;
        struct tiny t;
        struct st_draft d = {0};
        struct store *s = NULL;
        struct config c;
        struct err e = {0};
        struct buckets part = {0}, both = {0};
        char dir[] = "/tmp/moult-s-XXXXXX";
        size_t n;
        assert_non_null(mkdtemp(dir));
        tiny_new(&t, FORMAT_BF16, 128, 64); /* 2I = H */
        tiny_write(&t, dir, &spells[i], NULL);
        if (folder_store(&s, &c, dir, FORMAT_COUNT, &e) != OK) fail_msg("%s", e.msg);
        uint64_t h = store_hash(s);
        tiny_tensors(&d, &t, &spells[i]);
        void *bytes = part_of(&d, keep_gate_up, &n);
        assert_int_equal(buckets_add(&part, bytes, n, UINT64_MAX, &e), OK);
        assert_int_equal(update_buckets(s, &part, &e), ERR_INPUT);
        assert_non_null(strstr(e.msg, "fits both ways round"));
        bytes = part_of(&d, keep_experts, &n);
        assert_int_equal(buckets_add(&both, bytes, n, UINT64_MAX, &e), OK);
        if (update_buckets(s, &both, &e) != OK) fail_msg("%s", e.msg);
        assert_true(store_hash(s) == h); /* the same weights, the right way round */
        buckets_release(&part);
        buckets_release(&both);
        buf_release(&d.header);
        buf_release(&d.data);
        folder_store_free(s);
        tiny_free(&t);
        dir_drop(dir);
    }
}

/* Released weights: kept, or lost until a whole update. */
static void release_and_resume(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    struct buckets part = {0}, all = {0};
    pair_open(&p, spell_of(FORMAT_FP8_BLOCK));
    uint64_t h = store_hash(p.s);
    assert_false(store_lost(p.s));
    assert_int_equal(store_release(p.s, true, &e), OK);
    assert_true(store_lost(p.s));
    if (!test_on_gpu()) assert_true(store_hash(p.s) != h); /* there nothing is mapped */
    assert_int_equal(store_resume(p.s, &e), OK);
    assert_true(!store_lost(p.s) && store_hash(p.s) == h);
    mem_fault_at(1);
    assert_int_equal(store_release(p.s, true, &e), ERR_NOMEM);
    assert_true(!store_lost(p.s) && store_hash(p.s) == h);
    assert_int_equal(store_release(p.s, false, &e), OK);
    assert_int_equal(store_resume(p.s, &e), OK);
    assert_true(store_lost(p.s));
    add(&part, &p, keep_layer1);
    assert_int_equal(update_buckets(p.s, &part, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "missing tensors"));
    assert_true(store_lost(p.s));
    add(&all, &p, keep_all);
    if (update_buckets(p.s, &all, &e) != OK) fail_msg("%s", e.msg);
    assert_true(!store_lost(p.s) && store_epoch(p.s) == 2);
    buckets_release(&part);
    buckets_release(&all);
    pair_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(partial_updates),
        cmocka_unit_test(companions),
        cmocka_unit_test(buckets_refuse),
        cmocka_unit_test(every_allocation),
        cmocka_unit_test(quantized_while_staged),
        cmocka_unit_test(release_and_resume),
        cmocka_unit_test(in_place),
        cmocka_unit_test(square_fused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
