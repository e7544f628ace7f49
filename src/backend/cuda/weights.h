/*
 * weights.h - resident weights in device memory: the store's memory (backend/memory.h) on a GPU.
 *
 *     struct weights *w;
 *     if (weights_new(&w, device, e) != OK) ...
 *     store_new(&store, specs, n, weights_memory(w), e);
 *     ...
 *     store_free(store);
 *     weights_free(w);
 *
 * Two arenas, taken when the store first asks for each: the resident one in device memory, whose
 * addresses stay for the life of the process (captured graphs hold them), and the staged one, in
 * device memory or, after weights_stage_on_host, in host memory that is pinned piece by piece as it
 * is filled (pinned.h).  A commit copies the staged bytes into place and waits: about 0.5 ms a GB
 * inside the device (17.5 GB in 8.1 ms measured), 18 ms a GB from the host.
 *
 * Canonical rows go through pinned buffers to the device and are packed into tiles there
 * (layout_cuda.h), and for an arena on the host come back as tiles.  Rows of matrices come in whole
 * panels of TILE_ROWS = MEMORY_ROWS. `put` may be called by several threads; many small pieces go to
 * the device at once (feed.h), and what has been put lies in the arena after a `check`. slot.h says
 * where in a slot a part lies.
 *
 * Errors: a failing device is found at the next `weights_error` (an update asks when it prepares);
 * until then puts do nothing.  Host memory that cannot be pinned fails the update that is open, and
 * no more.
 */
#ifndef BACKEND_CUDA_WEIGHTS_H
#define BACKEND_CUDA_WEIGHTS_H

#include "backend/cuda/device.h"
#include "backend/cuda/gemm.h"
#include "backend/memory.h"

struct weights;

err_t weights_new(struct weights **out, struct device *d, struct err *e) MUST_USE;
void weights_free(struct weights *w);
struct memory weights_memory(struct weights *w);
/* From here on the second arena, of `bytes` (store_bytes), is the host's.  Before it is taken. */
err_t weights_stage_on_host(struct weights *w, size_t bytes, struct err *e) MUST_USE;
/* Device bytes a store of `bytes` will take besides what weights_new took: one arena, and for
 * updates one more, or the buffers through which they come back. */
size_t weights_device_bytes(size_t bytes, enum staging_mode staging);
/* OK, or the first failure of the device since the start. */
err_t weights_error(struct weights *w, struct err *e) MUST_USE;

#endif
