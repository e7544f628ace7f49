/* Grammars: what is matched, what is refused and how, masks against their definition, eras, memory
 * failures. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "text/grammar.h"
#include <stdio.h>
#include <string.h>

#define TOKENIZER "models/tiny-moe/tokenizer.json"

static struct tokenizer *tok;
static struct token_trie *trie;

static int setup(void **state)
{
    struct err e = {0};
    (void)state;
    if (tokenizer_load(&tok, TOKENIZER, &e) || token_trie_new(&trie, tok, &e))
        fail_msg("%s", e.msg);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    token_trie_unref(trie);
    tokenizer_free(tok);
    return 0;
}

static err_t compile(struct grammar **g, const char *regex, const char *schema, struct err *e)
{
    json_t *s = schema ? json_loads(schema, JSON_DECODE_ANY, NULL) : NULL;
    assert_true(!schema || s);
    struct grammar_spec spec = {
        .pattern = regex, .n_pattern = regex ? strlen(regex) : 0, .schema = s};
    err_t rc = grammar_compile(g, trie, &spec, e);
    json_decref(s);
    return rc;
}

/* Texts after `yes` must match, those after `no` must not; "|"-less lists end with NULL. */
struct row {
    const char *spec;
    const char *yes[6], *no[8];
};

static void check_rows(const struct row *rows, size_t n, bool regex)
{
    for (size_t i = 0; i < n; i++) {
        struct grammar *g = NULL;
        struct err e = {0};
        bool whole, prefix;
        if (compile(&g, regex ? rows[i].spec : NULL, regex ? NULL : rows[i].spec, &e))
            fail_msg("%s: %s", rows[i].spec, e.msg);
        for (int k = 0; k < 6 && rows[i].yes[k]; k++) {
            assert_int_equal(
                grammar_match(g, rows[i].yes[k], strlen(rows[i].yes[k]), &whole, &prefix, &e), OK);
            if (!whole || !prefix) fail_msg("%s does not match %s", rows[i].spec, rows[i].yes[k]);
            for (size_t m = 0; m < strlen(rows[i].yes[k]);
                 m++) { /* its beginnings are beginnings */
                assert_int_equal(grammar_match(g, rows[i].yes[k], m, &whole, &prefix, &e), OK);
                assert_true(prefix);
            }
        }
        for (int k = 0; k < 8 && rows[i].no[k]; k++) {
            assert_int_equal(
                grammar_match(g, rows[i].no[k], strlen(rows[i].no[k]), &whole, &prefix, &e), OK);
            if (whole) fail_msg("%s matches %s", rows[i].spec, rows[i].no[k]);
        }
        grammar_unref(g);
    }
}

static void test_regex(void **state)
{
    static const struct row rows[] = {
        {"abc", {"abc"}, {"", "ab", "abcd", "xabc"}},
        {"", {""}, {"a"}},
        {"^a|b$", {"a", "b"}, {"ab", ""}},
        {"(a|bc)*d?", {"", "d", "abcad", "bcbc"}, {"b", "dd", "cb"}},
        {"a{2}b{1,3}c{2,}d{,2}", {"aabcc", "aabbbccccdd"}, {"aabc", "aabbbbcc", "aabccddd"}},
        {"x{", {"x{"}, {"x"}},
        {"[^a-c\\n]+", {"d", "é日😀"}, {"a", "\n", ""}},
        {"[\\w.-]+@[]x]", {"a_1.b-@]", "Z@x"}, {"é@x", "@x"}},
        {".", {"a", "é", "日", "😀"}, {"\n", "ab", "\xc3", "\xed\xa0\x80", "\xff", "\xc0\x80"}},
        {"\\d\\D\\s\\S\\w\\W", {"1a\t.b-"}, {"aa\t.b-"}},
        {"\\x41\\u00e9\\.\\\\\\/", {"Aé.\\/"}, {"Ae.\\/"}},
        {"(?:a|b)(?P<n>c+?)", {"ac", "bccc"}, {"c"}},
        {"[à-ü]{2}", {"éü"}, {"e", "é", "éééé"}},
        {"((a*)*)*b", {"b", "aaab"}, {"a"}},
    };
    (void)state;
    check_rows(rows, sizeof rows / sizeof rows[0], true);
}

static void test_schema(void **state)
{
    static const struct row rows[] = {
        {"{\"type\":\"integer\",\"minimum\":-12,\"maximum\":105}",
         {"-12", "-9", "0", "99", "105"},
         {"-13", "106", "007", "-0", "1.0", "+1"}},
        {"{\"type\":\"integer\",\"exclusiveMinimum\":0}",
         {"1", "999999999999999999"},
         {"0", "-1", "9999999999999999999"}},
        {"{\"type\":\"number\",\"minimum\":0,\"exclusiveMaximum\":2}",
         {"0", "1.99", "0.0", "1"},
         {"2", "2.0", "-0.1", "1e1", "1."}},
        {"{\"type\":\"number\",\"exclusiveMinimum\":1,\"maximum\":3}",
         {"1.01", "3", "3.00", "2"},
         {"1", "1.0", "3.1"}},
        {"{\"type\":\"number\"}",
         {"0", "-1.5e+3", "2E7"},
         {"01", ".5", "1e999", "NaN", "Infinity"}},
        {"{\"type\":\"string\",\"minLength\":1,\"maxLength\":2}",
         {"\"é\"", "\"\\n😀\"", "\"\\ud83d\\ude00a\""},
         {"\"\"", "\"abc\"", "\"\\ud83d\"", "\"\n\"", "\"\\x\""}},
        {"{\"type\":\"string\",\"pattern\":\"a\\\"$\"}",
         {"\"xa\\\"\"", "\"a\\\"\""},
         {"\"a\"", "\"a\\\"b\""}},
        {"{\"type\":\"string\",\"format\":\"date-time\"}",
         {"\"2024-02-28T23:59:59Z\""},
         {"\"2024-13-01T00:00:00Z\"", "\"x\""}},
        {"{\"enum\":[\"a\\n\",1,null,{\"k\":[2]}]}",
         {"\"a\\n\"", "1", "null", "{\"k\": [2]}"},
         {"\"a\"", "2", "true"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":"
         "\"boolean\"}},\"required\":[\"b\"]}",
         {"{\"b\":true}", "{ \"a\": 1, \"b\": false }", "{\n  \"a\": 1,\n  \"b\": true\n}"},
         {"{}", "{\"a\":1}", "{\"b\":true,\"a\":1}", "{\"b\":true,}", "{\"b\":true,\"c\":1}",
          "{\"b\":  true}"}},
        {"{\"type\":\"object\",\"properties\":{\"ab\":{\"type\":\"integer\"}},"
         "\"additionalProperties\":{\"type\":\"null\"}}",
         {"{}", "{\"ab\":1,\"abc\":null}", "{\"a\":null,\"\":null}", "{\"é\":null}"},
         {"{\"ab\":null}", "{\"x\":null,\"ab\":null}", "{\"\\u0061b\":null}"}},
        {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":1,\"maxItems\":3}",
         {"[1]", "[1, 2,3]"},
         {"[]", "[1,2,3,4]", "[1,]", "[true]"}},
        {"{\"prefixItems\":[{\"const\":1},{\"const\":2}],\"items\":false}",
         {"[]", "[1]", "[1,2]"},
         {"[2]", "[1,2,3]"}},
        {"{\"anyOf\":[{\"type\":\"null\"},{\"$ref\":\"#/$defs/"
         "p\"}],\"$defs\":{\"p\":{\"type\":\"object\",\"properties\":{\"n\":{\"$ref\":\"#\"}},"
         "\"required\":[\"n\"]}}}",
         {"null", "{\"n\":null}", "{\"n\":{\"n\":{\"n\":null}}}"},
         {"{}", "{\"n\":{}}"}},
        {"{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"null\"}}},{"
         "\"required\":[\"a\"]}]}",
         {"{\"a\":null}"},
         {"{}"}},
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"string\"}]}", {"1", "\"x\""}, {"null"}},
        {"{\"type\":[\"string\",\"null\"],\"maxLength\":1}", {"null", "\"x\""}, {"\"xx\"", "1"}},
        {"true", {"1", "[{}]", "{\"a\":[null,\"\"]}"}, {"", "{a:1}", "[1"}},
    };
    (void)state;
    check_rows(rows, sizeof rows / sizeof rows[0], false);
}

static void test_refused(void **state)
{
    static const char *const regexes[][2] = {
        {"a\\1", "back reference"},
        {"(?=a)", "this kind of group"},
        {"(?i)a", "this kind of group"},
        {"\\bx", "boundary"},
        {"\\p{L}", "\\p"},
        {"a**", "repetition"},
        {"*a", "repetition of nothing"},
        {"(a", "( without )"},
        {"a)", ") without ("},
        {"[a", "[ without ]"},
        {"[b-a]", "range"},
        {"a{3,2}", "limits"},
        {"a^b", "anchor"},
        {"x++", "possessive"},
        {"\\", "backslash"},
        {"(y|[^\\", "backslash"},
        {"[[:alpha:]]", "POSIX"},
        {"\\q", "unknown escape"},
        {"((a{1000}){1000}){9}", "too large"},
        {"((){9999}){9999}", "too large"},
        {"\xff", "UTF-8"},
        {"[^\\s\\S]", "matches no text"},
        {"a{100001}", "100000"},
    };
    static const char *const schemas[][2] = {
        {"{\"not\":{}}", "\"not\""},
        {"{\"type\":\"foo\"}", "foo"},
        {"{\"$ref\":\"#/x\"}", "nowhere"},
        {"{\"$ref\":\"http://x\"}", "$ref"},
        {"{\"$ref\":\"#\"}", "no text"},
        {"{\"multipleOf\":3}", "multipleOf"},
        {"{\"patternProperties\":{}}", "patternProperties"},
        {"{\"type\":\"string\",\"pattern\":\"a\",\"maxLength\":3}", "pattern together"},
        {"{\"oneOf\":[{\"type\":\"string\"},{}]}", "oneOf"},
        {"{\"type\":\"object\",\"required\":[\"x\"]}", "required"},
        {"false", "object or true"},
        {"{\"enum\":[]}", "enum"},
        {"{\"allOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]}", "no type"},
        {"{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "between"},
        {"{\"minItems\":3,\"maxItems\":2}", "minItems"},
        {"{\"type\":\"string\",\"minLength\":-1}", "minLength"},
        {"{\"uniqueItems\":true}", "uniqueItems"},
        {"{\"type\":\"array\",\"items\":{\"properties\":{\"a\":{\"if\":{}}}}}", "\"if\""},
        {"{\"const\":1,\"minimum\":2}", "together"},
        {"{\"$ref\":\"#\",\"type\":\"object\"}", "20000"},
    };
    (void)state;
    for (int k = 0; k < 2; k++) {
        size_t n = k ? sizeof schemas / sizeof schemas[0] : sizeof regexes / sizeof regexes[0];
        for (size_t i = 0; i < n; i++) {
            const char *const *r = k ? schemas[i] : regexes[i];
            struct grammar *g = NULL;
            struct err e = {0};
            if (!compile(&g, k ? NULL : r[0], k ? r[0] : NULL, &e)) fail_msg("%s was taken", r[0]);
            if (!strstr(e.msg, r[1])) fail_msg("%s: \"%s\" does not say \"%s\"", r[0], e.msg, r[1]);
            assert_null(g);
        }
    }
}

static bool bit(const uint32_t *m, int32_t id)
{
    return m[id >> 5] >> (id & 31) & 1;
}

/* Along a text, each mask is compared with what matching says of text + token. */
static void follow(struct grammar *g, const char *text)
{
    int32_t vocab = tokenizer_vocab_size(tok);
    uint32_t *mask = mem_alloc(((size_t)vocab + 31) / 32 * 4);
    struct ids ids = {0};
    struct grammar_run run = {0};
    struct err e = {0};
    assert_int_equal(tokenizer_encode(tok, &ids, text, strlen(text), &e), OK);
    struct buf so_far = {0};
    buf_puts(&so_far, "");
    for (size_t i = 0; i <= ids.n; i++) {
        bool whole, prefix, w;
        assert_int_equal(grammar_mask(g, &run, ids.v, (int32_t)i, mask, vocab, &whole, &e), OK);
        size_t len = so_far.len;
        for (int32_t id = 0; id < vocab; id++) {
            size_t n = 0;
            const char *p = tokenizer_decoded(tok, id, &n);
            prefix = false;
            if (p && n && !tokenizer_is_special(tok, id)) {
                buf_put(&so_far, p, n);
                assert_int_equal(grammar_match(g, so_far.data, so_far.len, &w, &prefix, &e), OK);
                so_far.len = len;
            }
            if (prefix != bit(mask, id)) fail_msg("after %zu tokens of %s: token %d", i, text, id);
        }
        assert_int_equal(grammar_match(g, so_far.data, so_far.len, &w, &prefix, &e), OK);
        assert_int_equal(w, whole);
        if (i == ids.n) break;
        assert_true(bit(mask, ids.v[i]));
        size_t n = 0;
        const char *p = tokenizer_decoded(tok, ids.v[i], &n);
        buf_put(&so_far, p, n);
    }
    ids_release(&ids);
    buf_release(&so_far);
    mem_free(mask);
}

static void test_masks(void **state)
{
    struct grammar *g = NULL;
    struct err e = {0};
    (void)state;
    assert_int_equal(compile(&g, "(yes|no), [a-z ]{3,9}é.*", NULL, &e), OK);
    follow(g, "yes, how many éé日");
    grammar_unref(g);
    assert_int_equal(compile(&g, NULL,
                             "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},"
                             "\"n\":{\"type\":\"number\"}},\"required\":[\"name\",\"n\"]}",
                             &e),
                     OK);
    follow(g, "{\"name\": \"Ada \\n é\", \"n\": -1.5e3}");
    grammar_unref(g);
}

/* A string long enough to need several eras, read with two runs at once; the masks are those of a
 * fresh grammar. */
static void test_eras(void **state)
{
    struct grammar *g = NULL, *fresh = NULL;
    struct err e = {0};
    int32_t vocab = tokenizer_vocab_size(tok), ids[9000], words = (vocab + 31) / 32;
    uint32_t *a = mem_alloc((size_t)words * 4), *b = mem_alloc((size_t)words * 4);
    struct grammar_run one = {0}, other = {0};
    bool whole;
    (void)state;
    assert_int_equal(compile(&g, "\"[a-zé]{12000}\"", NULL, &e), OK);
    assert_int_equal(compile(&fresh, "\"[a-zé]{12000}\"", NULL, &e), OK);
    ids[0] = tokenizer_id(tok, "\"");
    for (int i = 1; i < 9000; i++)
        ids[i] = tokenizer_id(tok, i % 7 ? "a" : "z");
    for (int32_t n = 1; n < 9000; n += n < 8900 ? 997 : 31) {
        assert_int_equal(grammar_mask(g, &one, ids, n, a, vocab, &whole, &e), OK);
        assert_int_equal(grammar_mask(g, &other, ids, n / 2 + 1, b, vocab, &whole, &e), OK);
        struct grammar_run again = {0};
        assert_int_equal(grammar_mask(fresh, &again, ids, n, b, vocab, &whole, &e), OK);
        assert_memory_equal(a, b, (size_t)words * 4);
    }
    ids[5] = tokenizer_id(tok, "1");
    other = (struct grammar_run){0};
    assert_int_equal(grammar_mask(g, &other, ids, 9, a, vocab, &whole, &e), ERR_INPUT);
    grammar_unref(g);
    grammar_unref(fresh);
    mem_free(a);
    mem_free(b);
}

static void test_calls_and_until(void **state)
{
    json_t *s =
        json_loads("{\"properties\":{\"n\":{\"type\":\"integer\"}},\"required\":[\"n\"]}", 0, NULL);
    struct grammar_call calls[] = {{"<c>f", "</c>", s}, {"<c>g", "</c>", NULL}};
    struct grammar_spec spec = {
        .until = "</th>", .calls = calls, .n_calls = 2, .open = "[", .between = ",", .close = "]"};
    static const struct {
        const char *text;
        bool many, one;
    } rows[] = {
        {"hm</th>[<c>f{\"n\":1}</c>]", true, true},
        {"</t</th>\n\n[<c>g{\"x\":[1]}</c>]", true, true},
        {"[<c>f{\"n\":1}</c>]", false, false},
        {"</th>[<c>g{}</c>,<c>f{\"n\":2}</c>]", true, false},
        {"</th>[]", false, false},
        {"a</th>[<c>h{}</c>]", false, false},
        {"</th>\n\n\n[<c>g{}</c>]", false, false},
        {"</th>x</th>[<c>g{}</c>]", false, false},
    };
    (void)state;
    for (int one = 0; one < 2; one++) {
        struct grammar *g = NULL;
        struct err e = {0};
        bool whole, prefix;
        spec.one_call = one;
        assert_int_equal(grammar_compile(&g, trie, &spec, &e), OK);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            assert_int_equal(
                grammar_match(g, rows[i].text, strlen(rows[i].text), &whole, &prefix, &e), OK);
            if (whole != (one ? rows[i].one : rows[i].many))
                fail_msg("%s, one %d", rows[i].text, one);
        }
        grammar_unref(g);
    }
    json_decref(s);
}

/* Free text only where the output begins with its mark; else the rest comes at once. */
static void test_until_if_begun(void **state)
{
    struct grammar_spec spec = {
        .until = "</th>", .if_begins = "<th>", .pattern = "[0-9<]+", .n_pattern = 7};
    static const struct {
        const char *text;
        bool whole, prefix;
    } rows[] = {
        {"12", true, true},
        {"<th>hm 1</th>12", true, true},
        {"<th>hm</th>\n\n7", true, true},
        {"<", true, true},
        {"<th", false, true},
        {"<th>12", false, true},
        {"hm</th>12", false, false},
        {"\n12", false, false},
        {"<th>a</th>b", false, false},
    };
    struct grammar *g = NULL;
    struct err e = {0};
    bool whole, prefix;
    (void)state;
    assert_int_equal(grammar_compile(&g, trie, &spec, &e), OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_int_equal(grammar_match(g, rows[i].text, strlen(rows[i].text), &whole, &prefix, &e),
                         OK);
        if (whole != rows[i].whole || prefix != rows[i].prefix)
            fail_msg("%s: whole %d, prefix %d", rows[i].text, whole, prefix);
    }
    grammar_unref(g);
}

/* Every allocation that may fail does, once. */
static void test_no_memory(void **state)
{
    int32_t vocab = tokenizer_vocab_size(tok);
    uint32_t *mask = mem_alloc(((size_t)vocab + 31) / 32 * 4);
    (void)state;
    for (long n = 1; n < 10000; n++) {
        struct grammar *g = NULL;
        struct err e = {0};
        struct grammar_run run = {0};
        bool whole;
        mem_fault_at(n);
        err_t rc =
            compile(&g, n % 2 ? "[a-z]{3}(x|\\d)*" : NULL,
                    n % 2 ? NULL : "{\"properties\":{\"a\":{\"type\":\"string\"},\"b\":true}}", &e);
        if (!rc) rc = grammar_mask(g, &run, NULL, 0, mask, vocab, &whole, &e);
        bool spent = mem_fault_at(0) == 0;
        if (rc) assert_true(rc == ERR_NOMEM || rc == ERR_TOOBIG);
        if (g) assert_int_equal(grammar_mask(g, &run, NULL, 0, mask, vocab, &whole, &e), OK);
        grammar_unref(g);
        if (!spent && n > 2) break;
    }
    mem_free(mask);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_regex),          cmocka_unit_test(test_schema),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_eras),           cmocka_unit_test(test_calls_and_until),
        cmocka_unit_test(test_until_if_begun), cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
