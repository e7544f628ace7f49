/* api_info.c - what is asked about the server: health, model, load. */
#include "base/clock.h"
#include "base/mem.h"
#include "engine/expert_load.h"
#include "engine/updates.h"
#include "server/info.h"
#include "server/internal.h"
#include <stdio.h>
#include <stdlib.h>
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
    if (v)
        put_str(b, v, strlen(v));
    else
        buf_puts(b, "null");
    buf_putc(b, ',');
}

static void put_common(struct xchg *x)
{
    struct buf *b = &x->out;
    char path[1024], version[128];
    engine_model_path(x->s->engine, path, sizeof path);
    engine_weight_version(x->s->engine, version, sizeof version);
    put_field(b, "model_path", path);
    put_field(b, "tokenizer_path",
              x->s->o.tokenizer_path ? x->s->o.tokenizer_path : x->s->o.model_path);
    put_field(b, "weight_version", version);
}

void api_model_info(struct xchg *x, const json_t *body)
{
    (void)body;
    const struct config *c = x->s->o.config;
    buf_putc(&x->out, '{');
    put_common(x);
    put_field(&x->out, "model_type", c->model_type);
    char *preferred = x->s->preferred ? json_dumps(x->s->preferred, JSON_COMPACT) : NULL;
    buf_printf(&x->out, "\"is_generation\":true,\"preferred_sampling_params\":%s,",
               preferred ? preferred : "null");
    free(preferred);
    buf_printf(&x->out,
               "\"has_image_understanding\":false,\"has_audio_understanding\":false,"
               "\"architectures\":[\"%s\"],\"max_model_len\":%d}",
               c->architecture, x->s->o.context_len);
}

#define GIB ((double)(1 << 30)) /* SGLang's unit of memory_usage */

void api_server_info(struct xchg *x, const json_t *body)
{
    (void)body;
    struct engine_stats st;
    struct buf *b = &x->out;
    engine_stat(x->s->engine, &st);
    buf_putc(b, '{');
    put_common(x);
    put_field(b, "served_model_name",
              x->s->o.served_model_name ? x->s->o.served_model_name : x->s->o.model_path);
    info_put(b, &x->s->o, x->s->port);
    buf_printf(b,
               ",\"max_req_input_len\":%d,\"max_total_num_tokens\":%lld,\"status\":\"ready\","
               "\"version\":\"moult\","
               "\"kv_pages_total\":%d,\"kv_pages_free\":%d,\"kv_pages_cached\":%d,\"steps\":%lld,"
               "\"epoch\":%llu,"
               "\"internal_states\":[{\"last_gen_throughput\":%.3f,\"effective_max_running_"
               "requests_per_dp\":%d,\"memory_usage\":{\"weight\":%.6f,\"kvcache\":%.6f,"
               "\"token_capacity\":%lld,\"graph\":%.6f}}]}",
               x->s->o.context_len - 1, (long long)st.pages_total * KV_PAGE, st.pages_total,
               st.pages_free, st.pages_cached, (long long)st.steps, (unsigned long long)st.epoch,
               st.gen_throughput, x->s->o.max_running, (double)x->s->o.loaded.weights / GIB,
               (double)x->s->o.loaded.kv / GIB, (long long)st.pages_total * KV_PAGE,
               (double)x->s->o.loaded.graphs / GIB);
}

/* Tokens that hold KV for somebody, without what only the prefix cache keeps. */
static long long used_tokens(const struct engine_stats *st)
{
    return (long long)(st->pages_total - st->pages_free - st->pages_cached) * KV_PAGE;
}

/* {"counts": [[tokens of expert 0, ...] of layer 0, ...]}; they grow while somebody asks. */
void api_expert_load(struct xchg *x, const json_t *body)
{
    const struct config *c = x->s->o.config;
    struct err e = {0};
    uint64_t *counts = NULL;
    (void)body;
    if (engine_expert_load(x->s->engine, &counts, &e)) {
        reply_err(x, &e);
        return;
    }
    buf_puts(&x->out, "{\"counts\":[");
    for (int32_t i = 0; i < c->n_layers; i++) {
        buf_puts(&x->out, i ? ",[" : "[");
        for (int32_t k = 0; k < c->n_experts; k++)
            buf_printf(&x->out, k ? ",%llu" : "%llu",
                       (unsigned long long)counts[(size_t)i * (size_t)c->n_experts + (size_t)k]);
        buf_putc(&x->out, ']');
    }
    buf_puts(&x->out, "]}");
    mem_free(counts);
}

void api_metrics(struct xchg *x, const json_t *body)
{
    const struct server_options *o = &x->s->o;
    struct engine_stats st;
    (void)body;
    engine_stat(x->s->engine, &st);
    x->type = "text/plain; version=0.0.4; charset=utf-8";
    metrics_put(&x->out, &x->s->metrics, &st, engine_update_totals(x->s->engine), o->loaded.seconds,
                o->metrics_prefix ? o->metrics_prefix : "moult_",
                o->served_model_name ? o->served_model_name : o->model_path);
}

/* The older form, which sglang-router asks for to choose the less loaded worker. */
void api_get_load(struct xchg *x, const json_t *body)
{
    (void)body;
    struct engine_stats st;
    engine_stat(x->s->engine, &st);
    buf_printf(&x->out,
               "[{\"dp_rank\":0,\"num_reqs\":%d,\"num_waiting_reqs\":%d,\"num_tokens\":%lld,"
               "\"num_pending_tokens\":%lld,\"ts_tic\":%.3f}]",
               st.running + st.waiting, st.waiting, used_tokens(&st) + (long long)st.waiting_tokens,
               (long long)st.waiting_tokens, clock_s());
}

/* Is `word` one of the comma-separated ones? */
static bool has_word(const char *list, const char *word)
{
    for (size_t n = strlen(word); list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (!strncmp(list, word, n) && (list[n] == ',' || !list[n])) return true;
    return false;
}

/* Sections of /v1/loads; those after the first three are known to clients and empty here. */
static const char *const sections[] = {"core", "memory", "queues", "all", "spec", "lora", "disagg"};

static bool check_loads(struct xchg *x, const char *include, const char *format, const char *rank)
{
    for (const char *at = include; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char word[32];
        bool known = false;
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        for (size_t i = 0; i < sizeof sections / sizeof sections[0]; i++)
            known = known || !strcmp(word, sections[i]);
        if (known) continue;
        reply_error(x, 400,
                    "include: must be a list of core, memory, queues, spec, lora, disagg, or all");
        return false;
    }
    if (format && strcmp(format, "json") != 0 && strcmp(format, "prometheus") != 0)
        return reply_error(x, 400, "format: must be json or prometheus"), false;
    if (rank && strcmp(rank, "0") != 0)
        return reply_error(x, 400, "dp_rank: there is one rank, 0"), false;
    return true;
}

/* Queues: `waiting` is all that wait, `retracted` those of them that have run before, `paused` all that a pause
 * holds, with KV or without. */
void api_loads(struct xchg *x, const json_t *body)
{
    (void)body;
    struct engine_stats st;
    struct buf *b = &x->out;
    const char *include = MHD_lookup_connection_value(x->c, MHD_GET_ARGUMENT_KIND, "include");
    const char *format = MHD_lookup_connection_value(x->c, MHD_GET_ARGUMENT_KIND, "format");
    const char *rank = MHD_lookup_connection_value(x->c, MHD_GET_ARGUMENT_KIND, "dp_rank");
    if (!check_loads(x, include, format, rank)) return;
    engine_stat(x->s->engine, &st);
    double pages = st.pages_total > 0 ? st.pages_total : 1, asked = (double)st.prompt_tokens;
    const struct {
        const char *name;
        double value;
        int digits;
    } rows[] = {
        {"num_running_reqs", st.running, 0},
        {"num_waiting_reqs", st.waiting, 0},
        {"num_total_reqs", st.running + st.waiting, 0},
        {"num_waiting_uncached_tokens", (double)st.waiting_tokens, 0},
        {"num_used_tokens", (double)used_tokens(&st), 0},
        {"num_total_tokens", (double)(used_tokens(&st) + st.waiting_tokens), 0},
        {"max_total_num_tokens", (double)st.pages_total * KV_PAGE, 0},
        {"max_running_requests", x->s->o.max_running, 0},
        {"token_usage", (st.pages_total - st.pages_free - st.pages_cached) / pages, 4},
        {"gen_throughput", st.gen_throughput, 3},
        {"cache_hit_rate", asked > 0 ? (double)st.cached_tokens / asked : 0, 4},
        {"utilization", x->s->o.max_running ? (double)st.running / x->s->o.max_running : 0, 4},
    };
    bool text = format && !strcmp(format, "prometheus"), all = !include || has_word(include, "all");
    if (text)
        x->type = "text/plain; version=0.0.4";
    else
        buf_printf(b,
                   "{\"timestamp\":%lld,\"version\":\"moult\",\"loads\":[{\"timestamp\":%lld,\"dp_"
                   "rank\":0",
                   (long long)time(NULL), (long long)time(NULL));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        buf_printf(b, text ? "sglang:%s{dp_rank=\"0\"} %.*f\n" : ",\"%s\":%.*f", rows[i].name,
                   rows[i].digits, rows[i].value);
    if (text) return;
    if (all || has_word(include, "memory"))
        buf_printf(b, ",\"memory\":{\"token_capacity\":%lld}", (long long)st.pages_total * KV_PAGE);
    if (all || has_word(include, "queues"))
        buf_printf(b, ",\"queues\":{\"waiting\":%d,\"grammar\":0,\"paused\":%d,\"retracted\":%d}",
                   st.waiting, st.held, st.retracted);
    const char *pause = api_pause_name(st.paused);
    buf_puts(b, ",\"paused\":");
    if (pause)
        put_str(b, pause, strlen(pause));
    else
        buf_puts(b, "null");
    buf_puts(b, "}]}");
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
