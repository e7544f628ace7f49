/* Turns taken apart: what is found, and that no cut of the text into pieces changes it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/mem.h"
#include "server/chat_parse.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The calls as name(arguments) one after the other. */
struct turn {
    struct buf reasoning, content, calls;
    size_t reasoning_bytes;
};

static void take(struct chat_parser *p, struct turn *t)
{
    buf_put(&t->reasoning, p->reasoning.data, p->reasoning.len);
    buf_put(&t->content, p->content.data, p->content.len);
    for (size_t i = 0; i < p->n_calls; i++) {
        const struct call_piece *c = &p->call[i];
        if (c->begins)
            buf_printf(&t->calls, "%s%d:%s ", c->index ? "|" : "", c->index,
                       c->name.data ? c->name.data : "");
        buf_put(&t->calls, c->arguments.data, c->arguments.len);
    }
    chat_taken(p);
}

static void release(struct turn *t)
{
    buf_release(&t->reasoning);
    buf_release(&t->content);
    buf_release(&t->calls);
}

/* Cut at the places whose bits are set in a pattern that repeats. */
static struct turn parse(const char *tools, const char *think, bool inside, const char *text,
                         unsigned cuts)
{
    struct turn t = {0};
    buf_puts(&t.reasoning, "");
    buf_puts(&t.content, "");
    buf_puts(&t.calls, "");
    struct chat_parser *p =
        chat_parser_new(tool_format_find(tools, NULL), reasoning_format_find(think, NULL), inside);
    size_t n = strlen(text), from = 0;
    for (size_t i = 1; i < n; i++) {
        if (!(cuts >> (i % 31) & 1)) continue;
        chat_parse(p, text + from, i - from, false);
        take(p, &t);
        from = i;
    }
    chat_parse(p, text + from, n - from, true);
    assert_false(p->failed);
    take(p, &t);
    t.reasoning_bytes = p->reasoning_bytes;
    chat_parser_free(p);
    return t;
}

static const struct row {
    const char *tools, *think;
    bool inside;
    const char *text, *reasoning, *content, *calls;
} rows[] = {
    {"none", "none", false, " plain <think>a</think> <tool_call>\n", "",
     " plain <think>a</think> <tool_call>\n", ""},
    {"qwen", "qwen3", false, "just text\n\n", "", "just text\n\n", ""},
    {"qwen", "qwen3", false, "<think>\nhm, so\n</think>\n\nThe answer ", "hm, so", "The answer ",
     ""},
    {"qwen", "qwen3", false, "\n <think></think>x", "", "x", ""},
    {"none", "qwen3", false, "<thin", "", "<thin", ""},
    {"none", "qwen3", false, "<think>never ends </thi", "never ends </thi", "", ""},
    {"none", "qwen3", true, "goes on\n</think>\nfine</think>", "goes on", "fine</think>", ""},
    {"none", "deepseek-r1", true, "<think>a b</think>", "a b", "", ""},
    {"qwen25", "none", false,
     "Let me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln "
     "\\\"}\", \"n\": [1, {}]}}\n</tool_call>",
     "", "Let me see.", "0:get_weather {\"city\": \"Köln \\\"}\", \"n\": [1, {}]}"},
    {"qwen", "none", false,
     "<tool_call>\n{\"name\": \"f\", \"arguments\": "
     "{}}\n</tool_call>\n<tool_call>\n{\"name\":\"g\",\"parameters\":{\"a\":1}}</tool_call>",
     "", "", "0:f {}|1:g {\"a\":1}"},
    {"qwen", "none", false,
     "<tool_call>{\"arguments\": {\"x\": [1]}, \"name\": \"late\"}</tool_call> and more", "",
     "and more", "0:late {\"x\": [1]}"},
    {"qwen", "none", false, "<tool_call>{\"name\": \"bare\"}</tool_call>", "", "", "0:bare {}"},
    {"qwen", "none", false, "<tool_call>{\"name\": \"s\", \"arguments\": \"text }\"}</tool_call>",
     "", "", "0:s \"text }\""},
    {"qwen", "none", false, "a <tool_call>no json</tool_call> b", "",
     "a <tool_call>no json</tool_call> b", ""},
    {"qwen", "none", false, "a <tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>", "",
     "a <tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>", ""},
    {"qwen", "none", false, "<tool_call>{\"name\": \"cut\", \"arguments\": {\"a\": \"b", "", "",
     "0:cut {\"a\": \"b"},
    {"qwen", "none", false, "x <tool_call>{\"na", "", "x <tool_call>{\"na", ""},
    {"qwen", "none", false, "1 < 2 <tool_cal", "", "1 < 2 <tool_cal", ""},
    {"qwen", "none", false,
     "<tool_call>{\"name\": \"\\u0066\\\"\", \"arguments\": {\"s\": \"</tool_call>\"}}</tool_call>",
     "", "", "0:f\" {\"s\": \"</tool_call>\"}"},
    {"qwen", "qwen3", false,
     "<think>\nuse <tool_call>?\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": "
     "null}}\n</tool_call>\n",
     "use <tool_call>?", "", "0:f {\"a\": null}"},
    {"deepseekv3", "none", false,
     "Sure. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n{\"c\": "
     "\"é```\"}\n```<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>v\n```json\n{}\n```<｜tool▁call▁end｜><"
     "｜tool▁calls▁end｜>",
     "", "Sure.", "0:w {\"c\": \"é```\"}|1:v {}"},
    {"deepseekv3", "none", false, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>oops", "",
     "<｜tool▁call▁begin｜>oops", ""},
    {"deepseekv3", "none", false, "1 <｜ 2", "", "1 <｜ 2", ""},
};

static void test_every_cut(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const struct row *r = &rows[i];
        unsigned cuts = 0;
        for (int k = 0; k < 300; k++) {
            struct turn t = parse(r->tools, r->think, r->inside, r->text, cuts);
            if (strcmp(t.reasoning.data, r->reasoning) != 0 ||
                strcmp(t.content.data, r->content) != 0 || strcmp(t.calls.data, r->calls) != 0)
                fail_msg("row %zu, cuts %x of\n%s\nreasoning [%s]\ncontent [%s]\ncalls [%s]", i,
                         cuts, r->text, t.reasoning.data, t.content.data, t.calls.data);
            release(&t);
            cuts = k == 0 ? UINT32_MAX : cuts * 1664525u + 1013904223u;
        }
    }
}

static void test_reasoning_bytes(void **state)
{
    (void)state;
    for (unsigned cuts = 0; cuts < 64; cuts++) {
        struct turn t =
            parse("none", "qwen3", false, "<think>\nabc\n</think>\n\nx", cuts * 0x9e3779b9u);
        assert_int_equal(t.reasoning_bytes, strlen("<think>\nabc\n</think>"));
        release(&t);
        t = parse("none", "qwen3", false, "no reasoning", cuts);
        assert_int_equal(t.reasoning_bytes, 0);
        release(&t);
    }
}

static void test_formats(void **state)
{
    (void)state;
    assert_string_equal(tool_format_find("auto", "x <tool_call> y")->name, "qwen");
    assert_string_equal(tool_format_find("auto", "'<｜tool▁calls▁begin｜>'")->name, "deepseekv3");
    assert_null(tool_format_find("auto", "plain"));
    assert_null(tool_format_find("auto", NULL));
    assert_string_equal(reasoning_format_find("auto", "..</think>")->name, "qwen3");
    assert_null(reasoning_format_find("auto", "plain"));
}

/* Any soup of marks and JSON: the whole and the pieces agree. */
static void test_soup(void **state)
{
    static const char *const bits[] = {"<tool_call>",
                                       "</tool_call>",
                                       "<think>",
                                       "</think>",
                                       "{\"name\": \"f\"",
                                       ", \"arguments\": ",
                                       "{\"a\": 1}",
                                       "}",
                                       "\n",
                                       " ",
                                       "x",
                                       "\"",
                                       "\\",
                                       "<",
                                       "<tool",
                                       "[",
                                       "]",
                                       "<｜tool▁calls▁begin｜>",
                                       "<｜tool▁call▁begin｜>",
                                       "<｜tool▁sep｜>",
                                       "\n```json\n",
                                       "\n```",
                                       "<｜tool▁call▁end｜>",
                                       "<｜tool▁calls▁end｜>",
                                       "é"};
    static const char *const tools[] = {"qwen", "deepseekv3", "none"};
    unsigned seed = 7;
    (void)state;
    for (int i = 0; i < 4000; i++) {
        struct buf text = {0};
        buf_puts(&text, "");
        for (int k = 0; k < 14; k++)
            buf_puts(&text, bits[(seed = seed * 1664525u + 1013904223u) >> 8 & 0xffff
                                     ? (seed >> 12) % (sizeof bits / sizeof bits[0])
                                     : 0]);
        const char *f = tools[i % 3];
        struct turn a = parse(f, i % 2 ? "qwen3" : "none", i % 4 == 1, text.data, 0),
                    b = parse(f, i % 2 ? "qwen3" : "none", i % 4 == 1, text.data, seed | 1);
        if (strcmp(a.content.data, b.content.data) != 0 ||
            strcmp(a.reasoning.data, b.reasoning.data) != 0 ||
            strcmp(a.calls.data, b.calls.data) != 0)
            fail_msg("%s\n[%s] [%s] [%s]\n[%s] [%s] [%s]", text.data, a.reasoning.data,
                     a.content.data, a.calls.data, b.reasoning.data, b.content.data, b.calls.data);
        release(&a);
        release(&b);
        buf_release(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_cut),
        cmocka_unit_test(test_reasoning_bytes),
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_soup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
