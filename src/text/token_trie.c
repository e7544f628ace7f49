#include "text/token_trie.h"

#include "base/mem.h"
#include <stdlib.h>
#include <string.h>

static int by_bytes(const void *a, const void *b, void *ctx)
{
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    size_t n = 0, m = 0;
    const char *p = tokenizer_decoded(ctx, i, &n), *q = tokenizer_decoded(ctx, j, &m);
    int c = memcmp(p, q, n < m ? n : m);
    if (c) return c;
    return n != m ? (n < m ? -1 : 1) : (i > j) - (i < j);
}

/* Ids that can be written byte by byte, sorted; returns the sum of their lengths. */
static size_t collect(struct token_trie *t)
{
    size_t bytes = 0, n = 0;
    for (int32_t id = 0; id < tokenizer_vocab_size(t->tok); id++) {
        if (!tokenizer_decoded(t->tok, id, &n) || tokenizer_is_special(t->tok, id)) continue;
        if (n == 0 || n > TRIE_MAX_BYTES) continue;
        t->id[t->n_ids++] = id;
        bytes += n;
    }
    qsort_r(t->id, (size_t)t->n_ids, sizeof *t->id, by_bytes, (void *)(uintptr_t)t->tok);
    return bytes;
}

/* Nodes of the sorted ids: what a token shares with the one before it is there already. */
static void build(struct token_trie *t)
{
    int32_t path[TRIE_MAX_BYTES];
    const char *last = NULL;
    size_t n_last = 0;
    for (int32_t k = 0; k < t->n_ids; k++) {
        size_t n = 0, same = 0;
        const char *p = tokenizer_decoded(t->tok, t->id[k], &n);
        while (same < n_last && same < n && p[same] == last[same])
            same++;
        for (size_t d = same; d < n_last; d++)
            t->end[path[d]] = t->n_nodes;
        for (size_t d = same; d < n; d++) {
            path[d] = t->n_nodes;
            t->byte[t->n_nodes] = (uint8_t)p[d];
            t->first[t->n_nodes++] = k;
        }
        t->first[t->n_nodes] = k + 1;
        last = p;
        n_last = n;
    }
    for (size_t d = 0; d < n_last; d++)
        t->end[path[d]] = t->n_nodes;
}

err_t token_trie_new(struct token_trie **out, const struct tokenizer *tok, struct err *e)
{
    struct token_trie *t = mem_alloc(sizeof *t);
    size_t vocab = (size_t)tokenizer_vocab_size(tok), bytes = 0;
    t->refs = 1;
    t->tok = tok;
    t->id = mem_try_array(vocab + 1, sizeof *t->id);
    if (t->id) bytes = collect(t);
    if (bytes < INT32_MAX) {
        t->byte = mem_try_array(bytes + 1, 1);
        t->end = mem_try_array(bytes + 1, sizeof *t->end);
        t->first = mem_try_array(bytes + 1, sizeof *t->first);
    }
    if (!t->id || !t->byte || !t->end || !t->first) {
        token_trie_unref(t);
        return err_set(e, ERR_NOMEM, "no memory for the trie of %zu tokens", vocab);
    }
    build(t);
    *out = t;
    return OK;
}

void token_trie_ref(struct token_trie *t)
{
    atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
}

void token_trie_unref(struct token_trie *t)
{
    if (!t || atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) != 1) return;
    mem_free(t->id);
    mem_free(t->byte);
    mem_free(t->end);
    mem_free(t->first);
    mem_free(t);
}
