#include "kv/pages.h"

#include "base/mem.h"

struct pages {
    int32_t n, n_free;
    int32_t *free_ids; /* [n], a stack */
    int32_t *refs;     /* [n] */
    pages_clear_fn *clear;
    void *ctx;
};

struct pages *pages_new(int32_t n, pages_clear_fn *clear, void *ctx)
{
    CHECK(n > 0);
    struct pages *p = mem_alloc(sizeof(*p));
    p->free_ids = mem_try_array((size_t)n, sizeof(int32_t));
    p->refs = mem_try_array((size_t)n, sizeof(int32_t));
    if (!p->free_ids || !p->refs) {
        pages_free(p);
        return NULL;
    }
    p->n = p->n_free = n;
    p->clear = clear;
    p->ctx = ctx;
    for (int32_t i = 0; i < n; i++)
        p->free_ids[i] = n - 1 - i;
    return p;
}

void pages_free(struct pages *p)
{
    if (!p) return;
    mem_free(p->free_ids);
    mem_free(p->refs);
    mem_free(p);
}

int32_t pages_total(const struct pages *p)
{
    return p->n;
}

int32_t pages_available(const struct pages *p)
{
    return p->n_free;
}

int32_t pages_take(struct pages *p)
{
    if (p->n_free == 0) return -1;
    int32_t page = p->free_ids[--p->n_free];
    CHECK(p->refs[page] == 0);
    p->refs[page] = 1;
    if (p->clear) p->clear(p->ctx, page);
    return page;
}

void pages_ref(struct pages *p, int32_t page)
{
    CHECK(page >= 0 && page < p->n && p->refs[page] > 0);
    p->refs[page]++;
}

void pages_unref(struct pages *p, int32_t page)
{
    CHECK(page >= 0 && page < p->n && p->refs[page] > 0);
    if (--p->refs[page] == 0) p->free_ids[p->n_free++] = page;
}

int32_t pages_refs(const struct pages *p, int32_t page)
{
    CHECK(page >= 0 && page < p->n);
    return p->refs[page];
}

err_t pages_check(const struct pages *p, const int32_t *expected, struct err *e)
{
    int32_t unused = 0;
    for (int32_t i = 0; i < p->n; i++) {
        if (p->refs[i] == 0) unused++;
        if (p->refs[i] < 0 || (expected && p->refs[i] != expected[i]))
            return err_set(e, ERR_STATE, "page %d has %d references, expected %d", i, p->refs[i],
                           expected ? expected[i] : 0);
    }
    if (unused != p->n_free)
        return err_set(e, ERR_STATE, "%d pages are unused but %d are free", unused, p->n_free);
    for (int32_t i = 0; i < p->n_free; i++)
        if (p->refs[p->free_ids[i]] != 0)
            return err_set(e, ERR_STATE, "page %d is free and in use", p->free_ids[i]);
    return OK;
}
