/* api_control.c - routes that change what runs: flush, abort. */
#include "server/internal.h"

void api_flush(struct xchg *x, const json_t *body)
{
    (void)body;
    struct err e = {0};
    err_t rc = engine_flush(x->s->engine, &e);
    reply_text(x, rc ? err_http(rc) : 200, "text/plain", rc ? e.msg : "Cache flushed.\n");
}

void api_abort_request(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *rid = "";
    bool all = false;
    if (json_get_str(b, "rid", &rid, &e) || json_get_bool(b, "abort_all", &all, &e)) {
        reply_err(x, &e);
        return;
    }
    engine_abort(x->s->engine, rid, all);
}

