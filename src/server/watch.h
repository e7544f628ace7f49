/*
 * watch.h - which clients have left.
 *
 * libmicrohttpd looks at a connection only while it wants bytes of it, and misses an end that came together with the
 * bytes that it read last.  One thread waits for the end of every connection (EPOLLRDHUP):
 *
 *     watch_start(w, n)                    before the daemon
 *     watch_connection                     MHD_OPTION_NOTIFY_CONNECTION: connections come and go
 *     watch_add(w, x), watch_remove(w, x)  a request is at work on its connection; if the client leaves: xchg_left(x)
 *     watch_stop(w)                        the thread ends;  watch_release(w): after the daemon
 *
 * A connection without a request whose client has sent its end is shut for reading until the daemon sees it.
 * watch_connection, watch_add and watch_remove are the daemon's thread's.
 */
#ifndef SERVER_WATCH_H
#define SERVER_WATCH_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdint.h>

struct xchg;

struct watch {
    pthread_mutex_t m;
    pthread_t thread;
    int epoll_fd, stop_fd, n;
    struct watched {
        struct xchg *x; /* at work, or NULL */
        uint32_t gen;   /* of the connection, against reuse of its descriptor; 0: closed */
    } * at;             /* [n] by descriptor */
    uint32_t next_gen;
    /* Ring of n: connections that ended with no request, and when to look at them again. */
    struct ended {
        int64_t due; /* clock_ns */
        uint32_t fd, gen;
    } * ended;
    int first, n_ended;
};

void watch_start(struct watch *w, int n); /* n: descriptors of the process, at most */
void watch_stop(struct watch *w);
void watch_release(struct watch *w);
void watch_connection(void *watch, struct MHD_Connection *c, void **state,
                      enum MHD_ConnectionNotificationCode code);
void watch_add(struct watch *w, struct xchg *x); /* sets x->fd */
void watch_remove(struct watch *w, struct xchg *x);

#endif
