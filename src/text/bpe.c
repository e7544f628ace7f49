#include "text/bpe.h"

#include "base/mem.h"

#include <string.h>

#define SHORT_PIECE 48 /* bytes up to which scanning beats the heap */
#define NONE        UINT32_MAX

/* A symbol of a long piece: a node of a list in array order. */
struct node {
    int32_t id; /* -1: merged away */
    uint32_t prev, next;
    uint32_t rank; /* of the pair (this, next), NONE when it does not merge */
};

struct heap {
    uint64_t *v; /* rank << 32 | position */
    size_t n, cap;
};

static inline const struct merge_slot *find(const struct bpe *b, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t at = (size_t)((pair * 0x9E3779B97F4A7C15u) >> b->shift);
    for (;; at = (at + 1) & b->mask) {
        if (b->merge[at].pair == pair) return &b->merge[at];
        if (b->merge[at].pair == UINT64_MAX) return NULL;
    }
}

static inline void rate(const struct bpe *b, int32_t left, int32_t right, uint32_t *rank,
                        int32_t *merged)
{
    const struct merge_slot *m = find(b, left, right);
    *rank = m ? m->rank : NONE;
    *merged = m ? m->id : -1;
}

static bool encode_short(const struct bpe *b, struct ids *out, const unsigned char *p, size_t n)
{
    int32_t id[SHORT_PIECE], merged[SHORT_PIECE];
    uint32_t rank[SHORT_PIECE];
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (b->byte_id[p[i]] >= 0) id[k++] = b->byte_id[p[i]];
    for (size_t i = 0; i + 1 < k; i++)
        rate(b, id[i], id[i + 1], &rank[i], &merged[i]);
    while (k > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < k; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NONE) break;
        id[best] = merged[best];
        size_t tail = k - best - 2; /* symbols after the pair */
        memmove(id + best + 1, id + best + 2, tail * sizeof *id);
        memmove(rank + best, rank + best + 1, tail * sizeof *rank);
        memmove(merged + best, merged + best + 1, tail * sizeof *merged);
        k--;
        if (best + 1 < k) rate(b, id[best], id[best + 1], &rank[best], &merged[best]);
        if (best > 0) rate(b, id[best - 1], id[best], &rank[best - 1], &merged[best - 1]);
    }
    for (size_t i = 0; i < k; i++)
        if (!ids_push(out, id[i])) return false;
    return true;
}

/* Four children a node, which share a cache line or two: half the levels, half the misses of two. */
static void sift_down(struct heap *h, size_t i)
{
    uint64_t x = h->v[i];
    for (;;) {
        size_t c = 4 * i + 1, end = c + 4 < h->n ? c + 4 : h->n;
        if (c >= h->n) break;
        for (size_t k = c + 1; k < end; k++)
            if (h->v[k] < h->v[c]) c = k;
        if (h->v[c] >= x) break;
        h->v[i] = h->v[c];
        i = c;
    }
    h->v[i] = x;
}

static bool heap_push(struct heap *h, uint64_t x)
{
    if (h->n == h->cap) {
        size_t cap = h->cap ? h->cap * 2 : 256;
        uint64_t *v = mem_retry(h->v, h->n * sizeof *v, cap * sizeof *v);
        if (!v) return false;
        h->v = v;
        h->cap = cap;
    }
    size_t i = h->n++;
    while (i > 0 && h->v[(i - 1) / 4] > x) {
        h->v[i] = h->v[(i - 1) / 4];
        i = (i - 1) / 4;
    }
    h->v[i] = x;
    return true;
}

static uint64_t heap_pop(struct heap *h)
{
    uint64_t top = h->v[0];
    h->v[0] = h->v[--h->n];
    if (h->n > 1) sift_down(h, 0);
    return top;
}

static bool rate_node(const struct bpe *b, struct node *s, struct heap *h, uint32_t at)
{
    s[at].rank = NONE;
    if (s[at].next == NONE) return true;
    const struct merge_slot *m = find(b, s[at].id, s[s[at].next].id);
    if (!m) return true;
    s[at].rank = m->rank;
    return heap_push(h, (uint64_t)m->rank << 32 | at);
}

/* False: no memory. */
static bool merge_all(const struct bpe *b, struct node *s, struct heap *h)
{
    while (h->n > 0) {
        uint64_t top = heap_pop(h);
        uint32_t at = (uint32_t)top;
        /* A rank belongs to one pair: an entry whose pair is gone has another rank. */
        if (s[at].id < 0 || s[at].rank != (uint32_t)(top >> 32)) continue;
        uint32_t gone = s[at].next;
        s[at].id = find(b, s[at].id, s[gone].id)->id;
        s[at].next = s[gone].next;
        if (s[at].next != NONE) s[s[at].next].prev = at;
        s[gone].id = -1;
        if (!rate_node(b, s, h, at)) return false;
        if (s[at].prev != NONE && !rate_node(b, s, h, s[at].prev)) return false;
    }
    return true;
}

static bool encode_long(const struct bpe *b, struct ids *out, const unsigned char *p, size_t n)
{
    if (n >= NONE / 2) return false;
    struct node *s = mem_try_array(n, sizeof *s);
    struct heap h = {0};
    bool ok = s != NULL;
    uint32_t k = 0;
    for (size_t i = 0; ok && i < n; i++) {
        if (b->byte_id[p[i]] < 0) continue;
        s[k] = (struct node){b->byte_id[p[i]], k - 1, k + 1, NONE}; /* 0 - 1 is NONE */
        k++;
    }
    if (ok && k > 0) {
        s[k - 1].next = NONE;
        for (uint32_t i = 0; ok && i < k; i++)
            ok = rate_node(b, s, &h, i);
        ok = ok && merge_all(b, s, &h);
        for (uint32_t i = 0; ok && i != NONE; i = s[i].next)
            ok = ids_push(out, s[i].id);
    }
    mem_free(s);
    mem_free(h.v);
    return ok;
}

bool bpe_encode(const struct bpe *b, struct ids *out, const char *piece, size_t n)
{
    const unsigned char *p = (const unsigned char *)piece;
    if (n == 1) return b->byte_id[p[0]] < 0 || ids_push(out, b->byte_id[p[0]]);
    int32_t whole = vocab_find_bytes(b->vocab, piece, n);
    if (whole >= 0) return ids_push(out, whole);
    return n <= SHORT_PIECE ? encode_short(b, out, p, n) : encode_long(b, out, p, n);
}
