/* ready.c - the next update's memory, made ready by a thread of its own right after the start.  One: beside a GPU
 * several are faster, but they keep the driver from launching steps (backend/cuda/pinned.h). */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"

/* Beside steps on a CPU it rests so many times the processor time that a piece took.  It is not nice: the system fills
 * pages under a lock that whoever maps memory waits for, and on a busy machine a nice thread that holds it is not run
 * for seconds. */
#define READY_REST 9

static err_t make_ready(struct engine *e, bool *more, struct err *why)
{
    int64_t began = clock_thread_ns();
    err_t rc = store_ready(e->o.store, more, why);
    if (e->o.loaders_yield && atomic_load(&e->pace.steps)) {
        int64_t rest = (clock_thread_ns() - began) * READY_REST;
        nanosleep(&(struct timespec){rest / 1000000000, rest % 1000000000}, NULL);
    }
    return rc;
}

static void *ready_main(void *arg)
{
    struct engine *e = arg;
    struct err why = {0};
    bool more = true;
    err_t rc = OK;
    int64_t began = clock_ns();
    (void)pthread_setname_np(pthread_self(), "ready");
    while (rc == OK && more && !atomic_load(&e->ready_over))
        rc = make_ready(e, &more, &why);
    if (rc != OK)
        log_line(LOG_WARN, "memory for updates is not ready: %s; the next update tries again",
                 why.msg);
    else if (!more)
        log_line(LOG_INFO, "memory for updates is ready, %.2f s after the start",
                 (double)(clock_ns() - began) * 1e-9);
    return NULL;
}

void ready_start(struct engine *e)
{
    e->has_ready = e->o.ready && pthread_create(&e->ready, NULL, ready_main, e) == 0;
}

void ready_stop(struct engine *e)
{
    atomic_store(&e->ready_over, true);
    if (e->has_ready) pthread_join(e->ready, NULL);
    e->has_ready = false;
}
