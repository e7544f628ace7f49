#include "engine/routing.h"

#include "base/mem.h"
#include "model/model.h"
#include <string.h>

struct routing {
    size_t n_ids, elem, row; /* of a row: ids, bytes of each, bytes */
    uint8_t *rows;           /* [n_pages][KV_PAGE] */
};

size_t routing_id_bytes(const struct config *c)
{
    return c->n_experts <= 256 ? 1 : 2;
}

size_t routing_row_bytes(const struct config *c)
{
    return (size_t)c->n_layers * (size_t)c->top_k * routing_id_bytes(c);
}

err_t routing_new(struct routing **out, const struct config *c, int32_t n_pages, struct err *e)
{
    struct routing *t = mem_alloc(sizeof(*t));
    size_t bytes;
    t->n_ids = (size_t)c->n_layers * (size_t)c->top_k;
    t->elem = routing_id_bytes(c);
    t->row = routing_row_bytes(c);
    /* Not cleared: a row is read only after it was written. */
    if (mul_size(&bytes, (size_t)n_pages * KV_PAGE, t->row)) t->rows = mem_retry(NULL, 0, bytes);
    if (!t->rows) {
        mem_free(t);
        return err_set(e, ERR_NOMEM, "no memory for the experts of %d KV pages, %zu bytes a token",
                       n_pages, routing_row_bytes(c));
    }
    *out = t;
    return OK;
}

void routing_free(struct routing *t)
{
    if (!t) return;
    mem_free(t->rows);
    mem_free(t);
}

static uint8_t *row_at(const struct routing *t, const int32_t *pages, int32_t position)
{
    size_t token = (size_t)pages[position / KV_PAGE] * KV_PAGE + (size_t)(position % KV_PAGE);
    return t->rows + token * t->row;
}

void routing_put(struct routing *t, const int32_t *pages, int32_t position, const int16_t *ids)
{
    uint8_t *to = row_at(t, pages, position);
    for (size_t i = 0; i < t->n_ids; i++) {
        to[i * t->elem] = (uint8_t)ids[i];
        if (t->elem == 2) to[i * 2 + 1] = (uint8_t)(ids[i] >> 8);
    }
}

uint8_t *routing_rows(const struct routing *t, const int32_t *pages, int32_t from, int32_t to)
{
    size_t bytes;
    if (!mul_size(&bytes, (size_t)(to - from), t->row)) return NULL;
    uint8_t *rows = mem_retry(NULL, 0, bytes), *at = rows;
    for (int32_t p = from, n; rows && p < to; p += n) {
        n = KV_PAGE - p % KV_PAGE; /* rows of a page lie together */
        if (n > to - p) n = to - p;
        memcpy(at, row_at(t, pages, p), (size_t)n * t->row);
        at += (size_t)n * t->row;
    }
    return rows;
}
