/*
 * pinned.h - a large piece of host memory that a GPU reads and writes, pinned bit by bit.
 *
 *     struct pinned *p;
 *     if (pinned_new(&p, device, bytes, e) != OK) ...        // addresses alone
 *     if (pinned_need(p, offset, n, e) != OK) ...            // [offset, offset + n) is, from here
 * on pinned_free(p);                                        // when no queue uses it
 *
 * Pinning 20 GB takes seconds, so it is not done at once: the range is cut into pieces of
 * PINNED_PIECE, and the first thread that needs a piece pins it, several threads several pieces.  A
 * piece stays pinned.  The driver brings missing pages into being one after the other, for all
 * threads together, and lets nobody launch meanwhile; so each thread fills its piece first, and what
 * the driver has left to do takes 1.5 ms a piece.  An H200's machine: 0.22 s a GB by one thread,
 * beside which no launch is slower than without; 0.08 by four, beside which one in a hundred waits
 * 3 ms, and by eight, 23 ms.  Kernels take the same addresses as the host; one copy of a queue must
 * stay within a piece (pinned_run).
 *
 * Errors: pinned_need says what the driver does, and the piece can be asked for again; pinning counts
 * for mem_fault_at.
 */
#ifndef BACKEND_CUDA_PINNED_H
#define BACKEND_CUDA_PINNED_H

#include "backend/cuda/device.h"

#define PINNED_PIECE ((size_t)64 << 20) /* copies of 16 MiB and more keep the link full */

struct pinned;

err_t pinned_new(struct pinned **out, struct device *d, size_t bytes, struct err *e) MUST_USE;
void pinned_free(struct pinned *p); /* NULL is fine */
char *pinned_base(const struct pinned *p);
size_t pinned_bytes(const struct pinned *p);
/* Has the machine room for what is not pinned yet? */
bool pinned_fits(struct pinned *p);
/* Any thread. */
err_t pinned_need(struct pinned *p, size_t offset, size_t n, struct err *e) MUST_USE;
/* Of [offset, offset + n), the first bytes that one copy may take. */
size_t pinned_run(size_t offset, size_t n);

#endif
