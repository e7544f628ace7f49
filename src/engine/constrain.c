#include "engine/constrain.h"

#include "base/mem.h"

static size_t words_of(const struct config *c)
{
    return ((size_t)c->vocab_size + 31) / 32;
}

bool constrain_init(struct seq *q, const struct config *c)
{
    if (!q->r->grammar) return true;
    q->mask_at = -1;
    q->mask = mem_try_array(words_of(c), sizeof *q->mask);
    return q->mask != NULL;
}

static void allow(struct seq *q, const int32_t *ids, int32_t n, int32_t vocab)
{
    for (int32_t i = 0; i < n; i++)
        if (ids[i] >= 0 && ids[i] < vocab) q->mask[ids[i] >> 5] |= 1u << (ids[i] & 31);
}

err_t constrain_step(struct seq *q, const struct config *c, struct err *e)
{
    const struct request *r = q->r;
    bool whole = false;
    if (!r->grammar || q->mask_at == r->n_output || q->max_new == 0) return OK;
    err_t rc = grammar_mask(r->grammar, &q->run, r->output_ids, r->n_output, q->mask, c->vocab_size,
                            &whole, e);
    if (rc) return rc;
    if (whole && r->n_output >= r->min_new_tokens) {
        allow(q, c->eos, c->n_eos, c->vocab_size);
        allow(q, r->stop_ids, r->n_stop_ids, c->vocab_size);
    }
    q->mask_at = r->n_output;
    for (size_t i = 0; i < words_of(c); i++)
        if (q->mask[i]) return OK;
    return err_set(
        e, ERR_INPUT,
        "no token of the vocabulary can continue the output under its grammar (%s after %d tokens)",
        whole ? "it is whole, but may not end," : "a dead end", r->n_output);
}

int32_t constrain_barred(const struct seq *q, const struct config *c, int32_t *to)
{
    int32_t n = 0;
    if (!q->mask) return 0;
    for (int32_t id = 0; id < c->vocab_size; id += 32) {
        uint32_t gone = ~q->mask[id >> 5];
        if (c->vocab_size - id < 32) gone &= (1u << (c->vocab_size - id)) - 1;
        for (; gone; gone &= gone - 1)
            to[n++] = id + __builtin_ctz(gone);
    }
    return n;
}
