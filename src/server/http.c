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
#include "server/internal.h"
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

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

/* Its thread is still at work and may be writing x->out. */
static enum MHD_Result send_cut(struct xchg *x)
{
    struct buf b = {0};
    error_put(&b, ERROR_REPLY, 503, "server is stopping");
    size_t n = b.len;
    char *text = buf_take(&b);
    if (!text) return MHD_NO;
    struct MHD_Response *r = MHD_create_response_from_buffer_with_free_callback(n, text, mem_free);
    if (!r) {
        mem_free(text);
        return MHD_NO;
    }
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
    if (x->type)
        MHD_add_response_header(r, "Content-Type", x->stream ? "text/event-stream" : x->type);
    if (x->s->o.cors_origin)
        MHD_add_response_header(r, "Access-Control-Allow-Origin", x->s->o.cors_origin);
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

static void name_caller(struct xchg *x)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    char host[48], port[8];
    if (!info || !info->client_addr) return;
    socklen_t n = info->client_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                           : sizeof(struct sockaddr_in);
    if (getnameinfo(info->client_addr, n, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        snprintf(x->caller, sizeof x->caller, "%s:%s", host, port);
}

/* A browser asks first whether another origin's page may call. */
static enum MHD_Result send_preflight(struct xchg *x)
{
    struct MHD_Response *r =
        MHD_create_response_from_buffer(0, (char *)(uintptr_t) "", MHD_RESPMEM_PERSISTENT);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Access-Control-Allow-Origin", x->s->o.cors_origin);
    MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, PUT, OPTIONS");
    MHD_add_response_header(r, "Access-Control-Allow-Headers",
                            "Authorization, Content-Type, X-Request-Id");
    MHD_add_response_header(r, "Access-Control-Max-Age", "600");
    enum MHD_Result rc = MHD_queue_response(x->c, 204, r);
    MHD_destroy_response(r);
    return rc;
}

static enum MHD_Result on_access(void *cls, struct MHD_Connection *c, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *n, void **state)
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
    if (access_refuse(x, method)) return send_reply(x);
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
    if (x->route->where == RUN_THREAD)
        xchg_thread(x);
    else
        xchg_queue(x);
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
    if (x->prev_live)
        x->prev_live->next_live = x->next_live;
    else
        s->live = x->next_live;
    if (x->next_live) x->next_live->prev_live = x->prev_live;
    pthread_mutex_unlock(&s->m);
    xchg_left(x);
    *state = NULL;
    xchg_unref(x);
}

/* One write a round of daemon_main, however many connections were resumed. */
void daemon_wake(struct server *s)
{
    if (!atomic_exchange(&s->woken, true)) (void)eventfd_write(s->wake_fd, 1);
}

static bool is_full(const struct server *s)
{
    const union MHD_DaemonInfo *info =
        MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_CURRENT_CONNECTIONS);
    return info && info->num_connections >= s->max_connections;
}

/* At its limit of connections (or of descriptors) the library stops listening, and listens again at the beginning of
 * the first run after some have gone: there may be nobody left whose bytes would bring that about. */
static void *daemon_main(void *arg)
{
    struct server *s = arg;
    bool full = false;
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    struct pollfd fds[2] = {{.fd = info->epoll_fd, .events = POLLIN},
                            {.fd = s->wake_fd, .events = POLLIN}};
    (void)pthread_setname_np(pthread_self(), "http");
    while (!s->daemon_ends) {
        MHD_UNSIGNED_LONG_LONG ms;
        eventfd_t n;
        bool due = MHD_get_timeout(s->daemon, &ms) == MHD_YES;
        (void)poll(fds, 2, !due || ms > 1000 ? 1000 : (int)ms);
        if (fds[1].revents) (void)eventfd_read(s->wake_fd, &n);
        atomic_store(&s->woken, false); /* MHD_run sees what was resumed before this */
        (void)MHD_run(s->daemon);
        bool was = full;
        full = is_full(s);
        if (was && !full) (void)MHD_run(s->daemon);
    }
    return NULL;
}

err_t http_start(struct server *s, struct err *e)
{
    char port[16];
    snprintf(port, sizeof port, "%d", s->o.port);
    struct addrinfo hint = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *a = NULL;
    const char *host = s->o.host ? s->o.host : "127.0.0.1";
    if (getaddrinfo(host, port, &hint, &a))
        return err_set(e, ERR_INPUT, "host: cannot resolve %s", host);
    s->max_connections = s->watch.n > 256 ? (unsigned)s->watch.n - 128 : 64;
    s->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | (a->ai_family == AF_INET6 ? MHD_USE_IPv6 : 0),
        (uint16_t)s->o.port, NULL, NULL, on_access, s, MHD_OPTION_SOCK_ADDR, a->ai_addr,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_CONNECTION_LIMIT,
        s->max_connections, MHD_OPTION_NOTIFY_CONNECTION, watch_connection, &s->watch,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)s->o.keep_alive_s,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)65536, MHD_OPTION_LISTENING_ADDRESS_REUSE, 1u,
        MHD_OPTION_LISTEN_BACKLOG_SIZE, 1024u, MHD_OPTION_END);
    freeaddrinfo(a);
    if (!s->daemon) return err_set(e, ERR_IO, "cannot listen on %s port %d", host, s->o.port);
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_BIND_PORT);
    s->port = info && info->port ? info->port : s->o.port;
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(pthread_create(&s->thread, NULL, daemon_main, s) == 0);
    return OK;
}
