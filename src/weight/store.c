#include "weight/store.h"

#include "base/mem.h"
#include "base/pages.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SLOT_ALIGN 64

struct store {
    size_t n, bytes;
    struct slot_spec *specs;
    size_t *offsets; /* of each slot in an arena */
    size_t *order;   /* slots sorted by name, then by slot */
    size_t *rank;    /* place of each slot in `order` */
    const void **ptrs;
    struct matrix *matrices;
    struct memory memory;
    void *arena;
    _Atomic(void *) resting; /* the arena of the next update, or NULL */
    void *backup;            /* of a released arena, on the host */
    bool lost;               /* the arena's bytes are no weights */
    uint64_t epoch;
    atomic_bool claimed;
    struct {
        pthread_mutex_t lock;
        pthread_cond_t left;
        void *arena; /* whose memory is made ready, by `busy` threads, up to `next` */
        size_t next;
        int busy;
        bool over; /* there is no such arena any more */
    } ready;
};

static err_t place_slots(struct store *s, struct err *e)
{
    size_t at = 0;
    for (size_t i = 0; i < s->n; i++) {
        const struct slot_spec *p = &s->specs[i];
        size_t bytes, end;
        if (!s->memory.ops->bytes(&bytes, &p->shape) || !add_size(&end, at, bytes) ||
            !add_size(&end, end, SLOT_ALIGN - 1))
            return err_set(e, ERR_TOOBIG, "%s: [%llu, %llu] does not fit in memory", p->name,
                           (unsigned long long)p->shape.rows, (unsigned long long)p->shape.cols);
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

err_t store_new(struct store **out, const struct slot_spec *specs, size_t n, struct memory memory,
                struct err *e)
{
    struct store *s = mem_try(sizeof *s);
    if (s == NULL) return err_set(e, ERR_NOMEM, "no memory for the weight store");
    s->n = n;
    s->memory = memory;
    pthread_mutex_init(&s->ready.lock, NULL);
    pthread_cond_init(&s->ready.left, NULL);
    s->specs = mem_try_array(n, sizeof s->specs[0]);
    s->offsets = mem_try_array(n, sizeof s->offsets[0]);
    s->order = mem_try_array(n, sizeof s->order[0]);
    s->rank = mem_try_array(n, sizeof s->rank[0]);
    s->ptrs = mem_try_array(n, sizeof s->ptrs[0]);
    s->matrices = mem_try_array(n, sizeof s->matrices[0]);
    err_t rc = OK;
    if (!s->specs || !s->offsets || !s->order || !s->rank || !s->ptrs || !s->matrices) {
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

/* Nobody makes an arena ready from here on, so that arenas may go. */
static void end_ready(struct store *s)
{
    pthread_mutex_lock(&s->ready.lock);
    s->ready.over = true;
    while (s->ready.busy)
        pthread_cond_wait(&s->ready.left, &s->ready.lock);
    pthread_mutex_unlock(&s->ready.lock);
}

/* The arena that rests goes back. */
static void wake(struct store *s)
{
    void *arena = atomic_exchange(&s->resting, NULL);
    if (arena) s->memory.ops->free(s->memory.ctx, arena, s->bytes);
}

void store_free(struct store *s)
{
    if (s == NULL) return;
    end_ready(s);
    if (s->arena) s->memory.ops->free(s->memory.ctx, s->arena, s->bytes);
    wake(s);
    pages_release(s->backup, s->bytes);
    mem_free(s->specs);
    mem_free(s->offsets);
    mem_free(s->order);
    mem_free(s->rank);
    mem_free(s->ptrs);
    mem_free(s->matrices);
    pthread_cond_destroy(&s->ready.left);
    pthread_mutex_destroy(&s->ready.lock);
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

const struct matrix *store_matrix(const struct store *s, size_t slot)
{
    CHECK(slot < s->n && s->specs[slot].shape.kind == RESIDENT_MATRIX);
    return &s->matrices[slot];
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
    return s->arena ? s->memory.ops->hash(s->memory.ctx, s->arena, s->bytes) : 0;
}

void *store_arena_new(struct store *s)
{
    pthread_mutex_lock(&s->ready.lock); /* while one is made to rest */
    void *arena = atomic_exchange(&s->resting, NULL);
    pthread_mutex_unlock(&s->ready.lock);
    return arena ? arena : s->memory.ops->alloc(s->memory.ctx, s->bytes);
}

/* The first call takes an arena; lock held. */
static err_t begin_ready(struct store *s, struct err *e)
{
    const struct memory *m = &s->memory;
    CHECK(s->arena);
    if (s->ready.over || s->ready.arena) return OK;
    void *none = NULL, *arena = m->ops->ready ? m->ops->alloc(m->ctx, s->bytes) : NULL;
    s->ready.over = arena == NULL;
    if (m->ops->ready && arena == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a second generation of weights (%zu bytes)",
                       s->bytes);
    s->ready.arena = arena;
    if (arena && !atomic_compare_exchange_strong(&s->resting, &none, arena)) {
        m->ops->free(m->ctx, arena, s->bytes); /* an update has come and gone */
        s->ready.over = true;
    }
    return OK;
}

/* All is done; lock held.  The system may have the memory until an update takes it. */
static void lend_ready(struct store *s)
{
    const struct memory *m = &s->memory;
    if (m->ops->rest && atomic_load(&s->resting) == s->ready.arena)
        m->ops->rest(m->ctx, s->ready.arena, s->bytes);
    s->ready.over = true;
}

err_t store_ready(struct store *s, bool *more, struct err *e)
{
    const struct memory *m = &s->memory;
    pthread_mutex_lock(&s->ready.lock);
    err_t rc = begin_ready(s, e);
    size_t at = s->ready.next, most = m->ops->ready_bytes,
           n = s->bytes - at < most ? s->bytes - at : most;
    bool work = rc == OK && !s->ready.over && n > 0;
    if (work) {
        s->ready.next += n;
        s->ready.busy++;
        pthread_mutex_unlock(&s->ready.lock);
        rc = m->ops->ready(m->ctx, s->ready.arena, at, n, e);
        pthread_mutex_lock(&s->ready.lock);
        s->ready.busy--;
        if (rc == OK && s->ready.busy == 0 && s->ready.next == s->bytes && !s->ready.over)
            lend_ready(s);
        if (rc != OK) s->ready.over = true;
        pthread_cond_broadcast(&s->ready.left);
    }
    *more = work && rc == OK && !s->ready.over;
    pthread_mutex_unlock(&s->ready.lock);
    return rc;
}

void store_arena_free(struct store *s, void *arena)
{
    const struct memory *m = &s->memory;
    void *none = NULL;
    if (arena == NULL) return;
    if (m->ops->rest) {
        m->ops->rest(m->ctx, arena, s->bytes);
        if (atomic_compare_exchange_strong(&s->resting, &none, arena)) return;
        end_ready(s); /* of this arena, maybe */
    }
    m->ops->free(m->ctx, arena, s->bytes);
}

void *store_lend(const struct store *s, size_t bytes)
{
    return s->memory.ops->lend ? s->memory.ops->lend(s->memory.ctx, bytes) : NULL;
}

void store_take_back(const struct store *s, void *lent)
{
    if (lent) s->memory.ops->take_back(s->memory.ctx, lent);
}

void store_flush(const struct store *s)
{
    if (s->memory.ops->flush) s->memory.ops->flush(s->memory.ctx);
}

void store_put(const struct store *s, void *arena, size_t slot, part_t part, size_t row0, size_t n,
               const void *canon)
{
    CHECK(slot < s->n);
    s->memory.ops->put(s->memory.ctx, (char *)arena + s->offsets[slot], &s->specs[slot].shape, part,
                       row0, n, canon);
}

void store_get_from(const struct store *s, const void *arena, void *canon, size_t slot, part_t part,
                    size_t row0, size_t n)
{
    CHECK(slot < s->n && arena);
    s->memory.ops->get(s->memory.ctx, canon, &s->specs[slot].shape, part, row0, n,
                       (const char *)arena + s->offsets[slot]);
}

void store_get(const struct store *s, void *canon, size_t slot, part_t part, size_t row0, size_t n)
{
    store_get_from(s, s->arena, canon, slot, part, row0, n);
}

void store_keep(const struct store *s, void *arena, size_t slot, size_t n)
{
    CHECK(slot <= s->n && n <= s->n - slot);
    CHECK(!store_lost(s));
    size_t at = slot < s->n ? s->offsets[slot] : s->bytes;
    size_t end = slot + n < s->n ? s->offsets[slot + n] : s->bytes;
    s->memory.ops->copy(s->memory.ctx, (char *)arena + at, (const char *)s->arena + at, end - at);
}

void store_swap(struct store *s, void **a)
{
    void *spare;
    s->arena = s->memory.ops->commit(s->memory.ctx, s->arena, *a, s->bytes, &spare);
    *a = spare;
    for (size_t i = 0; i < s->n; i++) {
        const struct resident *r = &s->specs[i].shape;
        s->ptrs[i] = (const char *)s->arena + s->offsets[i];
        if (r->kind == RESIDENT_MATRIX)
            s->matrices[i] = layout_matrix(r->format, (size_t)r->rows, (size_t)r->cols, s->ptrs[i]);
    }
    s->lost = false;
    s->epoch++;
}

bool store_lost(const struct store *s)
{
    return s->arena == NULL || s->lost;
}

err_t store_release(struct store *s, bool keep, struct err *e)
{
    const struct memory *m = &s->memory;
    CHECK(s->arena);
    end_ready(s);
    wake(s);
    if (keep && !s->lost) {
        s->backup = pages_try(s->bytes);
        if (s->backup == NULL)
            return err_set(e, ERR_NOMEM, "no memory to keep the weights in (%zu bytes)", s->bytes);
        m->ops->copy(m->ctx, s->backup, s->arena, s->bytes);
    }
    err_t rc = m->ops->check(m->ctx, e);
    if (rc == OK) rc = m->ops->release(m->ctx, s->arena, s->bytes, e);
    if (rc == OK) {
        s->lost = true;
    } else {
        pages_release(s->backup, s->bytes);
        s->backup = NULL;
    }
    return rc;
}

err_t store_resume(struct store *s, struct err *e)
{
    const struct memory *m = &s->memory;
    err_t rc = m->ops->resume(m->ctx, s->arena, s->bytes, e);
    if (rc != OK || s->backup == NULL) return rc;
    m->ops->copy(m->ctx, s->arena, s->backup, s->bytes);
    pages_release(s->backup, s->bytes);
    s->backup = NULL;
    s->lost = false;
    return m->ops->check(m->ctx, e);
}

void *store_reopen(struct store *s)
{
    CHECK(s->arena);
    s->lost = true;
    s->epoch++;
    return s->arena;
}

void store_rewritten(struct store *s)
{
    s->lost = false;
}

err_t store_check(const struct store *s, struct err *e)
{
    return s->memory.ops->check(s->memory.ctx, e);
}

bool store_claim(struct store *s)
{
    return !atomic_exchange(&s->claimed, true);
}

void store_unclaim(struct store *s)
{
    atomic_store(&s->claimed, false);
}
