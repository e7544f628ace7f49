/*
 * pages.h - memory of the machine: how much is left, and large pieces of it.
 *
 * A piece is zeroed, comes into being page by page when it is first written (in large pages where
 * the system has them) and goes back at once when it is freed.  The system promises more than it
 * has and ends the process that comes too late; so a piece larger than what is left is refused.
 */
#ifndef BASE_PAGES_H
#define BASE_PAGES_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>

/* What this process may still take, and all it could ever have; a control group's limits count. */
void pages_left(size_t *available, size_t *total);
void *pages_try(size_t bytes) MUST_USE; /* NULL: not that much is left; counts for mem_fault_at */
/* The same, whatever is left now: for what is filled over time, page by page. */
void *pages_reserve(size_t bytes) MUST_USE;
/* The system may take the memory back where it needs it, page by page, which are zero then; the others keep what was in
 * them, and cost nothing when they are written again. */
void pages_lend(void *p, size_t bytes);
/* Brings all pages into being, without a change to what is in them; for the first write costs more than all that come
 * after.  Any thread, also while others write there.  false: the system cannot, or has no memory. */
bool pages_fill(void *p, size_t bytes);
/* The memory goes back, the piece stays: it is zeroed, as at first. */
void pages_drop(void *p, size_t bytes);
void pages_release(void *p, size_t bytes); /* NULL is fine */

#endif
