/* access.c - who may call what, and when. */
#include "server/internal.h"
#include <stdio.h>
#include <string.h>

/* In a time that depends on the length of what was given alone. */
static bool same(const char *given, const char *key)
{
    size_t n = strlen(given), k = strlen(key);
    unsigned diff = n != k;
    for (size_t i = 0; i < n; i++)
        diff |= (unsigned)(given[i] ^ key[k ? i % k : 0]);
    return !diff;
}

/* Without a route, too: nobody learns without a key what there is. */
bool access_allowed(const struct xchg *x)
{
    const struct server_options *o = &x->s->o;
    enum who who = x->route ? x->route->who : FOR_USERS;
    const char *key = who == FOR_CONTROL && o->admin_key ? o->admin_key : o->api_key;
    if (!key || who == FOR_ALL) return true;
    const char *h = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Authorization");
    return h && !strncmp(h, "Bearer ", 7) && same(h + 7, key);
}

/* Does a body of the OpenAI routes say that it is JSON? */
static bool says_json(const struct xchg *x)
{
    static const char json[] = "application/json";
    const char *type = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Content-Type");
    size_t n = sizeof json - 1;
    return type && !strncasecmp(type, json, n) && (!type[n] || type[n] == ';' || type[n] == ' ');
}

/* A router's choice of a rank, of which there is one. */
static bool is_rank(const struct xchg *x)
{
    const char *rank = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "X-Data-Parallel-Rank");
    return !rank || !strcmp(rank, "0");
}

static bool refuse_loading(struct xchg *x)
{
    struct server *s = x->s;
    char stage[sizeof s->stage + 32];
    pthread_mutex_lock(&s->m);
    float progress = s->progress;
    snprintf(stage, sizeof stage, "loading: %s", s->stage);
    pthread_mutex_unlock(&s->m);
    reply_error(x, 503, stage);
    x->out.len--; /* one object: the error, and how far it is */
    buf_printf(&x->out, ",\"status\":\"loading\",\"progress\":%.3f,\"stage\":", (double)progress);
    put_str(&x->out, stage + strlen("loading: "), strlen(stage) - strlen("loading: "));
    buf_putc(&x->out, '}');
    return true;
}

static int method_of(const char *name)
{
    static const struct {
        const char *name;
        int method;
    } names[] = {{"GET", M_GET}, {"HEAD", M_GET}, {"POST", M_POST}, {"PUT", M_PUT}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(names[i].name, name)) return names[i].method;
    return 0;
}

bool access_refuse(struct xchg *x, const char *method)
{
    struct server *s = x->s;
    int m = method_of(method);
    x->type = "application/json";
    if (!access_allowed(x)) return reply_failure(x, ERROR_KEY, 401, "Unauthorized"), true;
    if (!x->route) return reply_error(x, 404, "Not Found"), true;
    if (!(x->route->methods & m)) return reply_error(x, 405, "Method Not Allowed"), true;
    if (body_refuse(x)) return true;
    if (!s->ready && !(x->route->flags & ROUTE_LOADING)) return refuse_loading(x);
    bool new_work = m != M_GET && strcmp(x->path, "/abort_request") != 0;
    if (s->stopping || (s->draining && new_work))
        return reply_error(x, 503, "server is stopping"), true;
    if ((x->route->flags & ROUTE_GENERATES) && waiting_for_update(s))
        return reply_error(x, 503, "waiting for the first weight update (--ready-after-update)"),
               true;
    if ((x->route->flags & ROUTE_OPENAI) && m == M_POST && !says_json(x))
        return reply_error(x, 400, "Content-Type must be application/json"), true;
    if ((x->route->flags & ROUTE_OPENAI) && !is_rank(x))
        return reply_error(x, 400, "X-Data-Parallel-Rank: must be 0, the one rank there is"), true;
    if (x->discard) return reply_error(x, 503, "body: it came before the server was ready"), true;
    return false;
}
