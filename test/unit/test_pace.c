#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/pace.h"
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LOADERS = 4, PIECES = 50 };

static struct pace pace;
static _Atomic int inside, most, pieces, begun;

static void *loader(void *arg)
{
    (void)arg;
    atomic_fetch_add(&begun, 1);
    for (int i = 0; i < PIECES; i++) {
        pace_wait(&pace, true);
        int now = atomic_fetch_add(&inside, 1) + 1, old = atomic_load(&most);
        while (now > old && !atomic_compare_exchange_weak(&most, &old, now))
            ;
        usleep(200);
        atomic_fetch_sub(&inside, 1);
        atomic_fetch_add(&pieces, 1);
    }
    pace_wait(&pace, false);
    return NULL;
}

static void start(pthread_t t[LOADERS])
{
    atomic_store(&most, 0);
    atomic_store(&pieces, 0);
    atomic_store(&begun, 0);
    for (int i = 0; i < LOADERS; i++)
        assert_int_equal(pthread_create(&t[i], NULL, loader, NULL), 0);
}

static void end(const pthread_t t[LOADERS])
{
    for (int i = 0; i < LOADERS; i++)
        assert_int_equal(pthread_join(t[i], NULL), 0);
    assert_int_equal(pieces, LOADERS * PIECES);
    assert_false(pace.taken);
}

/* Beside steps one at a time, until each has done all of its own. */
static void one_beside_steps(void **state)
{
    (void)state;
    pthread_t t[LOADERS];
    pace_init(&pace);
    pace_steps(&pace);
    start(t);
    end(t);
    assert_int_equal(most, 1);
    pace_destroy(&pace);
}

/* All where there are none, also those that waited. */
static void all_beside_none(void **state)
{
    (void)state;
    pthread_t t[LOADERS];
    pace_init(&pace);
    start(t);
    end(t);
    assert_true(most > 1);
    pace_steps(&pace);
    start(t);
    while (atomic_load(&begun) < LOADERS || atomic_load(&pieces) == 0)
        usleep(100);
    pace_idle(&pace);
    end(t);
    assert_true(most > 1);
    pace_destroy(&pace);
}

/* Steps that come and go lose no loader. */
static void steps_come_and_go(void **state)
{
    (void)state;
    pthread_t t[LOADERS];
    pace_init(&pace);
    start(t);
    while (atomic_load(&pieces) < LOADERS * PIECES) {
        pace_steps(&pace);
        usleep(300);
        pace_idle(&pace);
        usleep(50);
    }
    end(t);
    pace_destroy(&pace);
}

static void *niceness(void *arg)
{
    const id_t me = (id_t)gettid();
    int *seen = arg;
    pace_wait(&pace, true);
    pace_wait(&pace, false);
    seen[0] = getpriority(PRIO_PROCESS, me);
    pace_yield(&pace);
    seen[1] = getpriority(PRIO_PROCESS, me);
    pace_steps(&pace);
    pace_yield(&pace);
    pace_yield(&pace);
    seen[2] = getpriority(PRIO_PROCESS, me);
    pace_idle(&pace);
    return NULL;
}

/* A thread of an update is nice once it has met steps; neither before nor twice. */
static void nice_beside_steps(void **state)
{
    (void)state;
    int seen[3], own = getpriority(PRIO_PROCESS, 0);
    int nice = own + PACE_NICE < 19 ? own + PACE_NICE : 19;
    pthread_t t;
    pace_init(&pace);
    assert_int_equal(pthread_create(&t, NULL, niceness, seen), 0);
    assert_int_equal(pthread_join(t, NULL), 0);
    assert_int_equal(seen[0], own);
    assert_int_equal(seen[1], own);
    assert_int_equal(seen[2], nice);
    assert_int_equal(getpriority(PRIO_PROCESS, 0), own);
    pace_destroy(&pace);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_beside_steps), cmocka_unit_test(all_beside_none),
        cmocka_unit_test(steps_come_and_go), cmocka_unit_test(nice_beside_steps)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
