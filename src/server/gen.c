/* gen.c - what the generating routes share: prompts, submission, streaming. */
#include "base/mem.h"
#include "server/chat_parse.h"
#include "server/internal.h"
#include "server/record.h"
#include <stdio.h>
#include <string.h>

/* The first sample of the first prompt says how many there will be. */
static err_t make_slots(struct xchg *x, int n, struct err *e)
{
    size_t total = (size_t)n * (size_t)x->n_prompts;
    if (total > GEN_MAX_REQUESTS)
        return err_set(e, ERR_INPUT,
                       "n: %d samples of %d prompts; at most %d in one call are allowed", n,
                       x->n_prompts, GEN_MAX_REQUESTS);
    x->slots = mem_try_array(total, sizeof *x->slots);
    if (!x->slots) return err_set(e, ERR_NOMEM, "n: out of memory");
    x->n_samples = n;
    return OK;
}

struct request *gen_add(struct xchg *x, const json_t *params, enum sampling_api api, int sample,
                        struct err *e)
{
    int n = 1;
    struct request *r = request_new();
    if (!r) {
        err_set(e, ERR_NOMEM, "out of memory");
        return NULL;
    }
    r->stream_interval = x->s->o.stream_interval;
    err_t rc = sampling_parse(params, api, x->s->o.config, r, &n, e);
    if (!rc) rc = constraint_parse(x, params, api, sample, r, e);
    if (!rc && !x->slots) rc = make_slots(x, n, e);
    if (!rc && n != x->n_samples)
        rc = err_set(e, ERR_INPUT, "n: %d is not allowed; all prompts must share n", n);
    if (rc) {
        request_unref(r);
        return NULL;
    }
    if (sample) r->sp.seed = x->slots[x->n_slots - 1].r->sp.seed;
    r->sp.sample_index = (uint32_t)sample;
    struct slot *sl = &x->slots[x->n_slots];
    *sl = (struct slot){.x = x, .r = r, .index = x->n_slots++};
    r->ctx = sl;
    return r;
}

err_t gen_text(struct xchg *x, struct request *r, const char *text, size_t n, bool bos,
               struct err *e)
{
    const struct server_options *o = &x->s->o;
    if (!o->tokenizer)
        return err_set(e, ERR_INPUT, "text: this server has no tokenizer; give input_ids");
    struct ids ids = {0};
    if (bos && o->add_bos && !ids_push(&ids, o->bos_id))
        return err_set(e, ERR_NOMEM, "text: out of memory");
    err_t rc = tokenizer_encode(o->tokenizer, &ids, text, n, e);
    if (rc) {
        ids_release(&ids);
        return rc;
    }
    r->n_prompt = (int32_t)ids.n;
    r->prompt = mem_try_array(ids.n + 1, sizeof *r->prompt);
    if (r->prompt && ids.n) memcpy(r->prompt, ids.v, ids.n * sizeof *ids.v);
    ids_release(&ids);
    return r->prompt ? OK : err_set(e, ERR_NOMEM, "text: out of memory");
}

err_t gen_prompt(struct xchg *x, struct request *r, const json_t *v, const char *name,
                 struct err *e)
{
    if (json_is_string(v))
        return gen_text(x, r, json_string_value(v), json_string_length(v), true, e);
    return json_ids(v, name, x->s->o.config->vocab_size, &r->prompt, &r->n_prompt, e);
}

err_t gen_finish(struct xchg *x, struct request *r, struct err *e)
{
    int32_t context = x->s->o.context_len;
    if (!r->n_prompt) return err_set(e, ERR_INPUT, "input_ids cannot be empty.");
    if (r->n_prompt >= context)
        return err_set(
            e, ERR_INPUT,
            "The input (%d tokens) is longer than the model's context length (%d tokens).",
            r->n_prompt, context);
    if (r->logprob_start > r->n_prompt)
        return err_set(e, ERR_INPUT,
                       "logprob_start_len: %d is not allowed; must be in -1..%d (the prompt)",
                       r->logprob_start, r->n_prompt);
    if (r->logprob_start == r->n_prompt) r->logprob_start = -1;
    if (r->max_new_tokens > context - r->n_prompt) r->max_new_tokens = context - r->n_prompt;
    if (r->min_new_tokens > r->max_new_tokens) r->min_new_tokens = r->max_new_tokens;
    if (!*r->rid) put_id(r->rid, sizeof r->rid, "");
    r->notify = xchg_notify;
    return OK;
}

err_t gen_rid(struct request *r, const char *rid, int number, struct err *e)
{
    int len = number < 0 ? snprintf(r->rid, sizeof r->rid, "%s", rid)
                         : snprintf(r->rid, sizeof r->rid, "%s_%d", rid, number);
    if (len < (int)sizeof r->rid && *rid) return OK;
    return err_set(e, ERR_INPUT, "rid: %d bytes are not allowed; must be 1..%zu", len,
                   sizeof r->rid - 1);
}

void slot_release(struct slot *sl)
{
    const struct server_options *o = &sl->x->s->o;
    if (sl->counted && o->log_requests) request_log(sl->x, sl->r);
    if (sl->counted && o->record)
        record_out(o->record, sl->x->id, sl->index, sl->r, gen_reason(sl->r));
    request_unref(sl->r);
    chat_parser_free(sl->parser);
    buf_release(&sl->experts);
    buf_release(&sl->json.text);
    buf_release(&sl->json.ids);
    buf_release(&sl->json.logprobs);
    buf_release(&sl->json.top);
    buf_release(&sl->json.input);
    buf_release(&sl->json.input_top);
    buf_release(&sl->json.of);
    buf_release(&sl->json.input_of);
}

void gen_submit(struct xchg *x)
{
    struct err e = {0};
    for (int32_t i = 0; i < x->n_slots; i++) {
        struct slot *sl = &x->slots[i];
        atomic_fetch_add(&x->refs, 1); /* until its last notify */
        if (!engine_submit(x->s->engine, sl->r, &e)) continue;
        xchg_unref(x);
        pthread_mutex_lock(&x->m);
        x->replied = true; /* keeps the notifies of the others from building */
        x->stream = false;
        pthread_mutex_unlock(&x->m);
        for (int32_t j = 0; j < i; j++)
            engine_abort_request(x->s->engine, x->slots[j].r);
        reply_err(x, &e);
        pthread_mutex_lock(&x->m);
        x->replied = false;
        x->n_done = INT32_MIN / 2;
        pthread_mutex_unlock(&x->m);
        xchg_ready(x);
        return;
    }
    pthread_mutex_lock(&x->m);
    x->submitted = true;
    bool gone = x->gone;
    pthread_mutex_unlock(&x->m);
    for (int32_t i = 0; gone && i < x->n_slots; i++)
        engine_abort_request(x->s->engine, x->slots[i].r);
    if (x->stream) xchg_ready(x);
}

bool gen_failed(struct xchg *x)
{
    for (int32_t i = 0; i < x->n_slots; i++) {
        struct request *r = x->slots[i].r;
        if (r->finish != FINISH_ABORT || !r->finish_status) continue;
        reply_error(x, r->finish_status, r->finish_message);
        return true;
    }
    return false;
}

/* Something new, and enough of it: the first token, then every stream_interval, and the end. */
static bool frame_due(const struct slot *sl)
{
    int32_t fresh = sl->r->n_output - sl->sent_ids;
    if (sl->r->done) return !sl->r->has_experts || sl->encoded;
    return fresh > 0 && (!sl->sent_ids || fresh >= sl->r->stream_interval);
}

void gen_pull(struct xchg *x)
{
    int32_t finished = 0;
    for (int32_t i = 0; i < x->n_slots; i++) {
        struct slot *sl = &x->slots[i];
        if (!sl->finished) {
            pthread_mutex_lock(&sl->r->lock);
            if (sl->r->done && sl->r->finish == FINISH_ABORT && sl->r->finish_status) {
                buf_puts(&x->out, "data: ");
                error_put(&x->out, ERROR_FRAME, sl->r->finish_status, sl->r->finish_message);
                buf_puts(&x->out, "\n\n");
                sl->finished = true;
            } else if (frame_due(sl)) {
                bool done = sl->r->done;
                x->frame(x, sl);
                sl->sent_ids = sl->r->n_output;
                sl->sent_text = sl->r->text_sent;
                sl->finished = done;
            }
            pthread_mutex_unlock(&sl->r->lock);
        }
        finished += sl->finished;
    }
    if (finished < x->n_slots || x->stream_end) return;
    if (x->last) x->last(x);
    buf_puts(&x->out, "data: [DONE]\n\n");
    x->stream_end = true;
}

const char *gen_reason(const struct request *r)
{
    switch (r->finish) {
    case FINISH_STOP_ID:
    case FINISH_STOP_STRING: return "stop";
    case FINISH_ABORT: return "abort";
    default: return "length";
    }
}
