/*
 * radix.h - the prefix tree: which whole pages of which token prefixes are resident.
 *
 *     struct radix_node *n = radix_match(t, epoch, key, ids, max_tokens, pages, &n_pages);
 *     radix_lock(n);                                   // keeps the path from eviction
 *     n2 = radix_insert(t, epoch, key, ids, n_pages, pages);
 *
 * A node is one page: its parent, its tokens and the page that holds their K and V.  Roots are told
 * apart by (epoch, extra key), compared in full; a child is found by hash and accepted only after
 * its parent and all its tokens compared equal (case C63).  Nodes that no sequence uses are evicted
 * leaf by leaf, least recently used first.  The tree holds one reference of each of its pages.
 */
#ifndef KV_RADIX_H
#define KV_RADIX_H

#include "kv/pages.h"
#include <stddef.h>

struct radix;
struct radix_node;

/* `hash_mask` is UINT64_MAX but in tests, which make hashes collide. */
struct radix *radix_new(struct pages *p, int32_t page_tokens, uint64_t hash_mask);
void radix_free(struct radix *t); /* gives its pages back; nothing may be locked */

/* The deepest node that covers whole pages of ids[0 .. max_tokens); NULL if none.  Page ids go to
 * `pages` (room for max_tokens / page_tokens; no references are taken) and their count to *n_pages.
 */
struct radix_node *radix_match(struct radix *t, uint64_t epoch, const char *key, const int32_t *ids,
                               int32_t max_tokens, int32_t *pages, int32_t *n_pages);
/* Insert the first n_pages pages of ids.  Where the tree has a page for the same prefix, pages[i]
 * is replaced by it (the caller's reference moves along), since equal prefixes have equal bits.
 * Returns the deepest node, NULL for n_pages 0 or when out of memory at the first page; *n_done (if
 * not NULL) counts the pages inserted or found. */
struct radix_node *radix_insert(struct radix *t, uint64_t epoch, const char *key,
                                const int32_t *ids, int32_t n_pages, int32_t *pages,
                                int32_t *n_done);
/* NULL is allowed and does nothing. */
void radix_lock(struct radix *t, struct radix_node *n);
void radix_unlock(struct radix *t, struct radix_node *n);
bool radix_evict(struct radix *t);              /* one leaf; false: all in use */
void radix_clear(struct radix *t);              /* every node not in use */
int32_t radix_size(const struct radix *t);      /* nodes, i.e. pages */
int32_t radix_evictable(const struct radix *t); /* nodes not in use */
/* Links, counts, LRU order; adds the tree's references to refs [pages_total] (may be NULL). */
err_t radix_check(const struct radix *t, int32_t *refs, struct err *e) MUST_USE;

#endif
