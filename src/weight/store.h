/*
 * store.h - every resident weight, for the life of the process.
 *
 * A slot is one matrix or vector that kernels read; its spec comes from the model (model/tensors.h)
 * and never changes.  Two slots may have one name (a tied head); they get the same values.  All slots of one generation lie in one arena; the store keeps the table of
 * addresses that kernels read through store_ptr.  An update (weight/update.h) fills a second arena
 * while the first serves, then swaps the table: the commit is a pointer flip, and cannot fail.
 *
 * Resident layouts, each a bijection of the canonical bytes (backend/layout.h):
 *     STORE_PLAIN   as in the checkpoint, BF16, row-major
 *     STORE_PANEL   [rows up to 16][cols / 2][16][2] BF16, rows padded with zeros
 *
 * Threads: specs are constant.  store_ptr and the swap belong to the engine thread.
 * The epoch counts commits from 1 (the first load); caches of anything computed from weights are
 * keyed by it.
 */
#ifndef WEIGHT_STORE_H
#define WEIGHT_STORE_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { STORE_PLAIN, STORE_PANEL } store_layout_t;

struct slot_spec {
    char name[128];      /* in the checkpoint */
    uint64_t rows, cols; /* a vector is [1][cols]; checkpoint shape [cols] */
    int n_dims;          /* 1 or 2, of the checkpoint's tensor */
    store_layout_t layout;
};

struct store;
struct arena; /* one generation of all slots */

/* Copies the specs; no weights are resident yet (epoch 0). */
err_t store_new(struct store **out, const struct slot_spec *specs, size_t n, struct err *e) MUST_USE;
void store_free(struct store *s);
size_t store_slots(const struct store *s);
const struct slot_spec *store_spec(const struct store *s, size_t slot);
size_t store_find(const struct store *s, const char *name); /* first slot, or SIZE_MAX */
size_t store_find_next(const struct store *s, size_t slot); /* next slot of that name, or SIZE_MAX */
const void *store_ptr(const struct store *s, size_t slot);
uint64_t store_epoch(const struct store *s);
size_t store_bytes(const struct store *s);  /* of one generation, padding included */
uint64_t store_hash(const struct store *s); /* xxh3 of the resident bytes */

/* For update.c: a zeroed arena (NULL: out of memory), where a slot lies in it, and the swap, which
 * returns the former arena (NULL the first time). */
struct arena *store_arena_new(const struct store *s);
void *store_arena_slot(const struct store *s, struct arena *a, size_t slot);
void store_arena_free(struct arena *a);
struct arena *store_swap(struct store *s, struct arena *a);
/* One update at a time; any thread.  false: another holds the claim. */
bool store_claim(struct store *s);
void store_unclaim(struct store *s);

#endif
