/*
 * spelling.h - where a checkpoint keeps each weight, whatever tool wrote it.
 *
 *     struct spelling s;
 *     if (spelling_open(&s, &checkpoint, e) != OK) ...
 *     struct spelled w;
 *     rc = spelling_find(&s, &w, "model.layers.0.mlp.experts.5.up_proj.weight", 2, rows, cols, e);
 *     rc = spelling_find_kv(&s, kv, "model.layers.0.self_attn", e);
 *     rc = spelling_rest(&s, e);           // a tensor that nobody asked for
 *     spelling_close(&s);
 *
 * A weight is asked for by the name that Hugging Face's BF16 checkpoint gives it, one tensor an
 * expert.  Found are its format and the source of each canonical part (format/format.h), decided by
 * the tensors present - names, dtypes, shapes - and by nothing else.  Headers alone are read.
 *
 * Formats, by the dtype of the data and of its scale (S is F32, BF16 or F16):
 *
 *     BF16, F16, F32                    bf16
 *     F8_E4M3  S [ceil(N/128)][ceil(K/128)]   fp8-block
 *     F8_E4M3  S [N] or [N, 1]          fp8-channel
 *     F8_E4M3  S [], [1] or [1, 1]      fp8-tensor
 *     F8_E4M3  U8 or F8_E8M0 [N, ceil(K/32)]  mxfp8
 *     U8 or F4 F8_E4M3 [N, ceil(K/16)]  nvfp4, with a tensor scale
 *     U8 or F4 U8 or F8_E8M0 [N, ceil(K/32)]  mxfp4
 *
 * Read from top to bottom: a [1, 1] scale is a block grid where the grid is one block, else it
 * belongs to the whole tensor.  Any other grid is refused with both shapes.
 *
 * Names    of the parts of module M:  M.weight, .weight_packed; .weight_scale_inv, .weight_scale;
 *          .weight_scale_2, .weight_global_scale (inverse); .input_scale, .activation_scale,
 *          .input_global_scale (inverse).  Fused experts M_weight_scale ... too, M_blocks and
 *          M_scales.
 * Experts  one tensor each (gate_proj, up_proj, down_proj; Mixtral's w1, w3, w2); fused
 *          gate_up_proj [E, 2I, H], gate rows first; transposed [E, H, 2I]; gpt-oss [E, 2I, ...]
 *          with gate and up rows in turn.  Scalars of fused experts: one, [E] or [E, 2] (gate, up).
 * Prefixes model., language_model.model., model.language_model., none: as the embedding has it, or
 *          without one (part of a checkpoint) the first tensor that tells.
 * k and v scales under the names of spelling.c's table.
 *
 * A scale whose weight is not there is refused by name, like a weight without its scale: in part of a
 * checkpoint as in a whole one.
 *
 * Whether a scale is usable is a matter of its bytes: update.h.  An input scale may be missing.
 */
#ifndef WEIGHT_SPELLING_H
#define WEIGHT_SPELLING_H

#include "backend/layout.h"
#include "weight/checkpoint.h"
#include "weight/source.h"

struct spelling {
    const struct checkpoint *checkpoint; /* borrowed */
    const char *prefix, *head_prefix;    /* instead of "model." and before "lm_head." */
    bool partial;   /* of part of a checkpoint, which may lack what tells how a fused tensor lies */
    uint64_t *used; /* [n_tensors], bytes of each that were asked for */
};

struct spelled {
    format_t format;
    const char *arrangement;        /* "" a tensor of its own; "mixtral", "fused", ... */
    struct source part[PART_COUNT]; /* PART_DATA always; others as the format and the file have */
};

err_t spelling_open(struct spelling *s, const struct checkpoint *c, struct err *e) MUST_USE;
void spelling_close(struct spelling *s);

/* n_dims 1: a vector of `cols`, rows is 1.  ERR_NOTFOUND: no tensor of that name or of another
 * spelling of it (the message names it); other errors: it is there, but not as allowed, or without
 * its scale.  Marks what it found as used. */
err_t spelling_find(struct spelling *s, struct spelled *out, const char *name, int n_dims,
                    uint64_t rows, uint64_t cols, struct err *e) MUST_USE;
/* The scales of K and V of an attention module, one f32 each; both tensors NULL if there are none;
 * one without the other is refused. */
err_t spelling_find_kv(struct spelling *s, struct source kv[2], const char *module,
                       struct err *e) MUST_USE;
/* ERR_INPUT naming the first tensor that no find has used and that means something (rotary tables
 * do not, nor does the head where `tied`). */
err_t spelling_rest(const struct spelling *s, bool tied, struct err *e) MUST_USE;
/* Is entry i of the checkpoint such a tensor?  If some of it was used: it holds too much. */
bool spelling_is_rest(const struct spelling *s, size_t i, bool tied);

#endif
