/* ready.c - the next update's memory, made ready by threads of its own right after the start. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"
#include <sys/resource.h>
#include <unistd.h>

#define READY_NICE 19 /* on the CPU: steps come first */

static void end_thread(struct engine *e, const char *why)
{
    struct ready *r = &e->ready;
    pthread_mutex_lock(&e->lock);
    bool last = --r->working == 0, told = r->failed;
    if (why) r->failed = true;
    pthread_mutex_unlock(&e->lock);
    if (why && !told)
        log_line(LOG_WARN, "memory for updates is not ready: %s; the next update tries again", why);
    else if (last && !told && !why && !atomic_load(&r->stop))
        log_line(LOG_INFO, "memory for updates is ready, %.2f s after the start",
                 (double)(clock_ns() - r->began) * 1e-9);
}

static void *ready_main(void *arg)
{
    struct engine *e = arg;
    struct err why = {0};
    bool more = true;
    err_t rc = OK;
    (void)pthread_setname_np(pthread_self(), "ready");
    if (e->o.loaders_yield) (void)setpriority(PRIO_PROCESS, (id_t)gettid(), READY_NICE);
    while (rc == OK && more && !atomic_load(&e->ready.stop))
        rc = store_ready(e->o.store, &more, &why);
    end_thread(e, rc == OK ? NULL : why.msg);
    return NULL;
}

void ready_start(struct engine *e)
{
    struct ready *r = &e->ready;
    int want = e->o.ready_threads < READY_MOST ? e->o.ready_threads : READY_MOST;
    r->began = clock_ns();
    r->working = want;
    while (r->n < want && pthread_create(&r->threads[r->n], NULL, ready_main, e) == 0)
        r->n++;
    pthread_mutex_lock(&e->lock);
    r->working -= want - r->n;
    pthread_mutex_unlock(&e->lock);
}

void ready_stop(struct engine *e)
{
    atomic_store(&e->ready.stop, true);
    for (int i = 0; i < e->ready.n; i++)
        pthread_join(e->ready.threads[i], NULL);
    e->ready.n = 0;
}
