/* xchg.c - the life of an exchange: made, told that its reply is ready or its client gone, freed. */
#include "base/mem.h"
#include "server/internal.h"
#include "text/grammar.h"
#include <stdio.h>
#include <string.h>

static void xchg_free(struct xchg *x)
{
    struct server *s = x->s;
    for (int32_t i = 0; i < x->n_slots; i++)
        slot_release(&x->slots[i]);
    mem_free(x->slots);
    mem_free(x->model);
    grammar_unref(x->tool_grammar);
    body_release(x);
    buf_release(&x->out);
    pthread_mutex_destroy(&x->m);
    mem_free(x);
    atomic_fetch_sub(&s->n_xchg, 1); /* the server may be gone from here on */
}

void xchg_unref(struct xchg *x)
{
    if (atomic_fetch_sub(&x->refs, 1) == 1) xchg_free(x);
}

void xchg_wake(struct xchg *x)
{
    x->wake = true;
    if (!x->suspended) return;
    x->suspended = false;
    MHD_resume_connection(x->c);
    daemon_wake(x->s);
}

void xchg_ready(struct xchg *x)
{
    pthread_mutex_lock(&x->m);
    if (!x->replied) {
        x->replied = true;
        if (!x->gone || x->suspended) xchg_wake(x);
    }
    pthread_mutex_unlock(&x->m);
}

void xchg_encoded(struct slot *sl)
{
    struct xchg *x = sl->x;
    pthread_mutex_lock(&x->m);
    sl->encoded = true;
    if (x->replied && x->stream)
        xchg_wake(x);
    else
        x->wake = true;
    pthread_mutex_unlock(&x->m);
}

void xchg_notify(void *ctx)
{
    struct slot *sl = ctx;
    struct xchg *x = sl->x;
    bool queue = false, drop = false, encode = false;
    pthread_mutex_lock(&sl->r->lock);
    bool done = sl->r->done;
    pthread_mutex_unlock(&sl->r->lock);
    pthread_mutex_lock(&x->m);
    if (done && !sl->counted) {
        sl->counted = drop = true;
        sl->to_encode = x->stream && sl->r->has_experts;
        encode = sl->to_encode && !x->encoding;
        x->encoding = x->encoding || encode;
        metrics_finished(&x->s->metrics, sl->r);
        queue = ++x->n_done == x->n_slots && !x->stream && !x->replied;
        if (queue) x->building = true;
    }
    if (x->replied && x->stream)
        xchg_wake(x);
    else
        x->wake = true;
    pthread_mutex_unlock(&x->m);
    if (queue || encode) xchg_queue(x);
    if (drop) xchg_unref(x);
}

void xchg_left(struct xchg *x)
{
    pthread_mutex_lock(&x->m);
    x->gone = true;
    /* Before `submitted` and `replied` a worker may be writing the rest. */
    int32_t n = x->submitted && x->n_done < x->n_slots ? x->n_slots : 0;
    if (x->replied && x->stream) xchg_wake(x);
    pthread_mutex_unlock(&x->m);
    for (int32_t i = 0; i < n; i++)
        engine_abort_request(x->s->engine, x->slots[i].r);
}

struct xchg *xchg_new(struct server *s, struct MHD_Connection *c, const char *url)
{
    struct xchg *x = mem_try(sizeof *x);
    if (!x) return NULL;
    atomic_fetch_add(&s->n_xchg, 1);
    x->s = s;
    x->c = c;
    x->fd = -1;
    x->refs = 1;
    pthread_mutex_init(&x->m, NULL);
    snprintf(x->path, sizeof x->path, "%s", url);
    x->route = route_find(x->path);
    const char *id = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "x-request-id");
    bool plain = id && *id && strlen(id) < sizeof x->id;
    for (const char *p = id; plain && *p; p++)
        plain = *p > 0x20 && *p < 0x7f;
    if (plain)
        snprintf(x->id, sizeof x->id, "%s", id);
    else
        put_id(x->id, sizeof x->id, "");
    pthread_mutex_lock(&s->m);
    x->next_live = s->live;
    if (s->live) s->live->prev_live = x;
    s->live = x;
    pthread_mutex_unlock(&s->m);
    return x;
}
