/*
 * store.h - every resident weight, for the life of the process.
 *
 * A slot is one matrix or vector that kernels read; its spec comes from the model (model/tensors.h)
 * and never changes, its format neither.  Two slots may have one name (a tied head); they get the
 * same values. All slots of one generation lie in one arena of a memory (backend/memory.h: host or
 * device); the store keeps the tables of addresses that kernels read through store_ptr and
 * store_matrix.  An update (weight/update.h) fills a second arena while the first serves, then
 * commits it: that cannot fail.
 *
 * Threads: specs are constant.  store_ptr, store_matrix and the swap belong to the engine thread.
 * The epoch counts commits from 1 (the first load); caches of anything computed from weights are
 * keyed by it.
 */
#ifndef WEIGHT_STORE_H
#define WEIGHT_STORE_H

#include "backend/memory.h"
#include "base/err.h"

struct slot_spec {
    char name[128]; /* of the weight, as Hugging Face's checkpoint has it */
    int n_dims;     /* 1 or 2, of the checkpoint's tensor; a vector is [1][cols], shape [cols] */
    struct resident shape; /* rows, cols, kind, format */
    bool optional; /* a RESIDENT_F32 slot that a checkpoint may lack; it then holds `absent` */
    float absent;
    /* Matrices: */
    bool linear; /* a projection of attention or an MLP: what quantizers take by default */
    bool encode; /* BF16 becomes shape.format while it is staged; else formats must be equal */
    uint8_t amax_at, amax_n; /* place in a run of neighbours that share one amax when they are
                                encoded, and its length (q, k, v; gate, up); 0 of 0 or 1: alone */
};

struct store;
struct arena; /* one generation of all slots */

/* Copies the specs; no weights are resident yet (epoch 0). */
err_t store_new(struct store **out, const struct slot_spec *specs, size_t n, struct memory memory,
                struct err *e) MUST_USE;
void store_free(struct store *s);
size_t store_slots(const struct store *s);
const struct slot_spec *store_spec(const struct store *s, size_t slot);
size_t store_find(const struct store *s, const char *name); /* first slot, or SIZE_MAX */
size_t store_find_next(const struct store *s,
                       size_t slot);                       /* next slot of that name, or SIZE_MAX */
const void *store_ptr(const struct store *s, size_t slot); /* plain and f32 slots */
/* Matrices; an array: slots of an expert are neighbours (model/tensors.h). */
const struct matrix *store_matrix(const struct store *s, size_t slot);
uint64_t store_epoch(const struct store *s);
size_t store_bytes(const struct store *s);  /* of one generation, padding included */
uint64_t store_hash(const struct store *s); /* xxh3 of the resident bytes */

/* Between two steps: the memory of the resident weights back to the system.  `keep`: their bytes are copied to
 * host memory before, and come back with the resume; else they are lost, and what is resident then is no weights
 * until the next commit (store_lost): nothing may be computed with it, or kept of it by an update. */
err_t store_release(struct store *s, bool keep, struct err *e) MUST_USE;
err_t store_resume(struct store *s, struct err *e) MUST_USE;
bool store_lost(const struct store *s); /* no weights are resident */

/* For update.c: an arena, zero where no slot lies (NULL: out of memory), rows of a part into a slot of it, and the
 * swap, which leaves the arena to free in *a (NULL the first time). */
void *store_arena_new(struct store *s);
void store_arena_free(struct store *s, void *arena); /* the next update's, where memory can rest */
void store_put(const struct store *s, void *arena, size_t slot, part_t part, size_t row0, size_t n,
               const void *canon);
/* Of a store with weights: the next update's memory, before it comes: an arena that rests, and memory for it piece by piece.  Any thread, several
 * at once, beside updates, which find what is done by then.  OK with *more false: nothing is left, or the weights
 * were released. */
err_t store_ready(struct store *s, bool *more, struct err *e) MUST_USE;
/* Host memory that puts need not copy (backend/memory.h, lend); NULL: take your own. */
void *store_lend(const struct store *s, size_t bytes);
void store_take_back(const struct store *s, void *lent); /* NULL is fine */
void store_flush(const struct store *s);                 /* a thread that has put, at its end */
void store_get_from(const struct store *s, const void *arena, void *canon, size_t slot, part_t part,
                    size_t row0, size_t n);
void store_swap(struct store *s, void **a);
/* Slots [slot, slot + n) of the resident generation into an arena. */
void store_keep(const struct store *s, void *arena, size_t slot, size_t n);
/* For an update in place: the resident arena, which counts as another generation from here on, and as lost until
 * store_rewritten. */
void *store_reopen(struct store *s);
void store_rewritten(struct store *s);
/* Canonical rows of a resident part. */
void store_get(const struct store *s, void *canon, size_t slot, part_t part, size_t row0, size_t n);
/* OK, or the first failure of the memory (backend/memory.h, check). */
err_t store_check(const struct store *s, struct err *e) MUST_USE;
/* One update at a time; any thread.  false: another holds the claim. */
bool store_claim(struct store *s);
void store_unclaim(struct store *s);

#endif
