/* watchdog.c - a step that never ends must not leave clients waiting for ever. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include <stdio.h>
#include <unistd.h>

/* Best effort: the engine thread may hold a request's lock, so none is waited for. */
static void answer(struct request *r)
{
    if (pthread_mutex_trylock(&r->lock) != 0) return;
    bool was_done = r->done;
    r->done = true;
    if (!was_done) {
        r->finish = FINISH_ABORT;
        r->finish_status = 500;
        snprintf(r->finish_message, sizeof(r->finish_message), "a step did not end in time");
    }
    pthread_mutex_unlock(&r->lock);
    if (!was_done && r->notify) r->notify(r->ctx);
}

/* The engine's lock is not held while a request's is taken or notified: others take them the other way round. */
static void answer_all(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    struct request **all = mem_try_array((size_t)e->in_flight + 1, sizeof(*all));
    int32_t n = 0;
    for (int b = 0; all && b < RID_BUCKETS; b++)
        for (struct rid_entry *x = e->rids[b]; x; x = x->next) {
            request_ref(x->r);
            all[n++] = x->r;
        }
    pthread_mutex_unlock(&e->lock);
    for (int32_t i = 0; i < n; i++)
        answer(all[i]);
}

void *watchdog_main(void *arg)
{
    struct engine *e = arg;
    pthread_mutex_lock(&e->lock);
    while (!e->ended) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 100 * 1000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&e->dog_wake, &e->lock, &until);
        int64_t began = atomic_load(&e->step_began);
        double age = began ? (double)(clock_ns() - began) * 1e-9 : 0;
        if (age <= e->o.watchdog_s) continue;
        log_line(LOG_ERROR, "a step has run for %.1f s, the limit is %.1f s: ending", age,
                 e->o.watchdog_s);
        pthread_mutex_unlock(&e->lock);
        answer_all(e);
        usleep(200 * 1000); /* the server's time to send the answers */
        _exit(70);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}
