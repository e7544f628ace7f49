#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/mem.h"
#include "weight/safetensors.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define T(dtype, shape, span) \
    "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" span "}}"

static err_t parse(const char *h, size_t n, uint64_t data, struct err *e)
{
    struct st_file f = {.fd = -1};
    char *copy = mem_alloc(n ? n : 1); /* exact size: a read past it is seen */
    memcpy(copy, h, n);
    err_t rc = st_parse(&f, copy, n, 8 + n, data, e);
    mem_free(copy);
    if (rc == OK) st_close(&f);
    return rc;
}

static void headers(void **state)
{
    (void)state;
    static const struct {
        const char *h;
        uint64_t data;
        err_t rc;
    } t[] = {
        {T("\"BF16\"", "[2,3]", "[0,12]"), 12, OK},
        {T("\"BF16\"", "[]", "[0,2]"), 2, OK},
        {T("\"BF16\"", "[0,5]", "[0,0]"), 0, OK},
        {T("\"F8_E8M0\"", "[4]", "[0,4]"), 4, OK},
        {T("\"F4\"", "[4]", "[0,2]"), 2, OK},
        {T("\"F4\"", "[3]", "[0,2]"), 2, ERR_INPUT},
        {T("\"BF16\"", "[4294967296,4294967296]", "[0,0]"), 0, ERR_INPUT},
        {T("\"BF16\"", "[4611686018427387904,4]", "[0,0]"), 0, ERR_INPUT},
        {T("\"BF16\"", "[-1]", "[0,2]"), 2, ERR_INPUT},
        {T("\"BF16\"", "[1.0]", "[0,2]"), 2, ERR_INPUT},
        {T("\"BF16\"", "[4398046511105,1152]", "[0,2304]"), 2304, ERR_INPUT},
        {T("\"BF16\"", "[1,1,1,1,1,1,1,1,1]", "[0,2]"), 2, ERR_INPUT},
        {T("\"BF16\"", "[99999999999999999999]", "[0,2]"), 2, ERR_INPUT},
        {T("\"BF61\"", "[1]", "[0,2]"), 2, ERR_INPUT},
        {T("\"bf16\"", "[1]", "[0,2]"), 2, ERR_INPUT},
        {T("16", "[1]", "[0,2]"), 2, ERR_INPUT},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,2]}}", 2, ERR_INPUT},
        {T("\"BF16\"", "[1]", "[0,4]"), 4, ERR_INPUT},
        {T("\"BF16\"", "[1]", "[0,2]"), 4, ERR_INPUT}, /* data left over */
        {T("\"BF16\"", "[1]", "[2,4]"), 4, ERR_INPUT}, /* hole */
        {T("\"BF16\"", "[1]", "[2,0]"), 2, ERR_INPUT},
        {T("\"BF16\"", "[1]", "[-2,0]"), 2, ERR_INPUT},
        {T("\"BF16\"", "[1]", "[0,2,2]"), 2, ERR_INPUT},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, ERR_INPUT},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         2, ERR_INPUT},
        {"{}", 0, OK},
        {"{}   ", 0, OK},
        {" {}", 0, ERR_INPUT},
        {"[]", 0, ERR_INPUT},
        {"{\"a\":1", 0, ERR_INPUT},
        {"", 0, ERR_INPUT},
        {"{\"__metadata__\":{\"format\":\"pt\"}}", 0, OK},
        {"{\"__metadata__\":{\"format\":1}}", 0, ERR_INPUT},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct err e = {0};
        err_t rc = parse(t[i].h, strlen(t[i].h), t[i].data, &e);
        if (rc != t[i].rc) fail_msg("%zu: %s: %d %s", i, t[i].h, rc, e.msg);
    }
}

static void every_prefix(void **state)
{
    (void)state;
    const char *h = T("\"BF16\"", "[2,3]", "[0,12]");
    for (size_t n = 0; n < strlen(h); n++)
        assert_int_equal(parse(h, n, 12, NULL), ERR_INPUT);
}

static void write_file(const char *path, const void *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

static void lengths(void **state)
{
    (void)state;
    char path[] = "/tmp/moult-st-XXXXXX";
    close(mkstemp(path));
    struct st_file f;
    unsigned char d[64];
    static const uint64_t bad[] = {0,  1,         7,         8,          57,
                                   64, 100000001, INT64_MAX, UINT64_MAX, 0xFFFFFFFFFFFFFFFB};
    memset(d, 'x', sizeof d);
    for (size_t n = 0; n < 8; n++) {
        write_file(path, d, n);
        assert_int_equal(st_open(&f, path, NULL), ERR_INPUT);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        for (int b = 0; b < 8; b++)
            d[b] = (unsigned char)(bad[i] >> 8 * b);
        memcpy(d + 8, "{\"a\":1", 6);
        write_file(path, d, sizeof d);
        assert_int_equal(st_open(&f, path, NULL), ERR_INPUT);
    }
    write_file(path, "\2\0\0\0\0\0\0\0{}", 10);
    assert_int_equal(st_open(&f, path, NULL), OK);
    st_close(&f);
    unlink(path);
    assert_int_equal(st_open(&f, path, NULL), ERR_NOTFOUND);
    assert_int_equal(st_open(&f, "/tmp", NULL), ERR_INPUT);
}

static long peak_kib(void)
{
    struct rusage u;
    assert_int_equal(getrusage(RUSAGE_SELF, &u), 0);
    return u.ru_maxrss;
}

/* C65: a header of 99 MB of spaces costs neither memory nor seconds, wherever they stand; inside of a string
 * they count. */
static void padded(void **state)
{
    (void)state;
    static const char *const forms[] = {"{", "{\"a\":{\"dtype\":\"U8\",", "{}", "", "{\"a"};
    static const char *const tails[] = {"}", "\"shape\":[2],\"data_offsets\":[0,2]}}", "", "",
                                        "\":1}"};
    static const err_t want[] = {OK, OK, OK, ERR_INPUT, ERR_INPUT};
    static const uint64_t data[] = {0, 2, 0, 0, 0};
    char path[] = "/tmp/moult-st-XXXXXX";
    int fd = mkstemp(path);
    size_t block = 1 << 20;
    char *spaces = mem_alloc(block);
    memset(spaces, ' ', block);
    for (int k = 0; k < 5; k++) {
        uint64_t n = k == 4 ? 3000000 : 99000000, front = strlen(forms[k]), back = strlen(tails[k]);
        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(pwrite(fd, &n, 8, 0), 8);
        assert_int_equal(pwrite(fd, forms[k], front, 8), (ssize_t)front);
        for (uint64_t at = front, m; at < n - back; at += m) {
            m = n - back - at < block ? n - back - at : block;
            assert_int_equal(pwrite(fd, spaces, m, (off_t)(8 + at)), (ssize_t)m);
        }
        assert_int_equal(pwrite(fd, tails[k], back, (off_t)(8 + n - back)), (ssize_t)back);
        assert_int_equal(ftruncate(fd, (off_t)(8 + n + data[k])), 0);
        struct st_file f;
        struct err e = {0};
        long before = peak_kib();
        int64_t t = clock_thread_ns();
        err_t rc = st_open(&f, path, &e);
        double s = (double)(clock_thread_ns() - t) * 1e-9;
        if (rc != want[k]) fail_msg("%d: %d %s", k, rc, e.msg);
        if (rc == OK && k == 1) assert_int_equal(f.tensors[0].offset, 8 + n);
        if (rc == OK) st_close(&f);
        if (peak_kib() - before > 50 * 1024) fail_msg("%d: %ld KiB", k, peak_kib() - before);
        if (s > 2) fail_msg("%d: %.2f s", k, s);
    }
    mem_free(spaces);
    close(fd);
    unlink(path);
}

static void changed_file(void **state)
{
    (void)state;
    char path[] = "/tmp/moult-st-XXXXXX", d[128];
    const char *h = T("\"U8\"", "[4]", "[0,4]");
    uint64_t n = strlen(h);
    struct st_file f;
    struct err e = {0};
    memcpy(d, &n, 8);
    memcpy(d + 8, h, n);
    memcpy(d + 8 + n, "wxyz", 4);
    close(mkstemp(path));
    write_file(path, d, n + 12);
    assert_int_equal(st_open(&f, path, &e), OK);
    char got[2];
    assert_int_equal(st_read(&f, &f.tensors[0], 1, got, 2, &e), OK);
    assert_memory_equal(got, "xy", 2);
    assert_int_equal(truncate(path, (off_t)n + 10), 0);
    assert_int_equal(st_read(&f, &f.tensors[0], 0, got, 2, &e), ERR_IO);
    assert_non_null(strstr(e.msg, "changed"));
    assert_int_equal(st_read(&f, &f.tensors[0], 2, got, 2, &e), ERR_IO);
    st_close(&f);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headers), cmocka_unit_test(every_prefix), cmocka_unit_test(lengths),
        cmocka_unit_test(padded),  cmocka_unit_test(changed_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
