/*
 * body.c - the body of a request.
 *
 * JSON is collected in x->body.  Weights are collected in x->bytes, at their place from the first: the memory is taken
 * once where Content-Length tells the size, and the update takes it over as it is.  Nothing is collected of a body
 * that will be refused anyway.
 */
#include "base/mem.h"
#include "server/internal.h"
#include <stdlib.h>
#include <string.h>

#define FIRST_BYTES ((size_t)1 << 20)

static bool is_json(const char *type)
{
    return !type || strncasecmp(type, "application/json", 16) == 0;
}

static bool reserve(struct xchg *x, size_t bytes)
{
    uint8_t *p = mem_retry(x->bytes.data, x->bytes.len, bytes);
    if (!p) return false;
    x->bytes.data = p;
    x->bytes.cap = bytes;
    return true;
}

static void drop(struct xchg *x)
{
    buf_release(&x->body);
    mem_free(x->bytes.data);
    x->bytes = (struct bytes){0};
}

void body_begin(struct xchg *x, const char *method)
{
    const struct server *s = x->s;
    x->body.max = s->o.max_body_bytes + 1;
    if (!x->route || !(x->route->flags & ROUTE_BYTES) || strcmp(method, "POST") != 0) return;
    if (is_json(MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Content-Type"))) return;
    const char *length = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Content-Length");
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0; /* the daemon has checked it */
    x->is_bytes = true;
    x->discard = !access_allowed(x) || !s->ready || s->stopping || s->draining;
    x->too_big = n > s->o.max_weight_body;
    if (n && !x->discard && !x->too_big) x->no_memory = !reserve(x, (size_t)n);
}

static void add_bytes(struct xchg *x, const char *data, size_t n)
{
    uint64_t max = x->s->o.max_weight_body, len = x->bytes.len;
    if (n > max - len) {
        x->too_big = true;
        return;
    }
    if (n > x->bytes.cap - x->bytes.len) {
        size_t cap = x->bytes.cap + x->bytes.cap / 2 + FIRST_BYTES;
        if (cap < x->bytes.len + n) cap = x->bytes.len + n;
        if (!reserve(x, cap)) {
            x->no_memory = true;
            return;
        }
    }
    memcpy(x->bytes.data + x->bytes.len, data, n);
    x->bytes.len += n;
}

void body_add(struct xchg *x, const char *data, size_t n)
{
    if (x->discard || x->too_big || x->no_memory) return;
    if (x->is_bytes)
        add_bytes(x, data, n);
    else if (n > x->s->o.max_body_bytes - x->body.len || !buf_put(&x->body, data, n))
        x->too_big = true;
    if (x->too_big || x->no_memory) drop(x);
}

bool body_refuse(struct xchg *x)
{
    if (x->too_big)
        reply_error(x, 413,
                    x->is_bytes ? "body: too large (--max-weight-body)"
                                : "body: too large (--max-body-bytes)");
    else if (x->no_memory)
        reply_error(x, 503, "body: no memory for it");
    return x->too_big || x->no_memory;
}

void body_release(struct xchg *x)
{
    drop(x);
    json_decref(x->query);
}
