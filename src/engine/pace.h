/*
 * pace.h - how many loader threads run beside steps: one.
 *
 *     pace_steps(p), pace_idle(p)      the engine thread, before a step and before it waits for work
 *     pace_wait(p, true), ...          a loader, before each piece of work: returns when it may be done
 *     pace_wait(p, false)              the loader has no more
 *
 * Where nothing is computed all loaders run.  Beside steps one does, and keeps its turn until it has no
 * more work: a step meets a barrier many times a token, so that it waits for the slowest core, and two
 * loaders on two cores delay it twice, each by what its niceness leaves it.
 */
#ifndef ENGINE_PACE_H
#define ENGINE_PACE_H

#include <pthread.h>
#include <stdbool.h>

struct pace {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    _Atomic bool steps; /* are computed; written by the engine thread, under the lock */
    bool taken;         /* the turn beside steps, by: */
    pthread_t by;
};

void pace_init(struct pace *p); /* idle */
void pace_destroy(struct pace *p);
void pace_steps(struct pace *p);
void pace_idle(struct pace *p);
void pace_wait(void *pace, bool more); /* struct pace; any thread */

#endif
