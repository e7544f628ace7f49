/*
 * clear.h - zeroes KV pages in every layer before a new owner writes them.
 *
 *     clear_pages   grid (pages, halves): a block writes one page of one half (a layer's K or V)
 */
#ifndef BACKEND_CUDA_CLEAR_H
#define BACKEND_CUDA_CLEAR_H

#include <stdint.h>

#define CLEAR_THREADS 256

struct clear_args {
    char *kv;                        /* [halves][pages][page_bytes] */
    const int32_t *pages;            /* [grid x] */
    uint64_t half_bytes, page_bytes; /* multiples of 16 */
};

#endif
