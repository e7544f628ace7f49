#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "cli/numerics.h"
#include "cli/serve_options.h"
#include <stdlib.h>
#include <string.h>

/* Parse up to eight words; the message lands in e. */
static options_t parse(struct serve_args *a, struct buf *ignored, struct err *e, const char *w0,
                       const char *w1, const char *w2, const char *w3)
{
    char *argv[] = {(char *)(uintptr_t)w0, (char *)(uintptr_t)w1, (char *)(uintptr_t)w2,
                    (char *)(uintptr_t)w3};
    int n = 0;
    while (n < 4 && argv[n])
        n++;
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
        parse(&a, &ig, &e, "--attention-backend", "fa3", "--enable-torch-compile", "--tp=1"),
        OPTIONS_RUN);
    assert_string_equal(ig.data, " --attention-backend --enable-torch-compile");
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

/* SGLang's runners by their meaning here; those of other hardware are named in the joint warning. */
static void runners(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        bool routed, ignored;
    } rows[] = {{"auto", 0, 0},   {"fused", 0, 0},
                {"routed", 1, 0}, {"flashinfer_trtllm", 0, 0},
                {"triton", 0, 1}, {"deep_gemm", 0, 1},
                {"marlin", 0, 1}, {"flashinfer_trtllm_routed", 1, 0}};
    struct serve_args a;
    struct numerics n;
    struct buf ig = {0};
    struct err e = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        buf_clear(&ig);
        assert_int_equal(parse(&a, &ig, &e, "--model", "m", "--moe-runner-backend", rows[i].name),
                         OPTIONS_RUN);
        assert_int_equal(numerics_parse(&n, a.moe_backend, a.act_format, &ig, &e), OK);
        assert_int_equal(n.routed, rows[i].routed);
        assert_int_equal(n.act, ACT_BF16);
        assert_int_equal(ig.len > 0, rows[i].ignored);
        if (ig.len) assert_non_null(strstr(ig.data, rows[i].name));
    }
    assert_int_equal(numerics_parse(&n, "trtllm", NULL, &ig, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "\"trtllm\""));
    buf_release(&ig);
}

static void activation_formats(void **state)
{
    (void)state;
    static const char env[] = "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION";
    static const struct {
        const char *name, *env;
        act_t act;
    } rows[] = {{NULL, NULL, ACT_BF16},
                {"fp8_block", NULL, ACT_FP8_BLOCK},
                {"mxfp8", NULL, ACT_MXFP8},
                {"nvfp4", NULL, ACT_NVFP4},
                {"nvfp4-per-token", NULL, ACT_NVFP4_PER_TOKEN},
                {NULL, "1", ACT_NVFP4_PER_TOKEN},
                {NULL, "0", ACT_BF16},
                {"nvfp4", "1", ACT_NVFP4_PER_TOKEN},
                {"bf16", "1", ACT_BF16}};
    struct numerics n;
    struct buf ig = {0};
    struct err e = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].env) setenv(env, rows[i].env, 1);
        assert_int_equal(numerics_parse(&n, "auto", rows[i].name, &ig, &e), OK);
        unsetenv(env);
        assert_int_equal(n.act, rows[i].act);
    }
    assert_int_equal(numerics_parse(&n, "auto", "int8", &ig, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "fp8_block"));
}

/* A flag that may come several times. */
static void strings(void **state)
{
    (void)state;
    struct args {
        struct opt_strings names;
        bool last;
    } a = {0};
    static const struct opt opts[] = {
        {"name", NULL, OPT_HONOURED, OPT_STRINGS, offsetof(struct args, names), NULL, 0, 0, NULL,
         "a name", NULL},
        {"last", NULL, OPT_HONOURED, OPT_FLAG, offsetof(struct args, last), NULL, 0, 0, NULL,
         "a flag", NULL},
    };
    static const struct opt_command command = {"x", "", opts, 2};
    char words[3][16] = {"--name=a", "--name", "b"};
    char *argv[2 * OPT_STRINGS_MAX + 4] = {words[0], words[1], words[2], (char[]){"--last"}};
    struct err e = {0};
    assert_int_equal(options_parse(&command, 4, argv, &a, NULL, &e), OPTIONS_RUN);
    assert_true(a.last && a.names.n == 2);
    assert_string_equal(a.names.v[0], "a");
    assert_string_equal(a.names.v[1], "b");
    for (int i = 0; i <= OPT_STRINGS_MAX; i++)
        argv[i] = words[0];
    a = (struct args){0};
    assert_int_equal(options_parse(&command, OPT_STRINGS_MAX + 1, argv, &a, NULL, &e),
                     OPTIONS_ERROR);
    assert_non_null(strstr(e.msg, "--name"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runners),  cmocka_unit_test(activation_formats),
        cmocka_unit_test(strings),  cmocka_unit_test(honoured),
        cmocka_unit_test(ignored),  cmocka_unit_test(refused),
        cmocka_unit_test(distance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
