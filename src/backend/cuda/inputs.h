/*
 * inputs.h - one input scale for the matrices that read the same rows (nvfp4 activations).
 *
 *     input_scales   out[g] = the largest of *from[i], first[g] <= i < first[g + 1], that is
 * positive and finite; 0: none is.  Grid: groups
 */
#ifndef BACKEND_CUDA_INPUTS_H
#define BACKEND_CUDA_INPUTS_H

#include <stdint.h>

#define INPUTS_THREADS 128

/* All in device memory. */
struct inputs_args {
    const float *const *from;
    const int32_t *first; /* [grid + 1] */
    float *out;           /* [grid] */
};

#endif
