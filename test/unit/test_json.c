/* Field readers and the table of sampling parameters (cases C35, C37, C45, nesting). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "server/sampling.h"
#include <string.h>

static err_t sample(const char *text, struct err *e)
{
    static struct config cfg = {.vocab_size = 100};
    int n = 0;
    json_t *o = json_parse_object(text, strlen(text), e);
    if (!o) return e->code;
    struct request *r = request_new();
    err_t rc = sampling_parse(o, SAMPLING_NATIVE, &cfg, r, &n, e);
    request_unref(r);
    json_decref(o);
    return rc;
}

static void test_sampling_table(void **state)
{
    static const struct {
        const char *json;
        bool ok;
        const char *says;
    } rows[] = {
        {"{}", true, ""},
        {"{\"temperature\":NaN}", false, "JSON"},
        {"{\"temperature\":\"nan\"}", false, "temperature"},
        {"{\"temperature\":1e999}", false, "JSON"},
        {"{\"temperature\":-1}", false, "temperature"},
        {"{\"temperature\":1e-8}", true, ""},
        {"{\"top_k\":0}", false, "top_k"},
        {"{\"top_k\":-1}", true, ""},
        {"{\"top_p\":0}", false, "top_p"},
        {"{\"temprature\":1}", false, "temperature"},
        {"{\"stop\":\"\"}", false, "stop"},
        {"{\"logit_bias\":{\"99\":1}}", true, ""},
        {"{\"logit_bias\":{\"100\":1}}", false, "100"},
        {"{\"logit_bias\":{\"-1\":1}}", false, "-1"},
        {"{\"logit_bias\":{\"5.5\":1}}", false, "5.5"},
        {"{\"logit_bias\":{\"0x10\":1}}", false, "0x10"},
        {"{\"logit_bias\":{\"5\":null}}", false, "logit_bias"},
        {"{\"sampling_seed\":0}", true, ""},
        {"{\"sampling_seed\":-1}", false, "sampling_seed"},
        {"{\"sampling_seed\":9223372036854775808}", false, ""},
        {"{\"min_new_tokens\":9,\"max_new_tokens\":8}", false, "min_new_tokens"},
        {"{\"max_new_tokens\":null}", true, ""},
        {"{\"ebnf\":\"{}\"}", false, "ebnf"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct err e = {0};
        if ((sample(rows[i].json, &e) == OK) != rows[i].ok || !strstr(e.msg, rows[i].says))
            fail_msg("%s: %s", rows[i].json, e.msg);
    }
}

static void test_ids(void **state)
{
    static const char *const bad[] = {"{\"i\":[-1]}", "{\"i\":[100]}", "{\"i\":[1.5]}",
                                      "{\"i\":[\"1\"]}", "{\"i\":[null]}"};
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct err e = {0};
        int32_t *ids = NULL, n = 0;
        json_t *o = json_parse_object(bad[i], strlen(bad[i]), &e);
        assert_non_null(o);
        assert_int_equal(json_ids(json_object_get(o, "i"), "input_ids", 100, &ids, &n, &e),
                         ERR_INPUT);
        assert_non_null(strstr(e.msg, "input_ids[0]"));
        json_decref(o);
    }
}

static void test_depth(void **state)
{
    char deep[4096];
    struct err e = {0};
    (void)state;
    memset(deep, '[', sizeof deep);
    assert_null(json_parse_object(deep, sizeof deep, &e));
    assert_non_null(strstr(e.msg, "nested"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sampling_table),
                                       cmocka_unit_test(test_ids), cmocka_unit_test(test_depth)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
