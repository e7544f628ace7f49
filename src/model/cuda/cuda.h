/*
 * cuda.h - make a model whose step runs on a GPU (model.h says how it is used).
 *
 *     struct device *d; struct weights *w; struct store *s over weights_memory(w), holding weights
 *     struct cuda_options o = {...};
 *     if (cuda_model_new(&model, &config, s, d, &o, e) != OK) ...
 *
 * What it takes of the device is allocated here, once; a step allocates nothing but room for long
 * lists of penalties and biases, and what the driver keeps of a captured step.  cuda_model_needs
 * tells beforehand, for the memory plan.  cuda_model_check refuses by name what cuda_model_new
 * would: shapes that the kernels do not have (head_dim, top_k, experts, hidden_size), experts of one
 * layer in several formats.
 */
#ifndef MODEL_CUDA_CUDA_H
#define MODEL_CUDA_CUDA_H

#include "backend/cuda/weights.h"
#include "model/model.h"

struct cuda_options {
    int32_t n_kv_pages, max_step_tokens, max_seqs; /* max_seqs: sequences of a step */
    int32_t context_len; /* positions that are used, the model's at most; 0: those */
    kv_type_t kv;
    bool experts;   /* steps tell them (model.h) */
    bool no_graphs; /* --disable-cuda-graph: every step kernel by kernel */
};

err_t cuda_model_new(struct model **out, const struct config *c, struct store *s, struct device *d,
                     const struct cuda_options *o, struct err *e) MUST_USE;
/* `specs`: of model_specs, with the formats that the store will have. */
err_t cuda_model_check(const struct config *c, const struct slot_spec *specs, kv_type_t kv,
                       struct err *e) MUST_USE;

/* Device bytes besides weights. */
struct cuda_needs {
    size_t step;    /* a step's buffers */
    size_t partial; /* attention's results of single chunks */
    size_t graphs;  /* captured decode steps, from above */
    size_t kv_page;
};
err_t cuda_model_needs(struct cuda_needs *out, const struct device *d, const struct config *c,
                       const struct cuda_options *o, struct err *e) MUST_USE;

#endif
