/*
 * grammar.c - see grammar.h.
 *
 * A configuration is a node and a stack; a stack is a return node on top of another stack, each
 * kept once, so that equal stacks have equal numbers.  A state is a sorted set of configurations
 * that read a byte, and whether the text may end.  States, stacks and masks belong to an era; when
 * one of their tables is full the era ends.
 */
#include "text/grammar_build.h"

#include "base/mem.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STATES  (1 << 15)
#define MAX_STACKS  (1 << 16)
#define MAX_CONFIGS (1 << 19) /* of all states */
#define MAX_SET     2048      /* of one closure */
#define SEEN        8192      /* slots, a power of two well above MAX_SET */
#define MASK_BYTES  ((size_t)4 << 20)
#define DEAD        (-1)
#define UNKNOWN     (-2)

struct config {
    int32_t node, stack;
};

struct stack {
    int32_t parent, ret, depth;
};

struct state {
    int32_t from, n; /* in `configs` */
    int32_t mask;    /* in `masks`; -1 */
    bool whole;
    int32_t *next; /* [256], when first left */
};

/* A table of int32 by a hash, open addressing, -1 empty. */
struct table {
    int32_t *slot;
    uint32_t size; /* a power of two */
};

struct grammar {
    _Atomic int refs;
    pthread_mutex_t lock;
    struct token_trie *trie;
    struct gnode *node;
    int32_t *rule, start;
    uint64_t era;
    struct stack *stacks;
    struct state *states;
    struct config *configs;
    int32_t n_stacks, cap_stacks, n_states, cap_states, n_configs, cap_configs;
    struct table by_stack, by_state;
    uint32_t *masks; /* [n_masks][words] */
    int32_t *owner;  /* [n_masks] the state of each; -1 */
    int32_t n_masks, next_mask;
    size_t words;
    /* one closure */
    struct config set[MAX_SET];
    int32_t n_set;
    struct config seen[SEEN];
    uint32_t stamp[SEEN], now;
    bool whole, full; /* full: a table is, the era must end */
};

/* ---- stacks ---- */

static uint32_t mix(uint32_t a, uint32_t b)
{
    uint64_t z = ((uint64_t)a << 32 | b) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)(z >> 32);
}

static bool grow(void **p, int32_t n, int32_t *cap, size_t elem, int32_t max)
{
    if (n < *cap) return true;
    if (n >= max) return false;
    size_t to = *cap ? (size_t)*cap * 2 : 256;
    void *q = mem_retry(*p, (size_t)*cap * elem, to * elem);
    if (!q) return false;
    *p = q;
    *cap = (int32_t)to;
    return true;
}

/* Number of the stack, or -1: too deep, or no room (g->full). */
static int32_t push_stack(struct grammar *g, int32_t parent, int32_t ret)
{
    int32_t depth = parent < 0 ? 1 : g->stacks[parent].depth + 1;
    if (depth > GRAMMAR_MAX_DEPTH) return -1;
    uint32_t m = g->by_stack.size - 1, h = mix((uint32_t)parent, (uint32_t)ret) & m;
    for (; g->by_stack.slot[h] >= 0; h = (h + 1) & m) {
        const struct stack *s = &g->stacks[g->by_stack.slot[h]];
        if (s->parent == parent && s->ret == ret) return g->by_stack.slot[h];
    }
    if (!grow((void **)&g->stacks, g->n_stacks, &g->cap_stacks, sizeof *g->stacks, MAX_STACKS)) {
        g->full = true;
        return -1;
    }
    g->by_stack.slot[h] = g->n_stacks;
    g->stacks[g->n_stacks] = (struct stack){parent, ret, depth};
    return g->n_stacks++;
}

/* ---- states ---- */

static void add(struct grammar *g, int32_t node, int32_t stack)
{
    uint32_t h = mix((uint32_t)node, (uint32_t)stack) & (SEEN - 1);
    for (; g->stamp[h] == g->now; h = (h + 1) & (SEEN - 1))
        if (g->seen[h].node == node && g->seen[h].stack == stack) return;
    if (g->n_set == MAX_SET) {
        g->full = true;
        return;
    }
    g->stamp[h] = g->now;
    g->seen[h] = g->set[g->n_set++] = (struct config){node, stack};
}

static void begin_set(struct grammar *g)
{
    g->n_set = 0;
    g->whole = false;
    if (++g->now == 0) {
        memset(g->stamp, 0, sizeof g->stamp);
        g->now = 1;
    }
}

/* Follows what reads no byte; what reads one stays in the set. */
static void close_set(struct grammar *g)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < g->n_set && !g->full; i++) {
        struct config c = g->set[i];
        const struct gnode *n = &g->node[c.node];
        int32_t s = c.stack;
        switch (n->kind) {
        case G_RANGE:
            if (n->lo <= n->hi) g->set[kept++] = c;
            break;
        case G_SPLIT:
            add(g, n->a, s);
            add(g, n->b, s);
            break;
        case G_CALL: /* a call at a rule's end returns to where that would */
            if (g->node[n->b].kind == G_END)
                add(g, g->rule[n->a], s);
            else if ((s = push_stack(g, s, n->b)) >= 0)
                add(g, g->rule[n->a], s);
            break;
        default:
            if (s < 0)
                g->whole = true;
            else
                add(g, g->stacks[s].ret, g->stacks[s].parent);
        }
    }
    g->n_set = kept;
}

static int by_config(const void *a, const void *b)
{
    const struct config *x = a, *y = b;
    if (x->node != y->node) return x->node < y->node ? -1 : 1;
    return (x->stack > y->stack) - (x->stack < y->stack);
}

static bool same_state(const struct grammar *g, const struct state *s)
{
    return s->n == g->n_set && s->whole == g->whole &&
           (s->n == 0 || !memcmp(g->configs + s->from, g->set, (size_t)s->n * sizeof *g->set));
}

/* The state of the closed set; DEAD: nothing can come and nothing has ended.  -3: no room. */
static int32_t intern(struct grammar *g)
{
    if (g->full) return -3;
    if (g->n_set == 0 && !g->whole) return DEAD;
    qsort(g->set, (size_t)g->n_set, sizeof *g->set, by_config);
    uint32_t h = g->whole, m = g->by_state.size - 1;
    for (int32_t i = 0; i < g->n_set; i++)
        h = mix(h ^ (uint32_t)g->set[i].node, (uint32_t)g->set[i].stack);
    for (h &= m; g->by_state.slot[h] >= 0; h = (h + 1) & m)
        if (same_state(g, &g->states[g->by_state.slot[h]])) return g->by_state.slot[h];
    g->full =
        !grow((void **)&g->states, g->n_states, &g->cap_states, sizeof *g->states, MAX_STATES);
    while (!g->full && g->n_configs + g->n_set > g->cap_configs)
        g->full = !grow((void **)&g->configs, g->cap_configs, &g->cap_configs, sizeof *g->configs,
                        MAX_CONFIGS);
    if (g->full) return -3;
    struct state *s = &g->states[g->n_states];
    *s = (struct state){g->n_configs, g->n_set, -1, g->whole, NULL};
    if (g->n_set) memcpy(g->configs + s->from, g->set, (size_t)g->n_set * sizeof *g->set);
    g->n_configs += g->n_set;
    g->by_state.slot[h] = g->n_states;
    return g->n_states++;
}

static int32_t step_slow(struct grammar *g, int32_t at, unsigned byte)
{
    if (!g->states[at].next) {
        int32_t *row = mem_try_array(256, sizeof *row);
        if (!row) {
            g->full = true;
            return -3;
        }
        for (int i = 0; i < 256; i++)
            row[i] = UNKNOWN;
        g->states[at].next = row;
    }
    begin_set(g);
    struct state s = g->states[at];
    for (int32_t i = s.from; i < s.from + s.n; i++) {
        const struct gnode *n = &g->node[g->configs[i].node];
        if (byte >= n->lo && byte <= n->hi) add(g, n->a, g->configs[i].stack);
    }
    close_set(g);
    int32_t to = intern(g);
    if (to >= DEAD) s.next[byte] = to;
    return to;
}

static inline int32_t step(struct grammar *g, int32_t at, unsigned byte)
{
    const int32_t *row = g->states[at].next;
    return row && row[byte] != UNKNOWN ? row[byte] : step_slow(g, at, byte);
}

static void clear_table(struct table *t)
{
    memset(t->slot, 0xff, t->size * sizeof *t->slot);
}

/* A new era, with the state of an empty text as its number 0. */
static int32_t restart(struct grammar *g)
{
    for (int32_t i = 0; i < g->n_states; i++)
        mem_free(g->states[i].next);
    g->n_states = g->n_stacks = g->n_configs = 0;
    g->full = false;
    g->era++;
    clear_table(&g->by_stack);
    clear_table(&g->by_state);
    for (int32_t i = 0; i < g->n_masks; i++)
        g->owner[i] = -1;
    begin_set(g);
    add(g, g->start, -1);
    close_set(g);
    return intern(g);
}

/* ---- masks ---- */

static bool make_masks(struct grammar *g, size_t words)
{
    if (g->words == words) return true;
    size_t n = MASK_BYTES / (words * sizeof *g->masks);
    n = n < 16 ? 16 : n > 4096 ? 4096 : n;
    mem_free(g->masks);
    mem_free(g->owner);
    g->words = 0;
    g->masks = mem_try_array(n, words * sizeof *g->masks);
    g->owner = mem_try_array(n, sizeof *g->owner);
    if (!g->masks || !g->owner) return false;
    for (size_t i = 0; i < n; i++)
        g->owner[i] = -1;
    for (int32_t i = 0; i < g->n_states; i++)
        g->states[i].mask = -1;
    g->words = words;
    g->n_masks = (int32_t)n;
    g->next_mask = 0;
    return true;
}

/* All tokens that can be read from here; false: no room. */
static bool walk(struct grammar *g, int32_t from, uint32_t *bits, int32_t vocab)
{
    const struct token_trie *t = g->trie;
    int32_t end[TRIE_MAX_BYTES + 2], at[TRIE_MAX_BYTES + 2], d = 0;
    end[0] = t->n_nodes;
    at[0] = from;
    for (int32_t i = 0; i < t->n_nodes;) {
        while (i >= end[d])
            d--;
        int32_t s = step(g, at[d], t->byte[i]);
        if (s < DEAD) return false;
        if (s == DEAD) {
            i = t->end[i];
            continue;
        }
        for (int32_t k = t->first[i]; k < t->first[i + 1]; k++)
            if (t->id[k] < vocab) bits[t->id[k] >> 5] |= 1u << (t->id[k] & 31);
        end[++d] = t->end[i];
        at[d] = s;
        i++;
    }
    return true;
}

static uint32_t *mask_of(struct grammar *g, int32_t state, int32_t vocab)
{
    if (g->states[state].mask >= 0) return g->masks + (size_t)g->states[state].mask * g->words;
    int32_t m = g->next_mask++ % g->n_masks;
    uint32_t *bits = g->masks + (size_t)m * g->words;
    if (g->owner[m] >= 0) g->states[g->owner[m]].mask = -1;
    g->owner[m] = -1;
    memset(bits, 0, g->words * sizeof *bits);
    if (!walk(g, state, bits, vocab)) return NULL;
    g->owner[m] = state;
    g->states[state].mask = m;
    return bits;
}

/* ---- runs ---- */

static int32_t read_bytes(struct grammar *g, int32_t at, const char *p, size_t n)
{
    for (size_t i = 0; i < n && at >= 0; i++)
        at = step(g, at, (unsigned char)p[i]);
    return at;
}

static int32_t read_ids(struct grammar *g, struct grammar_run *run, const int32_t *ids,
                        int32_t n_ids)
{
    if (run->era != g->era || run->n > n_ids) *run = (struct grammar_run){.era = g->era};
    while (run->n < n_ids && run->state >= 0) {
        size_t n = 0;
        const char *p = tokenizer_decoded(g->trie->tok, ids[run->n], &n);
        int32_t to = p ? read_bytes(g, run->state, p, n) : DEAD;
        if (to < DEAD) return to;
        run->state = to;
        run->n++;
    }
    return run->state;
}

static err_t no_room(struct err *e)
{
    return err_set(e, ERR_TOOBIG,
                   "the grammar is too ambiguous, or needs more than %d states at once",
                   MAX_STATES);
}

err_t grammar_mask(struct grammar *g, struct grammar_run *run, const int32_t *ids, int32_t n_ids,
                   uint32_t *bits, int32_t vocab, bool *whole, struct err *e)
{
    err_t rc = OK;
    const uint32_t *mask = NULL;
    size_t words = ((size_t)vocab + 31) / 32;
    pthread_mutex_lock(&g->lock);
    if (!make_masks(g, words)) rc = err_set(e, ERR_NOMEM, "no memory for the grammar's masks");
    for (int attempt = 0; rc == OK && !mask; attempt++) {
        if (attempt == 2)
            rc = no_room(e);
        else if (attempt && restart(g) < 0)
            rc = no_room(e);
        if (rc) break;
        int32_t at = read_ids(g, run, ids, n_ids);
        if (at == DEAD)
            rc = err_set(e, ERR_INPUT, "the output is not of the grammar");
        else if (at >= 0)
            mask = mask_of(g, at, vocab);
        if (mask) *whole = g->states[at].whole;
    }
    if (mask) memcpy(bits, mask, words * sizeof *bits);
    pthread_mutex_unlock(&g->lock);
    return rc;
}

err_t grammar_match(struct grammar *g, const char *text, size_t n, bool *whole, bool *prefix,
                    struct err *e)
{
    pthread_mutex_lock(&g->lock);
    int32_t at = read_bytes(g, 0, text, n);
    if (at < DEAD && restart(g) >= 0) at = read_bytes(g, 0, text, n);
    if (at < DEAD) (void)restart(g);
    *prefix = at >= 0;
    *whole = at >= 0 && g->states[at].whole;
    pthread_mutex_unlock(&g->lock);
    return at < DEAD ? no_room(e) : OK;
}

/* ---- life ---- */

static bool make_table(struct table *t, uint32_t size)
{
    t->size = size;
    t->slot = mem_try_array(size, sizeof *t->slot);
    return t->slot != NULL;
}

static int32_t put_calls(struct gbuild *b, const struct grammar_spec *s, int32_t next)
{
    next = gb_bytes(b, s->close, strlen(s->close), next);
    int32_t loop = gb_split(b, next, next), again = -1, first = -1;
    for (int i = 0; i < s->n_calls && b->rc == OK; i++) {
        const struct grammar_call *c = &s->calls[i];
        int32_t r = gb_bytes(b, c->after, strlen(c->after), s->one_call ? next : loop);
        r = c->schema ? gb_schema(b, c->schema, r) : gb_json(b, RULE_OBJECT, r);
        r = gb_bytes(b, c->before, strlen(c->before), r);
        again = again < 0 ? r : gb_split(b, r, again);
        first = again;
    }
    if (b->rc) return 0;
    b->node[loop].a = gb_bytes(b, s->between, strlen(s->between), again);
    return gb_bytes(b, s->open, strlen(s->open), first);
}

static int32_t put_spec(struct gbuild *b, const struct grammar_spec *s)
{
    int32_t r = gb_end(b);
    if (s->pattern)
        r = gb_regex(b, s->pattern, s->n_pattern, false, false, r);
    else if (s->schema)
        r = gb_schema(b, s->schema, r);
    else if (s->any_object)
        r = gb_json(b, RULE_OBJECT, r);
    else
        r = put_calls(b, s, r);
    if (!s->until) return r;
    int32_t one = gb_range(b, '\n', '\n', r), two = gb_range(b, '\n', '\n', gb_split(b, one, r));
    int32_t free_text = gb_until(b, s->until, gb_split(b, two, r));
    if (!s->if_begins) return free_text;
    return gb_split(b, gb_bytes(b, s->if_begins, strlen(s->if_begins), free_text), r);
}

static err_t prepare(struct grammar *g, struct gbuild *b, const struct grammar_spec *s,
                     struct err *e)
{
    g->start = put_spec(b, s);
    g->node = b->node;
    g->rule = b->rule;
    if (b->rc) return b->rc;
    if (!make_table(&g->by_stack, MAX_STACKS * 2) || !make_table(&g->by_state, MAX_STATES * 2))
        return err_set(e, ERR_NOMEM, "no memory for the grammar");
    int32_t at = restart(g);
    if (at == DEAD) return err_set(e, ERR_INPUT, "the grammar matches no text at all");
    return at < 0 ? no_room(e) : OK;
}

err_t grammar_compile(struct grammar **out, struct token_trie *trie, const struct grammar_spec *s,
                      struct err *e)
{
    struct grammar *g = mem_try(sizeof *g);
    struct gbuild b = {.json = -1, .e = e};
    if (!g) return err_set(e, ERR_NOMEM, "no memory for the grammar");
    g->refs = 1;
    g->trie = trie;
    token_trie_ref(trie);
    CHECK(pthread_mutex_init(&g->lock, NULL) == 0);
    err_t rc = prepare(g, &b, s, e);
    if (rc)
        grammar_unref(g);
    else
        *out = g;
    return rc;
}

void grammar_ref(struct grammar *g)
{
    atomic_fetch_add_explicit(&g->refs, 1, memory_order_relaxed);
}

void grammar_unref(struct grammar *g)
{
    if (!g || atomic_fetch_sub_explicit(&g->refs, 1, memory_order_acq_rel) != 1) return;
    for (int32_t i = 0; i < g->n_states; i++)
        mem_free(g->states[i].next);
    mem_free(g->node);
    mem_free(g->rule);
    mem_free(g->stacks);
    mem_free(g->states);
    mem_free(g->configs);
    mem_free(g->by_stack.slot);
    mem_free(g->by_state.slot);
    mem_free(g->masks);
    mem_free(g->owner);
    token_trie_unref(g->trie);
    pthread_mutex_destroy(&g->lock);
    mem_free(g);
}
