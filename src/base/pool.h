/*
 * pool.h - one set of worker threads that share loops.
 *
 *     pool_run(p, fn, arg, n);     // calls fn(arg, i) once for each i in [0, n), returns when done
 *
 * Which thread takes which i is not defined: fn must write only what belongs to i.  pool_run is
 * called by one thread at a time (the engine's); the caller works too.  Idle workers
 * sleep.
 */
#ifndef BASE_POOL_H
#define BASE_POOL_H

struct pool;
typedef void pool_fn(void *arg, int i);

struct pool *pool_new(int n_threads); /* counting the caller; at least 1 */
void pool_free(struct pool *p);
int pool_threads(const struct pool *p);
/* CPUs that this process may use (its affinity: taskset, cpusets of containers), at least 1. */
int pool_cpus(void);
void pool_run(struct pool *p, pool_fn *fn, void *arg, int n);

#endif
