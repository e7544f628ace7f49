#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "cli/serve_options.h"
#include <string.h>

/* Parse up to eight words; the message lands in e. */
static options_t parse(struct serve_args *a, struct buf *ignored, struct err *e, const char *w0,
                       const char *w1, const char *w2, const char *w3)
{
    char *argv[] = {(char *)(uintptr_t)w0, (char *)(uintptr_t)w1, (char *)(uintptr_t)w2,
                    (char *)(uintptr_t)w3};
    int n = 0;
    while (n < 4 && argv[n]) n++;
    *a = (struct serve_args){0};
    *e = (struct err){0};
    return options_parse(&serve_command, n, argv, a, ignored, e);
}

static void honoured(void **state)
{
    (void)state;
    struct serve_args a;
    struct buf ig = {0};
    struct err e;
    assert_int_equal(parse(&a, &ig, &e, "--model", "m", "--port=0", "--check"), OPTIONS_RUN);
    assert_string_equal(a.model, "m");
    assert_int_equal(a.port, 0);
    assert_true(a.check);
    assert_int_equal(a.max_running, 256);
    assert_int_equal(ig.len, 0);
    assert_int_equal(parse(&a, &ig, &e, "--help", NULL, NULL, NULL), OPTIONS_HELP);
}

static void ignored(void **state)
{
    (void)state;
    struct serve_args a;
    struct buf ig = {0};
    struct err e;
    assert_int_equal(
        parse(&a, &ig, &e, "--attention-backend", "fa3", "--disable-cuda-graph", "--tp=1"),
        OPTIONS_RUN);
    assert_string_equal(ig.data, " --attention-backend --disable-cuda-graph");
    buf_release(&ig);
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *a, *b, *says;
    } rows[] = {
        {"--tp", "2", "--tp-size 2"},
        {"--max-runing-requests", "3", "did you mean --max-running-requests?"},
        {"--port", "70000", "0 .. 65535"},
        {"--port", "x", "not a whole number"},
        {"--port", "", "not a whole number"},
        {"--port", NULL, "needs a value"},
        {"--check=1", NULL, "takes no value"},
        {"--page-size", "8", "16 .. 16"},
        {"--isa", "sse", "portable|avx2|avx512|neon"},
        {"--mem-fraction-static", "nan", "not a number"},
        {"--enable-lora", NULL, "adapters"},
        {"word", NULL, "unexpected argument"},
        {"--", NULL, "unexpected argument"},
        {"--qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", NULL,
         "unknown flag"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct serve_args a;
        struct buf ig = {0};
        struct err e;
        assert_int_equal(parse(&a, &ig, &e, rows[i].a, rows[i].b, NULL, NULL), OPTIONS_ERROR);
        if (!strstr(e.msg, rows[i].says)) fail_msg("%s: %s", rows[i].a, e.msg);
    }
}

static void distance(void **state)
{
    (void)state;
    assert_int_equal(options_distance("", "abc"), 3);
    assert_int_equal(options_distance("port", "port"), 0);
    assert_int_equal(options_distance("prot", "port"), 1);
    assert_int_equal(options_distance("kitten", "sitting"), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(honoured),
        cmocka_unit_test(ignored),
        cmocka_unit_test(refused),
        cmocka_unit_test(distance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
