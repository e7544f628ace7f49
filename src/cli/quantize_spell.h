/*
 * quantize_spell.h - how each tool spells a quantized checkpoint: names, types, shapes, config.
 *
 * One row is a spelling of one format.  The parts of module M are stored as M + suffix:
 *
 *     data    [rows][bytes a row] or, for E4M3 and BF16, [rows][cols]
 *     scale   the grid of format/format.h; one scale a row or in all as `scale_dims` says
 *     tensor  one F32, [] or [1]; `inverse`: 1 / tensor (compressed-tensors)
 *     input   one F32: the scale of activations, copied from the source if it has one, or 1 where
 *             `unit_input` (Miles: activations are scaled by row)
 *
 * Sources: what tools write, as moe-formats' section 4 lists it (docs/formats.md).
 */
#ifndef CLI_QUANTIZE_SPELL_H
#define CLI_QUANTIZE_SPELL_H

#include "base/buf.h"
#include "format/format.h"
#include "weight/safetensors.h"
#include <jansson.h>

struct quantize_plan;

struct quantize_spell {
    const char *spelling;
    format_t format;
    bool preferred;   /* the spelling of this format when none is asked for */
    const char *rule; /* of encode.h; NULL: the format's default */
    const char *data, *scale, *tensor, *input; /* suffixes; NULL: not stored */
    st_dtype_t data_dtype, scale_dtype;
    int scale_dims;  /* of formats with one scale a row or in all: 0 [], 1 [n], 2 [n, 1] */
    int tensor_dims; /* 0 [], 1 [1] */
    bool inverse, unit_input, experts_only;
    const char *kv[2]; /* behind the attention module */
    /* quantization_config of config.json */
    json_t *(*config)(const struct quantize_spell *s, const struct quantize_plan *p);
    const char *algo;           /* ModelOpt's quant_algo; compressed-tensors' format */
    const char *layer_syntax;   /* of an excluded layer, with its number */
    const char *experts_syntax; /* of the excluded experts of a layer */
    bool hf_quant_config;       /* writes that file too */
    bool qkv_alias;             /* where q, k and v are left out, qkv_proj is listed too */
};

/* NULL: the format is not written in that spelling.  spelling NULL: the preferred one. */
const struct quantize_spell *quantize_spell_find(const char *spelling, format_t f);
/* "hf, miles, ..." that have the format. */
void quantize_spell_list(format_t f, struct buf *out);
/* The content of hf_quant_config.json, or NULL. */
json_t *quantize_spell_hf_quant_config(const struct quantize_spell *s,
                                       const struct quantize_plan *p);

#endif
