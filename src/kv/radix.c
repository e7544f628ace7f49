#include "kv/radix.h"

#include "base/mem.h"
#include <string.h>

struct radix_node {
    struct radix_node *parent;        /* NULL: a root */
    struct radix_node *chain;         /* same bucket (roots: next root) */
    struct radix_node *older, *newer; /* LRU list, while evictable */
    uint64_t hash;
    uint64_t tick;  /* last use */
    uint64_t epoch; /* roots */
    char *key;      /* roots; NULL: none */
    int32_t n_children, locks, page;
    bool listed;
    int32_t ids[]; /* [page_tokens]; none in a root */
};

struct radix {
    struct pages *pages;
    int32_t page_tokens;
    uint64_t mask;
    size_t n_buckets; /* a power of two */
    struct radix_node **buckets;
    struct radix_node *roots;
    struct radix_node *oldest, *newest; /* unlocked leaves */
    uint64_t tick;
    int32_t n, n_locked;
};

struct radix *radix_new(struct pages *p, int32_t page_tokens, uint64_t hash_mask)
{
    CHECK(page_tokens > 0);
    size_t n = 16;
    while (n < (size_t)pages_total(p) * 2)
        n *= 2;
    struct radix *t = mem_alloc(sizeof(*t));
    t->buckets = mem_try_array(n, sizeof(struct radix_node *));
    if (!t->buckets) {
        mem_free(t);
        return NULL;
    }
    t->n_buckets = n;
    t->pages = p;
    t->page_tokens = page_tokens;
    t->mask = hash_mask;
    return t;
}

static uint64_t hash_page(const struct radix *t, const struct radix_node *parent,
                          const int32_t *ids)
{
    uint64_t h = (uint64_t)(uintptr_t)parent * 0x9E3779B97F4A7C15u;
    for (int32_t i = 0; i < t->page_tokens; i++) {
        h = (h ^ (uint32_t)ids[i]) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    return h & t->mask;
}

static struct radix_node **bucket(const struct radix *t, uint64_t hash)
{
    return &t->buckets[hash & (t->n_buckets - 1)];
}

static struct radix_node *find_root(const struct radix *t, uint64_t epoch, const char *key)
{
    for (struct radix_node *r = t->roots; r; r = r->chain)
        if (r->epoch == epoch && !r->key == !key && (!key || strcmp(r->key, key) == 0)) return r;
    return NULL;
}

static struct radix_node *find_child(const struct radix *t, const struct radix_node *parent,
                                     const int32_t *ids)
{
    uint64_t h = hash_page(t, parent, ids);
    for (struct radix_node *n = *bucket(t, h); n; n = n->chain)
        if (n->hash == h && n->parent == parent &&
            memcmp(n->ids, ids, (size_t)t->page_tokens * sizeof(int32_t)) == 0)
            return n;
    return NULL;
}

static void unlist(struct radix *t, struct radix_node *n)
{
    if (!n->listed) return;
    if (n->older)
        n->older->newer = n->newer;
    else
        t->oldest = n->newer;
    if (n->newer)
        n->newer->older = n->older;
    else
        t->newest = n->older;
    n->older = n->newer = NULL;
    n->listed = false;
}

/* Put an unlocked leaf in its place by tick.  Ticks are near one of the ends: a sequence that just
 * ended is the newest, a parent whose child was just evicted about as old as the oldest. */
static void list_leaf(struct radix *t, struct radix_node *n)
{
    if (!n->parent || n->listed || n->locks || n->n_children) return;
    struct radix_node *after = t->newest;
    if (after && after->tick > n->tick) {
        struct radix_node *before = t->oldest;
        while (before->tick <= n->tick)
            before = before->newer;
        after = before->older;
    }
    n->older = after;
    n->newer = after ? after->newer : t->oldest;
    if (n->older)
        n->older->newer = n;
    else
        t->oldest = n;
    if (n->newer)
        n->newer->older = n;
    else
        t->newest = n;
    n->listed = true;
}

static void drop_root(struct radix *t, struct radix_node *root)
{
    struct radix_node **at = &t->roots;
    while (*at != root)
        at = &(*at)->chain;
    *at = root->chain;
    mem_free(root->key);
    mem_free(root);
}

static void drop_leaf(struct radix *t, struct radix_node *n)
{
    CHECK(n->locks == 0 && n->n_children == 0 && n->parent);
    unlist(t, n);
    struct radix_node **at = bucket(t, n->hash);
    while (*at != n)
        at = &(*at)->chain;
    *at = n->chain;
    pages_unref(t->pages, n->page);
    struct radix_node *parent = n->parent;
    parent->n_children--;
    t->n--;
    mem_free(n);
    if (parent->parent)
        list_leaf(t, parent);
    else if (parent->n_children == 0)
        drop_root(t, parent);
}

void radix_clear(struct radix *t)
{
    while (radix_evict(t)) {
    }
}

void radix_free(struct radix *t)
{
    if (!t) return;
    radix_clear(t);
    CHECK(t->n == 0 && !t->roots);
    mem_free(t->buckets);
    mem_free(t);
}

struct radix_node *radix_match(struct radix *t, uint64_t epoch, const char *key, const int32_t *ids,
                               int32_t max_tokens, int32_t *pages, int32_t *n_pages)
{
    *n_pages = 0;
    struct radix_node *n = find_root(t, epoch, key);
    if (!n) return NULL;
    uint64_t tick = ++t->tick;
    int32_t i = 0;
    for (; (i + 1) * (int64_t)t->page_tokens <= max_tokens; i++) {
        struct radix_node *child = find_child(t, n, ids + (int64_t)i * t->page_tokens);
        if (!child) break;
        n = child;
        pages[i] = n->page;
        if (n->listed) { /* move to the new end */
            unlist(t, n);
            n->tick = tick;
            list_leaf(t, n);
        }
        n->tick = tick;
    }
    *n_pages = i;
    return i ? n : NULL;
}

static struct radix_node *add_root(struct radix *t, uint64_t epoch, const char *key)
{
    struct radix_node *r = mem_try(sizeof(*r));
    if (!r) return NULL;
    if (key && !(r->key = mem_dup_n(key, strlen(key)))) {
        mem_free(r);
        return NULL;
    }
    r->epoch = epoch;
    r->chain = t->roots;
    t->roots = r;
    return r;
}

static struct radix_node *add_child(struct radix *t, struct radix_node *parent, const int32_t *ids,
                                    int32_t page)
{
    size_t bytes = (size_t)t->page_tokens * sizeof(int32_t);
    struct radix_node *n = mem_try(sizeof(*n) + bytes);
    if (!n) return NULL;
    memcpy(n->ids, ids, bytes);
    n->hash = hash_page(t, parent, ids);
    n->parent = parent;
    n->page = page;
    pages_ref(t->pages, page);
    struct radix_node **at = bucket(t, n->hash);
    n->chain = *at;
    *at = n;
    unlist(t, parent);
    parent->n_children++;
    t->n++;
    return n;
}

struct radix_node *radix_insert(struct radix *t, uint64_t epoch, const char *key,
                                const int32_t *ids, int32_t n_pages, int32_t *pages,
                                int32_t *n_done)
{
    if (n_done) *n_done = 0;
    if (n_pages <= 0) return NULL;
    struct radix_node *n = find_root(t, epoch, key);
    if (!n && !(n = add_root(t, epoch, key))) return NULL;
    uint64_t tick = ++t->tick;
    int32_t i = 0;
    for (; i < n_pages; i++) {
        const int32_t *at = ids + (int64_t)i * t->page_tokens;
        struct radix_node *child = find_child(t, n, at);
        if (child && child->page != pages[i]) {
            pages_ref(t->pages, child->page);
            pages_unref(t->pages, pages[i]);
            pages[i] = child->page;
        }
        if (!child && !(child = add_child(t, n, at, pages[i]))) break;
        n = child;
        unlist(t, n);
        n->tick = tick;
    }
    if (n_done) *n_done = i;
    if (i == 0) {
        if (n->n_children == 0) drop_root(t, n);
        return NULL;
    }
    list_leaf(t, n);
    return n;
}

void radix_lock(struct radix *t, struct radix_node *n)
{
    for (; n && n->parent; n = n->parent) {
        unlist(t, n);
        if (n->locks++ == 0) t->n_locked++;
    }
}

void radix_unlock(struct radix *t, struct radix_node *n)
{
    uint64_t tick = ++t->tick;
    for (; n && n->parent; n = n->parent) {
        CHECK(n->locks > 0);
        n->tick = tick;
        if (--n->locks == 0) {
            t->n_locked--;
            list_leaf(t, n);
        }
    }
}

bool radix_evict(struct radix *t)
{
    if (!t->oldest) return false;
    drop_leaf(t, t->oldest);
    return true;
}

int32_t radix_size(const struct radix *t)
{
    return t->n;
}

int32_t radix_evictable(const struct radix *t)
{
    return t->n - t->n_locked;
}

err_t radix_check(const struct radix *t, int32_t *refs, struct err *e)
{
    int32_t n = 0, locked = 0, children = 0, leaves = 0, listed = 0, expected = 0;
    for (size_t b = 0; b < t->n_buckets; b++) {
        for (const struct radix_node *x = t->buckets[b]; x; x = x->chain) {
            n++;
            if (x->locks > 0) locked++;
            children += x->n_children;
            bool leaf = x->locks == 0 && x->n_children == 0;
            leaves += leaf;
            if (leaf != x->listed)
                return err_set(e, ERR_STATE, "page %d: leaf %d but listed %d", x->page, leaf,
                               x->listed);
            if (x->parent->parent && x->parent->locks < x->locks)
                return err_set(e, ERR_STATE, "page %d is locked more than its parent", x->page);
            if (pages_refs(t->pages, x->page) < 1)
                return err_set(e, ERR_STATE, "page %d of the tree is free", x->page);
            if (refs) refs[x->page]++;
        }
    }
    for (const struct radix_node *r = t->roots; r; r = r->chain)
        expected += r->n_children;
    if (n != t->n || locked != t->n_locked || children + expected != n)
        return err_set(e, ERR_STATE, "tree counts: %d of %d nodes, %d of %d locked, %d children", n,
                       t->n, locked, t->n_locked, children + expected);
    for (const struct radix_node *x = t->oldest; x; x = x->newer) {
        listed++;
        if (x->newer && (x->newer->tick < x->tick || x->newer->older != x))
            return err_set(e, ERR_STATE, "LRU list out of order at page %d", x->page);
    }
    if (listed != leaves)
        return err_set(e, ERR_STATE, "%d leaves but %d in the LRU list", leaves, listed);
    return OK;
}
