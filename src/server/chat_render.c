/*
 * chat_render.c - messages to a prompt.
 *
 * Templates differ in what they take: arguments of calls as an object or as text, the content of a
 * message that only calls as null or as "".  Forms are tried in a fixed order until the template
 * renders one.
 */
#include "server/openai.h"

#include "base/mem.h"
#include <stdio.h>
#include <string.h>

enum { ARGUMENTS_TEXT = 1, CONTENT_EMPTY = 2, N_FORMS = 4 };

/* Parts of type text, joined, as most templates expect a string. */
static err_t join_parts(const json_t *c, const char *where, json_t **out, struct err *e)
{
    struct buf text = {0};
    buf_puts(&text, "");
    for (size_t k = 0; k < json_array_size(c); k++) {
        const json_t *t = json_object_get(json_array_get(c, k), "text");
        if (!json_is_string(t)) {
            buf_release(&text);
            return err_set(e, ERR_INPUT, "%s[%zu]: only parts of type text are supported", where,
                           k);
        }
        buf_put(&text, json_string_value(t), json_string_length(t));
    }
    *out = text.failed ? NULL : json_stringn(text.data, text.len);
    buf_release(&text);
    return *out ? OK : err_set(e, ERR_NOMEM, "%s: out of memory", where);
}

/* Arguments as an object, where they are the text of one. */
static json_t *with_objects(const json_t *calls)
{
    json_t *list = json_deep_copy(calls), *call;
    size_t i;
    json_array_foreach(list, i, call)
    {
        json_t *f = json_object_get(call, "function"), *a = json_object_get(f, "arguments");
        json_t *v = json_is_string(a)
                        ? json_loadb(json_string_value(a), json_string_length(a), 0, NULL)
                        : NULL;
        if (json_is_object(v)) json_object_set(f, "arguments", v);
        json_decref(v);
    }
    return list;
}

static err_t one_message(const json_t *m, size_t i, int form, json_t **out, struct err *e)
{
    const json_t *role = json_object_get(m, "role"), *c = json_field(m, "content"),
                 *calls = json_field(m, "tool_calls");
    char where[64];
    json_t *text = NULL;
    if (!json_is_object(m) || !json_is_string(role))
        return err_set(e, ERR_INPUT, "messages[%zu].role: must be a string", i);
    snprintf(where, sizeof where, "messages[%zu].content", i);
    if (c && !json_is_string(c) && !json_is_array(c))
        return json_bad(e, where, c, "a string or a list of text parts");
    snprintf(where + strlen(where) - 7, 16, "tool_calls");
    if (calls && !json_is_array(calls)) return json_bad(e, where, calls, "a list of calls");
    snprintf(where, sizeof where, "messages[%zu].content", i);
    if (json_is_array(c) && join_parts(c, where, &text, e)) return e->code;
    bool assistant = !strcmp(json_string_value(role), "assistant"),
         calling = assistant && json_array_size(calls) > 0;
    *out = json_copy((json_t *)(uintptr_t)m);
    if (text) json_object_set_new(*out, "content", text);
    if (!strcmp(json_string_value(role), "developer"))
        json_object_set_new(*out, "role", json_string("system"));
    const json_t *now = json_object_get(*out, "content");
    bool empty =
        now && (json_is_null(now) || (calling && json_is_string(now) && !json_string_length(now)));
    if (assistant && (empty || (calling && !now)))
        json_object_set_new(*out, "content", form & CONTENT_EMPTY ? json_string("") : json_null());
    if (calling && !(form & ARGUMENTS_TEXT))
        json_object_set_new(*out, "tool_calls", with_objects(calls));
    if (!calls) json_object_del(*out, "tool_calls");
    return OK;
}

struct rendering {
    const json_t *messages, *tools, *kwargs;
    size_t n; /* of the messages */
    bool prompt;
    const char *effort;
};

static err_t render_form(struct xchg *x, const struct rendering *r, int form, struct buf *text,
                         struct err *e)
{
    const struct server_options *o = &x->s->o;
    json_t *vars = json_object(), *list = json_array();
    err_t rc = OK;
    for (size_t i = 0; !rc && i < r->n; i++) {
        json_t *m = NULL;
        rc = one_message(json_array_get(r->messages, i), i, form, &m, e);
        if (m) json_array_append_new(list, m);
    }
    if (r->effort) json_object_set_new(vars, "reasoning_effort", json_string(r->effort));
    if (r->kwargs) json_object_update(vars, (json_t *)(uintptr_t)r->kwargs);
    json_object_set_new(vars, "messages", list);
    json_object_set_new(vars, "add_generation_prompt", json_boolean(r->prompt));
    if (r->tools) json_object_set(vars, "tools", (json_t *)(uintptr_t)r->tools);
    if (o->bos_token) json_object_set_new(vars, "bos_token", json_string(o->bos_token));
    if (o->eos_token) json_object_set_new(vars, "eos_token", json_string(o->eos_token));
    if (!rc) rc = tmpl_render(o->chat_template, text, vars, e);
    json_decref(vars);
    return rc;
}

/* The last message's text, which the model is to go on with. */
static const char *continued(const json_t *messages, struct err *e)
{
    const json_t *m = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(m, "role")),
               *text = json_string_value(json_object_get(m, "content"));
    if (role && !strcmp(role, "assistant") && text) return text;
    (void)err_set(e, ERR_INPUT,
                  "continue_final_message: the last message must be the assistant's, with a text");
    return NULL;
}

err_t chat_render(struct xchg *x, const json_t *b, const json_t *tools, struct buf *text,
                  struct err *e)
{
    struct rendering r = {.messages = json_field(b, "messages"),
                          .tools = tools,
                          .kwargs = json_field(b, "chat_template_kwargs"),
                          .prompt = true};
    bool go_on = false;
    const char *rest = NULL;
    err_t rc;
    if (!x->s->o.chat_template)
        return err_set(e, ERR_INPUT, "messages: this model has no chat template");
    r.n = json_array_size(r.messages);
    if (!r.n) return err_set(e, ERR_INPUT, "messages: must be a list of at least one message");
    if (r.kwargs && !json_is_object(r.kwargs))
        return json_bad(e, "chat_template_kwargs", r.kwargs, "an object");
    if ((rc = json_get_bool(b, "add_generation_prompt", &r.prompt, e)) ||
        (rc = json_get_str(b, "reasoning_effort", &r.effort, e)) ||
        (rc = json_get_bool(b, "continue_final_message", &go_on, e)))
        return rc;
    if (go_on) {
        if (!(rest = continued(r.messages, e))) return e->code;
        r.n--;
        r.prompt = true;
    }
    struct err first = {0};
    for (int form = 0; form < N_FORMS; form++) {
        buf_clear(text);
        rc = render_form(x, &r, form, text, form ? e : &first);
        if (!rc) break;
    }
    if (rc) return err_set(e, first.code, "%s", first.msg);
    if (rest && !buf_puts(text, rest)) return err_set(e, ERR_NOMEM, "messages: out of memory");
    return OK;
}

err_t openai_messages(struct xchg *x, const json_t *b, struct buf *text, struct err *e)
{
    const json_t *tools = NULL;
    err_t rc = chat_tools(x, b, &tools, e);
    return rc ? rc : chat_render(x, b, tools, text, e);
}
