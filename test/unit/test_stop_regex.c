/* A pattern in a growing text: the same as one that sees each text for the first time. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "text/stop_regex.h"
#include <stdlib.h>
#include <string.h>

static const char *const patterns[] = {
    "abc",
    "a+",
    "ab|abc|b c",
    "\\bab\\b",
    "ab\\B",
    "ab\\Bc",
    "a(?!b)",
    "a(?=bc)",
    "(?<=a)b",
    "(?<!a)b",
    "(?<=ab)c",
    "^ab",
    "ab$",
    "ab\\z",
    "b$.",
    ".*cc",
    "a.*b.*c",
    "(?s).*cb",
    "[^a]{3}",
    "a{2,4}b",
    "(a|b)\\1",
    "(?i)ABC",
    "\\s+b",
    "\\S+\\s\\S+",
    "a\\Kb",
    "a*",
    "(?:ab)*cc",
    "\xc3\xa9+",
    "\\w{4,}",
    "c(?!.*a)",
    "(?=b)bc",
    "ab(?!$)",
    "(?>a+)b",
    "a++c",
    "(?m)^c",
    "(?m)b$",
    "[[:alpha:]] [[:alpha:]]",
};
static const char *const pieces[] = {"a", "b", "c", "ab", " ", "bc", "\n", "\xc3\xa9", "aa", "ca"};

static stop_regex_t look(const char *pattern, const char *text, size_t n, size_t *at)
{
    struct stop_regex *fresh;
    struct err e = {0};
    assert_int_equal(stop_regex_new(&fresh, pattern, strlen(pattern), &e), OK);
    stop_regex_t got = stop_regex_search(fresh, text, n, at, &e);
    stop_regex_free(fresh);
    return got;
}

/* Text grows piece by piece.  What was said to be free of a beginning must never be part of a match. */
static void grow(const char *pattern, unsigned *seed, int *found)
{
    char text[128] = "";
    size_t n = 0, free_of = 0;
    struct stop_regex *s;
    struct err e = {0};
    assert_int_equal(stop_regex_new(&s, pattern, strlen(pattern), &e), OK);
    for (int i = 0; i < 24; i++) {
        const char *piece = pieces[(size_t)rand_r(seed) % (sizeof pieces / sizeof pieces[0])];
        memcpy(text + n, piece, strlen(piece));
        n += strlen(piece);
        size_t at = 0, want = 0;
        stop_regex_t got = stop_regex_search(s, text, n, &at, &e),
                     first = look(pattern, text, n, &want);
        if (got != first || (got == STOP_REGEX_FOUND && at != want))
            fail_msg("%s in \"%.*s\": %d at %zu, afresh %d at %zu", pattern, (int)n, text, (int)got,
                     at, (int)first, want);
        if (at < free_of)
            fail_msg("%s in \"%.*s\": %zu, but %zu bytes were let go", pattern, (int)n, text, at,
                     free_of);
        if (got == STOP_REGEX_FOUND) {
            (*found)++;
            break;
        }
        free_of = at;
    }
    stop_regex_free(s);
}

static void test_growing(void **state)
{
    (void)state;
    unsigned seed = 43;
    for (size_t p = 0; p < sizeof patterns / sizeof patterns[0]; p++) {
        int found = 0;
        for (int i = 0; i < 300; i++)
            grow(patterns[p], &seed, &found);
        if (!found && strcmp(patterns[p], "b$.") != 0) fail_msg("%s was never found", patterns[p]);
    }
}

static void test_refused(void **state)
{
    (void)state;
    struct stop_regex *s;
    struct err e = {0};
    static const char *const bad[] = {"(", "a{2,1}", "[b", "*a", "\\C", "(?<=a+)b", ""};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (stop_regex_new(&s, bad[i], strlen(bad[i]), &e) != ERR_INPUT)
            fail_msg("%s was taken", bad[i]);
    char *longest = mem_alloc(STOP_REGEX_BYTES + 1);
    memset(longest, 'a', STOP_REGEX_BYTES + 1);
    assert_int_equal(stop_regex_new(&s, longest, STOP_REGEX_BYTES + 1, &e), ERR_INPUT);
    assert_int_equal(stop_regex_new(&s, longest, STOP_REGEX_BYTES, &e), OK);
    stop_regex_free(s);
    /* An exponential pattern is given up, at once. */
    size_t at;
    assert_int_equal(stop_regex_new(&s, "(a+)+$", 6, &e), OK);
    memset(longest, 'a', 60);
    longest[60] = 'b';
    assert_int_equal(stop_regex_search(s, longest, 61, &at, &e), STOP_REGEX_FAILED);
    assert_non_null(strstr(e.msg, "stop_regex"));
    stop_regex_free(s);
    mem_free(longest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_growing),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
