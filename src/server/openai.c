#include "server/openai.h"

#include "base/mem.h"
#include "server/experts.h"
#include <string.h>
#include <time.h>

/* Known to clients, change the result, not served; a value that asks for nothing passes. */
static err_t check_refused(const json_t *b, struct err *e)
{
    static const char *const names[] = {
        "return_hidden_states", "image_data", "video_data", "audio_data",
        "session_params",       "functions",  "audio",      "return_indexer_topk",
        "return_sampling_mask"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *v = json_field(b, names[i]);
        if (v && !json_is_false(v) && !(json_is_array(v) && !json_array_size(v)))
            return err_set(e, ERR_INPUT, "%s: not supported by this server", names[i]);
    }
    return OK;
}

err_t openai_begin(struct xchg *x, const json_t *b, struct err *e)
{
    const char *model = "default";
    const json_t *so = json_field(b, "stream_options");
    err_t rc = check_refused(b, e);
    if (!rc && so && !json_is_object(so)) rc = json_bad(e, "stream_options", so, "an object");
    if (rc || (rc = json_get_str(b, "model", &model, e)) ||
        (rc = json_get_bool(b, "stream", &x->stream, e)) ||
        (rc = json_get_bool(so, "include_usage", &x->include_usage, e)) ||
        (rc = json_get_bool(so, "continuous_usage_stats", &x->each_usage, e)) ||
        (rc = json_get_bool(b, "return_prompt_token_ids", &x->return_prompt_ids, e)) ||
        (rc = json_get_bool(b, "return_meta_info", &x->return_meta, e)))
        return rc;
    if (x->stream && x->return_meta)
        return err_set(e, ERR_INPUT,
                       "return_meta_info: true is not allowed; must be false with stream");
    x->model = mem_dup(model);
    x->created = time(NULL);
    x->n_prompts = 1;
    return OK;
}

/* The prefix cache is separated by cache_salt and extra_key, one after the other. */
static err_t read_key(const json_t *b, struct request *r, struct err *e)
{
    const char *salt = NULL, *key = NULL;
    int64_t prio = 0;
    err_t rc;
    if ((rc = json_get_str(b, "cache_salt", &salt, e)) ||
        (rc = json_get_str(b, "extra_key", &key, e)) ||
        (rc = json_get_int(b, "priority", INT32_MIN, INT32_MAX, &prio, e)))
        return rc;
    r->priority = (int32_t)prio;
    if (!salt && !key) return OK;
    struct buf all = {0};
    buf_puts(&all, salt ? salt : "");
    buf_puts(&all, key ? key : "");
    r->extra_key = buf_take(&all);
    return r->extra_key ? OK : err_set(e, ERR_NOMEM, "extra_key: out of memory");
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
    if ((rc = read_key(b, r, e)) || (rc = json_get_str(b, "rid", &rid, e))) return rc;
    if (rid) return gen_rid(r, rid, x->n_slots > 1 ? x->n_slots - 1 : -1, e);
    put_id(r->rid, sizeof r->rid, x->chat ? "chatcmpl-" : "cmpl-");
    return OK;
}

err_t openai_add(struct xchg *x, const json_t *b, const json_t *prompt, const struct buf *text,
                 struct err *e)
{
    for (int j = 0; j < (x->n_samples ? x->n_samples : 1); j++) {
        struct request *r = gen_add(x, b, x->chat ? SAMPLING_CHAT : SAMPLING_COMPLETION, j, e);
        if (!r) return e->code;
        err_t rc = text ? gen_text(x, r, text->data ? text->data : "", text->len, false, e)
                        : gen_prompt(x, r, prompt, x->chat ? "input_ids" : "prompt", e);
        if (rc || (rc = read_extras(x, b, r, e)) || (rc = experts_read(b, x->s->o.config, r, e)) ||
            (rc = gen_finish(x, r, e)))
            return rc;
    }
    return OK;
}

err_t openai_parse(struct xchg *x, const json_t *b, struct err *e)
{
    return x->chat ? chat_body(x, b, e) : completions_body(x, b, e);
}

/* ---- replies ---- */

void openai_head(struct xchg *x)
{
    struct buf *b = &x->out;
    buf_puts(b, "{\"id\":");
    put_str(b, x->slots[0].r->rid, strlen(x->slots[0].r->rid));
    buf_printf(b, ",\"object\":\"%s\",\"created\":%lld,\"model\":",
               !x->chat    ? "text_completion"
               : x->stream ? "chat.completion.chunk"
                           : "chat.completion",
               (long long)x->created);
    put_str(b, x->model, strlen(x->model));
}

void openai_finish(struct xchg *x, const struct request *r, bool calls)
{
    struct buf *b = &x->out;
    const char *why = gen_reason(r);
    if (calls && !strcmp(why, "stop")) why = "tool_calls";
    buf_puts(b, ",\"finish_reason\":");
    if (r->done)
        put_str(b, why, strlen(why));
    else
        buf_puts(b, "null");
    buf_puts(b, ",\"matched_stop\":");
    if (r->done && r->finish == FINISH_STOP_ID)
        buf_printf(b, "%d", r->matched_id);
    else if (r->done && r->finish == FINISH_STOP_STRING)
        put_str(b, r->stops[r->matched_stop], r->stop_bytes[r->matched_stop]);
    else
        buf_puts(b, "null");
}

/* Tokens whose text begins in the reasoning. */
static long long reasoning_tokens(const struct xchg *x, const struct slot *sl)
{
    const struct request *r = sl->r;
    struct buf text = {0};
    struct detok d;
    int32_t n = 0;
    if (!sl->parser || !sl->parser->reasoning_bytes || !x->s->o.tokenizer) return 0;
    detok_init(&d, x->s->o.tokenizer, r->skip_special);
    while (n < r->n_output && text.len < sl->parser->reasoning_bytes && !text.failed)
        detok_push(&d, r->output_ids[n++], &text);
    buf_release(&text);
    return n;
}

void openai_usage(struct xchg *x, const struct slot *one)
{
    long long in = 0, out = 0, cached = 0, thought = 0;
    for (int32_t i = 0; i < x->n_slots; i++) {
        const struct request *r = x->slots[i].r;
        if (one && one != &x->slots[i]) continue;
        if (one || i % x->n_samples == 0) {
            in += r->n_prompt;
            cached += r->cached_tokens;
        }
        out += r->n_output;
        if (r->done) thought += reasoning_tokens(x, &x->slots[i]);
    }
    buf_printf(
        &x->out,
        "\"usage\":{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,", in,
        out, in + out);
    if (x->s->o.cache_report)
        buf_printf(&x->out, "\"prompt_tokens_details\":{\"cached_tokens\":%lld},", cached);
    else
        buf_puts(&x->out, "\"prompt_tokens_details\":null,");
    buf_printf(
        &x->out,
        "\"reasoning_tokens\":%lld,\"completion_tokens_details\":{\"reasoning_tokens\":%lld}}",
        thought, thought);
}

void openai_extras(struct xchg *x, struct slot *sl, bool first)
{
    const struct request *r = sl->r;
    if (x->return_prompt_ids && first) {
        buf_puts(&x->out, ",\"prompt_token_ids\":[");
        for (int32_t i = 0; i < r->n_prompt; i++)
            buf_printf(&x->out, i ? ",%d" : "%d", r->prompt[i]);
        buf_putc(&x->out, ']');
    }
    if (x->return_meta && !x->stream) {
        buf_puts(&x->out, ",\"meta_info\":");
        native_meta(x, sl);
    }
}

/* The versions of the tokens follow when they are all there. */
static void put_version(struct xchg *x, const struct request *r)
{
    char v[sizeof r->weight_version];
    memcpy(v, r->weight_version, sizeof v);
    if (!*v) engine_weight_version(x->s->engine, v, sizeof v);
    buf_puts(&x->out, ",\"metadata\":{\"weight_version\":");
    put_str(&x->out, v, strlen(v));
    if (r->done) {
        buf_puts(&x->out, ",\"weight_versions\":");
        put_spans(&x->out, r);
    }
    buf_puts(&x->out, "}}");
}

/* The experts of the first choice; those of the others are in their meta_info. */
static void put_experts(struct xchg *x)
{
    const struct slot *sl = &x->slots[0];
    if (!sl->r->has_experts) return;
    buf_puts(&x->out, ",\"sglext\":{\"routed_experts\":\"");
    if (sl->encoded)
        buf_put(&x->out, sl->experts.data, sl->experts.len);
    else
        experts_put(&x->out, x->s->o.config, sl->r);
    buf_puts(&x->out, "\"}");
}

void openai_build(struct xchg *x, void (*choice)(struct xchg *x, struct slot *sl))
{
    struct buf *b = &x->out;
    openai_head(x);
    buf_puts(b, ",\"choices\":[");
    for (int32_t i = 0; i < x->n_slots; i++) {
        if (i) buf_putc(b, ',');
        choice(x, &x->slots[i]);
    }
    buf_puts(b, "],");
    openai_usage(x, NULL);
    put_experts(x);
    put_version(x, x->slots[0].r);
}

void openai_frame(struct xchg *x, struct slot *sl, void (*choice)(struct xchg *x, struct slot *sl))
{
    struct buf *b = &x->out;
    buf_puts(b, "data: ");
    openai_head(x);
    buf_puts(b, ",\"choices\":[");
    choice(x, sl);
    buf_putc(b, ']');
    if (x->each_usage) {
        buf_putc(b, ',');
        openai_usage(x, sl);
    }
    put_version(x, sl->r);
    buf_puts(b, "\n\n");
}

static void put_chunk(struct xchg *x, bool usage)
{
    struct buf *b = &x->out;
    buf_puts(b, "data: ");
    openai_head(x);
    buf_puts(b, ",\"choices\":[]");
    if (usage) {
        buf_putc(b, ',');
        openai_usage(x, NULL);
    } else {
        put_experts(x);
    }
    put_version(x, x->slots[0].r);
    buf_puts(b, "\n\n");
}

void openai_last(struct xchg *x)
{
    if (x->slots[0].r->has_experts) put_chunk(x, false);
    if (x->include_usage) put_chunk(x, true);
}
