/* server.c - start and end of the server (server.h). */
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/updates.h"
#include "server/internal.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define STOP_S 5 /* seconds that server_stop waits for calls to end */

static int raise_files(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r)) return 1024;
    r.rlim_cur = r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
    getrlimit(RLIMIT_NOFILE, &r);
    return r.rlim_cur > 65536 ? 65536 : (int)r.rlim_cur;
}

err_t server_start(struct server **out, const struct server_options *o, struct err *e)
{
    json_t *preferred = NULL;
    if (o->preferred_sampling) {
        preferred = json_parse_object(o->preferred_sampling, strlen(o->preferred_sampling), e);
        if (!preferred) return err_wrap(e, ERR_INPUT, "--preferred-sampling-params");
    }
    struct server *s = mem_alloc(sizeof *s);
    s->o = *o;
    s->preferred = preferred;
    if (!s->o.max_body_bytes) s->o.max_body_bytes = (size_t)64 << 20;
    if (!s->o.max_weight_body) s->o.max_weight_body = (uint64_t)4 << 30;
    signal(SIGPIPE, SIG_IGN);
    pthread_mutex_init(&s->m, NULL);
    pthread_mutex_init(&s->grammars.m, NULL);
    s->started = time(NULL);
    work_start(s);
    watch_start(&s->watch, raise_files());
    if (http_start(s, e)) {
        err_t rc = e ? e->code : ERR_IO;
        (void)server_stop(s);
        return rc;
    }
    *out = s;
    return OK;
}

int server_port(const struct server *s)
{
    return s->port;
}

void server_progress(struct server *s, float progress, const char *stage)
{
    pthread_mutex_lock(&s->m);
    s->progress = progress;
    snprintf(s->stage, sizeof s->stage, "%s", stage ? stage : "");
    pthread_mutex_unlock(&s->m);
}

void server_set_model(struct server *s, const struct server_options *o)
{
    s->o.tokenizer = o->tokenizer;
    s->o.chat_template = o->chat_template;
    s->o.config = o->config;
    s->o.bos_token = o->bos_token;
    s->o.eos_token = o->eos_token;
    s->o.bos_id = o->bos_id;
    s->o.add_bos = o->add_bos;
    s->o.context_len = o->context_len;
    s->o.loaded = o->loaded;
    s->o.tool_format = o->tool_format;
    s->o.reasoning_format = o->reasoning_format;
}

void server_ready(struct server *s, struct engine *engine)
{
    s->engine = engine;
    s->ready = true;
}

void server_drain(struct server *s)
{
    s->draining = true;
}

/* Aborts and answers what is in flight, for at most STOP_S seconds.  The abort is repeated because a worker that
 * had passed the check of `stopping` may submit after the first one.  An update that is
 * being staged ends after its next read.  Returns how many calls are still at work: a read that hangs, or a long text
 * in the tokenizer, cannot be interrupted. */
static int answer_all(struct server *s)
{
    int64_t until = clock_ns() + (int64_t)STOP_S * 1000000000;
    for (;;) {
        int working = 0;
        if (s->ready) {
            engine_abort(s->engine, "", true);
            engine_cancel(s->engine);
        }
        pthread_mutex_lock(&s->m);
        for (struct xchg *x = s->live; x; x = x->next_live) {
            pthread_mutex_lock(&x->m);
            working += x->suspended; /* what is not waits for its client to read */
            pthread_mutex_unlock(&x->m);
        }
        if (s->n_threads > working) working = s->n_threads; /* whose client has left */
        bool none = !working && !s->live;
        pthread_mutex_unlock(&s->m);
        if (none || clock_ns() > until) return working;
        usleep(10000);
    }
}

/* Those that are still at work: told that there will be no answer, which their threads know nothing of. */
static void cut_all(struct server *s)
{
    pthread_mutex_lock(&s->m);
    for (struct xchg *x = s->live; x; x = x->next_live) {
        pthread_mutex_lock(&x->m);
        if (x->suspended) {
            x->cut = true;
            xchg_wake(x);
        }
        pthread_mutex_unlock(&x->m);
    }
    pthread_mutex_unlock(&s->m);
    usleep(200000); /* the daemon's time to send it */
}

bool server_stop(struct server *s)
{
    int listener = s->daemon ? MHD_quiesce_daemon(s->daemon) : -1;
    pthread_mutex_lock(&s->m);
    s->stopping = true;
    pthread_mutex_unlock(&s->m);
    /* The workers live on meanwhile: they build the replies.  No connection may be suspended when the daemon stops. */
    int working = s->daemon ? answer_all(s) : 0;
    if (working) {
        cut_all(s);
        log_line(LOG_WARN, "%d calls could not be ended in %d s", working, STOP_S);
        return false;
    }
    work_stop(s);
    watch_stop(&s->watch);
    if (s->daemon) {
        s->daemon_ends = true;
        daemon_wake(s);
        pthread_join(s->thread, NULL);
        close(s->wake_fd);
        MHD_stop_daemon(s->daemon);
    }
    if (listener >= 0) close(listener);
    for (int64_t until = clock_ns() + STOP_S * 1000000000ll; atomic_load(&s->n_xchg) > 0;
         usleep(1000))
        if (clock_ns() > until) return false; /* the engine has not let go of their requests */
    watch_release(&s->watch);
    constraint_release(s);
    json_decref(s->preferred);
    json_decref(s->snapshot);
    pthread_mutex_destroy(&s->m);
    mem_free(s);
    return true;
}
