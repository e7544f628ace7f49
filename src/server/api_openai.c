/* api_openai.c - /v1/models, /v1/completions, /v1/chat/completions.  Tool calls are not parsed yet. */
#include "base/mem.h"
#include "server/internal.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *model_name(const struct server_options *o)
{
    return o->served_model_name ? o->served_model_name : o->model_path ? o->model_path : "default";
}

static void put_model(struct xchg *x, const char *id)
{
    buf_puts(&x->out, "{\"id\":");
    put_str(&x->out, id, strlen(id));
    buf_printf(&x->out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"moult\",\"root\":",
               (long long)x->s->started);
    put_str(&x->out, id, strlen(id));
    buf_printf(&x->out, ",\"parent\":null,\"max_model_len\":%d}", x->s->o.context_len);
}

void api_models(struct xchg *x, const json_t *b)
{
    (void)b;
    buf_puts(&x->out, "{\"object\":\"list\",\"data\":[");
    put_model(x, model_name(&x->s->o));
    buf_puts(&x->out, "]}");
}

/* /v1/models/{id}; an id may hold slashes. */
void api_model(struct xchg *x, const json_t *b)
{
    const char *asked = x->path + strlen(x->route->path), *id = model_name(&x->s->o);
    (void)b;
    if (!strcmp(asked, id)) {
        put_model(x, id);
    } else {
        x->status = 404;
        buf_puts(&x->out, "{\"error\":{\"message\":\"The model '");
        put_chars(&x->out, asked, strlen(asked));
        buf_puts(&x->out, "' does not exist\",\"type\":\"invalid_request_error\",\"param\":\"model\","
                 "\"code\":\"model_not_found\"}}");
    }
}

static void put_token(struct xchg *x, int32_t id)
{
    struct buf t = {0};
    if (x->s->o.tokenizer) tokenizer_decode(x->s->o.tokenizer, &t, &id, 1, false);
    put_str(&x->out, t.data ? t.data : "", t.len);
    buf_release(&t);
}

static void put_entry(struct xchg *x, int32_t id, double lp)
{
    struct buf *b = &x->out;
    size_t n = 0;
    const char *p = x->s->o.tokenizer ? tokenizer_bytes(x->s->o.tokenizer, id, &n) : NULL;
    buf_puts(b, "\"token\":");
    put_token(x, id);
    buf_puts(b, ",\"logprob\":");
    put_real(b, lp);
    buf_puts(b, ",\"bytes\":[");
    for (size_t i = 0; p && i < n; i++) buf_printf(b, i ? ",%u" : "%u", (unsigned char)p[i]);
    buf_putc(b, ']');
}

static void chat_logprobs(struct xchg *x, const struct request *r, int32_t from)
{
    struct buf *b = &x->out;
    buf_puts(b, "{\"content\":[");
    for (int32_t i = from; i < r->n_output; i++) {
        buf_puts(b, i > from ? ",{" : "{");
        put_entry(x, r->output_ids[i], (double)r->output_logprobs[i]);
        buf_puts(b, ",\"top_logprobs\":[");
        for (int32_t k = 0; r->n_top && r->output_top && k < r->output_top[i].n; k++) {
            buf_puts(b, k ? ",{" : "{");
            put_entry(x, r->output_top[i].ids[k], (double)r->output_top[i].logprobs[k]);
            buf_putc(b, '}');
        }
        buf_puts(b, "]}");
    }
    buf_puts(b, "]}");
}

/* {"text of a token": logprob}.  Tokens of the same text (parts of characters) are one key: the likeliest. */
static void put_top_map(struct xchg *x, const struct top_row *t)
{
    struct buf texts = {0};
    size_t end[SAMPLE_MAX_TOP + 1] = {0};
    buf_putc(&x->out, '{');
    for (int32_t k = 0; t && k < t->n; k++) {
        bool seen = false;
        if (x->s->o.tokenizer) tokenizer_decode(x->s->o.tokenizer, &texts, &t->ids[k], 1, false);
        end[k + 1] = texts.len;
        size_t n = end[k + 1] - end[k];
        for (int32_t i = 0; i < k && !seen; i++)
            seen = end[i + 1] - end[i] == n && (!n || !memcmp(texts.data + end[i], texts.data + end[k], n));
        if (seen) continue;
        if (k) buf_putc(&x->out, ',');
        put_str(&x->out, n ? texts.data + end[k] : "", n);
        buf_putc(&x->out, ':');
        put_real(&x->out, (double)t->logprobs[k]);
    }
    buf_putc(&x->out, '}');
    buf_release(&texts);
}

static long long characters(const struct buf *b)
{
    long long n = 0;
    for (size_t i = 0; i < b->len; i++) n += ((unsigned char)b->data[i] & 0xc0) != 0x80;
    return n;
}

/* Where each token begins in the choice's text; a token inside of a character begins where that one does. */
static void put_offsets(struct xchg *x, struct slot *sl, int32_t from, int32_t pre)
{
    const struct request *r = sl->r;
    const struct tokenizer *t = x->s->o.tokenizer;
    struct buf text = {0};
    if (!from) {
        sl->n_chars = 0;
        detok_init(&sl->offsets, t, !pre && r->skip_special);
    }
    for (int32_t i = from; i < pre + r->n_output; i++) {
        if (pre && i == pre) { /* the prompt ends: its text stands by itself */
            detok_end(&sl->offsets, &text);
            sl->n_chars += characters(&text);
            detok_init(&sl->offsets, t, r->skip_special);
        }
        buf_printf(&x->out, i > from ? ",%lld" : "%lld", sl->n_chars);
        buf_clear(&text);
        if (t) detok_push(&sl->offsets, i < pre ? r->prompt[i] : r->output_ids[i - pre], &text);
        sl->n_chars += characters(&text);
        buf_clear(&text);
    }
    buf_release(&text);
}

/* Positions of the prompt (echo) come first, then those of the output. */
static void text_logprobs(struct xchg *x, struct slot *sl, int32_t from)
{
    struct buf *b = &x->out;
    const struct request *r = sl->r;
    int32_t pre = x->echo && !from && r->prompt_logprobs && r->logprob_start == 0 ? r->n_prompt : 0;
    for (int part = 0; part < 3; part++) {
        buf_puts(b, part == 0 ? "{\"tokens\":[" : part == 1 ? "],\"token_logprobs\":[" : "],\"top_logprobs\":[");
        for (int32_t i = from; i < pre + r->n_output; i++) {
            int32_t id = i < pre ? r->prompt[i] : r->output_ids[i - pre];
            const struct top_row *t = !r->n_top ? NULL : i < pre ? (r->prompt_top ? &r->prompt_top[i] : NULL)
                                      : r->output_top ? &r->output_top[i - pre] : NULL;
            if (i > from) buf_putc(b, ',');
            if (part == 0) put_token(x, id);
            else if (i < pre && !i) buf_puts(b, "null");
            else if (part == 1) put_real(b, (double)(i < pre ? r->prompt_logprobs[i] : r->output_logprobs[i - pre]));
            else {
                put_top_map(x, t);
            }
        }
    }
    buf_puts(b, "],\"text_offset\":[");
    put_offsets(x, sl, from, pre);
    buf_puts(b, "]}");
}

static void put_usage(struct xchg *x)
{
    long long in = 0, out = 0;
    for (int32_t i = 0; i < x->n_slots; i++) {
        if (i % x->n_samples == 0) in += x->slots[i].r->n_prompt;
        out += x->slots[i].r->n_output;
    }
    buf_printf(&x->out, "\"usage\":{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,"
               "\"prompt_tokens_details\":null,\"reasoning_tokens\":0}", in, out, in + out);
}

static void put_head(struct xchg *x)
{
    struct buf *b = &x->out;
    buf_puts(b, "{\"id\":");
    put_str(b, x->slots[0].r->rid, strlen(x->slots[0].r->rid));
    buf_printf(b, ",\"object\":\"%s\",\"created\":%lld,\"model\":",
               !x->chat ? "text_completion" : x->stream ? "chat.completion.chunk" : "chat.completion",
               (long long)x->created);
    put_str(b, x->model, strlen(x->model));
}

static void put_finish(struct xchg *x, const struct request *r)
{
    struct buf *b = &x->out;
    buf_puts(b, ",\"finish_reason\":");
    if (r->done) put_str(b, gen_reason(r), strlen(gen_reason(r)));
    else buf_puts(b, "null");
    buf_puts(b, ",\"matched_stop\":");
    if (r->done && r->finish == FINISH_STOP_ID) buf_printf(b, "%d", r->matched_id);
    else if (r->done && r->finish == FINISH_STOP_STRING) put_str(b, r->stops[r->matched_stop], r->stop_bytes[r->matched_stop]);
    else buf_puts(b, "null");
}

static void put_choice(struct xchg *x, struct slot *sl)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out, whole = {0};
    size_t from = x->stream ? sl->sent_text : 0;
    bool first = !x->stream || !sl->role_sent;
    if (x->echo && first && x->s->o.tokenizer)
        tokenizer_decode(x->s->o.tokenizer, &whole, r->prompt, (size_t)r->n_prompt, false);
    if (r->text.data) buf_put(&whole, r->text.data + from, r->text_sent - from);
    buf_printf(b, "{\"index\":%d,", sl->index);
    if (x->chat) {
        buf_puts(b, x->stream ? "\"delta\":{" : "\"message\":{");
        if (first) buf_puts(b, "\"role\":\"assistant\",");
        buf_puts(b, "\"content\":");
    } else {
        buf_puts(b, "\"text\":");
    }
    put_str(b, whole.data ? whole.data : "", whole.len);
    buf_release(&whole);
    if (x->chat) buf_puts(b, x->stream ? "}" : ",\"reasoning_content\":null,\"tool_calls\":null}");
    buf_puts(b, ",\"logprobs\":");
    if (!r->want_logprobs) buf_puts(b, "null");
    else if (x->chat) chat_logprobs(x, r, x->stream ? sl->sent_ids : 0);
    else text_logprobs(x, sl, x->stream ? sl->sent_ids : 0);
    put_finish(x, r);
    buf_putc(b, '}');
}

static void openai_build(struct xchg *x)
{
    struct buf *b = &x->out;
    const char *v = x->slots[0].r->weight_version;
    put_head(x);
    buf_puts(b, ",\"choices\":[");
    for (int32_t i = 0; i < x->n_slots; i++) {
        if (i) buf_putc(b, ',');
        put_choice(x, &x->slots[i]);
    }
    buf_puts(b, "],");
    put_usage(x);
    buf_puts(b, ",\"metadata\":{\"weight_version\":");
    put_str(b, v, strlen(v));
    buf_puts(b, ",\"weight_versions\":");
    put_spans(b, x->slots[0].r);
    buf_puts(b, "}}");
}

static void openai_frame(struct xchg *x, struct slot *sl)
{
    struct buf *b = &x->out;
    if (x->chat && !sl->role_sent) {
        buf_puts(b, "data: ");
        put_head(x);
        buf_printf(b, ",\"choices\":[{\"index\":%d,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                   "\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n", sl->index);
        sl->role_sent = true;
    }
    buf_puts(b, "data: ");
    put_head(x);
    buf_puts(b, ",\"choices\":[");
    put_choice(x, sl);
    buf_puts(b, "]}\n\n");
    sl->role_sent = true;
}

static void openai_last(struct xchg *x)
{
    if (!x->include_usage) return;
    buf_puts(&x->out, "data: ");
    put_head(x);
    buf_puts(&x->out, ",\"choices\":[],");
    put_usage(x);
    buf_puts(&x->out, "}\n\n");
}

/* Text parts are joined, as most templates expect a string. */
static err_t flat_message(const json_t *m, size_t i, json_t **out, struct err *e)
{
    const json_t *role = json_field(m, "role"), *c = json_field(m, "content");
    char where[64];
    if (!json_is_object(m) || !json_is_string(role))
        return err_set(e, ERR_INPUT, "messages[%zu].role: must be a string", i);
    snprintf(where, sizeof where, "messages[%zu].content", i);
    if (c && !json_is_string(c) && !json_is_array(c)) return json_bad(e, where, c, "a string or a list of text parts");
    struct buf text = {0};
    buf_puts(&text, "");
    for (size_t k = 0; json_is_array(c) && k < json_array_size(c); k++) {
        const json_t *t = json_object_get(json_array_get(c, k), "text");
        if (!json_is_string(t)) {
            buf_release(&text);
            return err_set(e, ERR_INPUT, "%s[%zu]: only parts of type text are supported", where, k);
        }
        buf_put(&text, json_string_value(t), json_string_length(t));
    }
    *out = json_copy((json_t *)(uintptr_t)m);
    if (json_is_array(c)) json_object_set_new(*out, "content", json_stringn(text.data ? text.data : "", text.len));
    buf_release(&text);
    return OK;
}

static err_t render(struct xchg *x, const json_t *b, struct buf *text, struct err *e)
{
    const struct server_options *o = &x->s->o;
    const json_t *msgs = json_field(b, "messages"), *kw = json_field(b, "chat_template_kwargs");
    if (!o->chat_template) return err_set(e, ERR_INPUT, "messages: this model has no chat template");
    if (!json_is_array(msgs) || !json_array_size(msgs))
        return err_set(e, ERR_INPUT, "messages: must be a list of at least one message");
    if (kw && !json_is_object(kw)) return json_bad(e, "chat_template_kwargs", kw, "an object");
    json_t *vars = json_object(), *list = json_array();
    err_t rc = OK;
    for (size_t i = 0; !rc && i < json_array_size(msgs); i++) {
        json_t *m = NULL;
        rc = flat_message(json_array_get(msgs, i), i, &m, e);
        if (m) json_array_append_new(list, m);
    }
    if (kw) json_object_update(vars, (json_t *)(uintptr_t)kw);
    json_object_set_new(vars, "messages", list);
    json_object_set_new(vars, "add_generation_prompt", json_true());
    const json_t *tools = json_field(b, "tools");
    if (tools) json_object_set(vars, "tools", (json_t *)(uintptr_t)tools);
    if (o->bos_token) json_object_set_new(vars, "bos_token", json_string(o->bos_token));
    if (o->eos_token) json_object_set_new(vars, "eos_token", json_string(o->eos_token));
    if (!rc) rc = tmpl_render(o->chat_template, text, vars, e);
    json_decref(vars);
    return rc;
}

static err_t read_extras(struct xchg *x, const json_t *b, struct request *r, struct err *e)
{
    int64_t top = 0;
    const char *rid = NULL;
    err_t rc;
    if (x->chat) {
        if ((rc = json_get_bool(b, "logprobs", &r->want_logprobs, e)) ||
            (rc = json_get_int(b, "top_logprobs", 0, SAMPLE_MAX_TOP, &top, e)))
            return rc;
    } else {
        if ((rc = json_get_int(b, "logprobs", 0, SAMPLE_MAX_TOP, &top, e))) return rc;
        r->want_logprobs = json_field(b, "logprobs") != NULL;
    }
    r->n_top = r->want_logprobs ? (int32_t)top : 0;
    if (x->echo && r->want_logprobs) r->logprob_start = 0;
    if ((rc = json_get_str(b, "rid", &rid, e))) return rc;
    if (rid) return gen_rid(r, rid, x->n_slots > 1 ? x->n_slots - 1 : -1, e);
    put_id(r->rid, sizeof r->rid, x->chat ? "chatcmpl-" : "cmpl-");
    return OK;
}

static err_t add(struct xchg *x, const json_t *b, const json_t *prompt, const struct buf *text, struct err *e)
{
    for (int j = 0; j < (x->n_samples ? x->n_samples : 1); j++) {
        struct request *r = gen_add(x, b, x->chat ? SAMPLING_CHAT : SAMPLING_COMPLETION, j, e);
        if (!r) return e->code;
        err_t rc = text ? gen_text(x, r, text->data ? text->data : "", text->len, false, e)
                  : gen_prompt(x, r, prompt, x->chat ? "input_ids" : "prompt", e);
        if (rc || (rc = read_extras(x, b, r, e)) || (rc = gen_finish(x, r, e))) return rc;
    }
    return OK;
}

err_t openai_parse(struct xchg *x, const json_t *b, struct err *e)
{
    const char *model = "default";
    x->build = openai_build;
    x->frame = openai_frame;
    x->last = openai_last;
    err_t rc;
    if ((rc = json_get_str(b, "model", &model, e)) || (rc = json_get_bool(b, "stream", &x->stream, e)) ||
        (rc = json_get_bool(json_field(b, "stream_options"), "include_usage", &x->include_usage, e)))
        return rc;
    x->model = mem_dup(model);
    x->created = time(NULL);
    x->n_prompts = 1;
    if (x->chat) {
        const json_t *ids = json_field(b, "input_ids");
        if (ids) return add(x, b, ids, NULL, e);
        struct buf text = {0};
        rc = render(x, b, &text, e);
        if (!rc) rc = add(x, b, NULL, &text, e);
        buf_release(&text);
        return rc;
    }
    int64_t best_of = 1;
    if ((rc = json_get_bool(b, "echo", &x->echo, e)) || (rc = json_get_int(b, "best_of", 1, 1, &best_of, e))) return rc;
    const json_t *p = json_field(b, "prompt"), *first = json_array_get(p, 0);
    if (!json_is_string(p) && !first)
        return err_set(e, ERR_INPUT, "prompt: must be a string, a list of strings, ids or lists of ids, not empty");
    bool batch = json_is_string(first) || json_is_array(first);
    if (batch && json_array_size(p) > 65536)
        return err_set(e, ERR_INPUT, "prompt: %zu prompts; at most 65536 are allowed", json_array_size(p));
    x->n_prompts = batch ? (int)json_array_size(p) : 1;
    for (int i = 0; !rc && i < x->n_prompts; i++) rc = add(x, b, batch ? json_array_get(p, (size_t)i) : p, NULL, e);
    return rc;
}

static void run(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    if (openai_parse(x, b, &e)) {
        reply_err(x, &e);
        xchg_ready(x);
        return;
    }
    gen_submit(x);
}

void api_completions(struct xchg *x, const json_t *b)
{
    run(x, b);
}

void api_chat(struct xchg *x, const json_t *b)
{
    x->chat = true;
    run(x, b);
}
