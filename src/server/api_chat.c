/* api_chat.c - /v1/chat/completions. */
#include "server/openai.h"

#include "base/mem.h"

/* Reads the text that came since the last time; false: no memory. */
static bool parse_more(struct xchg *x, struct slot *sl)
{
    const struct request *r = sl->r;
    if (!sl->parser)
        sl->parser = chat_parser_new(x->tools, x->separate ? x->think : NULL, x->think_inside);
    if (!sl->parser) return false;
    size_t from = sl->parser->seen;
    chat_parse(sl->parser, r->text.data ? r->text.data + from : "", r->text_sent - from, r->done);
    return !sl->parser->failed;
}

static void put_text(struct buf *b, const char *key, const struct buf *text, bool null)
{
    buf_printf(b, "\"%s\":", key);
    if (null && !text->len)
        buf_puts(b, "null");
    else
        put_str(b, text->data ? text->data : "", text->len);
}

static void put_call(struct buf *b, const struct call_piece *c, bool with_index)
{
    char id[48];
    buf_putc(b, '{');
    if (with_index) buf_printf(b, "\"index\":%d,", c->index);
    if (c->begins) {
        put_id(id, sizeof id, "call_");
        buf_printf(b, "\"id\":\"%.29s\",\"type\":\"function\",\"function\":{\"name\":", id);
        put_str(b, c->name.data ? c->name.data : "", c->name.len);
        buf_putc(b, ',');
    } else {
        buf_puts(b, "\"function\":{");
    }
    put_text(b, "arguments", &c->arguments, false);
    buf_puts(b, "}}");
}

static void put_calls(struct buf *b, const struct chat_parser *p, bool with_index)
{
    buf_puts(b, "\"tool_calls\":[");
    for (size_t i = 0; i < p->n_calls; i++) {
        if (i) buf_putc(b, ',');
        put_call(b, &p->call[i], with_index);
    }
    buf_putc(b, ']');
}

static void put_message(struct xchg *x, const struct chat_parser *p)
{
    struct buf *b = &x->out;
    buf_puts(b, "\"message\":{\"role\":\"assistant\",");
    put_text(b, "content", &p->content, p->n_begun > 0);
    buf_putc(b, ',');
    put_text(b, "reasoning_content", &p->reasoning, true);
    buf_putc(b, ',');
    if (p->n_begun)
        put_calls(b, p, false);
    else
        buf_puts(b, "\"tool_calls\":null");
    buf_putc(b, '}');
}

static void put_delta(struct xchg *x, struct slot *sl)
{
    struct buf *b = &x->out;
    const struct chat_parser *p = sl->parser;
    bool other = p->reasoning.len || p->n_calls;
    buf_puts(b, "\"delta\":{");
    if (!sl->role_sent) buf_puts(b, "\"role\":\"assistant\",");
    if (p->reasoning.len) put_text(b, "reasoning_content", &p->reasoning, false), buf_putc(b, ',');
    if (p->n_calls) put_calls(b, p, true), buf_putc(b, ',');
    if (p->content.len || !other)
        put_text(b, "content", &p->content, false);
    else
        buf_puts(b, "\"content\":null");
    buf_putc(b, '}');
}

static void put_choice(struct xchg *x, struct slot *sl)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out;
    buf_printf(b, "{\"index\":%d,", sl->index);
    if (x->stream)
        put_delta(x, sl);
    else
        put_message(x, sl->parser);
    buf_puts(b, ",\"logprobs\":");
    if (r->want_logprobs)
        chat_logprobs(x, r, x->stream ? sl->sent_ids : 0);
    else
        buf_puts(b, "null");
    openai_finish(x, r, sl->parser->n_begun > 0);
    openai_extras(x, sl, !x->stream);
    buf_putc(b, '}');
}

static void build(struct xchg *x)
{
    for (int32_t i = 0; i < x->n_slots; i++)
        if (!parse_more(x, &x->slots[i])) x->out.failed = true;
    if (!x->out.failed) openai_build(x, put_choice);
}

static void put_first(struct xchg *x, struct slot *sl)
{
    buf_printf(
        &x->out,
        "{\"index\":%d,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
        "\"finish_reason\":null,\"matched_stop\":null",
        sl->index);
    openai_extras(x, sl, true);
    buf_putc(&x->out, '}');
}

/* A frame without anything new is left out, unless it has logprobs or is the last. */
static void frame(struct xchg *x, struct slot *sl)
{
    if (!sl->role_sent) openai_frame(x, sl, put_first);
    sl->role_sent = true;
    if (!parse_more(x, sl)) {
        x->out.failed = true;
        return;
    }
    const struct chat_parser *p = sl->parser;
    if (p->reasoning.len || p->content.len || p->n_calls || sl->r->done || sl->r->want_logprobs)
        openai_frame(x, sl, put_choice);
    chat_taken(sl->parser);
}

err_t chat_body(struct xchg *x, const json_t *b, struct err *e)
{
    const json_t *ids = json_field(b, "input_ids"), *tools = NULL;
    struct buf text = {0};
    x->chat = true;
    x->build = build;
    x->frame = frame;
    x->last = openai_last;
    err_t rc = openai_begin(x, b, e);
    if (!rc) rc = chat_tools(x, b, &tools, e);
    if (!rc && !ids) rc = chat_render(x, b, tools, &text, e);
    if (!rc && ids) {
        int32_t *v = NULL, n = 0;
        rc = json_ids(ids, "input_ids", x->s->o.config->vocab_size, &v, &n, e);
        if (!rc && x->s->o.tokenizer) /* its end is enough to see whether reasoning has begun */
            tokenizer_decode(x->s->o.tokenizer, &text, v + (n > 32 ? n - 32 : 0),
                             (size_t)(n > 32 ? 32 : n), false);
        mem_free(v);
    }
    if (!rc) rc = chat_reasoning(x, b, text.data ? text.data : "", text.len, e);
    if (!rc) rc = chat_choice(x, b, tools, e);
    if (!rc) rc = openai_add(x, b, ids, ids ? NULL : &text, e);
    buf_release(&text);
    return rc;
}

void api_chat(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    if (!chat_body(x, b, &e)) {
        gen_submit(x);
        return;
    }
    reply_err(x, &e);
    xchg_ready(x);
}
