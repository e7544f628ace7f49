/*
 * read_weights.c - resident bytes, read between steps in short pieces so that serving goes on.
 *
 * A commit between two pieces would make a mixture: the epoch is compared at each, and another one is ERR_BUSY.
 */
#include "base/mem.h"
#include "server/read_weights.h"

#define PIECE_BYTES ((size_t)1 << 20)

struct piece {
    struct weight_reader *r;
    size_t slot;
    const struct export_tensor *t;
    size_t row0, n;
    char *to;
};

static err_t read_piece(void *ctx, struct err *e)
{
    const struct piece *p = ctx;
    const struct store *s = engine_store(p->r->engine);
    if (store_lost(s))
        return err_set(e, ERR_STATE, "no weights are resident: released, and not updated since");
    if (p->r->epoch == 0) p->r->epoch = store_epoch(s);
    if (store_epoch(s) != p->r->epoch)
        return err_set(e, ERR_BUSY, "the weights were updated while they were read; ask again");
    store_get(s, p->to, p->slot, p->t->part, p->row0, p->n);
    return OK;
}

err_t weight_read_rows(struct weight_reader *r, size_t slot, const struct export_tensor *t,
                       size_t row0, size_t n, void *to, struct err *e)
{
    size_t step = PIECE_BYTES / (t->row_bytes ? t->row_bytes : 1) / MEMORY_ROWS * MEMORY_ROWS;
    if (step == 0) step = MEMORY_ROWS;
    struct engine_stats st;
    engine_stat(r->engine, &st);
    if (st.no_weights)
        return err_set(e, ERR_STATE,
                       "no valid weights are resident: released, or ruined by an update in place; "
                       "an update brings them");
    for (size_t i = 0, m; i < n; i += m) {
        m = n - i < step ? n - i : step;
        struct piece p = {r, slot, t, row0 + i, m, (char *)to + i * t->row_bytes};
        err_t rc = engine_between_steps(r->engine, read_piece, &p, e);
        if (rc != OK) return rc;
    }
    return OK;
}

err_t weight_read(struct weight_reader *r, size_t slot, const struct export_tensor *t,
                  struct buf *out, struct err *e)
{
    size_t bytes;
    char *room = mul_size(&bytes, t->rows, t->row_bytes) ? mem_try(bytes + 1) : NULL;
    if (!room) return err_set(e, ERR_NOMEM, "tensor %s: no memory to read it", t->name);
    err_t rc = weight_read_rows(r, slot, t, 0, t->rows, room, e);
    if (rc == OK && !buf_put(out, room + t->at, t->bytes))
        rc = err_set(e, ERR_TOOBIG, "tensor %s: %zu bytes are too many for one reply", t->name,
                     t->bytes);
    mem_free(room);
    return rc;
}
