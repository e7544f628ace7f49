#include "base/pool.h"

#include "base/mem.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

/*
 * A job is published and withdrawn under the lock: fn is NULL between jobs, so a worker that wakes
 * late sleeps on, and `next` is reset only when no worker is inside.  Each index is taken once.
 */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    pthread_t *threads;
    int n_threads, n_active; /* n_active: workers inside the present job, guarded by lock */
    uint64_t generation;
    pool_fn *fn;
    void *arg;
    int n;
    atomic_int next;
    int stop;
};

static void work(struct pool *p, pool_fn *fn, void *arg, int n)
{
    for (;;) {
        int i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (i >= n) return;
        fn(arg, i);
    }
}

static void *worker(void *arg)
{
    struct pool *p = arg;
    uint64_t seen = 0;
    (void)pthread_setname_np(pthread_self(), "compute");
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->stop && (p->generation == seen || !p->fn))
            pthread_cond_wait(&p->wake, &p->lock);
        if (p->stop) break;
        seen = p->generation;
        pool_fn *fn = p->fn;
        void *fn_arg = p->arg;
        int n = p->n;
        p->n_active++;
        pthread_mutex_unlock(&p->lock);
        work(p, fn, fn_arg, n);
        pthread_mutex_lock(&p->lock);
        if (--p->n_active == 0) pthread_cond_signal(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

struct pool *pool_new(int n_threads)
{
    struct pool *p = mem_alloc(sizeof *p);
    if (n_threads < 1) n_threads = 1;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    p->threads = mem_alloc(sizeof *p->threads * (size_t)n_threads);
    p->n_threads = 1;
    for (int i = 1; i < n_threads; i++)
        if (pthread_create(&p->threads[p->n_threads], NULL, worker, p) == 0) p->n_threads++;
    return p;
}

void pool_free(struct pool *p)
{
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 1; i < p->n_threads; i++)
        pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    mem_free(p->threads);
    mem_free(p);
}

int pool_cpus(void)
{
    cpu_set_t set;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    /* More CPUs than a cpu_set_t holds: all of them. */
    if (sched_getaffinity(0, sizeof set, &set) != 0) return online > 1 ? (int)online : 1;
    return CPU_COUNT(&set);
}

int pool_threads(const struct pool *p)
{
    return p->n_threads;
}

void pool_run(struct pool *p, pool_fn *fn, void *arg, int n)
{
    if (p->n_threads == 1 || n <= 1) {
        for (int i = 0; i < n; i++)
            fn(arg, i);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->fn = fn;
    p->arg = arg;
    p->n = n;
    p->generation++;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    work(p, fn, arg, n);
    pthread_mutex_lock(&p->lock);
    p->fn = NULL; /* no worker joins from here on */
    while (p->n_active)
        pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}
