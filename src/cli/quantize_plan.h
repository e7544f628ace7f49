/*
 * quantize_plan.h - what `moult quantize` makes of each weight, decided before anything is written.
 *
 *     quantize_plan_make(&p, &request, e)      // reads headers only
 *     p.weights[i], p.outs[...]                // quantize_run.h does the work
 *     quantize_plan_free(&p)
 *
 * Quantized are the projections of attention and of MLPs (with `lm_head` the head too), less what
 * the request excludes; norms, embeddings and routers are not.  Weights that runtimes fuse (q, k
 * and v; gate and up) share the amax of a scale that spans a matrix.  A weight that is in the
 * wanted format already keeps its bytes, unless a rule was asked for.
 */
#ifndef CLI_QUANTIZE_PLAN_H
#define CLI_QUANTIZE_PLAN_H

#include "cli/options.h"
#include "cli/quantize_spell.h"
#include "format/encode.h"
#include "model/config.h"
#include "weight/checkpoint.h"
#include "weight/safetensors_write.h"
#include "weight/spelling.h"
#include "weight/store.h"

struct quantize_request {
    const char *src;
    const char *format, *spelling, *rule; /* the last two may be NULL */
    struct opt_strings exclude;
    int64_t bf16_first_n, bf16_last_n;
    bool experts_only, lm_head, requantize;
};

struct quantize_weight {
    char module[128]; /* Hugging Face's name without ".weight" */
    int n_dims;
    size_t rows, cols;
    struct spelled src;
    format_t to;
    bool linear;  /* a projection or the head: what configs list when it is left out */
    bool copy;    /* canonical parts are taken over as they are */
    size_t share; /* index of the first weight with which it shares its amax; its own if none */
    size_t out[PART_COUNT]; /* index into outs, or SIZE_MAX */
};

struct quantize_kv {
    struct source src;
    size_t out;
};

struct quantize_plan {
    const struct quantize_spell *spell;
    format_t format;
    const struct encode_rule *rule;
    struct config config;
    json_t *json; /* config.json of the source, without quantization_config */
    struct checkpoint checkpoint;
    struct spelling reader;
    size_t n_weights, n_outs, n_kv;
    struct quantize_weight *weights;
    struct st_out *outs;
    struct quantize_kv *kv;
    size_t n_quantized, n_inputs; /* weights in `format`; of them with a scale of activations */
    bool fp8_kv;                  /* the source's config asks for an FP8 KV cache */
    uint64_t src_bytes;
    char *dir; /* of the source */
};

err_t quantize_plan_make(struct quantize_plan *p, const struct quantize_request *r,
                         struct err *e) MUST_USE;
void quantize_plan_free(struct quantize_plan *p);
/* The list of what was left unquantized, in the spelling's syntax. */
json_t *quantize_plan_excluded(const struct quantize_plan *p);

#endif
