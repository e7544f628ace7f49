/* The engine when memory is short or a step hangs: that request fails, and nothing else. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_rig.h"
#include <signal.h>
#include <sys/wait.h>

/* A request that uses all there is: stops, text, prompt and top logprobs, stop ids, bias. */
static struct request *rich(int32_t salt)
{
    struct request *r = make(salt, 24, 10);
    r->logprob_start = 0;
    r->n_top = 3;
    r->n_stops = 2;
    r->stops = mem_alloc(2 * sizeof *r->stops);
    r->stop_bytes = mem_alloc(2 * sizeof *r->stop_bytes);
    r->stops[0] = mem_dup("never said");
    r->stops[1] = mem_dup("nor this");
    r->stop_bytes[0] = 10;
    r->stop_bytes[1] = 8;
    r->n_stop_ids = 200;
    r->stop_ids = mem_alloc(200 * sizeof(int32_t));
    for (int i = 0; i < 200; i++)
        r->stop_ids[i] = 2047;
    r->min_new_tokens = 10;
    return r;
}

static void fault_sweep(struct engine_options o, int n_at_once)
{
    struct rig g = {0};
    struct err err = {0};
    struct tokenizer *tok = NULL;
    struct request *r[4], *want[4];
    int failures = 0, refused = 0, quiet = 0;
    assert_int_equal(tokenizer_load(&tok, DIR_FINAL "/tokenizer.json", &err), OK);
    o.tokenizer = tok;
    rig_open(&g, DIR_FINAL, o);
    for (int i = 0; i < n_at_once; i++)
        want[i] = run_one(g.e, rich(i));
    for (long n = 1;; n++) {
        bool in[4] = {0};
        for (int i = 0; i < n_at_once; i++)
            r[i] = rich(i);
        assert_int_equal(engine_flush(g.e, 0, &err), OK);
        (void)mem_fault_at(n);
        for (int i = 0; i < n_at_once; i++) {
            err_t rc = engine_submit(g.e, r[i], &err);
            if (rc != OK) assert_int_equal(rc, ERR_NOMEM);
            in[i] = rc == OK;
        }
        int bad = 0;
        for (int i = 0; i < n_at_once; i++) {
            refused += !in[i];
            if (!in[i]) continue;
            wait_done(r[i]);
            if (r[i]->finish == FINISH_ABORT) {
                assert_int_equal(r[i]->finish_status, 503);
                assert_non_null(strstr(r[i]->finish_message, "memory"));
                bad++;
            } else {
                same(want[i], r[i]);
            }
        }
        bool over = mem_fault_at(0) > 0;
        failures += bad;
        assert_true(bad <= 1); /* only the one that asked for the memory */
        if (!over && !bad && in[0] && in[n_at_once - 1])
            quiet++; /* the prefix cache does without */
        for (int i = 0; i < n_at_once; i++)
            request_unref(r[i]);
        if (n % 7 == 0 || over) { /* the next request is served as ever */
            struct request *next = run_one(g.e, rich(0));
            same(want[0], next);
            request_unref(next);
            if (engine_check(g.e, &err) != OK) fail_msg("%s", err.msg);
        }
        if (over) break;
    }
    print_message("%d requests failed, %d were refused, %d allocations were not needed\n", failures,
                  refused, quiet);
    assert_true(failures > 20 && refused >= 8);
    for (int i = 0; i < n_at_once; i++)
        request_unref(want[i]);
    check_idle(g.e);
    rig_close(&g);
    tokenizer_free(tok);
}

static void test_every_allocation(void **state)
{
    (void)state;
    if (no_model()) skip();
    fault_sweep((struct engine_options){0}, 1);
}

static void test_every_allocation_under_pressure(void **state)
{
    (void)state;
    if (no_model()) skip();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* the sweep above has been checked; this one takes minutes */
#endif
    fault_sweep((struct engine_options){.chunk_tokens = 7, .n_kv_pages = 4, .retract_every = 5}, 2);
}

struct told {
    struct engine *e;
    int fd;
};

/* A server's thread asks the engine for names while it answers. */
static void on_notify(void *ctx)
{
    struct told *t = ctx;
    char version[128];
    engine_weight_version(t->e, version, sizeof version);
    (void)!write(t->fd, "n", 1);
}

/* A hanging step ends the process, and its requests are told before. */
static void test_watchdog(void **state)
{
    (void)state;
    if (no_model()) skip();
    enum { N = 4 };
    int fd[2], status = 0;
    char got[N + 1] = "";
    assert_int_equal(pipe(fd), 0);
    pid_t child = fork();
    if (child == 0) {
        struct rig g = {0};
        struct err err = {0};
        rig_open(&g, DIR_FINAL,
                 (struct engine_options){
                     .watchdog_s = 0.001, .max_step_tokens = 8192, .n_kv_pages = 1200});
        struct told t = {g.e, fd[1]};
        for (int i = 0; i < N; i++) {
            struct request *r = make(i, 4000, 1);
            r->notify = on_notify;
            r->ctx = &t;
            if (engine_submit(g.e, r, &err) != OK) _exit(1);
        }
        sleep(60);
        _exit(2);
    }
    for (int i = 0; i < 1000 && waitpid(child, &status, WNOHANG) == 0; i++)
        usleep(20000);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 70) {
        kill(child, SIGKILL);
        fail_msg("the watchdog did not end the process: status %x", (unsigned)status);
    }
    close(fd[1]);
    assert_int_equal(read(fd[0], got, N + 1), N); /* each once */
    close(fd[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_watchdog),
                                       cmocka_unit_test(test_every_allocation),
                                       cmocka_unit_test(test_every_allocation_under_pressure)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
