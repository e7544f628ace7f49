/* watch.c - the thread that waits for the ends of connections. */
#include "server/watch.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/internal.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define AGAIN_NS 200000000ll /* the daemon's time to read what came before the end */

static int fd_of(struct MHD_Connection *c, const struct watch *w)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    return info && info->connect_fd >= 0 && info->connect_fd < w->n ? info->connect_fd : -1;
}

/* Tells once; an end that is there already is told at once. */
static void arm(const struct watch *w, int how, int fd)
{
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLONESHOT,
                             .data.u64 = (uint64_t)w->at[fd].gen << 32 | (uint32_t)fd};
    epoll_ctl(w->epoll_fd, how, fd, &ev);
}

void watch_connection(void *watch, struct MHD_Connection *c, void **state,
                      enum MHD_ConnectionNotificationCode code)
{
    struct watch *w = watch;
    int fd = fd_of(c, w);
    (void)state;
    if (fd < 0) return;
    bool starts = code == MHD_CONNECTION_NOTIFY_STARTED;
    pthread_mutex_lock(&w->m);
    if (starts && ++w->next_gen == 0) w->next_gen = 1;
    w->at[fd] = (struct watched){NULL, starts ? w->next_gen : 0};
    pthread_mutex_unlock(&w->m);
    if (starts) arm(w, EPOLL_CTL_ADD, fd);
}

static void bind_to(struct watch *w, int fd, struct xchg *x)
{
    if (fd < 0) return;
    pthread_mutex_lock(&w->m);
    w->at[fd].x = x;
    pthread_mutex_unlock(&w->m);
    arm(w, EPOLL_CTL_MOD, fd);
}

void watch_add(struct watch *w, struct xchg *x)
{
    x->fd = fd_of(x->c, w);
    bind_to(w, x->fd, x);
}

void watch_remove(struct watch *w, struct xchg *x)
{
    bind_to(w, x->fd, NULL);
    x->fd = -1;
}

/* ---- the thread ---- */

static void put_ended(struct watch *w, uint32_t fd, uint32_t gen) /* lock held */
{
    if (w->n_ended == w->n) return; /* the idle time ends it */
    w->ended[(w->first + w->n_ended++) % w->n] = (struct ended){clock_ns() + AGAIN_NS, fd, gen};
}

static void on_end(struct watch *w, uint32_t fd, uint32_t gen)
{
    pthread_mutex_lock(&w->m);
    struct xchg *x = w->at[fd].gen == gen ? w->at[fd].x : NULL;
    if (x)
        atomic_fetch_add(&x->refs, 1);
    else if (w->at[fd].gen == gen)
        put_ended(w, fd, gen);
    pthread_mutex_unlock(&w->m);
    if (!x) return;
    xchg_left(x);
    xchg_unref(x);
}

/* Shutting it for reading wakes the daemon.  The lock keeps the descriptor open: its close comes after
 * watch_connection.  Returns milliseconds until the next is due. */
static int shut_ended(struct watch *w)
{
    int64_t now = clock_ns(), wait = 1000;
    pthread_mutex_lock(&w->m);
    while (w->n_ended) {
        struct ended e = w->ended[w->first];
        if (e.due > now) {
            wait = (e.due - now) / 1000000 + 1;
            break;
        }
        w->first = (w->first + 1) % w->n;
        w->n_ended--;
        if (w->at[e.fd].gen != e.gen || w->at[e.fd].x) continue;
        (void)shutdown((int)e.fd, SHUT_RD);
        put_ended(w, e.fd, e.gen);
    }
    pthread_mutex_unlock(&w->m);
    return (int)wait;
}

static void *watcher(void *arg)
{
    struct watch *w = arg;
    struct epoll_event ev[64];
    (void)pthread_setname_np(pthread_self(), "watch");
    for (;;) {
        int n = epoll_wait(w->epoll_fd, ev, 64, shut_ended(w));
        for (int i = 0; i < n; i++) {
            if (ev[i].data.u64 == UINT64_MAX) return NULL;
            on_end(w, (uint32_t)ev[i].data.u64, (uint32_t)(ev[i].data.u64 >> 32));
        }
    }
}

void watch_start(struct watch *w, int n)
{
    *w = (struct watch){.n = n};
    w->at = mem_alloc((size_t)n * sizeof *w->at);
    w->ended = mem_alloc((size_t)n * sizeof *w->ended);
    pthread_mutex_init(&w->m, NULL);
    w->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = UINT64_MAX};
    epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->stop_fd, &ev);
    CHECK(pthread_create(&w->thread, NULL, watcher, w) == 0);
}

void watch_stop(struct watch *w)
{
    eventfd_write(w->stop_fd, 1);
    pthread_join(w->thread, NULL);
}

void watch_release(struct watch *w)
{
    close(w->epoll_fd);
    close(w->stop_fd);
    mem_free(w->at);
    mem_free(w->ended);
    pthread_mutex_destroy(&w->m);
}
