/*
 * matrix.h - a resident matrix, as kernels read it.
 *
 * Resident = one contiguous run of bytes for a matrix of any format:
 *
 *     [panels][f32 scales][f32 tensor scale][f32 input scale]
 *
 * Panels hold 16 rows each (rows padded with zeros), front to back in the order a GEMM reads them;
 * the small scales of MXFP8, NVFP4 and MXFP4 lie inside the panels beside their elements, f32
 * scales behind all panels.  layout.h is the bijection from canonical bytes (format/format.h) and
 * back, and says the exact byte places.
 */
#ifndef BACKEND_MATRIX_H
#define BACKEND_MATRIX_H

#include "format/format.h"
#include <stdbool.h>

struct matrix {
    format_t format;
    uint32_t rows, cols;
    const void *panel;  /* ceil(rows / 16) panels, layout_panel_bytes apart */
    const float *scale; /* f32 scales [format_scale_rows][format_scale_cols]; NULL where they lie in
                           the panels */
    const float *tensor; /* [1]: NVFP4; else NULL */
    const float *input; /* [1]: scale of the activations (decode), 0: the checkpoint has none; BF16:
                           NULL */
};

/* Is it multiplied by activations in fixed point (fixed.h)? */
static inline bool matrix_fixed(const struct matrix *m)
{
    return formats[m->format].elem == ELEM_E2M1;
}

#endif
