/* serve.c - `moult serve`: flags, start, signals, orderly end. */
#include "base/clock.h"
#include "base/log.h"
#include "base/notify.h"
#include "cli/commands.h"
#include "cli/load.h"
#include "cli/numerics.h"
#include "cli/serve_options.h"
#include "cli/words.h"
#include "server/chat_parse.h"
#include "server/record.h"
#include "server/server.h"
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

struct start {
    struct server *server;
    bool tty;
    sigset_t signals;     /* blocked in every thread; the first one takes them */
    _Atomic int quarters; /* of the weights, already told */
};

static void show_progress(void *ctx, float part, const char *stage)
{
    struct start *s = ctx;
    int sig = sigtimedwait(&s->signals, NULL, &(struct timespec){0});
    if (sig > 0) _exit(128 + sig); /* nothing is served yet: nothing to drain */
    if (s->server) server_progress(s->server, part, stage);
    if (s->tty) {
        char bar[41];
        int full = (int)(part * 40.0f);
        for (int i = 0; i < 40; i++)
            bar[i] = i < full ? '#' : '.';
        bar[40] = 0;
        fprintf(stderr, "\r%s [%s] %3d%%%s", stage, bar, (int)(part * 100.0f),
                part >= 1.0f ? "\n" : "");
        return;
    }
    int quarter = (int)(part * 4.0f);
    if (quarter > atomic_load(&s->quarters)) {
        atomic_store(&s->quarters, quarter);
        log_line(LOG_INFO, "%s: %d%%", stage, quarter * 25);
    }
}

static struct load_options load_from(const struct serve_args *a, struct start *s)
{
    return (struct load_options){
        .model = a->model,
        .tokenizer_path = a->tokenizer_path,
        .context_len = a->context_length,
        .max_running = a->max_running,
        .max_queued = a->max_queued,
        .max_total_tokens = a->max_total_tokens,
        .mem_fraction = a->mem_fraction,
        .chunk = a->chunk,
        .threads = a->threads,
        .isa = a->isa,
        .device = a->device,
        .no_graphs = a->no_graphs,
        .no_overlap = a->no_overlap,
        .kv = strcmp(a->kv_dtype, "fp8_e4m3") == 0 ? KV_E4M3 : KV_BF16,
        .dummy = strcmp(a->load_format, "dummy") == 0,
        .quantization = a->quantization,
        .numerics = a->numerics,
        .weight_version = a->weight_version,
        .no_prefix_cache = a->no_prefix_cache,
        .keep_experts = a->keep_experts,
        .retract_every = a->retract_every,
        .watchdog_s = a->watchdog_s,
        .memory_saver = a->memory_saver,
        .weights_backup = a->weights_backup,
        .update_staging = a->update_staging,
        .loader_threads = a->loader_threads,
        .progress = show_progress,
        .ctx = s,
    };
}

static struct server_options server_from(const struct serve_args *a, const struct loaded *l)
{
    enum in_flight in_flight = IN_FLIGHT_DRAIN;
    (void)in_flight_parse(a->update_in_flight,
                          &in_flight); /* the table of flags lets only these in */
    return (struct server_options){
        .host = a->host,
        .port = (int)a->port,
        .served_model_name = a->served_name,
        .model_path = a->model,
        .tokenizer_path = a->tokenizer_path ? a->tokenizer_path : a->model,
        .tokenizer = l->tokenizer,
        .chat_template = l->text.chat,
        .config = &l->config,
        .bos_token = l->text.bos,
        .eos_token = l->text.eos,
        .bos_id = l->bos_id,
        .add_bos = l->text.add_bos,
        .context_len = l->context_len,
        .loaded = {.weights = l->weight_bytes,
                   .kv = (size_t)l->n_pages * l->page_bytes,
                   .graphs = l->device ? l->needs.graphs : 0,
                   .seconds = l->read_s},
        .api_key = a->api_key,
        .incremental_streaming = a->incremental,
        .stream_interval = (int)a->stream_interval,
        .preferred_sampling = a->preferred,
        .max_body_bytes = (size_t)a->max_body,
        .keep_alive_s = (int)a->keep_alive_s,
        .max_weight_body = (uint64_t)a->max_weight_body,
        .max_running = (int)a->max_running,
        .cache_report = a->cache_report,
        .tool_format = tool_format_find(a->tool_parser, l->text.source),
        .reasoning_format = reasoning_format_find(a->reasoning_parser, l->text.source),
        .keep_experts = a->keep_experts,
        .memory_saver = a->memory_saver,
        .update_in_flight = in_flight,
        .update_drain_s = a->update_drain_s,
        .ready_after_update = a->ready_after_update,
        .dtype = a->dtype,
        .load_format = a->load_format,
        .kv_cache_dtype = a->kv_dtype,
        .quantization = a->quantization,
        .admin_key = a->admin_key,
        .roots = a->allowed_paths.v,
        .n_roots = a->allowed_paths.n,
        .cors_origin = a->cors_origin,
        .metrics_prefix = strcmp(a->metrics_prefix, "sglang") == 0 ? "sglang:" : "moult_",
        .log_requests = a->log_requests,
    };
}

static void tell_plan(const struct loaded *l)
{
    const struct config *c = &l->config;
    struct buf b = {0};
    load_plan(l, &b);
    log_line(LOG_INFO, "model: %s, %d layers, %d experts (top %d), vocabulary %d, context %d",
             c->model_type, c->n_layers, c->n_experts, c->top_k, c->vocab_size, l->context_len);
    log_line(LOG_INFO, "%s", b.data ? b.data : "");
    buf_release(&b);
    for (const char *at = l->formats.data; at && *at;) {
        int n = (int)strcspn(at, "\n");
        log_line(LOG_INFO, "%.*s", n, at);
        at += n + (at[n] == '\n');
    }
}

/* SIGTERM and SIGINT are taken by sigwait in the first thread alone; a gone client never kills. */
static void own_signals(sigset_t *set)
{
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    pthread_sigmask(SIG_BLOCK, set, NULL);
}

/* A connection is a descriptor: take as many as the system allows. */
static void raise_files(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0) return;
    r.rlim_cur = r.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &r);
}

/* Let what runs and an update finish, at most `seconds`, or until a second signal.  What a pause holds would not end. */
static void drain(struct engine *engine, double seconds, const sigset_t *set)
{
    double until = clock_s() + seconds;
    while (clock_s() < until) {
        struct engine_stats st;
        engine_stat(engine, &st);
        if ((st.paused || st.running + st.waiting == 0) && !st.updating) return;
        struct timespec step = {.tv_nsec = 50000000};
        if (sigtimedwait(set, NULL, &step) > 0) return;
    }
}

static void tell_numerics(const struct loaded *l, const struct numerics *n)
{
    struct buf b = {0};
    numerics_tell(l, n, &b);
    log_line(LOG_INFO, "%s", b.data ? b.data : "");
    buf_release(&b);
}

/* A key that a flag sets would only hide what runs; the address is the exception: clients may know us by another. */
static err_t info_from(struct server_info **out, const struct serve_args *a, struct err *e)
{
    for (size_t i = 0; i < a->server_info.n; i++)
        for (size_t k = 0; k < serve_command.n_opts; k++) {
            const struct opt *o = &serve_command.opts[k];
            const char *key = a->server_info.v[i], *name = o->name;
            if (o->cls != OPT_HONOURED || strcmp(name, "host") == 0 || strcmp(name, "port") == 0)
                continue;
            while (*name && *key == (*name == '-' ? '_' : *name))
                key++, name++;
            if (*name == 0 && *key == '=')
                return err_set(e, ERR_INPUT, "--server-info %.100s: give --%s", a->server_info.v[i],
                               o->name);
        }
    return server_info_new(out, a->server_info.v, a->server_info.n, e);
}

/* One line of what has happened since the last one; none while nothing does. */
static void tell_status(struct engine *engine, struct engine_stats *last, double seconds)
{
    struct engine_stats st;
    char version[128], line[512];
    engine_stat(engine, &st);
    engine_weight_version(engine, version, sizeof version);
    int64_t in = st.prompt_tokens - last->prompt_tokens,
            cached = st.cached_tokens - last->cached_tokens;
    int64_t out = st.output_tokens - last->output_tokens;
    int32_t used = st.pages_total - st.pages_free - st.pages_cached;
    bool news = in || out || st.running || st.waiting || st.epoch != last->epoch;
    snprintf(line, sizeof line,
             "STATUS=%d running, %d waiting | in %.0f tok/s (%.0f%% cached), out %.0f tok/s | KV "
             "%.0f%% used, %.0f%% cached | "
             "%lld done, %lld aborted, %lld retracted | weights %s, epoch %llu",
             st.running, st.waiting, (double)in / seconds,
             in ? 100.0 * (double)cached / (double)in : 0.0, (double)out / seconds,
             100.0 * used / st.pages_total, 100.0 * st.pages_cached / st.pages_total,
             (long long)(st.finished - last->finished), (long long)(st.aborted - last->aborted),
             (long long)(st.retractions - last->retractions), version,
             (unsigned long long)st.epoch);
    if (news) log_line(LOG_INFO, "%s", line + strlen("STATUS="));
    notify(line);
    *last = st;
}

/* Until a signal comes: status lines, and the service manager's watchdog while steps end. */
static int wait_for_signal(struct engine *engine, double status_s, const sigset_t *set)
{
    double dog = notify_interval(), now = clock_s(), status_at = now, dog_at = now;
    struct engine_stats last;
    engine_stat(engine, &last);
    for (;;) {
        double until = now + 3600;
        if (status_s > 0 && status_at + status_s < until) until = status_at + status_s;
        if (dog > 0 && dog_at + dog < until) until = dog_at + dog;
        double wait = until - now > 0 ? until - now : 0;
        struct timespec t = {.tv_sec = (time_t)wait,
                             .tv_nsec = (long)((wait - (double)(time_t)wait) * 1e9)};
        int sig = sigtimedwait(set, NULL, &t);
        if (sig > 0) return sig;
        now = clock_s();
        if (status_s > 0 && now >= status_at + status_s) {
            tell_status(engine, &last, now - status_at);
            status_at = now;
        }
        struct engine_stats st;
        engine_stat(engine, &st);
        if (dog > 0 && now >= dog_at + dog) {
            if (!st.stuck) notify("WATCHDOG=1");
            dog_at = now;
        }
    }
}

static err_t bring_up(struct start *s, struct loaded *l, const struct load_options *lo,
                      const struct serve_args *a, struct err *e)
{
    err_t rc = load_headers(l, lo, e);
    if (rc == OK) rc = numerics_check(l, &lo->numerics, e);
    if (rc != OK) return rc;
    tell_plan(l);
    rc = load_weights(l, lo, e);
    if (rc == OK) rc = load_engine(l, lo, e);
    if (rc != OK) return rc;
    if (strcmp(a->sampling_defaults, "openai") == 0) config_no_defaults(&l->config);
    tell_numerics(l, &lo->numerics);
    struct server_options so = server_from(a, l);
    server_set_model(s->server, &so);
    server_ready(s->server, l->engine);
    return OK;
}

static int run(const struct serve_args *a, struct err *e)
{
    double t0 = clock_s();
    sigset_t set;
    own_signals(&set);
    raise_files();
    struct start s = {.tty = isatty(2), .signals = set};
    struct loaded l = {.bos_id = -1};
    struct server_options so = server_from(a, &l);
    so.config = NULL;
    struct server_info *info = NULL;
    if (info_from(&info, a, e) != OK) return 2;
    so.info = info;
    if ((a->record && record_open(&so.record, a->record, e) != OK) ||
        server_start(&s.server, &so, e) != OK) {
        record_close(so.record);
        server_info_free(info);
        return 1;
    }
    log_line(LOG_INFO, "listening on http://%s:%d", a->host, server_port(s.server));
    struct load_options lo = load_from(a, &s);
    err_t rc = bring_up(&s, &l, &lo, a, e);
    if (rc == OK) {
        log_line(LOG_INFO, "kernels: %s, %d threads", model_isa(l.model), l.n_threads);
        if (l.staging == STAGING_OFF)
            log_line(LOG_WARN,
                     "updates are in place: each reads its folder twice, and stops serving for the "
                     "second "
                     "time (reading took %.2f s at start)",
                     l.read_s);
        log_line(LOG_INFO, "ready in %.2f s", clock_s() - t0);
        notify("READY=1");
        int sig = wait_for_signal(l.engine, a->status_s, &set);
        notify("STOPPING=1");
        log_line(LOG_INFO, "%s: draining for at most %.0f s", sig == SIGINT ? "SIGINT" : "SIGTERM",
                 a->drain_s);
        server_drain(s.server);
        drain(l.engine, a->drain_s, &set);
    }
    if (!server_stop(s.server)) _exit(rc == OK ? 0 : 1);
    if (l.engine) engine_stop(l.engine, 0);
    load_release(&l);
    server_info_free(info);
    record_close(so.record);
    return rc == OK ? 0 : 1;
}

/* --check: everything that needs no weight bytes. */
static int check(const struct serve_args *a, struct err *e)
{
    struct loaded l = {.bos_id = -1};
    struct load_options lo = load_from(a, NULL);
    lo.progress = NULL;
    err_t rc = load_headers(&l, &lo, e);
    if (rc == OK) rc = numerics_check(&l, &lo.numerics, e);
    if (rc == OK) {
        tell_plan(&l);
        log_line(LOG_INFO, "check passed: %s can be served", a->model);
    }
    load_release(&l);
    return rc == OK ? 0 : 1;
}

static log_level_t level_of(const char *name)
{
    if (strcmp(name, "error") == 0 || strcmp(name, "critical") == 0) return LOG_ERROR;
    if (strcmp(name, "warning") == 0) return LOG_WARN;
    return strcmp(name, "debug") == 0 ? LOG_DEBUG : LOG_INFO;
}

int cmd_serve(int argc, char **argv)
{
    struct serve_args a = {0};
    struct buf text = {0};
    struct err e = {0};
    struct words words;
    options_t got = OPTIONS_ERROR;
    if (words_gather(&words, &serve_command, argc, argv, &e) == OK)
        got = options_parse(&serve_command, words.n, words.v, &a, &text, &e);
    if (got == OPTIONS_HELP) {
        buf_clear(&text);
        options_help(&serve_command, &text);
        fputs(text.data ? text.data : "", stdout);
        buf_release(&text);
        words_release(&words);
        return 0;
    }
    if (got == OPTIONS_RUN && !a.model) {
        (void)err_set(&e, ERR_INPUT, "--model is required; see moult serve --help");
        got = OPTIONS_ERROR;
    }
    if (got == OPTIONS_RUN && a.weights_backup && !a.memory_saver) {
        (void)err_set(
            &e, ERR_INPUT,
            "--enable-weights-cpu-backup is for --enable-memory-saver, which is not given");
        got = OPTIONS_ERROR;
    }
    if (got == OPTIONS_RUN &&
        numerics_parse(&a.numerics, a.moe_backend, a.act_format, &text, &e) != OK)
        got = OPTIONS_ERROR;
    if (got == OPTIONS_ERROR) {
        fprintf(stderr, "moult serve: %s\n", e.msg);
        buf_release(&text);
        words_release(&words);
        return 2;
    }
    log_set_level(level_of(a.log_level));
    log_set_json(strcmp(a.log_format, "json") == 0);
    if (a.isa && strcmp(a.isa, "auto") == 0) a.isa = NULL;
    if (text.len) log_line(LOG_WARN, "accepted, without effect here:%s", text.data);
    buf_release(&text);
    int rc = a.check ? check(&a, &e) : run(&a, &e);
    if (rc) fprintf(stderr, "moult serve: %s\n", e.msg);
    words_release(&words);
    return rc;
}
