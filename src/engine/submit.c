/* submit.c - a request on its way in: what it asks for is checked, what it needs is allocated, in its caller's thread. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/mem.h"
#include "engine/constrain.h"
#include <string.h>

/* What only some models do. */
static err_t check_asked(const struct engine *e, const struct request *r, struct err *err)
{
    const struct {
        const char *name;
        bool wanted;
        unsigned needs;
    } rows[] = {{"routed_experts", r->n_forced > 0, MODEL_FORCED},
                {"token_ids_logprob", r->n_of > 0, MODEL_OF},
                {"return_top_p_token_ids", r->want_kept, MODEL_KEPT}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        if (rows[i].wanted && !(model_can(e->o.model) & rows[i].needs))
            return err_set(err, ERR_INPUT, "%s: not offered with this model on %s", rows[i].name,
                           model_isa(e->o.model));
    for (int32_t i = 0; i < r->n_of; i++)
        if (r->of[i] < 0 || r->of[i] >= e->o.config->vocab_size)
            return err_set(err, ERR_INPUT, "token_ids_logprob[%d]: %d is not in [0, %d)", i,
                           r->of[i], e->o.config->vocab_size);
    return OK;
}

static err_t check_request(const struct engine *e, const struct request *r, struct err *err)
{
    if (r->n_prompt < 1) return err_set(err, ERR_INPUT, "input_ids: the prompt is empty");
    for (int32_t i = 0; i < r->n_prompt; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= e->o.config->vocab_size)
            return err_set(err, ERR_INPUT, "input_ids[%d]: %d is not in [0, %d)", i, r->prompt[i],
                           e->o.config->vocab_size);
    if (r->max_new_tokens < 0)
        return err_set(err, ERR_INPUT, "max_new_tokens: %d is negative", r->max_new_tokens);
    if (r->logprob_start > r->n_prompt || r->n_top < 0 || r->n_top > SAMPLE_MAX_TOP)
        return err_set(err, ERR_INPUT, "logprob_start_len %d or top logprobs %d out of range",
                       r->logprob_start, r->n_top);
    if (sched_room(&e->s, r->n_prompt) < 0 ||
        (e->o.context_len > 0 && r->n_prompt > e->o.context_len))
        return err_set(err, ERR_INPUT,
                       "the prompt of %d tokens can never fit: the KV pool holds %lld tokens, the "
                       "context %d",
                       r->n_prompt, (long long)e->o.n_kv_pages * KV_PAGE, e->o.context_len);
    if (r->experts_start < 0 || r->experts_start > r->n_prompt || r->n_forced < 0 ||
        r->n_forced > r->n_prompt)
        return err_set(err, ERR_INPUT,
                       "experts from %d on, or given for %d tokens: the prompt has %d",
                       r->experts_start, r->n_forced, r->n_prompt);
    if (!e->o.tokenizer && r->n_stops + r->n_regexes > 0)
        return err_set(err, ERR_INPUT, "stop: stop strings need a tokenizer");
    if (r->grammar && e->o.config->n_eos + r->n_stop_ids == 0)
        return err_set(err, ERR_INPUT, "a grammar needs an end token, and the model names none");
    return check_asked(e, r, err);
}

static bool fill_seq(const struct engine *e, struct seq *q, struct request *r)
{
    q->r = r;
    q->n_ids = q->n_prompt = r->n_prompt;
    q->cap_ids = r->n_prompt + 16;
    q->ids = mem_try_array((size_t)q->cap_ids, sizeof(int32_t));
    if (!q->ids) return false;
    memcpy(q->ids, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    int64_t room = sched_room(&e->s, r->n_prompt);
    if (e->o.context_len > 0 && room > e->o.context_len - r->n_prompt)
        room = e->o.context_len - r->n_prompt;
    q->max_new = r->max_new_tokens < room ? r->max_new_tokens : (int32_t)room;
    q->next_score = r->n_prompt;
    if (r->logprob_start >= 0) {
        size_t n = (size_t)(r->n_prompt - r->logprob_start);
        q->next_score = r->logprob_start + 1;
        r->prompt_logprobs = mem_try_array(n + 1, sizeof(float));
        if (r->n_top > 0) r->prompt_top = mem_try_array(n + 1, sizeof(struct top_row));
        if (r->n_of > 0) {
            if (!mul_size(&n, n + 1, (size_t)r->n_of)) return false;
            r->prompt_of = mem_try_array(n, sizeof(float));
            if (!r->prompt_of) return false;
        }
        if (!r->prompt_logprobs || (r->n_top > 0 && !r->prompt_top)) return false;
    }
    return output_init(q, e->o.tokenizer) && constrain_init(q, e->o.config);
}

static err_t enter(struct engine *e, struct request *r, struct msg *m, struct rid_entry *x,
                   struct err *err)
{
    err_t rc = OK;
    pthread_mutex_lock(&e->lock);
    if (e->stopping)
        rc = err_set(err, ERR_STATE, "the server is shutting down");
    else if (memory_held(e))
        rc = memory_refuse(e, err);
    else if (rid_known(e, r->rid))
        rc = err_set(err, ERR_INPUT, "Duplicate request ID detected: %s", r->rid);
    else if (updates_check_weights(e, err) != OK)
        rc = ERR_BUSY;
    else if (e->o.max_queued > 0 &&
             e->in_flight - e->stats.running - e->stats.retracted >= e->o.max_queued)
        rc = err_set(err, ERR_BUSY, "the queue is full: %d requests wait", e->o.max_queued);
    if (rc == OK) {
        request_ref(r);
        *x = (struct rid_entry){.r = r};
        rid_add(e, x);
        e->in_flight++;
        *m = (struct msg){.kind = MSG_SUBMIT, .r = r};
        engine_post(e, m);
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

err_t engine_submit(struct engine *e, struct request *r, struct err *err)
{
    err_t rc = check_request(e, r, err);
    if (rc != OK) return rc;
    struct seq *q = mem_try(sizeof(*q));
    struct msg *m = mem_try(sizeof(*m));
    struct rid_entry *x = mem_try(sizeof(*x));
    r->t_submit = clock_ns();
    r->seq = q;
    if (!q || !m || !x || !fill_seq(e, q, r))
        rc = err_set(err, ERR_NOMEM, "no memory for the request");
    if (rc == OK) rc = enter(e, r, m, x, err);
    if (rc != OK) {
        r->seq = NULL;
        engine_seq_free(q);
        mem_free(m);
        mem_free(x);
    }
    return rc;
}
