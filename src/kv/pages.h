/*
 * pages.h - a pool of KV page ids with reference counts.
 *
 * A page has one reference for each sequence whose table names it and one if the prefix tree holds
 * it. The pool knows nothing of the memory behind a page: `clear` is called with each page handed
 * out. Conservation: every page is either on the free list with no references, or not on it with
 * some.
 */
#ifndef KV_PAGES_H
#define KV_PAGES_H

#include "base/err.h"
#include <stdbool.h>
#include <stdint.h>

struct pages;
typedef void pages_clear_fn(void *ctx, int32_t page);

struct pages *pages_new(int32_t n, pages_clear_fn *clear, void *ctx); /* NULL: out of memory */
void pages_free(struct pages *p);
int32_t pages_total(const struct pages *p);
int32_t pages_available(const struct pages *p); /* on the free list */
int32_t pages_take(struct pages *p);            /* one reference; -1: none free */
void pages_ref(struct pages *p, int32_t page);
void pages_unref(struct pages *p, int32_t page); /* the last one frees */
int32_t pages_refs(const struct pages *p, int32_t page);
/* Compare with `expected` references of each page ([n]; NULL: only the pool's own rules). */
err_t pages_check(const struct pages *p, const int32_t *expected, struct err *e) MUST_USE;

#endif
