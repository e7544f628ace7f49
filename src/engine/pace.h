/*
 * pace.h - how threads that stage an update run beside steps: one of them, and nice.
 *
 *     pace_steps(p), pace_idle(p)      the engine thread, before a step and before it waits for work
 *     pace_wait(p, true), ...          a loader, before each piece of work: returns when it may be done
 *     pace_wait(p, false)              the loader has no more
 *     pace_yield(p)                    a thread of an update that is no loader, now and then
 *
 * Where nothing is computed all loaders run, as the process does: an update of an idle server does not wait
 * for the machine's other programs.  Beside steps one does, and keeps its turn until it has no more work: a
 * step meets a barrier many times a token, so that it waits for the slowest core, and two loaders on two cores
 * delay it twice, each by what its niceness leaves it.  A thread that met steps stays nice (to undo that takes
 * a privilege), so threads of an update are made for it and end with it.
 */
#ifndef ENGINE_PACE_H
#define ENGINE_PACE_H

#include <pthread.h>
#include <stdbool.h>

#define PACE_NICE 14 /* added: about a twentieth of a core that steps want too */

struct pace {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int nice;           /* of threads that met steps */
    _Atomic bool steps; /* are computed; written by the engine thread, under the lock */
    bool taken;         /* the turn beside steps, by: */
    pthread_t by;
};

void pace_init(struct pace *p); /* idle */
void pace_destroy(struct pace *p);
void pace_steps(struct pace *p);
void pace_idle(struct pace *p);
void pace_wait(void *pace, bool more); /* struct pace; any thread */
void pace_yield(struct pace *p); /* any thread; while steps are computed: it is nice from here on */

#endif
