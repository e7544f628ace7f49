/* clang-format off: cmocka.h needs the others first */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include "base/mem.h"
#include "text/detok.h"
#include "text/nfc.h"
#include "text/rewrite.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define SPLIT                                                                         \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| " \
    "?[^\\\\s\\\\p{L}"                                                                \
    "\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define PRETOK                                                                              \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":" \
    "\"" SPLIT "\"},\"behavior\":\"Isolated\",\"invert\":false}," BYTE_LEVEL "]}"
#define DECODER "{\"type\":\"ByteLevel\"}"

/* Ids: byte b is id b; then the merges' results from 256 on; then the added tokens. */
static const char merges[] =
    "[\"h e\",[\"l\",\"l\"],\"he ll\",\"hell o\",\"\\u0120 hello\",\"a a\","
    "\"aa aa\",\"\\u0120 \\u0120\"]";
static const char *const results[] = {"he",           "ll", "hell", "hello",
                                      "\\u0120hello", "aa", "aaaa", "\\u0120\\u0120"};
enum { HE = 256, LL, HELL, HELLO, SP_HELLO, AA, AAAA, SP_SP, ADDED0 };

static const char added[] =
    "[{\"id\":264,\"content\":\"<a>\",\"lstrip\":true,\"normalized\":false},"
    "{\"id\":265,\"content\":\"<b>\",\"rstrip\":true,\"normalized\":false},"
    "{\"id\":266,\"content\":\"<ab>\",\"normalized\":false},"
    "{\"id\":267,\"content\":\"abc\",\"single_word\":true,\"normalized\":false},"
    "{\"id\":268,\"content\":\"Foo\",\"normalized\":true},"
    "{\"id\":269,\"content\":\"<|im_start|>\",\"special\":true,\"normalized\":false},"
    "{\"id\":270,\"content\":\"\\u65e5 \\u672c\",\"normalized\":true}]";

static void put_vocab(struct buf *b)
{
    int next = 0x100;
    buf_puts(b, "{");
    for (int i = 0; i < 256; i++) {
        bool plain = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i <= 0xAC) || i >= 0xAE;
        buf_printf(b, "\"\\u%04x\":%d,", plain ? i : next, i);
        next += !plain;
    }
    for (int i = 0; i < 8; i++)
        buf_printf(b, "%s\"%s\":%d", i ? "," : "", results[i], 256 + i);
    buf_puts(b, "}");
}

static err_t make(struct tokenizer **t, const char *pretok, const char *more, struct err *e)
{
    struct buf b = {0};
    buf_printf(&b,
               "{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":%s,\"decoder\":" DECODER
               ",\"added_tokens\":%s,\"model\":{\"type\":\"BPE\",%s\"vocab\":",
               pretok, added, more);
    put_vocab(&b);
    buf_printf(&b, ",\"merges\":%s}}", merges);
    assert_false(b.failed);
    err_t rc = tokenizer_parse(t, b.data, b.len, e);
    buf_release(&b);
    return rc;
}

static struct tokenizer *tok(void)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (make(&t, PRETOK, "", &e) != OK) fail_msg("%s", e.msg);
    return t;
}

/* `want` ends with -1; -2 at its start: a text for the byte ids of itself. */
static void expect(const struct tokenizer *t, const char *text, const int32_t *want)
{
    struct ids ids = {0};
    struct err e = {0};
    if (tokenizer_encode(t, &ids, text, strlen(text), &e) != OK) fail_msg("%s", e.msg);
    size_t n = 0;
    while (want[n] != -1)
        n++;
    for (size_t i = 0; i < n && i < ids.n; i++)
        if (ids.v[i] != want[i]) fail_msg("'%s' id %zu: %d, want %d", text, i, ids.v[i], want[i]);
    assert_int_equal(ids.n, n);
    ids_release(&ids);
}
#define EXPECT(t, text, ...) expect(t, text, (const int32_t[]){__VA_ARGS__, -1})

static void test_bpe(void **state)
{
    (void)state;
    struct tokenizer *t = tok();
    EXPECT(t, "hello", HELLO);
    EXPECT(t, " hello", SP_HELLO);
    EXPECT(t, "  hello", ' ', SP_HELLO);
    EXPECT(t, "hell", HELL);
    EXPECT(t, "\thello", '\t', HELLO);
    EXPECT(t, "aaaaaa", AAAA, AA);
    EXPECT(t, "e\xcc\x81", 0xC3, 0xA9); /* NFC */
    EXPECT(t, "\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", 0xED, 0x95, 0x9C);
    EXPECT(t, "\xef\xac\x81", 0xEF, 0xAC, 0x81); /* no compatibility mapping */
    expect(t, "", (const int32_t[]){-1});
    assert_int_equal(tokenizer_vocab_size(t), 271);
    assert_int_equal(tokenizer_id(t, "hello"), HELLO);
    assert_int_equal(tokenizer_id(t, "nope"), -1);
    assert_true(tokenizer_is_special(t, 269));
    assert_false(tokenizer_is_special(t, 268));
    assert_false(tokenizer_is_special(t, -5));
    size_t n;
    assert_memory_equal(tokenizer_bytes(t, SP_HELLO, &n), " hello", 6);
    assert_int_equal(n, 6);
    assert_null(tokenizer_bytes(t, 271, &n));
    tokenizer_free(t);
}

static void test_added(void **state) /* C31 */
{
    (void)state;
    struct tokenizer *t = tok();
    EXPECT(t, "x <a> y", 'x', 264, ' ', 'y');
    EXPECT(t, "x<b>  y", 'x', 265, 'y');
    EXPECT(t, "<ab>", 266);
    EXPECT(t, "<a><b>", 264, 265);
    EXPECT(t, "abcd abc", 'a', 'b', 'c', 'd', ' ', 267);
    EXPECT(t, "<|im_start|>hello", 269, HELLO);
    EXPECT(t, "\xc2\xa0<a>x", 264, 'x');
    EXPECT(t, "\xe2\x80\x8b<b>\xe2\x80\x8b", 0xE2, 0x80, 0x8B, 265, 0xE2, 0x80, 0x8B);
    EXPECT(t, "aFoo", 'a', 268);
    EXPECT(t, "<a", '<', 'a');
    tokenizer_free(t);
}

static void test_prefix_space(void **state)
{
    (void)state;
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(make(&t, "{\"type\":\"ByteLevel\"}", "", &e), OK);
    EXPECT(t, "hello", SP_HELLO);
    EXPECT(t, "  hello", ' ', SP_HELLO);
    tokenizer_free(t);
}

static void test_refusals(void **state)
{
    (void)state;
    static const char *const model[] = {"\"byte_fallback\":true,", "\"dropout\":0.5,",
                                        "\"unk_token\":\"x\",",
                                        "\"continuing_subword_prefix\":\"##\","};
    static const char *const pretok[] = {
        "null",
        "[]",
        "{}",
        "{\"type\":\"Metaspace\"}",
        "{\"type\":\"Sequence\"}",
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\"}",
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a\"},\"behavior\":\"Isolated\"}",
        "{\"type\":\"Split\",\"pattern\":3,\"behavior\":\"Isolated\"}"};
    static const char *const whole[] = {"",
                                        "[]",
                                        "{}",
                                        "{\"model\":3}",
                                        "{\"decoder\":" DECODER ",\"pre_tokenizer\":" BYTE_LEVEL
                                        ",\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}",
                                        "{\"decoder\":" DECODER ",\"pre_tokenizer\":" BYTE_LEVEL
                                        ",\"model\":{\"vocab\":{\"a\":99999999999},\"merges\":[]}}",
                                        "{\"decoder\":" DECODER ",\"pre_tokenizer\":" BYTE_LEVEL
                                        ",\"model\":{\"vocab\":{\"a\":1,\"b\":1},\"merges\":[]}}",
                                        "{\"decoder\":" DECODER ",\"pre_tokenizer\":" BYTE_LEVEL
                                        ",\"model\":{\"vocab\":{\"a\":1},\"merges\":[\"a a\"]}}",
                                        "{\"decoder\":" DECODER ",\"pre_tokenizer\":" BYTE_LEVEL
                                        ",\"model\":{\"vocab\":{\"a\":1},\"merges\":[[1,2]]}}"};
    struct tokenizer *t = NULL;
    struct err e = {0};
    for (size_t i = 0; i < sizeof model / sizeof *model; i++)
        assert_int_equal(make(&t, PRETOK, model[i], &e), ERR_UNSUPPORTED);
    for (size_t i = 0; i < sizeof pretok / sizeof *pretok; i++)
        assert_int_not_equal(make(&t, pretok[i], "", &e), OK);
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        assert_int_not_equal(tokenizer_parse(&t, whole[i], strlen(whole[i]), &e), OK);
    assert_null(t);
    t = tok();
    struct ids ids = {0};
    assert_int_equal(tokenizer_encode(t, &ids, "ab\xff", 3, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "byte 2"));
    tokenizer_free(t);
}

static void test_rewrite(void **state)
{
    (void)state;
    struct buf b = {0};
    struct err e = {0};
    const char *in = "[^\\s\\p{L}]+\\s\\S\\p{Han}";
    assert_int_equal(regex_rewrite(&b, in, strlen(in), &e), OK);
    assert_string_equal(b.data, "[^\\t-\\r\\x{85}\\p{Z}\\p{L}]+[\\t-\\r\\x{85}\\p{Z}]"
                                "[^\\t-\\r\\x{85}\\p{Z}]\\p{sc:Han}");
    static const char *const bad[] = {"[\\S]", "\\w",     "[a&&b]",  "[[:alpha:]]", "a{1,2}+",
                                      "a\\",   "\\p{Han", "(*FAIL)", "(?m:a)"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(regex_rewrite(&b, bad[i], strlen(bad[i]), &e), ERR_UNSUPPORTED);
    buf_release(&b);
}

static void expect_text(const struct tokenizer *t, const int32_t *ids, size_t n, bool skip)
{
    struct buf whole = {0}, parts = {0};
    struct detok d;
    assert_true(tokenizer_decode(t, &whole, ids, n, skip));
    detok_init(&d, t, skip);
    for (size_t i = 0; i < n; i++) {
        assert_true(detok_push(&d, ids[i], &parts));
        assert_int_equal(utf8_valid(parts.data ? parts.data : "", parts.len), parts.len);
    }
    assert_true(detok_end(&d, &parts));
    assert_int_equal(parts.len, whole.len);
    if (whole.len) assert_memory_equal(parts.data, whole.data, whole.len);
    buf_release(&whole);
    buf_release(&parts);
}

static void decodes(const struct tokenizer *t, const char *want, bool skip, const int32_t *ids,
                    size_t n)
{
    struct buf b = {0};
    assert_true(tokenizer_decode(t, &b, ids, n, skip));
    assert_string_equal(b.data ? b.data : "", want);
    buf_release(&b);
    expect_text(t, ids, n, skip);
}
#define DECODES(t, want, skip, ...)                        \
    decodes(t, want, skip, (const int32_t[]){__VA_ARGS__}, \
            sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t))

static void test_decode(void **state) /* C27 */
{
    (void)state;
    struct tokenizer *t = tok();
    DECODES(t, "hello hello", false, HELLO, SP_HELLO);
    DECODES(t, "\xf0\x9f\x98\x80", false, 0xF0, 0x9F, 0x98, 0x80);
    DECODES(t,
            "a\xef\xbf\xbd"
            "b",
            false, 'a', 0xF0, 0x9F, 0x98, 'b'); /* one maximal subpart */
    DECODES(t, "\xef\xbf\xbd\xef\xbf\xbd", false, 0xC0, 0x80);
    DECODES(t, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", false, 0xED, 0xA0, 0x80);
    DECODES(t, "x\xef\xbf\xbd", false, 'x', 0xE4, 0xB8);
    DECODES(t, "<|im_start|>hello", false, 269, HELLO);
    DECODES(t, "hello", true, 269, HELLO, 99999, -7);
    DECODES(t, "\xe6\x97\xa5 \xe6\x9c\xac", true, 270);
    uint64_t seed = 12345;
    int32_t ids[24];
    for (int k = 0; k < 10000; k++) {
        size_t n = (size_t)(k % 24) + 1;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            int32_t r = (int32_t)(seed >> 40);
            ids[i] = k % 2 ? r % 280 : 0x80 + r % 128;
        }
        expect_text(t, ids, n, k % 3 == 0);
    }
    tokenizer_free(t);
}

static double seconds_for(const struct tokenizer *t, const char *unit, size_t bytes)
{
    struct ids ids = {0};
    struct err e = {0};
    struct timespec a, b;
    size_t u = strlen(unit), n = bytes / u * u;
    char *s = mem_try(n);
    assert_non_null(s);
    for (size_t i = 0; i < n; i++)
        s[i] = unit[i % u];
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    assert_int_equal(tokenizer_encode(t, &ids, s, n, &e), OK);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    mem_free(s);
    ids_release(&ids);
    return (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
}

/* How much longer twice the text takes: the least of several runs each, and the best of a few attempts, since
 * other processes share the caches; quadratic work would be 4 in all of them. */
static double growth(const struct tokenizer *t, const char *unit, size_t bytes)
{
    double best = 1e9;
    for (int attempt = 0; attempt < 4 && best > 2.5; attempt++) {
        double one = 1e9, two = 1e9;
        for (int i = 0; i < 3; i++) {
            double a = seconds_for(t, unit, bytes), b = seconds_for(t, unit, 2 * bytes);
            one = a < one ? a : one;
            two = b < two ? b : two;
        }
        best = two / one < best ? two / one : best;
    }
    return best;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 4
#else
#define SLOWER 1
#endif
enum {
    LONG_RUN = 250000
}; /* twice that still fits a cache, so that the ratio is of the work alone */

static void test_long_runs(void **state) /* C29 */
{
    (void)state;
    struct tokenizer *t = tok();
    /* Memory stays with the process, so that the first touch of new pages is not measured (sanitizers have their
     * own allocator and ignore it). */
    (void)mallopt(M_MMAP_THRESHOLD, 1 << 30);
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
    static const char *const unit[] = {
        "a",    " ", "_", "\n", "\xe4\xb8\xad\xe5\xb1\xb1\xe3\x81\xae", "\xcc\x81\xcc\xa3",
        "hell", "1"};
    for (size_t i = 0; i < sizeof unit / sizeof *unit; i++) {
        double all = seconds_for(t, unit[i], 1000000), ratio = growth(t, unit[i], LONG_RUN);
        if (all > 2.0 * SLOWER) fail_msg("unit %zu: %.2f s for 1 MB", i, all);
        if (ratio > 2.5) fail_msg("unit %zu: twice as long takes %.2f times the time", i, ratio);
    }
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe),          cmocka_unit_test(test_added),
        cmocka_unit_test(test_prefix_space), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_rewrite),      cmocka_unit_test(test_decode),
        cmocka_unit_test(test_long_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
