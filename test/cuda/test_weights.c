/*
 * test_weights.c - the store's memory on a GPU: canonical bytes go in and come back, an update
 * staged on the device or on the host equals a fresh start, one that ends half-way leaves every
 * bit, and memory can be given back and taken again.
 */
#include "cuda/stores.h"
#include <pthread.h>

static struct gpu gpu;
static const enum staging_mode modes[] = {STAGING_DEVICE, STAGING_HOST};
static const char *const mode_names[] = {"device", "host"};
enum { MODES = 2 };

/* Sizes that are no multiples of a tile. */
static void small(struct config *c)
{
    config_of(c, 2, 264, 88, 5, 331);
}

static uint64_t fresh_hash(const struct config *c, format_t f, uint64_t seed)
{
    struct gpu_store g = store_make(gpu.d, c, f, STAGING_DEVICE);
    update_random(&g, seed);
    uint64_t h = store_hash(g.s);
    store_drop(&g);
    return h;
}

/* Bytes of a canonical row of a part, and rows; 0: there is no such part. */
static size_t part_bytes(const struct resident *r, part_t part, size_t *rows)
{
    *rows = layout_part_rows(r->format, part, (size_t)r->rows);
    if (r->kind == RESIDENT_MATRIX) return layout_part_row_bytes(r->format, part, (size_t)r->cols);
    *rows = part == PART_DATA ? (size_t)r->rows : 0;
    return (size_t)r->cols * (r->kind == RESIDENT_F32 ? sizeof(float) : sizeof(uint16_t));
}

/* Every part of every slot, of the resident generation. */
static void same_content(const struct gpu_store *a, const struct gpu_store *b, const char *what)
{
    for (size_t i = 0; i < a->n; i++)
        for (part_t p = 0; p < PART_COUNT; p++) {
            size_t rows, row = part_bytes(&a->specs[i].shape, p, &rows);
            if (row == 0 || rows == 0) continue;
            uint8_t *x = mem_alloc(rows * row), *y = mem_alloc(rows * row);
            memset(x, 0xAA, rows * row);
            store_get(a->s, x, i, p, 0, rows);
            store_get(b->s, y, i, p, 0, rows);
            if (memcmp(x, y, rows * row) != 0)
                fail_msg("%s: %s, part %d", what, a->specs[i].name, (int)p);
            mem_free(x);
            mem_free(y);
        }
}

/* What is staged can be read before it is committed. */
static void staged_reads_back(struct gpu_store *g, const struct gpu_store *host, const char *what)
{
    void *arena = store_arena_new(g->s);
    assert_non_null(arena);
    for (size_t i = 0; i < g->n; i++)
        for (part_t p = 0; p < PART_COUNT; p++) {
            size_t rows, row = part_bytes(&g->specs[i].shape, p, &rows);
            if (row == 0 || rows == 0) continue;
            uint8_t *x = mem_alloc(rows * row), *y = mem_alloc(rows * row);
            store_get(host->s, x, i, p, 0, rows);
            store_put(g->s, arena, i, p, 0, rows, x);
            MUST(store_check(g->s, &must_e)); /* puts are done */
            store_get_from(g->s, arena, y, i, p, 0, rows);
            if (memcmp(x, y, rows * row) != 0)
                fail_msg("%s: %s, part %d", what, g->specs[i].name, (int)p);
            mem_free(x);
            mem_free(y);
        }
    MUST(store_check(g->s, &must_e));
    store_arena_free(g->s, arena);
}

static void every_format(void **state)
{
    (void)state;
    struct config c;
    small(&c);
    for (format_t f = 0; f < FORMAT_COUNT; f++)
        for (int m = 0; m < MODES; m++) {
            char what[64];
            snprintf(what, sizeof what, "%s, staged on the %s", formats[f].name, mode_names[m]);
            struct gpu_store host = store_make(NULL, &c, f, STAGING_HOST);
            struct gpu_store g = store_make(gpu.d, &c, f, modes[m]);
            uint64_t want[3] = {0, fresh_hash(&c, f, 1), fresh_hash(&c, f, 2)};
            assert_true(want[1] != want[2]);
            update_random(&g, 1);
            update_random(&host, 1);
            assert_true(store_hash(g.s) == want[1]);
            same_content(&g, &host, what);
            const void *at = store_ptr(g.s, 0);
            for (int round = 0; round < 3; round++) { /* staged, then dropped */
                struct update *u = stage_random(&g, 2);
                assert_true(store_hash(g.s) == want[1]);
                update_free(u);
                assert_true(store_hash(g.s) == want[1]);
            }
            for (uint64_t seed = 2; seed >= 1; seed--) {
                update_random(&g, seed);
                if (store_hash(g.s) != want[seed]) fail_msg("%s: seed %d", what, (int)seed);
            }
            assert_ptr_equal(store_ptr(g.s, 0), at);
            staged_reads_back(&g, &host, what);
            assert_true(store_hash(g.s) == want[1]);
            store_drop(&g);
            store_drop(&host);
        }
}

/* Several pieces of pinned memory, large matrices that cross them; and how long a commit takes. */
static void large(void **state)
{
    (void)state;
    static const format_t some[] = {FORMAT_BF16, FORMAT_NVFP4, FORMAT_FP8_BLOCK};
    struct config c;
    config_of(&c, 3, 2048, 768, 32, 40000);
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        uint64_t want = fresh_hash(&c, some[i], 2);
        for (int m = 0; m < MODES; m++) {
            struct gpu_store g = store_make(gpu.d, &c, some[i], modes[m]);
            update_random(&g, 1);
            double s[3], t = clock_s();
            struct update *u = stage_random(&g, 3);
            s[0] = clock_s() - t;
            update_free(u);
            t = clock_s();
            s[1] = update_random(&g, 2);
            s[2] = clock_s() - t - s[1];
            assert_true(store_hash(g.s) == want);
            double gb = (double)store_bytes(g.s) * 1e-9;
            printf("%s, %.2f GB staged on the %s in %.0f and %.0f ms, committed in %.2f ms (%.0f "
                   "GB/s)\n",
                   formats[some[i]].name, gb, mode_names[m], s[0] * 1e3, s[2] * 1e3, s[1] * 1e3,
                   gb / s[1]);
            fflush(stdout);
            store_drop(&g);
        }
    }
}

static size_t free_now(void)
{
    size_t n = 0;
    MUST(device_free_bytes(&n, gpu.d, &must_e));
    return n;
}

/* With the bytes kept on the host and without; an update afterwards, in each mode. */
static void release_and_resume(void **state)
{
    (void)state;
    struct config c;
    config_of(&c, 2, 512, 256, 32, 2000);
    for (int m = 0; m < MODES; m++)
        for (int keep = 0; keep < 2; keep++) {
            struct gpu_store g = store_make(gpu.d, &c, FORMAT_MXFP8, modes[m]);
            update_random(&g, 1);
            uint64_t h = store_hash(g.s), other;
            update_random(&g, 2);
            other = store_hash(g.s);
            update_random(&g, 1);
            const void *at = store_ptr(g.s, 0);
            for (int round = 0; round < 3; round++) {
                size_t before = free_now();
                MUST(store_release(g.s, keep, &must_e));
                assert_true(store_lost(g.s));
                assert_true(free_now() - before >= store_bytes(g.s));
                MUST(store_resume(g.s, &must_e));
                assert_true(store_lost(g.s) == !keep);
                if (keep) assert_true(store_hash(g.s) == h);
                update_random(&g, 2);
                assert_true(store_hash(g.s) == other && !store_lost(g.s));
                update_random(&g, 1);
                assert_true(store_hash(g.s) == h && store_ptr(g.s, 0) == at);
            }
            store_drop(&g);
        }
}

static void *ready_main(void *arg)
{
    for (bool more = true; more;)
        MUST(store_ready(arg, &more, &must_e));
    return NULL;
}

/* The staged arena's memory, by several threads before an update, and while one is staged. */
static void made_ready(void **state)
{
    enum { THREADS = 4 };
    (void)state;
    struct config c;
    config_of(&c, 3, 2048, 768, 32, 40000);
    uint64_t want = fresh_hash(&c, FORMAT_NVFP4, 2);
    for (int early = 0; early < 2; early++) {
        struct gpu_store g = store_make(gpu.d, &c, FORMAT_NVFP4, STAGING_HOST);
        pthread_t t[THREADS];
        update_random(&g, 1);
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&t[i], NULL, ready_main, g.s), 0);
        if (early) update_random(&g, 2);
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_join(t[i], NULL), 0);
        if (!early) update_random(&g, 2);
        assert_true(store_hash(g.s) == want);
        update_random(&g, 3);
        update_random(&g, 2);
        assert_true(store_hash(g.s) == want);
        store_drop(&g);
    }
}

/* The device's memory over many updates, of which every tenth is dropped. */
static void memory_stays(void **state)
{
    enum { UPDATES = 60, WARM = 5 };
    (void)state;
    struct config c;
    config_of(&c, 2, 512, 256, 32, 2000);
    for (int m = 0; m < MODES; m++) {
        struct gpu_store g = store_make(gpu.d, &c, FORMAT_NVFP4, modes[m]);
        size_t before = 0;
        for (int i = 0; i < UPDATES; i++) {
            struct update *u = stage_random(&g, (uint64_t)i + 1);
            if (i == 0 || i % 10 != 9) update_commit(u);
            update_free(u);
            if (i == WARM) before = free_now();
            if (i > WARM) assert_int_equal(free_now(), before);
        }
        store_drop(&g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(made_ready), cmocka_unit_test(memory_stays),
                                       cmocka_unit_test(every_format), cmocka_unit_test(large),
                                       cmocka_unit_test(release_and_resume)};
    if (!gpu_open(&gpu)) return 0;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
