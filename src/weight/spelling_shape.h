/* spelling_shape.h - from the tensors of a module to a format and sources (spelling.c alone). */
#ifndef WEIGHT_SPELLING_SHAPE_H
#define WEIGHT_SPELLING_SHAPE_H

#include "weight/spelling.h"

/* The tensors that names led to. */
struct found {
    const struct checkpoint_entry *part[PART_COUNT]; /* NULL: none */
    bool inverse[PART_COUNT];
    const char *arrangement;
    bool fused, interleaved;       /* all experts in one tensor; gate and up rows in turn */
    bool partial;                  /* the checkpoint may lack the sibling */
    unsigned expert, half, halves; /* of a fused one: which expert, 0 or 1 of 1 or 2 */
    const struct checkpoint_entry *sibling; /* data of the layer's other fused tensor, or NULL */
};

/* Fills format, arrangement and part, or `absent` if a part is missing. */
err_t shape_match(struct spelled *w, const struct found *f, int n_dims, uint64_t rows,
                  uint64_t cols, part_t *absent, struct err *e) MUST_USE;
/* A tensor of one float. */
err_t shape_scalar(struct source *s, const struct checkpoint_entry *t, struct err *e) MUST_USE;

#endif
