#include "engine/pace.h"

#include "base/err.h"
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

void pace_init(struct pace *p)
{
    *p = (struct pace){.nice = getpriority(PRIO_PROCESS, 0) + PACE_NICE};
    CHECK(pthread_mutex_init(&p->lock, NULL) == 0);
    CHECK(pthread_cond_init(&p->changed, NULL) == 0);
}

void pace_destroy(struct pace *p)
{
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
}

static void tell(struct pace *p, bool steps)
{
    if (atomic_load(&p->steps) == steps) return;
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->steps, steps);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

void pace_steps(struct pace *p)
{
    tell(p, true);
}

void pace_idle(struct pace *p)
{
    tell(p, false);
}

void pace_yield(struct pace *p)
{
    const id_t me = (id_t)gettid();
    if (atomic_load(&p->steps) && getpriority(PRIO_PROCESS, me) < p->nice)
        (void)setpriority(PRIO_PROCESS, me, p->nice);
}

void pace_wait(void *pace, bool more)
{
    struct pace *p = pace;
    if (more) pace_yield(p);
    pthread_mutex_lock(&p->lock);
    bool mine = p->taken && pthread_equal(p->by, pthread_self());
    while (more && !mine && p->taken && atomic_load(&p->steps))
        pthread_cond_wait(&p->changed, &p->lock);
    if (more && !p->taken && atomic_load(&p->steps)) {
        p->taken = true;
        p->by = pthread_self();
    } else if (!more && mine) {
        p->taken = false;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
}
