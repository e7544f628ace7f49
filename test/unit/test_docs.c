/* test_docs.c - the manual page is clean roff, the completion is a script that bash runs. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "cli/commands.h"
#include "cli/docs.h"
#include "cli/serve_options.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct doc_command commands[] = {
    {"serve", "serve a model", &serve_command},
    {"generate", "generate - from a 'prompt'\n.not a request\\", &generate_command},
    {"bench", "measure", &gsm8k_command},
    {"version", "print it", NULL},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

/* What a shell prints (both streams) for a command with %s replaced by a file of `text`. */
static void shell(char *out, size_t size, const char *format, const char *text)
{
    char path[] = "/tmp/moult-docs-XXXXXX", line[512];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    const char *at = strstr(format, "%s");
    assert_non_null(at);
    snprintf(line, sizeof line, "{ %.*s%s%s; } 2>&1", (int)(at - format), format, path, at + 2);
    FILE *f = popen(line, "r");
    assert_non_null(f);
    size_t n = fread(out, 1, size - 1, f);
    out[n] = 0;
    (void)pclose(f);
    unlink(path);
}

static void manual(void **state)
{
    (void)state;
    struct buf b = {0};
    docs_man(commands, N_COMMANDS, "1.2.3", &b);
    assert_false(b.failed);
    assert_non_null(strstr(b.data, "\n\\&.not a request\\e\n"));
    assert_non_null(strstr(b.data, "\\fB\\-\\-tp\\-size\\fR, \\fB\\-\\-tp\\fR, "));
    assert_null(strstr(b.data, "retract\\-every")); /* a hidden row */
    if (system("command -v groff >/dev/null 2>&1") != 0) {
        print_message("skip: groff is not here\n");
    } else {
        char out[4096];
        shell(out, sizeof out, "groff -man -ww -Tascii %s >/dev/null", b.data);
        assert_string_equal(out, "");
    }
    buf_release(&b);
}

static void completes(const char *script, const char *words, int at, const char *want)
{
    char line[512], out[4096];
    snprintf(line, sizeof line,
             "bash -c 'set -u; . %%s; COMP_WORDS=(%s); COMP_CWORD=%d; _moult; "
             "echo \"${COMPREPLY[*]:-}\"'",
             words, at);
    shell(out, sizeof out, line, script);
    assert_string_equal(out, want);
}

static void completion(void **state)
{
    (void)state;
    if (system("command -v bash >/dev/null 2>&1") != 0) skip();
    struct buf b = {0};
    char out[4096];
    docs_bash(commands, N_COMMANDS, &b);
    assert_false(b.failed);
    shell(out, sizeof out, "bash -n %s", b.data);
    assert_string_equal(out, "");
    completes(b.data, "moult se", 1, "serve\n");
    completes(b.data, "moult serve --max-ru", 2, "--max-running-requests\n");
    completes(b.data, "moult serve --port 1 --isa av", 5, "avx2 avx512\n");
    completes(b.data, "moult serve --isa=auto --ten", 3, "\n"); /* refused flags are not offered */
    completes(b.data, "moult bench g", 2, "gsm8k\n");
    completes(b.data, "moult bench gsm8k --num-s", 3, "--num-shots\n");
    completes(b.data, "moult serve --model x", 3, "\n"); /* bash offers files */
    buf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(manual), cmocka_unit_test(completion)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
