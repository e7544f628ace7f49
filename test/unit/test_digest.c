/* base/digest: published values, and pieces of any size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/digest.h"
#include <stdio.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h> /* for the base instruction set */

/* FIPS 180-4's examples; RFC 1950's sum of "Wikipedia" as it is widely printed; the empty string. */
static const struct {
    const char *name, *text, *hex;
} known[] = {
    {"sha256", "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {"sha256", "abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    {"sha256", "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
     "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    {"adler32", "", "00000001"},
    {"adler32", "Wikipedia", "11e60398"},
    {"xxh3-128", "", "99aa06d3014798d86001c324468d497f"},
    {"xxh3-128", "abc", "06b05ab6733a618578af5f94892f3950"},
};

static void known_values(void **state)
{
    (void)state;
    char hex[DIGEST_HEX];
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        digest_t k = digest_find(known[i].name);
        assert_int_not_equal(k, DIGEST_COUNT);
        assert_string_equal(digest_name(k), known[i].name);
        digest_of(k, known[i].text, strlen(known[i].text), hex);
        assert_string_equal(hex, known[i].hex);
        assert_int_equal(strlen(hex), 2 * digest_size(k));
    }
    assert_int_equal(digest_find("blake3"), DIGEST_COUNT);
    assert_int_equal(digest_find(""), DIGEST_COUNT);
}

/* Whatever instructions the module chose. */
static void xxh3_of_any_length(void **state)
{
    (void)state;
    static unsigned char x[40000];
    for (size_t i = 0; i < sizeof x; i++)
        x[i] = (unsigned char)(i * i >> 3 ^ i);
    for (size_t n = 0; n < sizeof x; n += n < 600 ? 1 : 997) {
        char hex[DIGEST_HEX], want[DIGEST_HEX];
        XXH128_hash_t h = XXH3_128bits(x, n);
        snprintf(want, sizeof want, "%016llx%016llx", (unsigned long long)h.high64,
                 (unsigned long long)h.low64);
        digest_of(DIGEST_XXH3_128, x, n, hex);
        assert_string_equal(hex, want);
    }
}

static void pieces(void **state)
{
    (void)state;
    enum { N = 70000 };
    static unsigned char x[N];
    uint32_t s = 7;
    for (size_t i = 0; i < N; i++)
        x[i] = i < 20000 ? 0xff : (unsigned char)((s = s * 1664525 + 1013904223) >> 24);
    for (int k = 0; k < DIGEST_COUNT; k++) {
        char whole[DIGEST_HEX], hex[DIGEST_HEX];
        digest_of((digest_t)k, x, N, whole);
        struct digest d;
        digest_init(&d, (digest_t)k);
        for (size_t i = 0, n = 0; i < N; i += n) {
            n = (s = s * 1664525 + 1013904223) % 9001;
            if (n > N - i) n = N - i;
            digest_add(&d, x + i, n);
            digest_hex(&d, hex); /* asking changes nothing */
        }
        digest_hex(&d, hex);
        assert_string_equal(hex, whole);
        x[N - 1] ^= 1;
        digest_of((digest_t)k, x, N, hex);
        assert_string_not_equal(hex, whole);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(known_values),
                                       cmocka_unit_test(xxh3_of_any_length),
                                       cmocka_unit_test(pieces)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
