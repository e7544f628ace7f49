/* chat_tools.c - what a chat call says of tools and reasoning; the calls that must come are a
 * grammar. */
#include "server/openai.h"
#include "text/grammar.h"

#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOOLS 1024

static const char *tool_name(const json_t *tool)
{
    return json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
}

static err_t check_tools(const json_t *tools, struct err *e)
{
    if (!json_is_array(tools)) return json_bad(e, "tools", tools, "a list of functions");
    if (json_array_size(tools) > MAX_TOOLS)
        return err_set(e, ERR_INPUT, "tools: %zu are given; at most %d are allowed",
                       json_array_size(tools), MAX_TOOLS);
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *t = json_array_get(tools, i), *f = json_object_get(t, "function"),
                     *p = json_field(f, "parameters");
        const char *type = json_string_value(json_object_get(t, "type")), *name = tool_name(t);
        if (!type || strcmp(type, "function") != 0)
            return err_set(e, ERR_INPUT, "tools[%zu].type: must be \"function\"", i);
        if (!name || !*name || strlen(name) != json_string_length(json_object_get(f, "name")) ||
            strpbrk(name, "\n"))
            return err_set(e, ERR_INPUT,
                           "tools[%zu].function.name: must be a string of one line, not empty", i);
        if (p && !json_is_object(p))
            return err_set(e, ERR_INPUT, "tools[%zu].function.parameters: must be an object", i);
    }
    return OK;
}

/* "none", "auto", "required", or the name of a tool (*named). */
static err_t read_choice(const json_t *b, const json_t *tools, const char **mode,
                         const char **named, struct err *e)
{
    const json_t *c = json_field(b, "tool_choice");
    static const char allowed[] =
        "none, auto, required or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    *mode = tools && json_array_size(tools) ? "auto" : "none";
    *named = NULL;
    if (!c) return OK;
    if (json_is_object(c)) {
        *named = tool_name(c);
        *mode = "required";
        if (!*named) return json_bad(e, "tool_choice", c, allowed);
        for (size_t i = 0; i < json_array_size(tools); i++)
            if (!strcmp(tool_name(json_array_get(tools, i)), *named)) return OK;
        return err_set(e, ERR_INPUT, "tool_choice: no tool is named \"%.100s\"", *named);
    }
    const char *s = json_string_value(c);
    if (!s || (strcmp(s, "none") != 0 && strcmp(s, "auto") != 0 && strcmp(s, "required") != 0))
        return json_bad(e, "tool_choice", c, allowed);
    if (!strcmp(s, "required") && !json_array_size(tools))
        return err_set(e, ERR_INPUT, "tool_choice: required needs tools");
    if (!strcmp(s, "required") || !strcmp(s, "none")) *mode = s;
    return OK;
}

err_t chat_tools(struct xchg *x, const json_t *b, const json_t **tools, struct err *e)
{
    const json_t *list = json_field(b, "tools");
    const char *mode, *named;
    err_t rc = list ? check_tools(list, e) : OK;
    if (!rc) rc = read_choice(b, list, &mode, &named, e);
    if (rc || !strcmp(mode, "none")) return rc;
    *tools = list;
    x->tools = x->s->o.tool_format;
    return OK;
}

static bool ends_with_mark(const char *s, size_t n, const char *mark)
{
    size_t k = strlen(mark);
    while (n > 0 && strchr(" \n\t\r", s[n - 1]))
        n--;
    return n >= k && !memcmp(s + n - k, mark, k);
}

err_t chat_reasoning(struct xchg *x, const json_t *b, const char *prompt, size_t n, struct err *e)
{
    const struct reasoning_format *f = x->s->o.reasoning_format;
    x->separate = true;
    err_t rc = json_get_bool(b, "separate_reasoning", &x->separate, e);
    if (rc || !f) return rc;
    bool over =
        ends_with_mark(prompt, n, f->end); /* the prompt has ended it, or never lets it begin */
    x->think_inside = ends_with_mark(prompt, n, f->begin) || (f->always && !over);
    x->think = over ? NULL : f;
    x->think_end = over ? NULL : f->end;
    x->think_begin = x->think_inside ? NULL : f->begin;
    return OK;
}

/* ---- calls that must come ---- */

/* The texts around the arguments of a call. */
static bool call_texts(const struct tool_format *f, const char *name, struct grammar_call *c)
{
    struct buf before = {0}, after = {0};
    buf_puts(&before, f->begin);
    if (f->sep) {
        buf_printf(&before, "function%s%s%s", f->sep, name, f->fence);
        buf_printf(&after, "\n```%s", f->end);
    } else {
        buf_puts(&before, "\n{\"name\": ");
        put_str(&before, name, strlen(name));
        buf_puts(&before, ", \"arguments\": ");
        buf_printf(&after, "}\n%s", f->end);
    }
    c->before = buf_take(&before);
    c->after = buf_take(&after);
    return c->before && c->after;
}

static err_t compile_calls(struct xchg *x, const json_t *tools, const char *named, bool one,
                           struct err *e)
{
    const struct tool_format *f = x->tools;
    size_t n = json_array_size(tools);
    struct grammar_call *calls = mem_try_array(n, sizeof *calls);
    struct grammar_spec spec = {.until = x->think_end,
                                .if_begins = x->think_begin,
                                .calls = calls,
                                .one_call = one,
                                .open = f->open,
                                .between = f->between,
                                .close = f->close};
    bool ok = calls != NULL;
    for (size_t i = 0; ok && i < n; i++) {
        const json_t *t = json_array_get(tools, i),
                     *p = json_field(json_object_get(t, "function"), "parameters");
        if (named && strcmp(tool_name(t), named) != 0) continue;
        calls[spec.n_calls].schema = json_object_size(p) ? p : NULL;
        ok = call_texts(f, tool_name(t), &calls[spec.n_calls++]);
    }
    json_t *key = json_pack("{s:O,s:s?,s:b,s:s,s:s?,s:s?}", "tools", tools, "named", named, "one",
                            one, "format", f->name, "after", x->think_end, "if", x->think_begin);
    char *text = key ? json_dumps(key, JSON_COMPACT) : NULL;
    err_t rc = ok ? constraint_grammar(x->s, text, &spec, &x->tool_grammar, e)
                  : err_set(e, ERR_NOMEM, "tools: out of memory");
    if (!ok) free(text);
    for (int i = 0; calls && i < spec.n_calls; i++) {
        mem_free((char *)(uintptr_t)calls[i].before);
        mem_free((char *)(uintptr_t)calls[i].after);
    }
    mem_free(calls);
    json_decref(key);
    return rc ? err_wrap(e, rc, "tools") : OK;
}

err_t chat_choice(struct xchg *x, const json_t *b, const json_t *tools, struct err *e)
{
    const char *mode, *named;
    bool many = true;
    err_t rc = json_get_bool(b, "parallel_tool_calls", &many, e);
    if (!rc && tools) rc = read_choice(b, tools, &mode, &named, e);
    if (rc || !tools || strcmp(mode, "required") != 0) return rc;
    if (!x->tools)
        return err_set(e, ERR_INPUT,
                       "tool_choice: this model's chat template has no tool calls that are known; "
                       "see --tool-call-parser");
    return compile_calls(x, tools, named, named || !many, e);
}
