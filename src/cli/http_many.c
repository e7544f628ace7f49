#include "cli/http_many.h"
#include "base/clock.h"
#include "base/mem.h"
#include <string.h>

struct slot {
    CURL *h;
    int job; /* -1: idle */
    struct buf body;
};

struct run {
    const struct curl_dl *c;
    const struct http_jobs *j;
    CURLM *multi;
    struct curl_slist *headers;
    struct slot *slots;
    int n_slots, next, left;
    double t0;
};

static size_t take(char *p, size_t size, size_t n, void *ctx)
{
    struct slot *s = ctx;
    return buf_put(&s->body, p, size * n) ? size * n : 0;
}

static bool start(struct run *r, struct slot *s)
{
    const char *body = r->j->bodies[r->next];
    s->job = r->next++;
    if (r->j->urls) r->c->easy_setopt(s->h, CURLOPT_URL, r->j->urls[s->job]);
    buf_clear(&s->body);
    r->c->easy_setopt(s->h, CURLOPT_POSTFIELDS, body);
    r->c->easy_setopt(s->h, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(body));
    return r->c->multi_add(r->multi, s->h) == CURLM_OK;
}

static bool open_slot(struct run *r, struct slot *s)
{
    const struct curl_dl *c = r->c;
    s->h = c->easy_init();
    if (!s->h) return false;
    c->easy_setopt(s->h, CURLOPT_URL, r->j->url);
    c->easy_setopt(s->h, CURLOPT_HTTPHEADER, r->headers);
    c->easy_setopt(s->h, CURLOPT_WRITEFUNCTION, take);
    c->easy_setopt(s->h, CURLOPT_WRITEDATA, s);
    c->easy_setopt(s->h, CURLOPT_PRIVATE, s);
    c->easy_setopt(s->h, CURLOPT_NOSIGNAL, 1L);
    c->easy_setopt(s->h, CURLOPT_NOPROXY, "*");
    return true;
}

/* Seconds until the next job may begin; 0: now; negative: none is left. */
static double until_next(const struct run *r)
{
    if (r->next >= r->j->n) return -1;
    double wait = r->j->at ? r->j->at[r->next] - (clock_s() - r->t0) : 0;
    return wait > 0 ? wait : 0;
}

/* Idle slots take the jobs whose time has come. */
static bool pump(struct run *r)
{
    for (int i = 0; i < r->n_slots && until_next(r) == 0; i++) {
        struct slot *s = &r->slots[i];
        if (s->job < 0 && ((!s->h && !open_slot(r, s)) || !start(r, s))) return false;
    }
    return true;
}

static bool collect(struct run *r)
{
    CURLMsg *m;
    int rest;
    while ((m = r->c->multi_info(r->multi, &rest))) {
        if (m->msg != CURLMSG_DONE) continue;
        struct slot *s = NULL;
        long status = 0;
        CURLcode code = m->data.result;
        r->c->easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&s);
        r->c->easy_getinfo(m->easy_handle, CURLINFO_RESPONSE_CODE, &status);
        r->c->multi_remove(r->multi, m->easy_handle);
        int job = s->job;
        r->left--;
        s->job = -1;
        if (code != CURLE_OK) {
            const char *why = r->c->easy_strerror(code);
            r->j->done(r->j->ctx, job, 0, why, strlen(why));
        } else {
            const char *body = s->body.data ? s->body.data : "";
            r->j->done(r->j->ctx, job, status, body, s->body.len);
        }
    }
    return true;
}

static bool go(struct run *r)
{
    r->t0 = clock_s();
    for (int i = 0; i < r->n_slots; i++)
        r->slots[i].job = -1;
    while (r->left > 0) {
        int running = 0;
        if (!pump(r) || r->c->multi_perform(r->multi, &running) != CURLM_OK || !collect(r))
            return false;
        double wait = until_next(r);
        if (!pump(r)) return false;
        int ms = wait > 0 && wait < 1 ? (int)(wait * 1e3) + 1 : 1000;
        if (r->left > 0 && r->c->multi_poll(r->multi, NULL, 0, ms, NULL) != CURLM_OK) return false;
    }
    return true;
}

err_t http_many(const struct curl_dl *c, const struct http_jobs *j, struct err *e)
{
    struct run r = {.c = c, .j = j, .left = j->n};
    r.n_slots = j->parallel < j->n ? j->parallel : j->n;
    if (r.n_slots < 1) return OK;
    r.slots = mem_try_array((size_t)r.n_slots, sizeof *r.slots);
    r.multi = c->multi_init();
    r.headers = c->slist_append(NULL, "Content-Type: application/json");
    if (j->bearer) {
        struct buf b = {0};
        (void)buf_printf(&b, "Authorization: Bearer %s", j->bearer);
        r.headers = c->slist_append(r.headers, b.data ? b.data : "");
        buf_release(&b);
    }
    err_t rc = OK;
    if (!r.slots || !r.multi) rc = err_set(e, ERR_NOMEM, "no memory for %d connections", r.n_slots);
    if (rc == OK) {
        c->multi_setopt(r.multi, CURLMOPT_MAXCONNECTS, (long)r.n_slots);
        if (!go(&r)) rc = err_set(e, ERR_SYSTEM, "%s: libcurl failed", j->url);
    }
    for (int i = 0; r.slots && i < r.n_slots; i++) {
        if (r.slots[i].h) {
            c->multi_remove(r.multi, r.slots[i].h);
            c->easy_cleanup(r.slots[i].h);
        }
        buf_release(&r.slots[i].body);
    }
    if (r.multi) c->multi_cleanup(r.multi);
    c->slist_free_all(r.headers);
    mem_free(r.slots);
    return rc;
}
