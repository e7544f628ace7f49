#include "engine/request.h"

#include "base/mem.h"

struct request *request_new(void)
{
    struct request *r = mem_try(sizeof(*r));
    if (!r) return NULL;
    CHECK(pthread_mutex_init(&r->lock, NULL) == 0);
    atomic_init(&r->refs, 1);
    r->sp.temperature = 1.0f;
    r->sp.top_k = -1;
    r->sp.top_p = 1.0f;
    r->sp.repetition_penalty = 1.0f;
    r->skip_special = true;
    r->logprob_start = -1;
    r->matched_id = -1;
    r->matched_stop = -1;
    return r;
}

void request_ref(struct request *r)
{
    atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
}

static void free_rows(struct top_row *rows, int32_t n)
{
    for (int32_t i = 0; rows && i < n; i++) {
        mem_free(rows[i].ids);
        mem_free(rows[i].logprobs);
    }
    mem_free(rows);
}

void request_unref(struct request *r)
{
    if (!r || atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel) != 1) return;
    free_rows(r->output_top, r->n_output);
    if (r->logprob_start >= 0) free_rows(r->prompt_top, r->n_prompt - r->logprob_start);
    mem_free(r->prompt);
    mem_free(r->bias_ids);
    mem_free(r->bias);
    mem_free(r->stop_ids);
    for (int32_t i = 0; r->stops && i < r->n_stops + r->n_regexes; i++)
        mem_free(r->stops[i]);
    for (int32_t i = 0; i < r->n_regexes; i++)
        stop_regex_free(r->regexes[i]);
    mem_free(r->regexes);
    mem_free(r->stops);
    mem_free(r->stop_bytes);
    mem_free(r->extra_key);
    grammar_unref(r->grammar);
    mem_free(r->forced);
    mem_free(r->experts);
    mem_free(r->output_ids);
    mem_free(r->output_logprobs);
    mem_free(r->prompt_logprobs);
    mem_free(r->of);
    mem_free(r->output_of);
    mem_free(r->prompt_of);
    buf_release(&r->kept);
    buf_release(&r->kept_ends);
    mem_free(r->spans);
    buf_release(&r->text);
    pthread_mutex_destroy(&r->lock);
    mem_free(r);
}
