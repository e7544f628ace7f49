/* native_reply.c - what /generate answers: results, their meta_info, frames of a stream. */
#include "base/clock.h"
#include "server/base64.h"
#include "server/experts.h"
#include "server/internal.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

static void put_triple(struct xchg *x, struct buf *b, int32_t id, double lp, bool null)
{
    if (b->len) buf_putc(b, ',');
    buf_putc(b, '[');
    if (null)
        buf_puts(b, "null");
    else
        put_real(b, lp);
    buf_printf(b, ",%d,", id);
    struct buf text = {0};
    if (x->return_text && x->s->o.tokenizer &&
        tokenizer_decode(x->s->o.tokenizer, &text, &id, 1, false))
        put_str(b, text.data ? text.data : "", text.len);
    else
        buf_puts(b, "null");
    buf_release(&text);
    buf_putc(b, ']');
}

/* A position's list of n logprobs. */
static void put_triples(struct xchg *x, struct buf *b, const int32_t *ids, const float *lp,
                        int32_t n, bool null)
{
    struct buf list = {0};
    if (b->len) buf_putc(b, ',');
    if (null || !n) {
        buf_puts(b, "null");
        return;
    }
    for (int32_t k = 0; k < n; k++)
        put_triple(x, &list, ids[k], (double)lp[k], false);
    buf_putc(b, '[');
    buf_put(b, list.data, list.len);
    buf_putc(b, ']');
    b->failed |= list.failed;
    buf_release(&list);
}

static void put_top(struct xchg *x, struct buf *b, const struct top_row *row, bool null)
{
    put_triples(x, b, row->ids, row->logprobs, row->n, null);
}

static void put_of(struct xchg *x, struct buf *b, const struct request *r, const float *rows,
                   int32_t i, bool null)
{
    put_triples(x, b, r->of, rows + (size_t)i * (size_t)r->n_of, r->n_of, null);
}

/* The prompt's logprobs, once they are complete; before that the lists are empty. */
static void extend_input(struct xchg *x, struct slot *sl)
{
    const struct request *r = sl->r;
    struct slot_json *j = &sl->json;
    if (j->input.len || r->logprob_start < 0 || !r->prompt_done || !r->prompt_logprobs) return;
    for (int32_t i = 0; i < r->n_prompt - r->logprob_start; i++) {
        put_triple(x, &j->input, r->prompt[r->logprob_start + i], (double)r->prompt_logprobs[i],
                   i == 0);
        if (r->prompt_top) put_top(x, &j->input_top, &r->prompt_top[i], i == 0);
        if (r->prompt_of) put_of(x, &j->input_of, r, r->prompt_of, i, i == 0);
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
        buf_clear(&j->of);
    }
    if (r->text.data)
        put_chars(&j->text, r->text.data + sl->sent_text, r->text_sent - sl->sent_text);
    for (int32_t i = sl->sent_ids; i < r->n_output; i++) {
        buf_printf(&j->ids, j->ids.len ? ",%d" : "%d", r->output_ids[i]);
        if (!r->want_logprobs) continue;
        put_triple(x, &j->logprobs, r->output_ids[i], (double)r->output_logprobs[i], false);
        if (r->output_top) put_top(x, &j->top, &r->output_top[i], false);
        if (r->output_of) put_of(x, &j->of, r, r->output_of, i, false);
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
    if (sl->r->n_top) {
        put_list(b, ",\"input_top_logprobs\":[", &sl->json.input_top, "]");
        put_list(b, ",\"output_top_logprobs\":[", &sl->json.top, "]");
    }
    if (sl->r->n_of) {
        put_list(b, ",\"input_token_ids_logprobs\":[", &sl->json.input_of, "]");
        put_list(b, ",\"output_token_ids_logprobs\":[", &sl->json.of, "]");
    }
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

/* Numbers as little-endian int32 in base64. */
static void put_int32s(struct buf *b, const int32_t *v, size_t n)
{
    uint8_t bytes[4 * 768];
    for (size_t at = 0, here; at < n; at += here) {
        here = n - at < 768 ? n - at : 768;
        for (size_t i = 0; i < here * 4; i++)
            bytes[i] = (uint8_t)((uint32_t)v[at + i / 4] >> 8 * (i % 4));
        base64_put(b, bytes, here * 4);
    }
}

/* Ids that the filters left, and where each token's begin: n_output + 1 offsets. */
static void put_kept(struct buf *b, const struct request *r)
{
    const int32_t zero = 0;
    struct buf ends = {0};
    buf_puts(b, ",\"top_p_token_ids\":\"");
    put_int32s(b, (const int32_t *)(const void *)r->kept.data, r->kept.len / sizeof(int32_t));
    buf_puts(b, "\",\"top_p_token_offsets\":\"");
    buf_put(&ends, &zero, sizeof zero);
    if (r->kept_ends.len) buf_put(&ends, r->kept_ends.data, r->kept_ends.len);
    put_int32s(b, (const int32_t *)(const void *)ends.data, ends.len / sizeof(int32_t));
    b->failed |= ends.failed;
    buf_release(&ends);
    buf_putc(b, '"');
}

/* What only an ended request has. */
static void put_end(struct xchg *x, const struct slot *sl)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out;
    struct timespec now;
    int64_t end = r->t_end ? r->t_end : clock_ns(), start = r->t_submit ? r->t_submit : end;
    clock_gettime(CLOCK_REALTIME, &now);
    buf_printf(b, ",\"e2e_latency\":%.6f,\"response_sent_to_client_ts\":%lld.%06ld",
               (double)(end - start) * 1e-9, (long long)now.tv_sec, now.tv_nsec / 1000);
    if (r->want_kept) put_kept(b, r);
    if (!r->has_experts) return;
    put_list(b, ",\"routed_experts\":\"", &sl->experts, "");
    if (!sl->encoded) experts_put(b, x->s->o.config, r);
    buf_printf(b, "\",\"routed_experts_start_len\":%d", r->experts_start);
}

static void put_meta(struct xchg *x, const struct slot *sl)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out;
    buf_puts(b, "{\"id\":");
    put_str(b, r->rid, strlen(r->rid));
    buf_puts(b, ",\"finish_reason\":");
    put_finish(b, r);
    char version[128];
    snprintf(version, sizeof version, "%s", r->weight_version);
    if (!*version) engine_weight_version(x->s->engine, version, sizeof version);
    buf_printf(b,
               ",\"prompt_tokens\":%d,\"completion_tokens\":%d,\"cached_tokens\":%d,"
               "\"cached_tokens_details\":null,\"reasoning_tokens\":0,\"num_retractions\":%d,"
               "\"sampling_seed\":%llu,\"weight_version\":",
               r->n_prompt, r->n_output, r->cached_tokens, r->num_retractions,
               (unsigned long long)r->sp.seed);
    put_str(b, version, strlen(version));
    buf_puts(b, ",\"weight_versions\":");
    put_spans(b, r);
    if (r->want_logprobs) put_logprobs(x, sl);
    if (r->done) put_end(x, sl);
    buf_putc(b, '}');
}

/* The caller holds r->lock, or r is done. */
static void put_result(struct xchg *x, struct slot *sl, bool delta)
{
    const struct request *r = sl->r;
    struct buf *b = &x->out;
    extend(x, sl, delta);
    put_list(b, "{\"text\":\"", &sl->json.text, "\"");
    put_list(b, ",\"output_ids\":[", &sl->json.ids, "]");
    if (x->return_prompt) {
        buf_puts(b, ",\"prompt_token_ids\":[");
        for (int32_t i = 0; i < r->n_prompt; i++)
            buf_printf(b, i ? ",%d" : "%d", r->prompt[i]);
        buf_putc(b, ']');
    }
    buf_puts(b, ",\"meta_info\":");
    put_meta(x, sl);
    if (x->stream && x->list) buf_printf(b, ",\"index\":%d", sl->index);
    buf_putc(b, '}');
}

void native_meta(struct xchg *x, struct slot *sl)
{
    extend(x, sl, true);
    put_meta(x, sl);
}

void native_build(struct xchg *x)
{
    if (x->list) buf_putc(&x->out, '[');
    for (int32_t i = 0; i < x->n_slots; i++) {
        if (i) buf_putc(&x->out, ',');
        put_result(x, &x->slots[i], false);
    }
    if (x->list) buf_putc(&x->out, ']');
}

void native_frame(struct xchg *x, struct slot *sl)
{
    buf_puts(&x->out, "data: ");
    put_result(x, sl, x->incremental);
    buf_puts(&x->out, "\n\n");
}

static struct slot *next_to_encode(struct xchg *x)
{
    struct slot *found = NULL;
    pthread_mutex_lock(&x->m);
    for (int32_t i = 0; i < x->n_slots && !found; i++)
        if (x->slots[i].to_encode) found = &x->slots[i];
    if (found)
        found->to_encode = false;
    else
        x->encoding = false;
    pthread_mutex_unlock(&x->m);
    return found;
}

void native_encode(struct xchg *x)
{
    for (struct slot *sl; (sl = next_to_encode(x));) {
        experts_put(&sl->experts, x->s->o.config, sl->r);
        xchg_encoded(sl);
    }
}
