/*
 * step_io.h - a step's small arrays from pinned host memory to the device, and its results back, by
 * one launch each.
 *
 *     step_upload    pieces of whole 16 bytes; then the tokens' ids, where an id below 0 stands for
 *                    what row ~id of the step before drew, which the host does not know yet
 *     step_download  a warp a row: the result without the room for top logprobs that is unused
 *
 * Host addresses are of pinned memory, which the device reaches as it is.  A launch costs less than
 * a handful of copies, and leaves no gap for another engine to take over.
 */
#ifndef BACKEND_CUDA_STEP_IO_H
#define BACKEND_CUDA_STEP_IO_H

#include "backend/cuda/kernels.h"
#include <stdint.h>

#define STEP_IO_THREADS 256
#define STEP_IO_PIECES  12

struct step_piece {
    void *dst;
    const void *src;
    uint32_t units, unused; /* of 16 bytes; both addresses are aligned to them */
};

struct step_upload_args {
    struct step_piece pieces[STEP_IO_PIECES];
    int32_t *ids;            /* [n_ids] */
    const int32_t *host_ids; /* [n_ids] */
    const int32_t *drawn;    /* [rows of the step before] */
    int32_t n_pieces, n_ids;
};

struct step_download_args {
    const struct sample_result *results; /* [n] */
    struct sample_result *host;
    int32_t n, unused;
};

#endif
