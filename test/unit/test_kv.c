/* Page pool and prefix tree: conservation under random work, and case C63's table of hits. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "kv/radix.h"
#include <string.h>

#define PT 16

static int32_t hit(struct radix *t, uint64_t epoch, const char *key, const int32_t *ids, int32_t n)
{
    int32_t pages[64], n_pages = 0;
    struct radix_node *node = radix_match(t, epoch, key, ids, n - 1, pages, &n_pages);
    assert_int_equal(node != NULL, n_pages > 0);
    return n_pages;
}

static void put(struct pages *p, struct radix *t, uint64_t epoch, const char *key,
                const int32_t *ids, int32_t n)
{
    int32_t pages[64], done;
    for (int32_t i = 0; i < n; i++)
        pages[i] = pages_take(p);
    radix_insert(t, epoch, key, ids, n, pages, &done);
    assert_int_equal(done, n);
    for (int32_t i = 0; i < n; i++)
        pages_unref(p, pages[i]);
}

static void test_hits(void **state)
{
    (void)state;
    struct pages *p = pages_new(64, NULL, NULL);
    struct radix *t = radix_new(p, PT, 0); /* every hash collides */
    int32_t a[48], b[48];
    for (int32_t i = 0; i < 48; i++)
        a[i] = i;
    put(p, t, 1, NULL, a, 2);
    static const struct {
        int32_t n, pages;
    } lengths[] = {{13, 0}, {15, 0}, {16, 0}, {17, 1}, {32, 1}, {33, 2}, {48, 2}};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++)
        assert_int_equal(hit(t, 1, NULL, a, lengths[i].n), lengths[i].pages);
    static const struct {
        int32_t equal, pages;
    } common[] = {{0, 0}, {15, 0}, {16, 1}, {17, 1}, {31, 1}, {32, 2}};
    for (size_t i = 0; i < sizeof(common) / sizeof(*common); i++) {
        memcpy(b, a, sizeof(a));
        b[common[i].equal] += 1000;
        assert_int_equal(hit(t, 1, NULL, b, 48), common[i].pages);
    }
    for (int32_t i = 0; i < 48; i++)
        b[i] = a[47 - i];
    assert_int_equal(hit(t, 1, NULL, b, 48), 0);
    assert_int_equal(hit(t, 2, NULL, a, 48), 0);
    assert_int_equal(hit(t, 1, "", a, 48), 0);
    put(p, t, 1, "salt", a, 1);
    assert_int_equal(hit(t, 1, "salt", a, 48), 1);
    assert_int_equal(hit(t, 1, "sal", a, 48), 0);
    assert_int_equal(radix_check(t, NULL, NULL), OK);
    radix_free(t);
    assert_int_equal(pages_available(p), 64);
    pages_free(p);
}

static void test_lru(void **state)
{
    (void)state;
    struct pages *p = pages_new(8, NULL, NULL);
    struct radix *t = radix_new(p, PT, UINT64_MAX);
    int32_t ids[3][32];
    for (int32_t k = 0; k < 3; k++)
        for (int32_t i = 0; i < 32; i++)
            ids[k][i] = k * 100 + i;
    put(p, t, 1, NULL, ids[0], 2);
    put(p, t, 1, NULL, ids[1], 2);
    put(p, t, 1, NULL, ids[2], 1);
    assert_int_equal(hit(t, 1, NULL, ids[0], 32), 1); /* a use of the first page */
    int32_t pages[2], n;
    struct radix_node *locked = radix_match(t, 1, NULL, ids[1], 32, pages, &n);
    radix_lock(t, locked);
    while (radix_evict(t))
        assert_int_equal(radix_check(t, NULL, NULL), OK);
    assert_int_equal(radix_size(t), 2);
    assert_int_equal(radix_evictable(t), 0);
    radix_unlock(t, locked);
    assert_int_equal(radix_evictable(t), 2);
    radix_free(t);
    assert_int_equal(pages_available(p), 8);
    pages_free(p);
}

struct user {
    int32_t ids[128], pages[8], n_pages;
    struct radix_node *node;
};

static void test_random(void **state)
{
    (void)state;
    enum { N = 40, USERS = 6 };
    struct pages *p = pages_new(N, NULL, NULL);
    struct radix *t = radix_new(p, PT, 0xFF);
    struct user u[USERS] = {0};
    uint32_t x = 12345;
    for (int step = 0; step < 20000; step++) {
        x = x * 1664525u + 1013904223u;
        struct user *q = &u[(x >> 8) % USERS];
        if (q->n_pages) {
            for (int32_t i = 0; i < q->n_pages; i++)
                pages_unref(p, q->pages[i]);
            radix_unlock(t, q->node);
            *q = (struct user){0};
        } else {
            int32_t want = (int32_t)((x >> 12) % 8) + 1, done = 0;
            for (int32_t i = 0; i < want * PT; i++)
                q->ids[i] = (int32_t)((x >> (i / PT + 16)) & 1);
            q->node =
                radix_match(t, 1 + (x >> 30), NULL, q->ids, want * PT - 1, q->pages, &q->n_pages);
            radix_lock(t, q->node);
            for (int32_t i = 0; i < q->n_pages; i++)
                pages_ref(p, q->pages[i]);
            while (q->n_pages < want) {
                int32_t page = pages_take(p);
                if (page < 0 && !radix_evict(t)) break;
                if (page >= 0) q->pages[q->n_pages++] = page;
            }
            struct radix_node *n =
                radix_insert(t, 1 + (x >> 30), NULL, q->ids, q->n_pages, q->pages, &done);
            assert_int_equal(done, q->n_pages);
            radix_lock(t, n);
            radix_unlock(t, q->node);
            q->node = n;
        }
        int32_t refs[N] = {0};
        for (int k = 0; k < USERS; k++)
            for (int32_t i = 0; i < u[k].n_pages; i++)
                refs[u[k].pages[i]]++;
        struct err e = {0};
        assert_int_equal(radix_check(t, refs, &e), OK);
        assert_int_equal(pages_check(p, refs, &e), OK);
    }
    for (int k = 0; k < USERS; k++) {
        for (int32_t i = 0; i < u[k].n_pages; i++)
            pages_unref(p, u[k].pages[i]);
        radix_unlock(t, u[k].node);
    }
    radix_free(t);
    assert_int_equal(pages_available(p), N);
    pages_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_hits), cmocka_unit_test(test_lru),
                                       cmocka_unit_test(test_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
