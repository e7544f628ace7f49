/* api_admin.c - routes: the table, health, information, control. */
#include "base/clock.h"
#include "server/internal.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

static void health(struct xchg *x)
{
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
    engine_stat(s->engine, &st);
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

static void model_info(struct xchg *x)
{
    const struct config *c = x->s->o.config;
    buf_putc(&x->out, '{');
    put_common(x);
    put_field(&x->out, "model_type", c->model_type);
    buf_printf(&x->out, "\"is_generation\":true,\"preferred_sampling_params\":null,"
               "\"has_image_understanding\":false,\"has_audio_understanding\":false,"
               "\"architectures\":[\"%s\"],\"max_model_len\":%d}", c->architecture, x->s->o.context_len);
}

static void server_info(struct xchg *x)
{
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

static void loads(struct xchg *x)
{
    struct engine_stats st;
    engine_stat(x->s->engine, &st);
    double used = st.pages_total ? (double)(st.pages_total - st.pages_free - st.pages_cached) / st.pages_total : 0;
    buf_printf(&x->out, "{\"timestamp\":%lld,\"version\":\"moult\",\"loads\":[{\"dp_rank\":0,\"num_running_reqs\":%d,"
               "\"num_waiting_reqs\":%d,\"num_total_reqs\":%d,\"token_usage\":%.4f,\"gen_throughput\":%.3f,"
               "\"max_running_requests\":%d}]}", (long long)time(NULL), st.running, st.waiting,
               st.running + st.waiting, used, st.gen_throughput, x->s->o.max_running);
}

static void flush(struct xchg *x)
{
    struct err e = {0};
    err_t rc = engine_flush(x->s->engine, &e);
    reply_text(x, rc ? err_http(rc) : 200, "text/plain", rc ? e.msg : "Cache flushed.\n");
}

static void abort_request(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *rid = "";
    bool all = false;
    if (json_get_str(b, "rid", &rid, &e) || json_get_bool(b, "abort_all", &all, &e)) {
        reply_err(x, &e);
        return;
    }
    engine_abort(x->s->engine, rid, all);
}

static void update(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *path = NULL;
    struct update_options o = {.flush_cache = true};
    struct update_result res = {0};
    char message[1400];
    err_t rc;
    if ((rc = json_get_str(b, "model_path", &path, &e)) ||
        (rc = json_get_str(b, "weight_version", &o.weight_version, &e)) ||
        (rc = json_get_bool(b, "flush_cache", &o.flush_cache, &e)) ||
        (rc = json_get_bool(b, "abort_all_requests", &o.abort_all, &e))) {
        reply_err(x, &e);
        return;
    }
    if (!path) {
        reply_error(x, 400, "model_path: missing; must be a string");
        return;
    }
    int64_t t = clock_ns();
    rc = engine_update(x->s->engine, path, &o, &res, &e);
    if (rc) snprintf(message, sizeof message, "Failed to update weights: %s", e.msg);
    else if (o.weight_version)
        snprintf(message, sizeof message, "Succeeded to update model weights. Weight version updated to %s.", o.weight_version);
    else snprintf(message, sizeof message, "Succeeded to update model weights.");
    x->status = rc ? 400 : 200;
    buf_printf(&x->out, "{\"success\":%s,\"message\":", rc ? "false" : "true");
    put_str(&x->out, message, strlen(message));
    buf_printf(&x->out, ",\"num_paused_requests\":%d,\"stage_s\":%.6f,\"drain_s\":%.6f,\"swap_s\":%.6f,"
               "\"total_s\":%.6f,\"bytes\":%llu,\"epoch\":%llu", res.num_paused, res.stage_s, res.drain_s, res.swap_s,
               (double)(clock_ns() - t) * 1e-9, (unsigned long long)res.bytes, (unsigned long long)res.epoch);
    if (*res.warning) {
        buf_puts(&x->out, ",\"warning\":");
        put_str(&x->out, res.warning, strlen(res.warning));
    }
    buf_putc(&x->out, '}');
}

static void weight_version(struct xchg *x)
{
    char v[128];
    engine_weight_version(x->s->engine, v, sizeof v);
    buf_puts(&x->out, "{\"weight_version\":");
    put_str(&x->out, v, strlen(v));
    buf_putc(&x->out, '}');
}

void api_admin(struct xchg *x, const json_t *b)
{
    const char *p = x->route->path;
    if (!strcmp(p, "/")) reply_text(x, 200, "application/json", "\"Moult is running\"");
    else if (!strcmp(p, "/ping")) x->type = NULL;
    else if (!strncmp(p, "/health", 7)) health(x);
    else if (strstr(p, "model_info")) model_info(x);
    else if (strstr(p, "server_info")) server_info(x);
    else if (strstr(p, "weight_version")) weight_version(x);
    else if (!strcmp(p, "/v1/loads")) loads(x);
    else if (!strcmp(p, "/flush_cache")) flush(x);
    else if (!strcmp(p, "/abort_request")) abort_request(x, b);
    else update(x, b);
    xchg_ready(x);
}

static const struct route routes[] = {
    {"/", M_GET, RUN_INLINE, true, false, api_admin},
    {"/ping", M_GET, RUN_INLINE, true, false, api_admin},
    {"/health", M_GET, RUN_INLINE, false, false, api_admin},
    {"/health_generate", M_GET, RUN_INLINE, false, false, api_admin},
    {"/model_info", M_GET, RUN_INLINE, false, false, api_admin},
    {"/get_model_info", M_GET, RUN_INLINE, false, false, api_admin},
    {"/server_info", M_GET, RUN_INLINE, false, false, api_admin},
    {"/get_server_info", M_GET, RUN_INLINE, false, false, api_admin},
    {"/weight_version", M_GET, RUN_INLINE, false, false, api_admin},
    {"/get_weight_version", M_GET, RUN_INLINE, false, false, api_admin},
    {"/v1/loads", M_GET, RUN_INLINE, false, false, api_admin},
    {"/v1/models", M_GET, RUN_INLINE, false, false, api_models},
    {"/v1/models/", M_GET, RUN_INLINE, false, false, api_model},
    {"/flush_cache", M_GET | M_POST, RUN_THREAD, false, false, api_admin},
    {"/abort_request", M_POST, RUN_WORKER, false, false, api_admin},
    {"/update_weights_from_disk", M_POST, RUN_THREAD, false, false, api_admin},
    {"/generate", M_POST | M_PUT, RUN_WORKER, false, false, api_generate},
    {"/v1/completions", M_POST, RUN_WORKER, false, true, api_completions},
    {"/v1/chat/completions", M_POST, RUN_WORKER, false, true, api_chat},
};

const struct route *route_find(const char *path)
{
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        size_t n = strlen(routes[i].path);
        bool prefix = n > 1 && routes[i].path[n - 1] == '/';
        if (prefix ? !strncmp(routes[i].path, path, n) && path[n] : !strcmp(routes[i].path, path)) return &routes[i];
    }
    return NULL;
}
