#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/layout.h"
#include "base/file.h"
#include "base/mem.h"
#include "model/config.h"
#include "model/model.h"
#include "weight/cast.h"
#include "weight/checkpoint.h"
#include "weight/update.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FINAL "models/tiny-moe"
#define EARLY "models/tiny-moe-early"

static const struct slot_spec specs[] = {
    {.name = "emb", .n_dims = 2, .shape = {RESIDENT_PLAIN, FORMAT_BF16, 3, 4}},
    {.name = "emb", .n_dims = 2, .shape = {RESIDENT_MATRIX, FORMAT_BF16, 3, 4}}, /* tied */
    {.name = "norm", .n_dims = 1, .shape = {RESIDENT_PLAIN, FORMAT_BF16, 1, 4}},
};

/* A folder with one file: emb [3,4] and norm [4] of one dtype, every value 1. */
static void make_dir(char *dir, const char *dtype, size_t elem, const void *one, const char *extra)
{
    char path[256], h[512];
    size_t e = 12 * elem, z = 16 * elem;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/m.safetensors", dir);
    snprintf(h, sizeof h,
             "{\"emb\":{\"dtype\":\"%s\",\"shape\":[3,4],\"data_offsets\":[0,%zu]},"
             "\"%s\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[%zu,%zu]}}",
             dtype, e, extra, dtype, e, z);
    uint64_t n = strlen(h);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(&n, 8, 1, f);
    fwrite(h, n, 1, f);
    for (int i = 0; i < 16; i++)
        fwrite(one, elem, 1, f);
    fclose(f);
}

static void drop_dir(const char *dir)
{
    char path[256];
    snprintf(path, sizeof path, "%s/m.safetensors", dir);
    unlink(path);
    rmdir(dir);
}

static err_t load(struct store *s, const char *dir, int threads, struct err *e)
{
    struct update *u = NULL;
    struct update_progress p = {0};
    err_t rc = update_begin(&u, s, e);
    if (rc != OK) return rc;
    rc = update_stage_dir(u, dir, threads, &p, e);
    if (rc == OK) assert_true(p.bytes_done == p.bytes_total);
    if (rc == OK) rc = update_prepare(u, e);
    if (rc == OK) update_commit(u);
    update_free(u);
    return rc;
}

static void casts(void **state)
{
    (void)state;
    assert_int_equal(cast_f32_bits(0x3f808000), 0x3f80); /* tie to even */
    assert_int_equal(cast_f32_bits(0x3f818000), 0x3f82);
    assert_int_equal(cast_f32_bits(0x7f7fffff), 0x7f80);
    assert_int_equal(cast_f32_bits(0x7f800001), 0x7fc0);
    for (uint32_t h = 0; h < 65536; h++) {
        _Float16 f;
        uint16_t b = (uint16_t)h;
        uint32_t u;
        memcpy(&f, &b, 2);
        float x = (float)f;
        memcpy(&u, &x, 4);
        if (x == x) assert_int_equal(cast_f16_bits(b), cast_f32_bits(u));
    }
}

static void layout_round_trip(void **state)
{
    (void)state;
    for (size_t rows = 1; rows < 40; rows += 3)
        for (size_t cols = 1; cols < 9; cols++) {
            size_t n;
            assert_true(layout_bytes(&n, FORMAT_BF16, rows, cols));
            n /= 2;
            uint16_t *p = mem_alloc(n * 2), *a = mem_alloc(rows * cols * 2);
            uint16_t *b = mem_alloc(rows * cols * 2);
            memset(p, 0xff, n * 2);
            for (size_t i = 0; i < rows * cols; i++)
                a[i] = (uint16_t)(i + 1);
            size_t cut = rows / 2, zeros = 0;
            layout_put(p, FORMAT_BF16, rows, cols, PART_DATA, 0, cut, a);
            layout_put(p, FORMAT_BF16, rows, cols, PART_DATA, cut, rows - cut, a + cut * cols);
            for (size_t i = 0; i < n; i++)
                zeros += p[i] == 0;
            assert_int_equal(zeros, n - rows * cols);
            size_t r = rows - 1, c = cols - 1;
            assert_int_equal(p[((r / 16 * ((cols + 1) / 2) + c / 2) * 16 + r % 16) * 2 + c % 2],
                             rows * cols);
            layout_get(b, FORMAT_BF16, rows, cols, PART_DATA, 0, cut, p);
            layout_get(b + cut * cols, FORMAT_BF16, rows, cols, PART_DATA, cut, rows - cut, p);
            assert_memory_equal(a, b, rows * cols * 2);
            mem_free(p);
            mem_free(a);
            mem_free(b);
        }
}

static void all_or_nothing(void **state)
{
    (void)state;
    struct store *s;
    struct update *u = NULL, *v = NULL;
    struct err e = {0};
    uint16_t data[12];
    for (int i = 0; i < 12; i++)
        data[i] = (uint16_t)(0x3f80 + i);
    assert_int_equal(store_new(&s, specs, 3, memory_host, &e), OK);
    assert_int_equal(update_begin(&u, s, &e), OK);
    assert_int_equal(update_begin(&v, s, &e), ERR_STATE);
    assert_int_equal(update_stage(u, "emb", data, 3, 4, &e), OK);
    assert_int_equal(update_stage(u, "emb", data, 3, 4, &e), ERR_INPUT);
    assert_int_equal(update_stage(u, "norm", data, 1, 3, &e), ERR_INPUT);
    assert_int_equal(update_stage(u, "x", data, 1, 4, &e), ERR_INPUT);
    assert_int_equal(update_prepare(u, &e), ERR_INPUT);
    assert_string_equal(e.msg, "missing tensors: norm");
    assert_int_equal(update_stage(u, "norm", data, 1, 4, &e), OK);
    assert_int_equal(update_prepare(u, &e), OK);
    update_commit(u);
    update_free(u);
    assert_int_equal(store_epoch(s), 1);
    assert_memory_equal(store_ptr(s, 0), data, 24);
    assert_int_equal(((const uint16_t *)store_matrix(s, 1)->panel)[32 + 3], data[7]); /* (1, 3) */
    uint64_t h = store_hash(s);
    data[5] = 0x7fc0;
    assert_int_equal(update_begin(&u, s, &e), OK);
    assert_int_equal(update_stage(u, "emb", data, 3, 4, &e), OK);
    assert_int_equal(update_stage(u, "norm", data, 1, 4, &e), OK);
    assert_int_equal(update_prepare(u, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "emb: element 5"));
    update_free(u);
    assert_true(store_hash(s) == h && store_epoch(s) == 1);
    store_free(s);
}

static void converts_and_survives_faults(void **state)
{
    (void)state;
    struct store *s;
    struct err e = {0};
    const uint16_t f16 = 0x3c00, bf16 = 0x3f80;
    const float f32 = 1;
    char a[] = "/tmp/moult-u-XXXXXX", b[] = "/tmp/moult-u-XXXXXX", c[] = "/tmp/moult-u-XXXXXX";
    char d[] = "/tmp/moult-u-XXXXXX";
    make_dir(a, "BF16", 2, &bf16, "norm");
    make_dir(b, "F16", 2, &f16, "norm");
    make_dir(c, "F32", 4, &f32, "norm");
    make_dir(d, "BF16", 2, &bf16, "stranger");
    assert_int_equal(store_new(&s, specs, 3, memory_host, &e), OK);
    assert_int_equal(load(s, a, 1, &e), OK);
    uint64_t h = store_hash(s);
    assert_int_equal(load(s, b, 2, &e), OK);
    assert_true(store_hash(s) == h);
    assert_int_equal(load(s, c, 3, &e), OK);
    assert_true(store_hash(s) == h);
    assert_int_equal(load(s, d, 1, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "stranger"));
    for (long i = 1; i < 200; i++) {
        mem_fault_at(i);
        err_t rc = load(s, a, 1, &e);
        bool reached = mem_fault_at(0) == 0; /* some it does without */
        assert_true(store_hash(s) == h && (rc == OK || reached));
        if (!reached) break;
        if (rc != OK) assert_int_equal(rc, ERR_NOMEM);
        assert_true(i < 199);
    }
    store_free(s);
    drop_dir(a);
    drop_dir(b);
    drop_dir(c);
    drop_dir(d);
}

static void loads_model(void **state)
{
    (void)state;
    if (!file_is_dir(FINAL) || !file_is_dir(EARLY)) {
        printf("%s is absent\n", FINAL);
        skip();
    }
    struct config c;
    struct slot_spec *sp;
    struct store *s;
    struct err e = {0};
    size_t n;
    assert_int_equal(config_load(&c, FINAL, &e), OK);
    assert_int_equal(model_specs(&c, &sp, &n, &e), OK);
    assert_int_equal(store_new(&s, sp, n, memory_host, &e), OK);
    mem_free(sp);
    if (load(s, FINAL, 1, &e) != OK) fail_msg("%s", e.msg);
    uint64_t h = store_hash(s);
    const void *first = store_ptr(s, 0);
    assert_int_equal(load(s, EARLY, 2, &e), OK);
    assert_true(store_hash(s) != h);
    assert_ptr_not_equal(store_ptr(s, 0), first);
    assert_int_equal(load(s, FINAL, 2, &e), OK);
    assert_true(store_hash(s) == h);
    assert_ptr_equal(store_ptr(s, 0), first); /* it rested */
    assert_int_equal(store_epoch(s), 3);
    /* A refused update leaves what it wrote in memory that rests; a release gives that back. */
    struct update *u = NULL;
    struct update_progress p = {0};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(update_begin(&u, s, &e), OK);
        assert_int_equal(update_stage_dir(u, EARLY, 1, &p, &e), OK);
        update_free(u);
        if (i == 1) {
            assert_int_equal(store_release(s, false, &e), OK);
            assert_int_equal(store_resume(s, &e), OK);
        }
        assert_int_equal(load(s, FINAL, 2, &e), OK);
        assert_true(store_hash(s) == h);
    }
    store_free(s);
}

/* A memory whose copies fail, as a device's may: prepare finds it, and the resident weights stay. */
static err_t failing(void *ctx, struct err *e)
{
    return *(bool *)ctx ? err_set(e, ERR_SYSTEM, "the device is gone") : OK;
}

static void failing_memory_is_found(void **state)
{
    (void)state;
    struct store *s;
    struct update *u;
    struct err e = {0};
    bool fails = false;
    uint16_t data[12] = {0}, other[12] = {1};
    struct memory_ops ops = *memory_host.ops;
    ops.check = failing;
    assert_int_equal(store_new(&s, specs, 3, (struct memory){&ops, &fails}, &e), OK);
    for (int round = 0; round < 2; round++) {
        uint64_t before = store_hash(s);
        fails = round == 1;
        assert_int_equal(update_begin(&u, s, &e), OK);
        assert_int_equal(update_stage(u, "emb", round ? other : data, 3, 4, &e), OK);
        assert_int_equal(update_stage(u, "norm", data, 1, 4, &e), OK);
        assert_int_equal(update_prepare(u, &e), fails ? ERR_SYSTEM : OK);
        if (!fails) update_commit(u);
        update_free(u);
        if (fails) assert_true(store_hash(s) == before);
        assert_int_equal(store_epoch(s), 1);
    }
    assert_non_null(strstr(e.msg, "gone"));
    store_free(s);
}

/* ---- memory before it is needed ---- */

#define LARGE_ROWS 9000 /* of 8 KiB: two pieces */
#define LARGE_COLS 4096
static const struct slot_spec large[] = {
    {.name = "emb", .n_dims = 2, .shape = {RESIDENT_PLAIN, FORMAT_BF16, LARGE_ROWS, LARGE_COLS}},
};

static size_t resident_pages(void)
{
    unsigned long all, here;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lu %lu", &all, &here), 2);
    fclose(f);
    return here;
}

static struct update *stage_large(struct store *s, const uint16_t *data)
{
    struct update *u = NULL;
    struct err e = {0};
    assert_int_equal(update_begin(&u, s, &e), OK);
    assert_int_equal(update_stage(u, "emb", data, LARGE_ROWS, LARGE_COLS, &e), OK);
    assert_int_equal(update_prepare(u, &e), OK);
    return u;
}

static struct store *large_store(uint16_t *data)
{
    struct store *s;
    struct err e = {0};
    assert_int_equal(store_new(&s, large, 1, memory_host, &e), OK);
    struct update *u = stage_large(s, data);
    update_commit(u);
    update_free(u);
    return s;
}

static void memory_is_ready(void **state)
{
    (void)state;
    struct err e = {0};
    bool more = true;
    int calls = 0;
    uint16_t *data = mem_try((size_t)LARGE_ROWS * LARGE_COLS * 2);
    assert_non_null(data);
    struct store *s = large_store(data);
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = resident_pages();
    size_t all = store_bytes(s) / page;
    mem_fault_at(1); /* the arena */
    assert_int_equal(store_ready(s, &more, &e), ERR_NOMEM);
    assert_false(more);
    assert_int_equal(store_ready(s, &more, &e), OK); /* it is given up */
    assert_false(more);
    update_free(stage_large(s, data));
    store_free(s);

    s = large_store(data);
    before = resident_pages();
    for (more = true; more && store_ready(s, &more, &e) == OK;)
        calls++;
    if (resident_pages() - before < all) {
        print_message("this system cannot fill memory with pages: not tested\n");
        store_free(s);
        mem_free(data);
        skip();
    }
    const size_t piece = memory_host.ops->ready_bytes;
    assert_int_equal(calls, (store_bytes(s) + piece - 1) / piece);
    size_t filled = resident_pages();
    for (size_t i = 0; i < (size_t)LARGE_ROWS * LARGE_COLS; i += 1000)
        data[i] = 0x3f80;
    struct update *u = stage_large(s, data);
    assert_in_range(resident_pages(), filled - all / 8, filled + all / 8); /* its memory was used */
    update_commit(u);
    update_free(u);
    assert_memory_equal(store_ptr(s, 0), data, (size_t)LARGE_ROWS * LARGE_COLS * 2);
    store_free(s);
    assert_true(resident_pages() < before);
    mem_free(data);
}

static void *ready_main(void *arg)
{
    struct err e = {0};
    for (bool more = true; more && store_ready(arg, &more, &e) == OK;)
        ;
    return NULL;
}

/* By two threads while updates come, are dropped and committed, and the weights are released. */
static void memory_is_made_ready_beside_updates(void **state)
{
    (void)state;
    struct err e = {0};
    size_t n = (size_t)LARGE_ROWS * LARGE_COLS;
    uint16_t *data = mem_try(n * 2);
    assert_non_null(data);
    for (int round = 0; round < 4; round++) {
        struct store *s = large_store(data);
        pthread_t t[2];
        for (int i = 0; i < 2; i++)
            assert_int_equal(pthread_create(&t[i], NULL, ready_main, s), 0);
        for (size_t i = (size_t)round; i < n; i += 999)
            data[i] = (uint16_t)(0x3f80 + round);
        if (round == 3)
            assert_int_equal(store_release(s, false, &e), OK);
        else if (round)
            update_free(stage_large(s, data));
        if (round == 3) assert_int_equal(store_resume(s, &e), OK);
        struct update *u = stage_large(s, data);
        if (round == 2)
            for (int i = 0; i < 2; i++)
                pthread_join(t[i], NULL);
        update_commit(u);
        update_free(u);
        assert_memory_equal(store_ptr(s, 0), data, n * 2);
        if (round != 2)
            for (int i = 0; i < 2; i++)
                pthread_join(t[i], NULL);
        assert_memory_equal(store_ptr(s, 0), data, n * 2);
        store_free(s);
    }
    mem_free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(casts),
        cmocka_unit_test(layout_round_trip),
        cmocka_unit_test(failing_memory_is_found),
        cmocka_unit_test(all_or_nothing),
        cmocka_unit_test(converts_and_survives_faults),
        cmocka_unit_test(loads_model),
        cmocka_unit_test(memory_is_ready),
        cmocka_unit_test(memory_is_made_ready_beside_updates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
