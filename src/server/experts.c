#include "server/experts.h"
#include "base/mem.h"
#include "engine/routing.h"
#include "server/base64.h"
#include <string.h>

enum { BATCH = 3 * 1024 }; /* ids encoded at once; a multiple of 3 */

void experts_put(struct buf *b, const struct config *c, const struct request *r)
{
    size_t elem = routing_id_bytes(c), n = (size_t)r->n_expert_rows * routing_row_bytes(c) / elem;
    uint8_t wide[BATCH * 4];
    for (size_t at = 0, here; at < n; at += here) {
        here = n - at < BATCH ? n - at : BATCH;
        memset(wide, 0, here * 4);
        for (size_t i = 0; i < here; i++)
            for (size_t k = 0; k < elem; k++)
                wide[i * 4 + k] = r->experts[(at + i) * elem + k];
        if (!base64_put(b, wide, here * 4)) return;
    }
}

/* Where the ids of a request go, one by one. */
struct sink {
    const struct config *c;
    int16_t *ids;
    size_t n, cap;
    struct err *e;
};

static err_t sink_open(struct sink *s, const struct config *c, size_t rows, const struct request *r,
                       struct err *e)
{
    size_t row = (size_t)c->n_layers * (size_t)c->top_k;
    *s = (struct sink){.c = c, .e = e};
    if (!c->n_experts) return err_set(e, ERR_INPUT, "routed_experts: the model has no experts");
    if (rows > (size_t)r->n_prompt)
        return err_set(e, ERR_INPUT, "routed_experts: %zu rows for a prompt of %d tokens", rows,
                       r->n_prompt);
    s->cap = rows * row;
    s->ids = mem_try_array(s->cap + 1, sizeof *s->ids);
    return s->ids ? OK : err_set(e, ERR_NOMEM, "routed_experts: out of memory");
}

static err_t sink_add(struct sink *s, int64_t id)
{
    size_t k = (size_t)s->c->top_k, layers = (size_t)s->c->n_layers, at = s->n++;
    if (id >= 0 && id < s->c->n_experts) {
        s->ids[at] = (int16_t)id;
        return OK;
    }
    return err_set(s->e, ERR_INPUT,
                   "routed_experts[%zu][%zu][%zu]: %lld is not allowed; must be an expert, 0..%d",
                   at / k / layers, at / k % layers, at % k, (long long)id, s->c->n_experts - 1);
}

static err_t from_text(struct sink *s, const json_t *v, const struct config *c,
                       const struct request *r, struct err *e)
{
    size_t row = (size_t)c->n_layers * (size_t)c->top_k * 4;
    struct buf raw = {0};
    err_t rc = OK;
    if (!base64_get(&raw, json_string_value(v), json_string_length(v)))
        rc = raw.failed ? err_set(e, ERR_NOMEM, "routed_experts: out of memory")
                        : err_set(e, ERR_INPUT, "routed_experts: this is not base64 with padding");
    if (!rc && row && raw.len % row)
        rc =
            err_set(e, ERR_INPUT,
                    "routed_experts: %zu bytes; must be int32 [tokens][%d layers][%d experts], %zu "
                    "bytes a token",
                    raw.len, c->n_layers, c->top_k, row);
    if (!rc) rc = sink_open(s, c, row ? raw.len / row : 0, r, e);
    for (size_t i = 0; !rc && i < s->cap; i++) {
        const uint8_t *p = (const uint8_t *)raw.data + i * 4;
        rc = sink_add(s, (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                                   (uint32_t)p[3] << 24));
    }
    buf_release(&raw);
    return rc;
}

static err_t add_layer(struct sink *s, const json_t *v, size_t row, size_t layer)
{
    for (size_t i = 0; i < (size_t)s->c->top_k; i++) {
        const json_t *id = json_array_get(v, i);
        if (!json_is_integer(id) || json_array_size(v) != (size_t)s->c->top_k)
            return err_set(s->e, ERR_INPUT,
                           "routed_experts[%zu][%zu]: must be a list of %d experts", row, layer,
                           s->c->top_k);
        err_t rc = sink_add(s, json_integer_value(id));
        if (rc) return rc;
    }
    return OK;
}

static err_t from_lists(struct sink *s, const json_t *v, const struct config *c,
                        const struct request *r, struct err *e)
{
    err_t rc = sink_open(s, c, json_array_size(v), r, e);
    for (size_t i = 0; !rc && i < json_array_size(v); i++) {
        const json_t *row = json_array_get(v, i);
        if (!json_is_array(row) || json_array_size(row) != (size_t)c->n_layers)
            return err_set(e, ERR_INPUT, "routed_experts[%zu]: must be a list of %d layers", i,
                           c->n_layers);
        for (size_t l = 0; !rc && l < (size_t)c->n_layers; l++)
            rc = add_layer(s, json_array_get(row, l), i, l);
    }
    return rc;
}

static err_t read_given(const json_t *v, const struct config *c, struct request *r, struct err *e)
{
    struct sink s = {0};
    err_t rc = json_is_string(v) ? from_text(&s, v, c, r, e)
               : json_is_array(v)
                   ? from_lists(&s, v, c, r, e)
                   : json_bad(e, "routed_experts", v, "base64, or a list [token][layer][expert]");
    r->forced = s.ids;
    r->n_forced = rc || !s.cap ? 0 : (int32_t)(s.cap / ((size_t)c->n_layers * (size_t)c->top_k));
    return rc;
}

err_t experts_read(const json_t *o, const struct config *c, struct request *r, struct err *e)
{
    const json_t *given = json_field(o, "routed_experts");
    int64_t from = 0;
    err_t rc = json_get_bool(o, "return_routed_experts", &r->want_experts, e);
    if (!rc) rc = json_get_int(o, "routed_experts_start_len", 0, INT32_MAX, &from, e);
    if (!rc && from > r->n_prompt)
        rc =
            err_set(e, ERR_INPUT,
                    "routed_experts_start_len: %lld is higher than the number of input tokens (%d)",
                    (long long)from, r->n_prompt);
    r->experts_start = (int32_t)from;
    return rc || !given ? rc : read_given(given, c, r, e);
}
