/* api_info.c - what is asked about the server: health, model, load. */
#include "base/clock.h"
#include "server/internal.h"
#include <string.h>
#include <time.h>

bool waiting_for_update(struct server *s)
{
    struct engine_stats st;
    if (!s->o.ready_after_update) return false;
    engine_stat(s->engine, &st);
    return st.updates == 0;
}

void api_health(struct xchg *x, const json_t *body)
{
    (void)body;
    struct server *s = x->s;
    struct engine_stats st;
    if (!s->ready) {
        x->status = 503;
        buf_printf(&x->out, "{\"status\":\"loading\",\"progress\":%.3f}", (double)s->progress);
        return;
    }
    if (s->draining) {
        x->status = 503;
        buf_puts(&x->out, "{\"status\":\"stopping\"}");
        return;
    }
    if (waiting_for_update(s)) {
        x->status = 503;
        buf_puts(&x->out, "{\"status\":\"waiting for the first update\"}");
        return;
    }
    engine_stat(s->engine, &st);
    if (memory_health(x, &st)) return;
    x->status = st.stuck ? 503 : 200;
    if (st.stuck) buf_puts(&x->out, "{\"status\":\"stuck\"}");
}

static void put_field(struct buf *b, const char *name, const char *v)
{
    buf_printf(b, "\"%s\":", name);
    if (v) put_str(b, v, strlen(v));
    else buf_puts(b, "null");
    buf_putc(b, ',');
}

static void put_common(struct xchg *x)
{
    struct buf *b = &x->out;
    char path[1024], version[128];
    engine_model_path(x->s->engine, path, sizeof path);
    engine_weight_version(x->s->engine, version, sizeof version);
    put_field(b, "model_path", path);
    put_field(b, "tokenizer_path", x->s->o.tokenizer_path ? x->s->o.tokenizer_path : x->s->o.model_path);
    put_field(b, "weight_version", version);
}

void api_model_info(struct xchg *x, const json_t *body)
{
    (void)body;
    const struct config *c = x->s->o.config;
    buf_putc(&x->out, '{');
    put_common(x);
    put_field(&x->out, "model_type", c->model_type);
    buf_printf(&x->out, "\"is_generation\":true,\"preferred_sampling_params\":null,"
               "\"has_image_understanding\":false,\"has_audio_understanding\":false,"
               "\"architectures\":[\"%s\"],\"max_model_len\":%d}", c->architecture, x->s->o.context_len);
}

void api_server_info(struct xchg *x, const json_t *body)
{
    (void)body;
    struct engine_stats st;
    struct buf *b = &x->out;
    engine_stat(x->s->engine, &st);
    buf_putc(b, '{');
    put_common(x);
    put_field(b, "served_model_name", x->s->o.served_model_name ? x->s->o.served_model_name : x->s->o.model_path);
    put_field(b, "host", x->s->o.host);
    buf_printf(b, "\"port\":%d,\"tp_size\":1,\"dp_size\":1,\"pp_size\":1,\"ep_size\":1,\"disaggregation_mode\":\"null\","
               "\"context_length\":%d,\"max_req_input_len\":%d,\"max_running_requests\":%d,\"status\":\"ready\","
               "\"version\":\"moult\",\"kv_pages_total\":%d,\"kv_pages_free\":%d,\"kv_pages_cached\":%d,"
               "\"steps\":%lld,\"epoch\":%llu,\"internal_states\":[{\"last_gen_throughput\":%.3f,"
               "\"effective_max_running_requests_per_dp\":%d}]}",
               x->s->port, x->s->o.context_len, x->s->o.context_len - 1, x->s->o.max_running, st.pages_total,
               st.pages_free, st.pages_cached, (long long)st.steps, (unsigned long long)st.epoch,
               st.gen_throughput, x->s->o.max_running);
}

/* Tokens that hold KV for somebody, without what only the prefix cache keeps. */
static long long used_tokens(const struct engine_stats *st)
{
    return (long long)(st->pages_total - st->pages_free - st->pages_cached) * KV_PAGE;
}

/* The older form, which sglang-router asks for to choose the less loaded worker. */
void api_get_load(struct xchg *x, const json_t *body)
{
    (void)body;
    struct engine_stats st;
    engine_stat(x->s->engine, &st);
    buf_printf(&x->out, "[{\"dp_rank\":0,\"num_reqs\":%d,\"num_waiting_reqs\":%d,\"num_tokens\":%lld,"
               "\"num_pending_tokens\":%lld,\"ts_tic\":%.3f}]", st.running + st.waiting, st.waiting,
               used_tokens(&st) + (long long)st.waiting_tokens, (long long)st.waiting_tokens, clock_s());
}

/* queues: `waiting` is all that wait, `retracted` those of them that have run before, `paused` all that a pause
 * holds, with KV or without. */
static void put_load(struct buf *b, const struct engine_stats *st, int max_running)
{
    double total = st->pages_total > 0 ? st->pages_total : 1;
    double seen = (double)(st->prompt_tokens + st->cached_tokens);
    const char *pause = api_pause_name(st->paused);
    long long used = used_tokens(st);
    buf_printf(b, "{\"timestamp\":%.3f,\"dp_rank\":0,\"num_running_reqs\":%d,\"num_waiting_reqs\":%d,\"num_total_reqs\":%d,"
               "\"num_waiting_uncached_tokens\":%lld,\"num_used_tokens\":%lld,\"num_total_tokens\":%lld,"
               "\"max_total_num_tokens\":%lld,\"max_running_requests\":%d,\"token_usage\":%.4f,\"gen_throughput\":%.3f,"
               "\"cache_hit_rate\":%.4f,\"utilization\":%.4f,\"memory\":{\"token_capacity\":%lld},",
               (double)time(NULL), st->running, st->waiting, st->running + st->waiting, (long long)st->waiting_tokens,
               used, used + (long long)st->waiting_tokens, (long long)st->pages_total * KV_PAGE, max_running,
               (double)(st->pages_total - st->pages_free - st->pages_cached) / total, st->gen_throughput,
               seen > 0 ? (double)st->cached_tokens / seen : 0, max_running > 0 ? (double)st->running / max_running : 0,
               (long long)st->pages_total * KV_PAGE);
    buf_printf(b, "\"queues\":{\"waiting\":%d,\"grammar\":0,\"paused\":%d,\"retracted\":%d},\"paused\":%s%s%s}", st->waiting,
               st->held, st->retracted, pause ? "\"" : "", pause ? pause : "null", pause ? "\"" : "");
}

void api_loads(struct xchg *x, const json_t *body)
{
    (void)body;
    struct engine_stats st;
    engine_stat(x->s->engine, &st);
    buf_printf(&x->out, "{\"timestamp\":%lld,\"version\":\"moult\",\"loads\":[", (long long)time(NULL));
    put_load(&x->out, &st, x->s->o.max_running);
    buf_puts(&x->out, "]}");
}

void api_weight_version(struct xchg *x, const json_t *body)
{
    (void)body;
    char v[128];
    engine_weight_version(x->s->engine, v, sizeof v);
    buf_puts(&x->out, "{\"weight_version\":");
    put_str(&x->out, v, strlen(v));
    buf_putc(&x->out, '}');
}

