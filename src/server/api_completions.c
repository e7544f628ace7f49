/* api_completions.c - /v1/completions. */
#include "server/openai.h"

static void put_choice(struct xchg *x, struct slot *sl)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out, whole = {0};
    size_t from = x->stream ? sl->sent_text : 0;
    if (x->echo && (!x->stream || !sl->role_sent) && x->s->o.tokenizer)
        tokenizer_decode(x->s->o.tokenizer, &whole, r->prompt, (size_t)r->n_prompt, false);
    if (r->text.data) buf_put(&whole, r->text.data + from, r->text_sent - from);
    buf_printf(b, "{\"index\":%d,\"text\":", sl->index);
    put_str(b, whole.data ? whole.data : "", whole.len);
    buf_release(&whole);
    buf_puts(b, ",\"logprobs\":");
    if (r->want_logprobs)
        text_logprobs(x, sl, x->stream ? sl->sent_ids : 0);
    else
        buf_puts(b, "null");
    openai_finish(x, r, false);
    openai_extras(x, sl, !x->stream || !sl->role_sent);
    buf_putc(b, '}');
}

static void build(struct xchg *x)
{
    openai_build(x, put_choice);
}

static void frame(struct xchg *x, struct slot *sl)
{
    openai_frame(x, sl, put_choice);
    sl->role_sent = true;
}

err_t completions_body(struct xchg *x, const json_t *b, struct err *e)
{
    int64_t best_of = 1;
    const char *suffix = NULL;
    x->build = build;
    x->frame = frame;
    x->last = openai_last;
    err_t rc = openai_begin(x, b, e);
    if (rc || (rc = json_get_bool(b, "echo", &x->echo, e)) ||
        (rc = json_get_int(b, "best_of", 1, 1, &best_of, e)) ||
        (rc = json_get_str(b, "suffix", &suffix, e)))
        return rc;
    if (suffix && *suffix) return err_set(e, ERR_INPUT, "suffix: not supported by this server");
    const json_t *p = json_field(b, "prompt"), *first = json_array_get(p, 0);
    if (!json_is_string(p) && !first)
        return err_set(
            e, ERR_INPUT,
            "prompt: must be a string, a list of strings, ids or lists of ids, not empty");
    bool batch = json_is_string(first) || json_is_array(first);
    if (batch && json_array_size(p) > 65536)
        return err_set(e, ERR_INPUT, "prompt: %zu prompts; at most 65536 are allowed",
                       json_array_size(p));
    x->n_prompts = batch ? (int)json_array_size(p) : 1;
    for (int i = 0; !rc && i < x->n_prompts; i++)
        rc = openai_add(x, b, batch ? json_array_get(p, (size_t)i) : p, NULL, e);
    return rc;
}

void api_completions(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    if (!completions_body(x, b, &e)) {
        gen_submit(x);
        return;
    }
    reply_err(x, &e);
    xchg_ready(x);
}
