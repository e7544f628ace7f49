/* api_native.c - /generate. */
#include "base/clock.h"
#include "base/mem.h"
#include "server/internal.h"
#include <stdio.h>
#include <string.h>

static void put_triple(struct xchg *x, struct buf *b, int32_t id, double lp, bool null)
{
    if (b->len) buf_putc(b, ',');
    buf_putc(b, '[');
    if (null) buf_puts(b, "null");
    else put_real(b, lp);
    buf_printf(b, ",%d,", id);
    struct buf text = {0};
    if (x->return_text && x->s->o.tokenizer && tokenizer_decode(x->s->o.tokenizer, &text, &id, 1, false))
        put_str(b, text.data ? text.data : "", text.len);
    else
        buf_puts(b, "null");
    buf_release(&text);
    buf_putc(b, ']');
}

static void put_top(struct xchg *x, struct buf *b, const struct top_row *row, bool null)
{
    struct buf list = {0};
    if (b->len) buf_putc(b, ',');
    if (null || !row->n) {
        buf_puts(b, "null");
        return;
    }
    for (int32_t k = 0; k < row->n; k++) put_triple(x, &list, row->ids[k], (double)row->logprobs[k], false);
    buf_putc(b, '[');
    buf_put(b, list.data, list.len);
    buf_putc(b, ']');
    b->failed |= list.failed;
    buf_release(&list);
}

/* The prompt's logprobs, once they are complete; before that the lists are empty. */
static void extend_input(struct xchg *x, struct slot *sl)
{
    const struct request *r = sl->r;
    if (sl->json.input.len || r->logprob_start < 0 || !r->prompt_done || !r->prompt_logprobs) return;
    for (int32_t i = 0; i < r->n_prompt - r->logprob_start; i++) {
        put_triple(x, &sl->json.input, r->prompt[r->logprob_start + i], (double)r->prompt_logprobs[i], i == 0);
        if (r->prompt_top) put_top(x, &sl->json.input_top, &r->prompt_top[i], i == 0);
    }
}

/* What came since the last frame; `delta` forgets what was in it. */
static void extend(struct xchg *x, struct slot *sl, bool delta)
{
    const struct request *r = sl->r;
    struct slot_json *j = &sl->json;
    if (delta) {
        buf_clear(&j->text);
        buf_clear(&j->ids);
        buf_clear(&j->logprobs);
        buf_clear(&j->top);
    }
    if (r->text.data) put_chars(&j->text, r->text.data + sl->sent_text, r->text_sent - sl->sent_text);
    for (int32_t i = sl->sent_ids; i < r->n_output; i++) {
        buf_printf(&j->ids, j->ids.len ? ",%d" : "%d", r->output_ids[i]);
        if (!r->want_logprobs) continue;
        put_triple(x, &j->logprobs, r->output_ids[i], (double)r->output_logprobs[i], false);
        if (r->output_top) put_top(x, &j->top, &r->output_top[i], false);
    }
    if (r->want_logprobs) extend_input(x, sl);
}

static void put_list(struct buf *b, const char *before, const struct buf *inside, const char *after)
{
    buf_puts(b, before);
    if (inside->len) buf_put(b, inside->data, inside->len);
    buf_puts(b, after);
    b->failed |= inside->failed;
}

static void put_logprobs(struct xchg *x, const struct slot *sl)
{
    struct buf *b = &x->out;
    put_list(b, ",\"input_token_logprobs\":[", &sl->json.input, "]");
    put_list(b, ",\"output_token_logprobs\":[", &sl->json.logprobs, "]");
    buf_printf(b, ",\"output_token_logprobs_length\":%d", sl->r->n_output);
    if (!sl->r->n_top) return;
    put_list(b, ",\"input_top_logprobs\":[", &sl->json.input_top, "]");
    put_list(b, ",\"output_top_logprobs\":[", &sl->json.top, "]");
}

static void put_finish(struct buf *b, const struct request *r)
{
    if (!r->done) {
        buf_puts(b, "null");
    } else if (r->finish == FINISH_STOP_ID) {
        buf_printf(b, "{\"type\":\"stop\",\"matched\":%d}", r->matched_id);
    } else if (r->finish == FINISH_STOP_STRING) {
        buf_puts(b, "{\"type\":\"stop\",\"matched\":");
        put_str(b, r->stops[r->matched_stop], r->stop_bytes[r->matched_stop]);
        buf_putc(b, '}');
    } else if (r->finish == FINISH_ABORT) {
        buf_puts(b, "{\"type\":\"abort\",\"message\":");
        put_str(b, r->finish_message, strlen(r->finish_message));
        buf_puts(b, ",\"status_code\":null,\"err_type\":null}");
    } else {
        buf_printf(b, "{\"type\":\"length\",\"length\":%d}", r->n_output);
    }
}

/* The caller holds r->lock, or r is done. */
static void put_result(struct xchg *x, struct slot *sl, bool delta)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out;
    extend(x, sl, delta);
    put_list(b, "{\"text\":\"", &sl->json.text, "\"");
    put_list(b, ",\"output_ids\":[", &sl->json.ids, "]");
    buf_puts(b, ",\"meta_info\":{\"id\":");
    put_str(b, r->rid, strlen(r->rid));
    buf_puts(b, ",\"finish_reason\":");
    put_finish(b, r);
    char version[128];
    snprintf(version, sizeof version, "%s", r->weight_version);
    if (!*version) engine_weight_version(x->s->engine, version, sizeof version);
    buf_printf(b, ",\"prompt_tokens\":%d,\"completion_tokens\":%d,\"cached_tokens\":%d,"
               "\"cached_tokens_details\":null,\"reasoning_tokens\":0,\"num_retractions\":%d,"
               "\"sampling_seed\":%llu,\"weight_version\":",
               r->n_prompt, r->n_output, r->cached_tokens, r->num_retractions, (unsigned long long)r->sp.seed);
    put_str(b, version, strlen(version));
    buf_puts(b, ",\"weight_versions\":");
    put_spans(b, r);
    if (r->done) {
        int64_t end = r->t_end ? r->t_end : clock_ns(), start = r->t_submit ? r->t_submit : end;
        buf_printf(b, ",\"e2e_latency\":%.6f", (double)(end - start) * 1e-9);
    }
    if (r->want_logprobs) put_logprobs(x, sl);
    buf_putc(b, '}');
    if (x->stream && x->list) buf_printf(b, ",\"index\":%d", sl->index);
    buf_putc(b, '}');
}

static void native_build(struct xchg *x)
{
    if (x->list) buf_putc(&x->out, '[');
    for (int32_t i = 0; i < x->n_slots; i++) {
        if (i) buf_putc(&x->out, ',');
        put_result(x, &x->slots[i], false);
    }
    if (x->list) buf_putc(&x->out, ']');
}

static void native_frame(struct xchg *x, struct slot *sl)
{
    buf_puts(&x->out, "data: ");
    put_result(x, sl, x->incremental);
    buf_puts(&x->out, "\n\n");
}

/* Field `name` of prompt i: the value itself, or its i-th when a list of values is given. */
static json_t *item(const json_t *b, const char *name, int i)
{
    const json_t *v = json_field(b, name);
    if (json_is_array(v)) v = json_array_get(v, (size_t)i);
    json_t *o = json_object();
    if (v) json_object_set(o, name, (json_t *)(uintptr_t)v);
    return o;
}

static err_t read_logprobs(const json_t *b, int i, struct request *r, struct err *e)
{
    int64_t start = -1, top = 0;
    json_t *w = item(b, "return_logprob", i), *s = item(b, "logprob_start_len", i);
    json_t *t = item(b, "top_logprobs_num", i);
    err_t rc = json_get_bool(w, "return_logprob", &r->want_logprobs, e);
    if (!rc) rc = json_get_int(s, "logprob_start_len", -1, INT32_MAX, &start, e);
    if (!rc) rc = json_get_int(t, "top_logprobs_num", 0, SAMPLE_MAX_TOP, &top, e);
    json_decref(w);
    json_decref(s);
    json_decref(t);
    r->logprob_start = r->want_logprobs ? (int32_t)start : -1;
    r->n_top = r->want_logprobs ? (int32_t)top : 0;
    return rc;
}

static err_t read_rid(const json_t *b, int i, int n_total, int at, struct request *r, struct err *e)
{
    const json_t *v = json_field(b, "rid");
    if (!v) return OK;
    bool list = json_is_array(v);
    const json_t *s = list ? json_array_get(v, (size_t)i) : v;
    if (!json_is_string(s)) return json_bad(e, "rid", s ? s : v, "a string, or a list of one string per prompt");
    if (strlen(json_string_value(s)) != json_string_length(s))
        return err_set(e, ERR_INPUT, "rid: a string with U+0000 is not allowed");
    return gen_rid(r, json_string_value(s), n_total > 1 ? at : -1, e);
}

static err_t read_extras(const json_t *b, int i, struct request *r, struct err *e)
{
    const char *key = NULL;
    int64_t prio = 0;
    json_t *k = item(b, "extra_key", i);
    err_t rc = json_get_str(k, "extra_key", &key, e);
    if (!rc && key) r->extra_key = mem_dup_n(key, strlen(key));
    json_decref(k);
    if (!rc) rc = json_get_int(b, "priority", INT32_MIN, INT32_MAX, &prio, e);
    r->priority = (int32_t)prio;
    return rc;
}

static err_t check_refused(const json_t *b, struct err *e)
{
    static const char *const names[] = {"lora_path", "image_data", "video_data", "audio_data", "input_embeds",
        "custom_logit_processor", "session_params", "return_hidden_states", "return_routed_experts",
        "return_indexer_topk", "return_sampling_mask", "return_entropy", "token_ids_logprob"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *v = json_field(b, names[i]);
        if (v && !json_is_false(v) && !(json_is_array(v) && !json_array_size(v)))
            return err_set(e, ERR_INPUT, "%s: not supported by this server", names[i]);
    }
    return OK;
}

static err_t add_prompt(struct xchg *x, const json_t *b, const json_t *prompt, const char *name, int i,
                        struct err *e)
{
    const json_t *sp = json_field(b, "sampling_params");
    if (json_is_array(sp)) {
        if (json_array_size(sp) != (size_t)x->n_prompts)
            return err_set(e, ERR_INPUT, "sampling_params: %zu items for %d prompts", json_array_size(sp), x->n_prompts);
        sp = json_array_get(sp, (size_t)i);
    }
    for (int j = 0; j < (x->n_samples ? x->n_samples : 1); j++) {
        struct request *r = gen_add(x, sp, SAMPLING_NATIVE, j, e);
        if (!r) return e->code;
        err_t rc;
        int total = json_is_array(json_field(b, "rid")) ? x->n_samples : x->n_samples * x->n_prompts;
        int at = json_is_array(json_field(b, "rid")) ? j : x->n_slots - 1;
        if ((rc = gen_prompt(x, r, prompt, name, e)) || (rc = read_logprobs(b, i, r, e)) ||
            (rc = read_rid(b, i, total, at, r, e)) || (rc = read_extras(b, i, r, e)) ||
            (rc = gen_finish(x, r, e)))
            return rc;
    }
    return OK;
}

err_t native_parse(struct xchg *x, const json_t *b, struct err *e)
{
    const json_t *text = json_field(b, "text"), *ids = json_field(b, "input_ids");
    x->build = native_build;
    x->frame = native_frame;
    x->incremental = x->s->o.incremental_streaming;
    err_t rc = check_refused(b, e);
    if (rc) return rc;
    if (!text && !ids)
        return err_set(e, ERR_INPUT, "Either text, input_ids or input_embeds should be provided.");
    if (text && !json_is_string(text) && !json_is_array(text)) return json_bad(e, "text", text, "a string or a list of strings");
    if (ids && !json_is_array(ids)) return json_bad(e, "input_ids", ids, "a list of ids or a list of such lists");
    bool nested = ids && json_is_array(json_array_get(ids, 0));
    bool batch = text ? json_is_array(text) : nested;
    if (ids && batch && !nested && text) batch = false;
    const json_t *src = ids ? ids : text;
    const char *name = ids ? "input_ids" : "text";
    if (!json_is_string(src) && !json_array_size(src)) return err_set(e, ERR_INPUT, "%s cannot be empty.", name);
    if ((rc = json_get_bool(b, "stream", &x->stream, e)) ||
        (rc = json_get_bool(b, "return_text_in_logprobs", &x->return_text, e)))
        return rc;
    if (ids && nested && !batch) src = json_array_get(ids, 0);
    x->n_prompts = batch ? (int)json_array_size(src) : 1;
    if (x->n_prompts > 65536) return err_set(e, ERR_INPUT, "%s: at most 65536 prompts are allowed", name);
    for (int i = 0; i < x->n_prompts; i++) {
        const json_t *p = batch ? json_array_get(src, (size_t)i) : src;
        if (ids ? !json_is_array(p) : !json_is_string(p)) return json_bad(e, name, p, ids ? "a list of ids" : "a string");
        if ((rc = add_prompt(x, b, p, name, i, e))) return rc;
    }
    x->list = batch || x->n_samples > 1;
    return OK;
}

void api_generate(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    if (native_parse(x, b, &e)) {
        reply_err(x, &e);
        xchg_ready(x);
        return;
    }
    gen_submit(x);
}
