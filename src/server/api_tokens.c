/* api_tokens.c - /tokenize and /detokenize: text to ids and back, without a model. */
#include "base/mem.h"
#include "server/internal.h"
#include <string.h>

static void put_ids(struct buf *b, const struct ids *ids)
{
    buf_putc(b, '[');
    for (size_t i = 0; i < ids->n; i++)
        buf_printf(b, i ? ",%d" : "%d", ids->v[i]);
    buf_putc(b, ']');
}

/* What /generate would make of the text, with its begin token if `special`. */
static err_t encode(struct xchg *x, struct ids *ids, const char *text, size_t n, bool special,
                    struct err *e)
{
    const struct server_options *o = &x->s->o;
    if (special && o->add_bos && !ids_push(ids, o->bos_id))
        return err_set(e, ERR_NOMEM, "prompt: out of memory");
    return tokenizer_encode(o->tokenizer, ids, text, n, e);
}

/* One text's ids go to the reply, their count to `counts`. */
static err_t tokenize_one(struct xchg *x, const char *text, size_t n, bool special,
                          struct buf *counts, struct err *e)
{
    struct ids ids = {0};
    err_t rc = encode(x, &ids, text, n, special, e);
    if (!rc) {
        put_ids(&x->out, &ids);
        buf_printf(counts, counts->len ? ",%zu" : "%zu", ids.n);
    }
    ids_release(&ids);
    return rc;
}

static err_t tokenize_list(struct xchg *x, const json_t *list, bool special, struct buf *counts,
                           struct err *e)
{
    err_t rc = OK;
    buf_putc(&x->out, '[');
    for (size_t i = 0; !rc && i < json_array_size(list); i++) {
        const json_t *s = json_array_get(list, i);
        if (!json_is_string(s)) return json_bad(e, "prompt", s, "a string or a list of strings");
        if (i) buf_putc(&x->out, ',');
        rc = tokenize_one(x, json_string_value(s), json_string_length(s), special, counts, e);
    }
    buf_putc(&x->out, ']');
    return rc;
}

static err_t tokenize(struct xchg *x, const json_t *b, struct buf *counts, struct err *e)
{
    const json_t *prompt = json_field(b, "prompt"), *messages = json_field(b, "messages");
    bool special = true;
    err_t rc = json_get_bool(b, "add_special_tokens", &special, e);
    if (rc) return rc;
    if (!prompt == !messages) return err_set(e, ERR_INPUT, "give one of prompt and messages");
    if (!x->s->o.tokenizer) return err_set(e, ERR_INPUT, "prompt: this server has no tokenizer");
    buf_puts(&x->out, "{\"tokens\":");
    if (json_is_array(prompt)) return tokenize_list(x, prompt, special, counts, e);
    if (json_is_string(prompt))
        return tokenize_one(x, json_string_value(prompt), json_string_length(prompt), special,
                            counts, e);
    if (prompt) return json_bad(e, "prompt", prompt, "a string or a list of strings");
    struct buf text = {0};
    rc = openai_messages(x, b, &text, e);
    if (!rc) rc = tokenize_one(x, text.data ? text.data : "", text.len, false, counts, e);
    buf_release(&text);
    return rc;
}

void api_tokenize(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct buf counts = {0};
    bool list = json_is_array(json_object_get(b, "prompt"));
    if (tokenize(x, b, &counts, &e)) {
        reply_err(x, &e);
    } else {
        buf_printf(&x->out, ",\"count\":%s%s%s,\"max_model_len\":%d}", list ? "[" : "",
                   counts.data ? counts.data : "", list ? "]" : "", x->s->o.context_len);
        x->out.failed |= counts.failed;
    }
    buf_release(&counts);
}

static err_t detokenize_one(struct xchg *x, const json_t *list, bool skip, struct err *e)
{
    struct buf text = {0};
    int32_t *ids = NULL, n = 0;
    err_t rc = json_ids(list, "tokens", x->s->o.config->vocab_size, &ids, &n, e);
    if (!rc && !tokenizer_decode(x->s->o.tokenizer, &text, ids, (size_t)n, skip))
        rc = err_set(e, ERR_NOMEM, "tokens: out of memory");
    if (!rc) put_str(&x->out, text.data ? text.data : "", text.len);
    buf_release(&text);
    mem_free(ids);
    return rc;
}

static err_t detokenize(struct xchg *x, const json_t *b, struct err *e)
{
    const json_t *tokens = json_field(b, "tokens");
    bool skip = true, nested = json_is_array(json_array_get(tokens, 0));
    err_t rc = json_get_bool(b, "skip_special_tokens", &skip, e);
    if (rc) return rc;
    if (!json_is_array(tokens))
        return json_bad(e, "tokens", tokens ? tokens : json_null(),
                        "a list of ids, or of such lists");
    if (!x->s->o.tokenizer) return err_set(e, ERR_INPUT, "tokens: this server has no tokenizer");
    buf_puts(&x->out, nested ? "{\"text\":[" : "{\"text\":");
    for (size_t i = 0; !rc && i < (nested ? json_array_size(tokens) : 1); i++) {
        if (i) buf_putc(&x->out, ',');
        rc = detokenize_one(x, nested ? json_array_get(tokens, i) : tokens, skip, e);
    }
    buf_puts(&x->out, nested ? "]}" : "}");
    return rc;
}

void api_detokenize(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    if (detokenize(x, b, &e)) reply_err(x, &e);
}
