/* serve.c - `moult serve`: flags, start, signals, orderly end. */
#include "base/clock.h"
#include "base/log.h"
#include "cli/commands.h"
#include "cli/load.h"
#include "cli/numerics.h"
#include "cli/serve_options.h"
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
        for (int i = 0; i < 40; i++) bar[i] = i < full ? '#' : '.';
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
        .kv = strcmp(a->kv_dtype, "fp8_e4m3") == 0 ? KV_E4M3 : KV_BF16,
        .dummy = strcmp(a->load_format, "dummy") == 0,
        .quantization = a->quantization,
        .numerics = a->numerics,
        .weight_version = a->weight_version,
        .no_prefix_cache = a->no_prefix_cache,
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
    (void)in_flight_parse(a->update_in_flight, &in_flight); /* the table of flags lets only these in */
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
        .api_key = a->api_key,
        .incremental_streaming = a->incremental,
        .max_body_bytes = (size_t)a->max_body,
        .max_weight_body = (uint64_t)a->max_weight_body,
        .max_running = (int)a->max_running,
        .update_in_flight = in_flight,
        .update_drain_s = a->update_drain_s,
        .ready_after_update = a->ready_after_update,
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
    if (server_start(&s.server, &so, e) != OK) return 1;
    log_line(LOG_INFO, "listening on http://%s:%d", a->host, server_port(s.server));
    struct load_options lo = load_from(a, &s);
    err_t rc = bring_up(&s, &l, &lo, a, e);
    if (rc == OK) {
        log_line(LOG_INFO, "kernels: %s, %d threads", model_isa(l.model), l.n_threads);
        if (l.staging == STAGING_OFF)
            log_line(LOG_WARN, "updates are in place: each reads its folder twice, and stops serving for the second "
                     "time (reading took %.2f s at start)", l.read_s);
        log_line(LOG_INFO, "ready in %.2f s", clock_s() - t0);
        int sig = 0;
        sigwait(&set, &sig);
        log_line(LOG_INFO, "%s: draining for at most %.0f s", sig == SIGINT ? "SIGINT" : "SIGTERM",
                 a->drain_s);
        server_drain(s.server);
        drain(l.engine, a->drain_s, &set);
    }
    if (!server_stop(s.server)) _exit(rc == OK ? 0 : 1);
    if (l.engine) engine_stop(l.engine, 0);
    load_release(&l);
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
    options_t got = options_parse(&serve_command, argc, argv, &a, &text, &e);
    if (got == OPTIONS_HELP) {
        buf_clear(&text);
        options_help(&serve_command, &text);
        fputs(text.data ? text.data : "", stdout);
        buf_release(&text);
        return 0;
    }
    if (got == OPTIONS_RUN && !a.model) {
        (void)err_set(&e, ERR_INPUT, "--model is required; see moult serve --help");
        got = OPTIONS_ERROR;
    }
    if (got == OPTIONS_RUN && a.weights_backup && !a.memory_saver) {
        (void)err_set(&e, ERR_INPUT, "--enable-weights-cpu-backup is for --enable-memory-saver, which is not given");
        got = OPTIONS_ERROR;
    }
    if (got == OPTIONS_RUN &&
        numerics_parse(&a.numerics, a.moe_backend, a.act_format, &text, &e) != OK)
        got = OPTIONS_ERROR;
    if (got == OPTIONS_ERROR) {
        fprintf(stderr, "moult serve: %s\n", e.msg);
        buf_release(&text);
        return 2;
    }
    log_set_level(level_of(a.log_level));
    if (a.isa && strcmp(a.isa, "auto") == 0) a.isa = NULL;
    if (text.len) log_line(LOG_WARN, "accepted, without effect here:%s", text.data);
    buf_release(&text);
    int rc = a.check ? check(&a, &e) : run(&a, &e);
    if (rc) fprintf(stderr, "moult serve: %s\n", e.msg);
    return rc;
}
