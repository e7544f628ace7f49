#include "weight/store.h"

#include "backend/layout.h"
#include "base/mem.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define SLOT_ALIGN 64

struct store {
    size_t n, bytes;
    struct slot_spec *specs;
    size_t *offsets; /* of each slot in an arena */
    size_t *order;   /* slots sorted by name, then by slot */
    size_t *rank;    /* place of each slot in `order` */
    const void **ptrs;
    struct arena *arena;
    uint64_t epoch;
    atomic_bool claimed;
};

struct arena {
    char *base;
};

static bool slot_bytes(size_t *out, const struct slot_spec *p)
{
    size_t len;
    bool ok = p->layout == STORE_PANEL ? layout_panel_len(&len, p->rows, p->cols)
                                       : mul_size(&len, p->rows, p->cols);
    return ok && mul_size(out, len, sizeof(uint16_t));
}

static err_t place_slots(struct store *s, struct err *e)
{
    size_t at = 0;
    for (size_t i = 0; i < s->n; i++) {
        const struct slot_spec *p = &s->specs[i];
        size_t bytes, end;
        if (!slot_bytes(&bytes, p) || !add_size(&end, at, bytes) ||
            !add_size(&end, end, SLOT_ALIGN - 1))
            return err_set(e, ERR_TOOBIG, "%s: [%llu, %llu] does not fit in memory", p->name,
                           (unsigned long long)p->rows, (unsigned long long)p->cols);
        s->offsets[i] = at;
        at = end / SLOT_ALIGN * SLOT_ALIGN;
    }
    s->bytes = at;
    return OK;
}

static int by_name(const void *a, const void *b, void *arg)
{
    const struct slot_spec *specs = arg;
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    int c = strcmp(specs[x].name, specs[y].name);
    return c ? c : (x > y) - (x < y);
}

static void sort_slots(struct store *s)
{
    for (size_t i = 0; i < s->n; i++)
        s->order[i] = i;
    if (s->n) qsort_r(s->order, s->n, sizeof s->order[0], by_name, s->specs);
    for (size_t i = 0; i < s->n; i++)
        s->rank[s->order[i]] = i;
}

err_t store_new(struct store **out, const struct slot_spec *specs, size_t n, struct err *e)
{
    struct store *s = mem_try(sizeof *s);
    if (s == NULL) return err_set(e, ERR_NOMEM, "no memory for the weight store");
    s->n = n;
    s->specs = mem_try_array(n, sizeof s->specs[0]);
    s->offsets = mem_try_array(n, sizeof s->offsets[0]);
    s->order = mem_try_array(n, sizeof s->order[0]);
    s->rank = mem_try_array(n, sizeof s->rank[0]);
    s->ptrs = mem_try_array(n, sizeof s->ptrs[0]);
    err_t rc = OK;
    if (!s->specs || !s->offsets || !s->order || !s->rank || !s->ptrs) {
        rc = err_set(e, ERR_NOMEM, "no memory for a table of %zu weights", n);
    } else {
        if (n) memcpy(s->specs, specs, n * sizeof s->specs[0]);
        sort_slots(s);
        rc = place_slots(s, e);
    }
    if (rc != OK) {
        store_free(s);
        return rc;
    }
    *out = s;
    return OK;
}

void store_free(struct store *s)
{
    if (s == NULL) return;
    store_arena_free(s->arena);
    mem_free(s->specs);
    mem_free(s->offsets);
    mem_free(s->order);
    mem_free(s->rank);
    mem_free(s->ptrs);
    mem_free(s);
}

size_t store_slots(const struct store *s)
{
    return s->n;
}

const struct slot_spec *store_spec(const struct store *s, size_t slot)
{
    CHECK(slot < s->n);
    return &s->specs[slot];
}

size_t store_find(const struct store *s, const char *name)
{
    size_t lo = 0, hi = s->n;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (strcmp(s->specs[s->order[mid]].name, name) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == s->n || strcmp(s->specs[s->order[lo]].name, name) != 0) return SIZE_MAX;
    return s->order[lo];
}

size_t store_find_next(const struct store *s, size_t slot)
{
    CHECK(slot < s->n);
    size_t r = s->rank[slot] + 1;
    if (r >= s->n || strcmp(s->specs[s->order[r]].name, s->specs[slot].name) != 0) return SIZE_MAX;
    return s->order[r];
}

const void *store_ptr(const struct store *s, size_t slot)
{
    CHECK(slot < s->n);
    return s->ptrs[slot];
}

uint64_t store_epoch(const struct store *s)
{
    return s->epoch;
}

size_t store_bytes(const struct store *s)
{
    return s->bytes;
}

uint64_t store_hash(const struct store *s)
{
    return s->arena ? XXH3_64bits(s->arena->base, s->bytes) : 0;
}

struct arena *store_arena_new(const struct store *s)
{
    struct arena *a = mem_try(sizeof *a);
    if (a == NULL) return NULL;
    a->base = mem_try(s->bytes);
    if (a->base == NULL) {
        mem_free(a);
        return NULL;
    }
    return a;
}

void *store_arena_slot(const struct store *s, struct arena *a, size_t slot)
{
    CHECK(slot < s->n);
    return a->base + s->offsets[slot];
}

void store_arena_free(struct arena *a)
{
    if (a == NULL) return;
    mem_free(a->base);
    mem_free(a);
}

struct arena *store_swap(struct store *s, struct arena *a)
{
    struct arena *former = s->arena;
    s->arena = a;
    for (size_t i = 0; i < s->n; i++)
        s->ptrs[i] = a->base + s->offsets[i];
    s->epoch++;
    return former;
}

bool store_claim(struct store *s)
{
    return !atomic_exchange(&s->claimed, true);
}

void store_unclaim(struct store *s)
{
    atomic_store(&s->claimed, false);
}
