/* reqlog.c - --log-requests: one event for each request that ended. */
#include "base/log.h"
#include "server/internal.h"
#include <string.h>

static double seconds(int64_t from, int64_t to)
{
    return from && to ? (double)(to - from) * 1e-9 : 0;
}

void request_log(const struct xchg *x, const struct request *r)
{
    struct buf text = {0}, f = {0};
    double first = seconds(r->t_submit, r->t_first), whole = seconds(r->t_submit, r->t_end);
    buf_printf(
        &text,
        "request %s %s: %d prompt (%d cached), %d output, %s, first %.3f s, %.3f s, weights %s",
        r->rid, x->path, r->n_prompt, r->cached_tokens, r->n_output, gen_reason(r), first, whole,
        r->weight_version);
    buf_puts(&f, "\"rid\":");
    put_str(&f, r->rid, strlen(r->rid));
    buf_puts(&f, ",\"path\":");
    put_str(&f, x->path, strlen(x->path));
    buf_puts(&f, ",\"request_id\":");
    put_str(&f, x->id, strlen(x->id));
    buf_puts(&f, ",\"weight_version\":");
    put_str(&f, r->weight_version, strlen(r->weight_version));
    buf_printf(&f,
               ",\"prompt_tokens\":%d,\"cached_tokens\":%d,\"completion_tokens\":%d,\"finish\":\"%"
               "s\",\"retractions\":%d,"
               "\"queue_s\":%.6f,\"first_token_s\":%.6f,\"total_s\":%.6f",
               r->n_prompt, r->cached_tokens, r->n_output, gen_reason(r), r->num_retractions,
               seconds(r->t_submit, r->t_admit), first, whole);
    if (!text.failed && !f.failed) log_event(LOG_INFO, text.data, f.data);
    buf_release(&text);
    buf_release(&f);
}
