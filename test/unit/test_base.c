/* base/: buffers, checked sizes, exact reads, the pool. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/carve.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/pages.h"
#include "base/pool.h"
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void buf_grows_and_keeps_its_maximum(void **state)
{
    (void)state;
    struct buf b = {.max = 100};
    for (int i = 0; i < 10; i++)
        assert_true(buf_printf(&b, "%09d.", i));
    assert_int_equal(b.len, 100);
    assert_false(buf_putc(&b, 'x'));
    assert_true(b.failed);
    assert_int_equal(b.len, 100);
    assert_int_equal(b.data[100], 0);
    buf_release(&b);
}

static void buf_survives_no_memory(void **state)
{
    (void)state;
    struct buf b = {0};
    assert_true(buf_puts(&b, "kept"));
    mem_fault_at(1);
    char big[1000] = {0};
    assert_false(buf_put(&b, big, sizeof big));
    mem_fault_at(0);
    assert_string_equal(b.data, "kept");
    buf_release(&b);
}

static void sizes_are_checked(void **state)
{
    (void)state;
    size_t r = 7;
    assert_false(mul_size(&r, SIZE_MAX / 2, 3));
    assert_false(add_size(&r, SIZE_MAX, 1));
    assert_int_equal(r, 7);
    assert_null(mem_try_array(SIZE_MAX, 2));
    assert_null(mem_try(SIZE_MAX));
    assert_null(mem_retry(NULL, 0, SIZE_MAX));
}

static void carve_three(struct carve *c, uint16_t **a, double **b, char **end, size_t n)
{
    CARVE(*c, *a, n, 3);
    CARVE(*c, *b, n, n);
    CARVE(*c, *end, 0, 1);
}

static void arrays_are_carved_side_by_side(void **state)
{
    (void)state;
    uint16_t *a;
    double *b;
    char *end;
    struct carve c = carve_at(0);
    carve_three(&c, &a, &b, &end, 100);
    assert_true(c.ok);
    assert_int_equal(c.bytes, 768 + 80128); /* 600 and 80,000, rounded up */
    char *block = mem_alloc(c.bytes);
    c = carve_at((uintptr_t)block);
    carve_three(&c, &a, &b, &end, 100);
    assert_ptr_equal(a, block);
    assert_ptr_equal(b, block + 768);
    assert_ptr_equal(end, block + c.bytes);
    mem_free(block);
    static const size_t most[] = {SIZE_MAX / 2, SIZE_MAX / 6, (size_t)1 << 32};
    for (size_t i = 0; i < 3; i++) {
        c = carve_at(0);
        carve_three(&c, &a, &b, &end, most[i]);
        assert_false(c.ok);
    }
}

static void errors_gather_context(void **state)
{
    (void)state;
    struct err e = {0};
    assert_int_equal(err_set(&e, ERR_IO, "short by %d", 3), ERR_IO);
    assert_int_equal(err_wrap(&e, ERR_INPUT, "shard %s", "a"), ERR_IO);
    assert_string_equal(e.msg, "shard a: short by 3");
    assert_int_equal(err_http(ERR_BUSY), 503);
}

static void short_reads_are_named(void **state)
{
    (void)state;
    char path[] = "/tmp/moult-base-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "0123456789", 10), 10);
    char got[8];
    struct err e = {0};
    assert_int_equal(file_pread(fd, got, 4, 3, path, &e), OK);
    assert_memory_equal(got, "3456", 4);
    assert_int_equal(file_pread(fd, got, 8, 5, path, &e), ERR_IO);
    assert_non_null(strstr(e.msg, path));
    struct buf b = {0};
    assert_int_equal(file_read(&b, path, 9, &e), ERR_TOOBIG);
    assert_int_equal(file_read(&b, path, 10, &e), OK);
    assert_int_equal(b.len, 10);
    buf_release(&b);
    close(fd);
    unlink(path);
}

static void count(void *arg, int i)
{
    atomic_int *hits = arg;
    atomic_fetch_add(&hits[i], 1);
}

static void cpus_are_those_of_the_process(void **state)
{
    (void)state;
    cpu_set_t all, one;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    assert_int_equal(pool_cpus(), CPU_COUNT(&all));
    int first = 0;
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(pool_cpus(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
}

static void pool_runs_each_index_once(void **state)
{
    (void)state;
    static atomic_int hits[1000];
    struct pool *p = pool_new(4);
    for (int round = 1; round <= 200; round++) {
        pool_run(p, count, hits, 1000);
        for (int i = 0; i < 1000; i++)
            assert_int_equal(atomic_load(&hits[i]), round);
    }
    pool_free(p);
}

static void pages_come_and_go(void **state)
{
    (void)state;
    size_t available, total, n = 5000001;
    pages_left(&available, &total);
    assert_true(available > 0 && available <= total && total < (size_t)1 << 50);
    unsigned char *p = pages_try(n);
    assert_non_null(p);
    for (size_t i = 0; i < n; i += 997)
        assert_int_equal(p[i], 0);
    memset(p, 7, n);
    pages_release(p, n);
    pages_release(NULL, n);
    assert_null(pages_try(total)); /* promised by the system, not there */
    assert_null(pages_try(SIZE_MAX));
    (void)mem_fault_at(1);
    assert_null(pages_try(100));
    p = pages_try(0);
    assert_non_null(p);
    pages_release(p, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_come_and_go),
        cmocka_unit_test(buf_grows_and_keeps_its_maximum),
        cmocka_unit_test(buf_survives_no_memory),
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(arrays_are_carved_side_by_side),
        cmocka_unit_test(errors_gather_context),
        cmocka_unit_test(short_reads_are_named),
        cmocka_unit_test(cpus_are_those_of_the_process),
        cmocka_unit_test(pool_runs_each_index_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
