/*
 * http.c - the daemon and its thread.
 *
 * The thread waits on libmicrohttpd's epoll descriptor itself: the library's own thread (0.9.75) asks for 128 events at a
 * time and, having got exactly that many, waits for another before it looks at them.  Connections that are resumed
 * tell it through wake_fd.
 *
 * A client that sends FIN is taken to have left, on every route: its requests are aborted at once (watch.h).
 */
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/updates.h"
#include "server/internal.h"
#include "text/grammar.h"
#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#define STOP_S 5   /* seconds that server_stop waits for calls to end */
#define IDLE_S 75u /* seconds without a byte until a connection is closed; not while its request is at work */

static void xchg_free(struct xchg *x)
{
    struct server *s = x->s;
    for (int32_t i = 0; i < x->n_slots; i++) slot_release(&x->slots[i]);
    mem_free(x->slots);
    mem_free(x->model);
    grammar_unref(x->tool_grammar);
    body_release(x);
    buf_release(&x->out);
    pthread_mutex_destroy(&x->m);
    mem_free(x);
    atomic_fetch_sub(&s->n_xchg, 1); /* the server may be gone from here on */
}

void xchg_unref(struct xchg *x)
{
    if (atomic_fetch_sub(&x->refs, 1) == 1) xchg_free(x);
}

/* One write a round of daemon_main, however many connections were resumed. */
static void wake_daemon(struct server *s)
{
    if (!atomic_exchange(&s->woken, true)) (void)eventfd_write(s->wake_fd, 1);
}

static void wake_locked(struct xchg *x)
{
    x->wake = true;
    if (!x->suspended) return;
    x->suspended = false;
    MHD_resume_connection(x->c);
    wake_daemon(x->s);
}

void xchg_ready(struct xchg *x)
{
    pthread_mutex_lock(&x->m);
    if (!x->replied) {
        x->replied = true;
        if (!x->gone || x->suspended) wake_locked(x);
    }
    pthread_mutex_unlock(&x->m);
}

void xchg_encoded(struct slot *sl)
{
    struct xchg *x = sl->x;
    pthread_mutex_lock(&x->m);
    sl->encoded = true;
    if (x->replied && x->stream) wake_locked(x);
    else x->wake = true;
    pthread_mutex_unlock(&x->m);
}

void xchg_notify(void *ctx)
{
    struct slot *sl = ctx;
    struct xchg *x = sl->x;
    bool queue = false, drop = false, encode = false;
    pthread_mutex_lock(&sl->r->lock);
    bool done = sl->r->done;
    pthread_mutex_unlock(&sl->r->lock);
    pthread_mutex_lock(&x->m);
    if (done && !sl->counted) {
        sl->counted = drop = true;
        sl->to_encode = x->stream && sl->r->has_experts;
        encode = sl->to_encode && !x->encoding;
        x->encoding = x->encoding || encode;
        metrics_finished(&x->s->metrics, sl->r);
        queue = ++x->n_done == x->n_slots && !x->stream && !x->replied;
        if (queue) x->building = true;
    }
    if (x->replied && x->stream) wake_locked(x);
    else x->wake = true;
    pthread_mutex_unlock(&x->m);
    if (queue || encode) xchg_queue(x);
    if (drop) xchg_unref(x);
}

void xchg_left(struct xchg *x)
{
    pthread_mutex_lock(&x->m);
    x->gone = true;
    /* Before `submitted` and `replied` a worker may be writing the rest. */
    int32_t n = x->submitted && x->n_done < x->n_slots ? x->n_slots : 0;
    if (x->replied && x->stream) wake_locked(x);
    pthread_mutex_unlock(&x->m);
    for (int32_t i = 0; i < n; i++) engine_abort_request(x->s->engine, x->slots[i].r);
}

/* ---- libmicrohttpd's callbacks ---- */

static ssize_t reader(void *cls, uint64_t pos, char *to, size_t max)
{
    struct xchg *x = cls;
    (void)pos;
    for (;;) {
        pthread_mutex_lock(&x->m);
        x->wake = false;
        bool gone = x->gone || x->cut;
        pthread_mutex_unlock(&x->m);
        if (gone) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (x->out_at == x->out.len) {
            buf_clear(&x->out);
            x->out_at = 0;
            if (x->stream_end) return MHD_CONTENT_READER_END_OF_STREAM;
            gen_pull(x);
            if (x->out.failed) return MHD_CONTENT_READER_END_WITH_ERROR;
        }
        size_t n = x->out.len - x->out_at;
        if (n) {
            if (n > max) n = max;
            memcpy(to, x->out.data + x->out_at, n);
            x->out_at += n;
            return (ssize_t)n;
        }
        pthread_mutex_lock(&x->m);
        bool sleep = !x->wake;
        if (sleep) {
            x->suspended = true;
            MHD_suspend_connection(x->c);
        }
        pthread_mutex_unlock(&x->m);
        if (sleep) return 0;
    }
}

static void reader_free(void *cls)
{
    xchg_unref(cls);
}

static enum MHD_Result send_cut(struct xchg *x)
{
    static const char text[] = "{\"object\":\"error\",\"message\":\"server is stopping\",\"code\":503,"
                               "\"error\":{\"message\":\"server is stopping\",\"code\":503}}";
    struct MHD_Response *r = MHD_create_response_from_buffer(sizeof text - 1, (char *)(uintptr_t)text,
                                                             MHD_RESPMEM_PERSISTENT);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", "application/json");
    enum MHD_Result rc = MHD_queue_response(x->c, 503, r);
    MHD_destroy_response(r);
    return rc;
}

static enum MHD_Result send_reply(struct xchg *x)
{
    struct MHD_Response *r;
    if (x->stream) {
        atomic_fetch_add(&x->refs, 1);
        r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32768, reader, x, reader_free);
        if (!r) xchg_unref(x);
    } else {
        size_t n = x->out.len; /* it may be large: given away, not copied */
        char *text = buf_take(&x->out);
        if (!text) return MHD_NO;
        r = MHD_create_response_from_buffer_with_free_callback(n, text, mem_free);
        if (!r) mem_free(text);
    }
    if (!r) return MHD_NO;
    if (x->type) MHD_add_response_header(r, "Content-Type", x->stream ? "text/event-stream" : x->type);
    if (x->s->o.cors_origin) MHD_add_response_header(r, "Access-Control-Allow-Origin", x->s->o.cors_origin);
    MHD_add_response_header(r, "x-request-id", x->id);
    if (x->stream) {
        MHD_add_response_header(r, "Cache-Control", "no-cache");
        MHD_add_response_header(r, "X-Accel-Buffering", "no");
    }
    if (x->status == 503 || x->status == 429) MHD_add_response_header(r, "Retry-After", "1");
    enum MHD_Result rc = MHD_queue_response(x->c, (unsigned)x->status, r);
    MHD_destroy_response(r);
    return rc;
}

static struct xchg *xchg_new(struct server *s, struct MHD_Connection *c, const char *url)
{
    struct xchg *x = mem_try(sizeof *x);
    if (!x) return NULL;
    atomic_fetch_add(&s->n_xchg, 1);
    x->s = s;
    x->c = c;
    x->fd = -1;
    x->refs = 1;
    pthread_mutex_init(&x->m, NULL);
    snprintf(x->path, sizeof x->path, "%s", url);
    x->route = route_find(x->path);
    const char *id = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "x-request-id");
    bool plain = id && *id && strlen(id) < sizeof x->id;
    for (const char *p = id; plain && *p; p++) plain = *p > 0x20 && *p < 0x7f;
    if (plain) snprintf(x->id, sizeof x->id, "%s", id);
    else put_id(x->id, sizeof x->id, "");
    pthread_mutex_lock(&s->m);
    x->next_live = s->live;
    if (s->live) s->live->prev_live = x;
    s->live = x;
    pthread_mutex_unlock(&s->m);
    return x;
}

static void name_caller(struct xchg *x)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(x->c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    char host[48], port[8];
    if (!info || !info->client_addr) return;
    socklen_t n = info->client_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (getnameinfo(info->client_addr, n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        snprintf(x->caller, sizeof x->caller, "%s:%s", host, port);
}

bool xchg_authorised(const struct xchg *x)
{
    bool admin = x->route && (x->route->flags & ROUTE_ADMIN) && x->s->o.admin_key;
    const char *key = admin ? x->s->o.admin_key : x->s->o.api_key;
    bool open = !strcmp(x->path, "/") || !strncmp(x->path, "/health", 7) || !strncmp(x->path, "/metrics", 8);
    if (!key || open) return true;
    const char *h = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Authorization");
    if (!h || strncmp(h, "Bearer ", 7) || strlen(h + 7) != strlen(key)) return false;
    unsigned diff = 0; /* in constant time */
    for (size_t i = 0; key[i]; i++) diff |= (unsigned)(h[7 + i] ^ key[i]);
    return !diff;
}

/* A browser asks first whether another origin's page may call. */
static enum MHD_Result send_preflight(struct xchg *x)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(0, (char *)(uintptr_t)"", MHD_RESPMEM_PERSISTENT);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Access-Control-Allow-Origin", x->s->o.cors_origin);
    MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, PUT, OPTIONS");
    MHD_add_response_header(r, "Access-Control-Allow-Headers", "Authorization, Content-Type, X-Request-Id");
    MHD_add_response_header(r, "Access-Control-Max-Age", "600");
    enum MHD_Result rc = MHD_queue_response(x->c, 204, r);
    MHD_destroy_response(r);
    return rc;
}

static bool refuse(struct xchg *x, const char *method)
{
    struct server *s = x->s;
    x->type = "application/json";
    int m = !strcmp(method, "GET") || !strcmp(method, "HEAD") ? M_GET
            : !strcmp(method, "POST") ? M_POST : !strcmp(method, "PUT") ? M_PUT : 0;
    if (!xchg_authorised(x)) return reply_error(x, 401, "Unauthorized"), true;
    if (!x->route) return reply_error(x, 404, "Not Found"), true;
    if (!(x->route->methods & m)) return reply_error(x, 405, "Method Not Allowed"), true;
    if (body_refuse(x)) return true;
    if (!s->ready && !(x->route->flags & ROUTE_LOADING)) {
        x->status = 503;
        pthread_mutex_lock(&s->m);
        buf_printf(&x->out, "{\"status\":\"loading\",\"progress\":%.3f,\"stage\":", (double)s->progress);
        put_str(&x->out, s->stage, strlen(s->stage));
        pthread_mutex_unlock(&s->m);
        buf_putc(&x->out, '}');
        return true;
    }
    bool new_work = m != M_GET && strcmp(x->path, "/abort_request") != 0;
    if (s->stopping || (s->draining && new_work)) return reply_error(x, 503, "server is stopping"), true;
    if ((x->route->flags & ROUTE_GENERATES) && waiting_for_update(s))
        return reply_error(x, 503, "waiting for the first weight update (--ready-after-update)"), true;
    const char *ct = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Content-Type");
    if ((x->route->flags & ROUTE_OPENAI) && m == M_POST &&
        (!ct || strncasecmp(ct, "application/json", 16) || (ct[16] && ct[16] != ';' && ct[16] != ' ')))
        return reply_error(x, 400, "Content-Type must be application/json"), true;
    if (x->discard) return reply_error(x, 503, "body: it came before the server was ready"), true;
    return false;
}

static enum MHD_Result on_access(void *cls, struct MHD_Connection *c, const char *url, const char *method,
                                 const char *version, const char *data, size_t *n, void **state)
{
    struct server *s = cls;
    struct xchg *x = *state;
    (void)version;
    if (!x) {
        *state = x = xchg_new(s, c, url);
        if (x) body_begin(x, method);
        return x ? MHD_YES : MHD_NO;
    }
    if (*n) {
        body_add(x, data, *n);
        *n = 0;
        return MHD_YES;
    }
    pthread_mutex_lock(&x->m);
    bool replied = x->replied, cut = x->cut;
    pthread_mutex_unlock(&x->m);
    if (cut) return send_cut(x);
    if (replied) return send_reply(x);
    if (x->started) return MHD_YES;
    x->started = true;
    if (x->s->o.cors_origin && !strcmp(method, "OPTIONS")) return send_preflight(x);
    if (refuse(x, method)) return send_reply(x);
    query_read(x);
    if (x->route->where == RUN_INLINE) {
        xchg_run(x);
        return send_reply(x);
    }
    if (x->route->where == RUN_THREAD) name_caller(x);
    watch_add(&x->s->watch, x);
    pthread_mutex_lock(&x->m);
    x->suspended = true;
    MHD_suspend_connection(c);
    pthread_mutex_unlock(&x->m);
    if (x->route->where == RUN_THREAD) xchg_thread(x);
    else xchg_queue(x);
    return MHD_YES;
}

static void on_completed(void *cls, struct MHD_Connection *c, void **state,
                         enum MHD_RequestTerminationCode code)
{
    struct xchg *x = *state;
    struct server *s = cls;
    (void)c;
    (void)code;
    if (!x) return;
    watch_remove(&s->watch, x);
    pthread_mutex_lock(&s->m);
    if (x->prev_live) x->prev_live->next_live = x->next_live;
    else s->live = x->next_live;
    if (x->next_live) x->next_live->prev_live = x->prev_live;
    pthread_mutex_unlock(&s->m);
    if (x->n_slots && x->n_done < x->n_slots) xchg_left(x);
    *state = NULL;
    xchg_unref(x);
}

/* ---- life ---- */

static int raise_files(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r)) return 1024;
    r.rlim_cur = r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
    getrlimit(RLIMIT_NOFILE, &r);
    return r.rlim_cur > 65536 ? 65536 : (int)r.rlim_cur;
}

static void *daemon_main(void *arg)
{
    struct server *s = arg;
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    struct pollfd fds[2] = {{.fd = info->epoll_fd, .events = POLLIN}, {.fd = s->wake_fd, .events = POLLIN}};
    (void)pthread_setname_np(pthread_self(), "http");
    while (!s->daemon_ends) {
        MHD_UNSIGNED_LONG_LONG ms;
        eventfd_t n;
        bool due = MHD_get_timeout(s->daemon, &ms) == MHD_YES;
        (void)poll(fds, 2, !due ? -1 : ms > 1000 ? 1000 : (int)ms);
        if (fds[1].revents) (void)eventfd_read(s->wake_fd, &n);
        atomic_store(&s->woken, false); /* MHD_run sees what was resumed before this */
        (void)MHD_run(s->daemon);
    }
    return NULL;
}

static err_t listen_at(struct server *s, struct err *e)
{
    char port[16];
    snprintf(port, sizeof port, "%d", s->o.port);
    struct addrinfo hint = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *a = NULL;
    const char *host = s->o.host ? s->o.host : "127.0.0.1";
    if (getaddrinfo(host, port, &hint, &a)) return err_set(e, ERR_INPUT, "host: cannot resolve %s", host);
    unsigned limit = s->watch.n > 256 ? (unsigned)s->watch.n - 128 : 64;
    s->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME |
            (a->ai_family == AF_INET6 ? MHD_USE_IPv6 : 0),
        (uint16_t)s->o.port, NULL, NULL, on_access, s, MHD_OPTION_SOCK_ADDR, a->ai_addr,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_CONNECTION_LIMIT, limit,
        MHD_OPTION_NOTIFY_CONNECTION, watch_connection, &s->watch, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)65536,
        MHD_OPTION_LISTENING_ADDRESS_REUSE, 1u, MHD_OPTION_LISTEN_BACKLOG_SIZE, 1024u, MHD_OPTION_END);
    freeaddrinfo(a);
    if (!s->daemon) return err_set(e, ERR_IO, "cannot listen on %s port %d", host, s->o.port);
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_BIND_PORT);
    s->port = info && info->port ? info->port : s->o.port;
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(pthread_create(&s->thread, NULL, daemon_main, s) == 0);
    return OK;
}

err_t server_start(struct server **out, const struct server_options *o, struct err *e)
{
    json_t *preferred = NULL;
    if (o->preferred_sampling) {
        preferred = json_parse_object(o->preferred_sampling, strlen(o->preferred_sampling), e);
        if (!preferred) return err_wrap(e, ERR_INPUT, "--preferred-sampling-params");
    }
    struct server *s = mem_alloc(sizeof *s);
    s->o = *o;
    s->preferred = preferred;
    if (!s->o.max_body_bytes) s->o.max_body_bytes = (size_t)64 << 20;
    if (!s->o.max_weight_body) s->o.max_weight_body = (uint64_t)4 << 30;
    signal(SIGPIPE, SIG_IGN);
    pthread_mutex_init(&s->m, NULL);
    pthread_mutex_init(&s->grammars.m, NULL);
    s->started = time(NULL);
    work_start(s);
    watch_start(&s->watch, raise_files());
    if (listen_at(s, e)) {
        err_t rc = e ? e->code : ERR_IO;
        (void)server_stop(s);
        return rc;
    }
    *out = s;
    return OK;
}

int server_port(const struct server *s)
{
    return s->port;
}

void server_progress(struct server *s, float progress, const char *stage)
{
    pthread_mutex_lock(&s->m);
    s->progress = progress;
    snprintf(s->stage, sizeof s->stage, "%s", stage ? stage : "");
    pthread_mutex_unlock(&s->m);
}

void server_set_model(struct server *s, const struct server_options *o)
{
    s->o.tokenizer = o->tokenizer;
    s->o.chat_template = o->chat_template;
    s->o.config = o->config;
    s->o.bos_token = o->bos_token;
    s->o.eos_token = o->eos_token;
    s->o.bos_id = o->bos_id;
    s->o.add_bos = o->add_bos;
    s->o.context_len = o->context_len;
    s->o.tool_format = o->tool_format;
    s->o.reasoning_format = o->reasoning_format;
}

void server_ready(struct server *s, struct engine *engine)
{
    s->engine = engine;
    s->ready = true;
}

void server_drain(struct server *s)
{
    s->draining = true;
}

/* Aborts and answers what is in flight, for at most STOP_S seconds.  The abort is repeated because a worker that
 * had passed the check of `stopping` may submit after the first one.  An update that is
 * being staged ends after its next read.  Returns how many calls are still at work: a read that hangs, or a long text
 * in the tokenizer, cannot be interrupted. */
static int answer_all(struct server *s)
{
    int64_t until = clock_ns() + (int64_t)STOP_S * 1000000000;
    for (;;) {
        int working = 0;
        if (s->ready) {
            engine_abort(s->engine, "", true);
            engine_cancel(s->engine);
        }
        pthread_mutex_lock(&s->m);
        for (struct xchg *x = s->live; x; x = x->next_live) {
            pthread_mutex_lock(&x->m);
            working += x->suspended; /* what is not waits for its client to read */
            pthread_mutex_unlock(&x->m);
        }
        if (s->n_threads > working) working = s->n_threads; /* whose client has left */
        bool none = !working && !s->live;
        pthread_mutex_unlock(&s->m);
        if (none || clock_ns() > until) return working;
        usleep(10000);
    }
}

/* Those that are still at work: told that there will be no answer, which their threads know nothing of. */
static void cut_all(struct server *s)
{
    pthread_mutex_lock(&s->m);
    for (struct xchg *x = s->live; x; x = x->next_live) {
        pthread_mutex_lock(&x->m);
        if (x->suspended) {
            x->cut = true;
            wake_locked(x);
        }
        pthread_mutex_unlock(&x->m);
    }
    pthread_mutex_unlock(&s->m);
    usleep(200000); /* the daemon's time to send it */
}

bool server_stop(struct server *s)
{
    int listener = s->daemon ? MHD_quiesce_daemon(s->daemon) : -1;
    pthread_mutex_lock(&s->m);
    s->stopping = true;
    pthread_mutex_unlock(&s->m);
    /* The workers live on meanwhile: they build the replies.  No connection may be suspended when the daemon stops. */
    int working = s->daemon ? answer_all(s) : 0;
    if (working) {
        cut_all(s);
        log_line(LOG_WARN, "%d calls could not be ended in %d s", working, STOP_S);
        return false;
    }
    work_stop(s);
    watch_stop(&s->watch);
    if (s->daemon) {
        s->daemon_ends = true;
        wake_daemon(s);
        pthread_join(s->thread, NULL);
        close(s->wake_fd);
        MHD_stop_daemon(s->daemon);
    }
    if (listener >= 0) close(listener);
    for (int64_t until = clock_ns() + STOP_S * 1000000000ll; atomic_load(&s->n_xchg) > 0; usleep(1000))
        if (clock_ns() > until) return false; /* the engine has not let go of their requests */
    watch_release(&s->watch);
    constraint_release(s);
    json_decref(s->preferred);
    json_decref(s->snapshot);
    pthread_mutex_destroy(&s->m);
    mem_free(s);
    return true;
}
