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
 * Two arenas of device memory, taken when the store first asks for each: the resident one, whose
 * addresses stay for the life of the process (captured graphs hold them), and the staged one.  A
 * commit copies the staged bytes into place, about 0.5 ms a GB (feasibility: 17.5 GB in 8.1 ms),
 * and waits.
 *
 * Canonical rows go through pinned buffers to the device, many small pieces at once, and are packed into
 * tiles there (feed.h, layout_cuda.h).  Rows of matrices come in whole panels of TILE_ROWS =
 * MEMORY_ROWS.  What has been put lies in the arena after a `check`.
 *
 * Slot of a matrix: [tiles][f32 scales][f32 tensor scale][f32 input scale], each on 16 bytes.
 *
 * Errors: a failing device is found at the next `weights_error` (an update asks when it prepares);
 * until then puts do nothing.
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
/* Device bytes a store of `bytes` will hold: one arena, and one more if updates are staged. */
size_t weights_device_bytes(size_t bytes, bool staging);
/* What a GEMM reads of a matrix that lies at `at`. */
struct gemm_weight weights_matrix(const struct resident *r, const void *at);
/* OK, or the first failure of the device since the start. */
err_t weights_error(struct weights *w, struct err *e) MUST_USE;

#endif
