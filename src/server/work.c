/*
 * work.c - the threads that parse, tokenize and build replies.
 *
 * Two lanes of two workers: a call with a big body (a megabyte of text takes a second to tokenize) waits behind
 * others of its kind only, so normal traffic goes on beside it.
 */
#include "server/internal.h"
#include "server/record.h"
#include "server/roots.h"

#define BIG_BODY ((size_t)256 << 10)

void xchg_run(struct xchg *x)
{
    struct err e = {0};
    json_t *body = NULL;
    x->status = 200;
    x->type = "application/json";
    if (x->s->o.record && (x->route->flags & ROUTE_LATER))
        record_in(x->s->o.record, x->id, x->path, &x->body);
    if (x->body.len) {
        body = json_parse_object(x->body.data, x->body.len, &e);
        buf_release(&x->body); /* it may be large, and the generation long */
        if (!body) {
            reply_err(x, &e);
            xchg_ready(x);
            return;
        }
    }
    const struct server_options *o = &x->s->o;
    if (x->route->who == FOR_CONTROL && (roots_check(o->roots, o->n_roots, body, &e) ||
                                         roots_check(o->roots, o->n_roots, x->query, &e))) {
        reply_err(x, &e);
        json_decref(body);
        xchg_ready(x);
        return;
    }
    bool ends = !(x->route->flags & ROUTE_LATER);
    x->route->handle(x, body);
    json_decref(body);
    if (ends) xchg_ready(x);
}

static void run(struct xchg *x)
{
    pthread_mutex_lock(&x->m);
    bool building = x->building, encoding = x->encoding;
    pthread_mutex_unlock(&x->m);
    if (encoding) {
        native_encode(x);
        return;
    }
    if (!building) {
        xchg_run(x);
        return;
    }
    if (!gen_failed(x)) x->build(x);
    if (x->out.failed) reply_error(x, 503, "reply: out of memory");
    xchg_ready(x);
}

void xchg_queue(struct xchg *x)
{
    struct server *s = x->s;
    if (x->body.len > BIG_BODY) x->big = true; /* and stays so when the body is gone */
    struct lane *l = &s->lanes[x->big];
    atomic_fetch_add(&x->refs, 1);
    pthread_mutex_lock(&s->m);
    x->next_work = NULL;
    if (l->tail)
        l->tail->next_work = x;
    else
        l->head = x;
    l->tail = x;
    pthread_cond_signal(&l->cond);
    pthread_mutex_unlock(&s->m);
}

static void *worker(void *arg)
{
    struct lane *l = arg;
    struct server *s = l->s;
    (void)pthread_setname_np(pthread_self(), "parse");
    pthread_mutex_lock(&s->m);
    for (;;) {
        while (!l->head && !s->quit)
            pthread_cond_wait(&l->cond, &s->m);
        struct xchg *x = l->head;
        if (!x) break;
        l->head = x->next_work;
        if (!l->head) l->tail = NULL;
        pthread_mutex_unlock(&s->m);
        run(x);
        xchg_unref(x);
        pthread_mutex_lock(&s->m);
    }
    pthread_mutex_unlock(&s->m);
    return NULL;
}

void work_start(struct server *s)
{
    for (int k = 0; k < 2; k++) {
        struct lane *l = &s->lanes[k];
        l->s = s;
        CHECK(pthread_cond_init(&l->cond, NULL) == 0);
        for (int i = 0; i < 2; i++)
            CHECK(pthread_create(&l->workers[i], NULL, worker, l) == 0);
    }
}

void work_stop(struct server *s)
{
    pthread_mutex_lock(&s->m);
    s->quit = true;
    for (int k = 0; k < 2; k++)
        pthread_cond_broadcast(&s->lanes[k].cond);
    pthread_mutex_unlock(&s->m);
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 2; i++)
            pthread_join(s->lanes[k].workers[i], NULL);
        pthread_cond_destroy(&s->lanes[k].cond);
    }
}

/* ---- calls that may block for long: a thread of their own ---- */

static void *long_runner(void *arg)
{
    struct xchg *x = arg;
    struct server *s = x->s;
    run(x);
    xchg_unref(x);
    pthread_mutex_lock(&s->m);
    s->n_threads--;
    pthread_mutex_unlock(&s->m);
    return NULL;
}

void xchg_thread(struct xchg *x)
{
    struct server *s = x->s;
    pthread_t t;
    atomic_fetch_add(&x->refs, 1);
    pthread_mutex_lock(&s->m);
    s->n_threads++;
    pthread_mutex_unlock(&s->m);
    if (pthread_create(&t, NULL, long_runner, x) == 0) {
        pthread_detach(t);
        return;
    }
    pthread_mutex_lock(&s->m);
    s->n_threads--;
    pthread_mutex_unlock(&s->m);
    reply_error(x, 503, "no thread for this call");
    xchg_ready(x);
    xchg_unref(x);
}
