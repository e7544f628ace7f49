#include "engine/pace.h"

#include "base/err.h"
#include <stdatomic.h>

void pace_init(struct pace *p)
{
    *p = (struct pace){.steps = false};
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

void pace_wait(void *pace, bool more)
{
    struct pace *p = pace;
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
