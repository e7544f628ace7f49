/* base64: the vectors of RFC 4648, random bytes there and back, and what is refused. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "server/base64.h"
#include <stdlib.h>
#include <string.h>

static void test_vectors(void **state)
{
    (void)state;
    static const char *const rows[][2] = {{"", ""},
                                          {"f", "Zg=="},
                                          {"fo", "Zm8="},
                                          {"foo", "Zm9v"},
                                          {"foob", "Zm9vYg=="},
                                          {"fooba", "Zm9vYmE="},
                                          {"foobar", "Zm9vYmFy"},
                                          {"\xff\xfe\xfd", "//79"},
                                          {"\xfb\xef", "++8="}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct buf text = {0}, back = {0};
        buf_puts(&text, "");
        buf_puts(&back, "");
        assert_true(base64_put(&text, (const uint8_t *)rows[i][0], strlen(rows[i][0])));
        assert_string_equal(text.data, rows[i][1]);
        assert_true(base64_get(&back, text.data, text.len));
        assert_string_equal(back.data, rows[i][0]);
        buf_release(&text);
        buf_release(&back);
    }
}

static void test_lengths(void **state)
{
    (void)state;
    unsigned seed = 4;
    enum { MOST = 20000 };
    uint8_t *bytes = mem_alloc(MOST);
    for (size_t n = 0; n <= MOST; n += n < 40                 ? 1
                                       : n < 3000             ? 997
                                       : n > 3060 && n < 3080 ? 1
                                                              : n % 7 + 2500) {
        struct buf text = {0}, back = {0};
        for (size_t i = 0; i < n; i++)
            bytes[i] = (uint8_t)rand_r(&seed);
        assert_true(base64_put(&text, bytes, n));
        assert_int_equal(text.len, (n + 2) / 3 * 4);
        assert_true(base64_get(&back, text.data, text.len));
        assert_int_equal(back.len, n);
        if (n) assert_memory_equal(back.data, bytes, n);
        buf_release(&text);
        buf_release(&back);
    }
    mem_free(bytes);
}

static void test_refused(void **state)
{
    (void)state;
    static const char *const rows[] = {"A",    "AA",       "AAA",      "AAAAA",     "AA=A", "=AAA",
                                       "A===", "====",     "AA A",     "AAA\n",     "AA-_", "AB==",
                                       "AAB=", "Zg==Zg==", "AAAA====", "AA\x80\x80"};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct buf out = {0};
        if (base64_get(&out, rows[i], strlen(rows[i]))) fail_msg("\"%s\" was taken", rows[i]);
        assert_false(out.failed);
        buf_release(&out);
    }
    struct buf small = {.max = 3};
    assert_false(base64_get(&small, "AAAAAAAA", 8));
    assert_true(small.failed);
    buf_release(&small);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_vectors),
                                       cmocka_unit_test(test_lengths),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
