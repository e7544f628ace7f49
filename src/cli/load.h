/*
 * load.h - from a model's name to a running engine: what serve and generate share.
 *
 *     struct loaded l = {0};
 *     if (load_headers(&l, &o, e) != OK) ...     // config, tokenizer, template, memory plan
 *     if (load_weights(&l, &o, e) != OK) ...     // store, weights, model
 *     if (load_engine(&l, &o, e) != OK) ...      // its thread starts
 *     load_release(&l);                          // any prefix of the above
 */
#ifndef CLI_LOAD_H
#define CLI_LOAD_H

#include "backend/cuda/weights.h"
#include "base/pool.h"
#include "cli/unloaded.h"
#include "engine/engine.h"
#include "format/act.h"
#include "model/config.h"
#include "model/cuda/cuda.h"
#include "model/model.h"
#include "text/tokenizer.h"
#include "weight/store.h"

struct numerics {
    act_t act;          /* what inputs of quantized matrices are rounded to */
    bool routed;        /* MoE choices in the packed form */
    const char *runner; /* as it was asked for (cli/numerics.h) */
};

struct load_options {
    const char *model, *tokenizer_path; /* tokenizer_path NULL: the model's */
    int64_t context_len;                /* 0: the model's */
    int64_t max_running, max_queued;
    int64_t max_total_tokens; /* KV tokens; 0: by memory */
    double mem_fraction;      /* of all memory for weights and KV; 0: the default rule */
    int64_t chunk;            /* prefill tokens a step; <= 0: the most a step takes */
    int64_t threads;          /* 0: pool_cpus() */
    const char *isa;          /* NULL: the best */
    const char *device;       /* NULL or "auto": a GPU if there is one; "cpu", "cuda" */
    bool no_graphs;           /* GPU: launch every kernel of every step */
    bool no_overlap;          /* GPU: make no step before the last one's tokens are known */
    kv_type_t kv;
    bool dummy;               /* random weights; the folder needs none */
    const char *quantization; /* NULL: as stored; see load_quantization */
    struct numerics numerics;
    const char *weight_version;
    bool no_prefix_cache, keep_experts;
    int64_t retract_every;
    double watchdog_s;
    bool memory_saver, weights_backup;
    const char *update_staging; /* NULL or "auto", "device", "host", "off" */
    int64_t loader_threads;     /* of an update; 0: the default */
    void (*progress)(void *ctx, float part, const char *stage); /* NULL, or called while loading */
    void *ctx;
};

struct loaded {
    char *dir;
    struct config config;
    struct tokenizer *tokenizer;
    struct textconf text;
    struct unloaded unloaded;
    int32_t bos_id, context_len;
    /* memory plan, in bytes */
    size_t weight_bytes, page_bytes;
    size_t expert_bytes;   /* of a page's experts, in host memory; 0: not kept */
    uint64_t stored_bytes; /* of the weights' parts in the checkpoint */
    struct buf formats;    /* lines: which modules have which format */
    int32_t n_pages, max_step_tokens;
    int n_threads;
    size_t available; /* when planned */
    enum staging_mode staging;
    double read_s; /* what reading the weights took */

    struct device *device; /* NULL: the CPU */
    struct weights *device_weights;
    size_t device_bytes; /* of its memory */
    struct cuda_needs needs;
    int64_t staging_tokens; /* KV that staging on the device costs */
    struct store *store;
    struct pool *pool;
    struct model *model;
    struct engine *engine;
};

err_t load_headers(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
err_t load_weights(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
err_t load_engine(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
/* "weights 14.1 MB, KV 1.2 GB (...)" */
void load_plan(const struct loaded *l, struct buf *out);
/* --quantization: a format's name, or SGLang's word for a format or method.  `format` is what a
 * BF16 checkpoint is encoded to while it is loaded (FORMAT_BF16: nothing is), `accept` the formats
 * (bits 1 << format_t) of a quantized one that is served as it is. */
err_t load_quantization(format_t *format, unsigned *accept, const char *name,
                        struct err *e) MUST_USE;
void load_release(struct loaded *l); /* the engine must have been stopped */

#endif
