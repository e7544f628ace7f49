/* engine/updates: states, cancellation, updates in place and what is left when one fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/log.h"
#include "engine/updates.h"
#include "engine_rig.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CANCELS = 12 };
#else
enum { CANCELS = 40 };
#endif

static const struct update_options plain = {.flush_cache = true};

/* 14 MB, so that there is something to change half-way. */
static void copy_model(const char *from, const char *to)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf %s && cp -r %s %s", to, from, to);
    assert_int_equal(system(command), 0);
}

static void new_folder(char *dir)
{
    strcpy(dir, "/tmp/moult-updates-XXXXXX");
    assert_non_null(mkdtemp(dir));
}

static void drop_folder(const char *dir)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    assert_int_equal(system(command), 0);
}

static uint64_t hash_now(struct rig *g)
{
    return store_hash(g->store);
}

static struct update_status *status(struct engine *e)
{
    struct update_status *s = mem_alloc(sizeof *s);
    engine_update_status(e, s);
    return s;
}

static bool is_busy(struct engine *e)
{
    struct engine_stats st;
    engine_stat(e, &st);
    return st.updating;
}

static void expect_state(struct engine *e, enum update_state want)
{
    struct update_status *s = status(e);
    assert_string_equal(update_state_name(s->state), update_state_name(want));
    mem_free(s);
}

static void expect_outcome(struct engine *e, const char *want)
{
    struct update_status *s = status(e);
    assert_true(s->n_done > 0);
    assert_string_equal(s->done[0].outcome, want);
    mem_free(s);
}

static void test_states(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct update_result r = {0}, r2 = {0};
    rig_open(&g, DIR_EARLY, (struct engine_options){0});
    uint64_t early = hash_now(&g);
    expect_state(g.e, UPDATE_IDLE);
    assert_int_equal(engine_commit(g.e, NULL, &plain, &r, &err), ERR_STATE);
    assert_int_equal(engine_discard(g.e, &err), ERR_STATE);
    assert_int_equal(engine_stage(g.e, "/nowhere", &plain, &r, &err), ERR_NOTFOUND);
    expect_state(g.e, UPDATE_IDLE);
    expect_outcome(g.e, "failed");
    assert_int_equal(engine_stage(g.e, DIR_FINAL, &plain, &r, &err), OK);
    expect_state(g.e, UPDATE_STAGED);
    assert_true(hash_now(&g) == early && r.bytes > 0 && strlen(r.checksum) == 32);
    assert_int_equal(engine_stage(g.e, DIR_FINAL "/../tiny-moe", &plain, &r2, &err), OK);
    assert_true(r2.was_staged);
    assert_string_equal(r2.checksum, r.checksum);
    assert_int_equal(engine_stage(g.e, DIR_EARLY, &plain, &r2, &err), ERR_STATE);
    assert_int_equal(engine_commit(g.e, DIR_EARLY, &plain, &r2, &err), ERR_STATE);
    assert_int_equal(engine_commit(g.e, DIR_FINAL, &plain, &r2, &err), OK);
    assert_true(hash_now(&g) != early && r2.epoch == 2);
    expect_outcome(g.e, "committed");
    /* Replaced by an update from elsewhere; discarded; left for the end. */
    assert_int_equal(engine_stage(g.e, DIR_FINAL, &plain, &r, &err), OK);
    assert_int_equal(engine_update(g.e, DIR_EARLY, &plain, &r2, &err), OK);
    assert_true(hash_now(&g) == early && !r2.was_staged);
    assert_string_not_equal(r2.checksum, r.checksum);
    assert_int_equal(engine_stage(g.e, DIR_FINAL, &plain, &r, &err), OK);
    assert_int_equal(engine_discard(g.e, &err), OK);
    expect_outcome(g.e, "discarded");
    expect_state(g.e, UPDATE_IDLE);
    for (int i = 0; i < 40; i++)
        assert_int_not_equal(engine_update(g.e, "/nowhere", &plain, &r, &err), OK);
    struct update_status *s = status(g.e);
    assert_int_equal(s->n_done, UPDATE_RECORDS);
    mem_free(s);
    assert_int_equal(engine_stage(g.e, DIR_FINAL, &plain, &r, &err), OK);
    rig_close(&g);
}

/* The checksum is of values: not of the file they lie in, nor of the machine's layout. */
static void test_checksum(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct update_result a = {0}, b = {0};
    rig_open(&g, DIR_EARLY, (struct engine_options){0});
    struct update_options four = plain;
    four.loader_threads = 4;
    assert_int_equal(engine_update(g.e, DIR_FINAL, &plain, &a, &err), OK);
    assert_int_equal(engine_update(g.e, DIR_FINAL, &four, &b, &err), OK);
    assert_string_equal(a.checksum, b.checksum);
    rig_close(&g);
    rig_open(&g, DIR_EARLY, (struct engine_options){.in_place = true});
    assert_int_equal(engine_update(g.e, DIR_FINAL, &four, &b, &err), OK);
    assert_string_equal(a.checksum, b.checksum);
    rig_close(&g);
}

struct caller {
    struct engine *e;
    err_t rc;
    struct err err;
    bool update;
};

static void *call(void *arg)
{
    struct caller *c = arg;
    struct update_result r;
    c->rc = c->update ? engine_update(c->e, DIR_FINAL, &plain, &r, &c->err)
                      : engine_stage(c->e, DIR_FINAL, &plain, &r, &c->err);
    return NULL;
}

/* Discards and stops at random moments of a staging. */
static void test_cancel(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    int cancelled = 0;
    rig_open(&g, DIR_EARLY, (struct engine_options){.loader_threads = 1});
    uint64_t early = hash_now(&g);
    for (int i = 0; i < CANCELS; i++) {
        struct caller c = {.e = g.e};
        pthread_t t;
        assert_int_equal(pthread_create(&t, NULL, call, &c), 0);
        usleep((useconds_t)(i * (20000 / CANCELS)));
        err_t rc = engine_discard(g.e, &err);
        pthread_join(t, NULL);
        if (rc != OK) { /* it had not begun: then it is staged now */
            assert_int_equal(rc, ERR_STATE);
            assert_int_equal(c.rc, OK);
            assert_int_equal(engine_discard(g.e, &err), OK);
        }
        cancelled += c.rc == ERR_STATE;
        if (c.rc == ERR_STATE) assert_non_null(strstr(c.err.msg, "cancelled"));
        expect_state(g.e, UPDATE_IDLE);
        assert_true(hash_now(&g) == early);
    }
    print_message("%d of %d were cancelled half-way\n", cancelled, CANCELS);
    assert_true(cancelled > 0);
    rig_close(&g);
    for (int i = 0; i < 6; i++) {
        rig_open(&g, DIR_EARLY, (struct engine_options){.in_place = i % 2 == 1});
        struct caller c = {.e = g.e, .update = i >= 3};
        pthread_t t;
        assert_int_equal(pthread_create(&t, NULL, call, &c), 0);
        while (!is_busy(g.e))
            usleep(100);
        engine_stop(g.e, 0);
        pthread_join(t, NULL);
        model_free(g.model);
        pool_free(g.pool);
        store_free(g.store);
        test_device_close(&g.t);
    }
}

static void test_in_place(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct update_result r = {0};
    struct request *q[2], *want[2];
    rig_open(&g, DIR_FINAL, (struct engine_options){0});
    uint64_t final = hash_now(&g);
    for (int i = 0; i < 2; i++)
        want[i] = run_one(g.e, make(i, 40, 12));
    rig_close(&g);
    rig_open(&g, DIR_EARLY, (struct engine_options){.in_place = true});
    uint64_t early = hash_now(&g);
    const void *at = store_ptr(g.store, 0);
    request_unref(run_one(g.e, make(0, 40, 12)));
    assert_int_equal(engine_stage(g.e, DIR_FINAL, &plain, &r, &err), OK);
    assert_true(hash_now(&g) == early); /* only looked at */
    assert_int_equal(engine_commit(g.e, NULL, &plain, &r, &err), OK);
    assert_true(hash_now(&g) == final && store_ptr(g.store, 0) == at && r.epoch == 2);
    for (int i = 0; i < 2; i++) { /* nothing of the former weights is left in the prefix cache */
        q[i] = run_one(g.e, make(i, 40, 12));
        same(want[i], q[i]);
        request_unref(q[i]);
        request_unref(want[i]);
    }
    assert_int_not_equal(engine_update(g.e, "/nowhere", &plain, &r, &err), OK);
    assert_true(hash_now(&g) == final);
    check_idle(g.e);
    rig_close(&g);
}

static void flip_byte(const char *dir, bool keep_time)
{
    char path[300];
    struct stat st;
    snprintf(path, sizeof path, "%s/model-00001-of-00001.safetensors", dir);
    assert_int_equal(stat(path, &st), 0);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -20000, SEEK_END), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, -20000, SEEK_END), 0);
    fputc(c ^ 1, f);
    fclose(f);
    const struct timespec times[2] = {st.st_atim, st.st_mtim};
    if (keep_time) assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* The folder changes between the two readings. */
static void test_in_place_changed(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct update_result r = {0};
    struct engine_stats st;
    char dir[64], next[80];
    new_folder(dir);
    snprintf(next, sizeof next, "%s/next", dir);
    rig_open(&g, DIR_EARLY, (struct engine_options){.in_place = true});
    uint64_t early = hash_now(&g);
    /* Seen before the first byte: as it was. */
    copy_model(DIR_FINAL, next);
    assert_int_equal(engine_stage(g.e, next, &plain, &r, &err), OK);
    flip_byte(next, false);
    assert_int_equal(engine_commit(g.e, NULL, &plain, &r, &err), ERR_IO);
    assert_true(hash_now(&g) == early);
    expect_state(g.e, UPDATE_IDLE);
    expect_outcome(g.e, "failed");
    request_unref(run_one(g.e, make(0, 20, 4)));
    /* Replaced by name: what was verified is still open. */
    copy_model(DIR_FINAL, next);
    assert_int_equal(engine_stage(g.e, next, &plain, &r, &err), OK);
    drop_folder(next);
    copy_model(DIR_EARLY, next);
    assert_int_equal(engine_commit(g.e, NULL, &plain, &r, &err), OK);
    uint64_t final = hash_now(&g);
    assert_true(final != early);
    /* Unseen: half of it is there already. */
    assert_int_equal(engine_stage(g.e, next, &plain, &r, &err), OK);
    flip_byte(next, true);
    assert_int_equal(engine_commit(g.e, NULL, &plain, &r, &err), ERR_IO);
    assert_non_null(strstr(err.msg, "no valid weights"));
    expect_state(g.e, UPDATE_NO_WEIGHTS);
    expect_outcome(g.e, "ruined");
    engine_stat(g.e, &st);
    assert_true(st.no_weights);
    struct request *q = make(0, 20, 4);
    assert_int_equal(engine_submit(g.e, q, &err), ERR_BUSY);
    assert_non_null(strstr(err.msg, "no valid weights"));
    request_unref(q);
    assert_int_not_equal(engine_update(g.e, "/nowhere", &plain, &r, &err), OK);
    expect_state(g.e, UPDATE_NO_WEIGHTS);
    assert_int_equal(engine_update(g.e, DIR_FINAL, &plain, &r, &err), OK);
    expect_state(g.e, UPDATE_IDLE);
    assert_true(hash_now(&g) == final);
    request_unref(run_one(g.e, make(0, 20, 4)));
    check_idle(g.e);
    rig_close(&g);
    drop_folder(dir);
}

/* Requests that wait for a commit that ruins the weights are told so. */
static void test_in_place_with_requests(void **state)
{
    (void)state;
    if (no_model()) skip();
    struct rig g = {0};
    struct err err = {0};
    struct update_result r = {0};
    char dir[64], next[80];
    new_folder(dir);
    snprintf(next, sizeof next, "%s/next", dir);
    copy_model(DIR_FINAL, next);
    rig_open(&g, DIR_EARLY, (struct engine_options){.in_place = true, .max_running = 1});
    assert_int_equal(engine_stage(g.e, next, &plain, &r, &err), OK);
    flip_byte(next, true);
    struct request *q[5];
    for (int i = 0; i < 5; i++) {
        q[i] = make(i, 20, 400);
        assert_int_equal(engine_submit(g.e, q[i], &err), OK);
    }
    wait_running(g.e, 1);
    struct caller c = {.e = g.e};
    c.rc = engine_commit(g.e, NULL, &plain, &r, &c.err);
    assert_int_equal(c.rc, ERR_IO);
    int ended = 0, refused = 0;
    for (int i = 0; i < 5; i++) {
        wait_done(q[i]);
        ended += q[i]->finish == FINISH_LENGTH;
        if (q[i]->finish == FINISH_ABORT && q[i]->finish_status == 503) {
            assert_non_null(strstr(q[i]->finish_message, "no valid weights"));
            refused++;
        }
        request_unref(q[i]);
    }
    assert_true(ended >= 1 && refused >= 1 && ended + refused == 5);
    rig_close(&g);
    drop_folder(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_states),           cmocka_unit_test(test_checksum),
        cmocka_unit_test(test_cancel),           cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_in_place_changed), cmocka_unit_test(test_in_place_with_requests),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
